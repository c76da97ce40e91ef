#include "base/text.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

namespace gemtune {
namespace {

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

// Edits (insert, delete, replace, swap of neighbours) that turn `a` into `b`; case costs nothing.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), previous(b.size() + 1), current(b.size() + 1);
  std::iota(previous.begin(), previous.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    current[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const bool same = lower(a[i - 1]) == lower(b[j - 1]);
      current[j] = std::min({previous[j] + 1, current[j - 1] + 1, previous[j - 1] + (same ? 0 : 1)});
      const bool swapped = i > 1 && j > 1 && lower(a[i - 1]) == lower(b[j - 2]) && lower(a[i - 2]) == lower(b[j - 1]);
      if (swapped) current[j] = std::min(current[j], before[j - 2] + 1);
    }
    std::swap(before, previous);
    std::swap(previous, current);
  }
  return previous[b.size()];
}

// One code point at the front of `text`; length 0 when the bytes there are not UTF-8.
struct CodePoint {
  uint32_t value = 0;
  size_t length = 0;
};

CodePoint first_code_point(std::string_view text) {
  if (text.empty()) return {};
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const uint32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  size_t length = 0;
  uint32_t value = 0;
  uint32_t smallest = 0;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2, value = lead & 0x1F, smallest = 0x80;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3, value = lead & 0x0F, smallest = 0x800;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4, value = lead & 0x07, smallest = 0x10000;
  }
  if (length == 0 || text.size() < length) return {};
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return {};
    value = value << 6 | (byte(i) & 0x3F);
  }
  const bool surrogate = value >= 0xD800 && value <= 0xDFFF;
  if (value < smallest || value > 0x10FFFF || surrogate) return {};
  return {value, length};
}

// What Python's str.isspace() accepts.
bool is_space(uint32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

// Code points that move the cursor, break the line or turn the reading direction of a terminal.
bool is_unprintable(uint32_t c) {
  return c < 0x20 || (c >= 0x7F && c <= 0x9F) || (c >= 0x200E && c <= 0x200F) || (c >= 0x2028 && c <= 0x202E) ||
         (c >= 0x2066 && c <= 0x2069) || c == 0xFEFF;
}

}  // namespace

std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates) {
  std::string best;
  // A typo changes up to a third of the word; short words may differ in one place.
  size_t best_distance = std::max<size_t>(1, word.size() / 3) + 1;
  for (const auto& candidate : candidates) {
    const size_t distance = edit_distance(word, candidate);
    if (distance < best_distance && distance < candidate.size()) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

std::string human_bytes(int64_t bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = std::fabs(static_cast<double>(bytes));
  if (value < 1024) return fmt::format("{} B", bytes);
  size_t unit = 0;
  value /= 1024;
  // 1023.95 would print as 1024.0.
  while (value >= 1023.95 && unit + 1 < std::size(kUnits)) value /= 1024, ++unit;
  return fmt::format("{}{:.1f} {}", bytes < 0 ? "-" : "", value, kUnits[unit]);
}

std::string human_duration(double seconds) {
  if (!std::isfinite(seconds)) return "unknown";
  if (seconds < 59.95) return fmt::format("{:.1f} s", std::max(seconds, 0.0));
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  if (whole < 3600) return fmt::format("{}m {:02}s", whole / 60, whole % 60);
  const int64_t minutes = (whole + 30) / 60;
  return fmt::format("{}h {:02}m", minutes / 60, minutes % 60);
}

std::string join_some(const std::vector<std::string>& items, size_t limit) {
  std::string text;
  const size_t shown = std::min(items.size(), limit);
  for (size_t i = 0; i < shown; ++i) {
    if (i > 0) text += ", ";
    text += items[i];
  }
  if (shown == items.size()) return text;
  return shown == 0 ? fmt::format("{} items", items.size()) : fmt::format("{} and {} more", text, items.size() - shown);
}

bool is_valid_utf8(std::string_view bytes) {
  while (!bytes.empty()) {
    const size_t length = first_code_point(bytes).length;
    if (length == 0) return false;
    bytes.remove_prefix(length);
  }
  return true;
}

std::string_view strip(std::string_view text) {
  while (!text.empty()) {
    const CodePoint first = first_code_point(text);
    if (first.length == 0 || !is_space(first.value)) break;
    text.remove_prefix(first.length);
  }
  while (!text.empty()) {
    size_t length = 1;
    while (length < 4 && length < text.size() && (static_cast<unsigned char>(text[text.size() - length]) & 0xC0) == 0x80) {
      ++length;
    }
    const CodePoint last = first_code_point(text.substr(text.size() - length));
    if (last.length != length || !is_space(last.value)) break;
    text.remove_suffix(length);
  }
  return text;
}

std::string in_quotes(std::string_view value, size_t limit) {
  std::string text = "\"";
  size_t used = 0;
  while (!value.empty()) {
    const CodePoint next = first_code_point(value);
    const size_t length = std::max<size_t>(next.length, 1);
    if (used + length > limit) {
      text += "…";
      break;
    }
    used += length;
    const unsigned char byte = static_cast<unsigned char>(value[0]);
    if (next.length == 0) {
      text += fmt::format("\\x{:02x}", byte);
    } else if (byte == '"' || byte == '\\') {
      text += fmt::format("\\{}", value[0]);
    } else if (byte == '\n') {
      text += "\\n";
    } else if (byte == '\r') {
      text += "\\r";
    } else if (byte == '\t') {
      text += "\\t";
    } else if (is_unprintable(next.value)) {
      text += next.value < 0x80 ? fmt::format("\\x{:02x}", next.value) : fmt::format("\\u{:04x}", next.value);
    } else {
      text += value.substr(0, length);
    }
    value.remove_prefix(length);
  }
  return text + "\"";
}

}  // namespace gemtune
