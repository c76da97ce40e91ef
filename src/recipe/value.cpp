#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "base/text.h"
#include "recipe/leaves.h"

namespace gemtune {
namespace {

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return out;
}

std::string mismatch(std::string_view expected, std::string_view got) {
  return fmt::format("expected {}, got {}", expected, in_quotes(got));
}

// The whole of `text` as a number of type T; "1e3" is also a whole number.
template <class T>
bool parse_number(std::string_view text, T& number) {
  if (text.starts_with('+')) text.remove_prefix(1);
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && stop == end;
}

template <class T>
std::string read_whole(std::string_view text, T& member) {
  text = strip(text);
  T number = 0;
  if (parse_number(text, number)) {
    member = number;
    return "";
  }
  double real = 0;
  if (!parse_number(text, real) || !std::isfinite(real)) return mismatch("a whole number", text);
  // Beyond 2^53 a double no longer tells neighbours apart.
  const double limit = std::min(static_cast<double>(std::numeric_limits<T>::max()), 9007199254740992.0);
  if (real != std::trunc(real)) return mismatch("a whole number", text);
  if (std::fabs(real) > limit) return mismatch(fmt::format("a whole number up to {}", std::numeric_limits<T>::max()), text);
  member = static_cast<T>(real);
  return "";
}

bool is_plain(std::string_view text) {
  const auto safe = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' || c == '/' ||
           c == '-' || c == '+';
  };
  if (text.empty() || !std::all_of(text.begin(), text.end(), safe)) return false;
  const bool starts_well = (text[0] >= 'a' && text[0] <= 'z') || (text[0] >= 'A' && text[0] <= 'Z') || text[0] == '/';
  static constexpr std::string_view kWords[] = {"true", "false", "yes", "no", "on", "off", "y", "n", "null", "nan", "inf"};
  return starts_well && std::find(std::begin(kWords), std::end(kWords), lower(text)) == std::end(kWords);
}

}  // namespace

std::vector<std::string> choices_of(std::string_view help) {
  const std::string_view head = help.substr(0, help.find(':'));
  if (head.find('|') == std::string_view::npos || head.find(' ') != std::string_view::npos) return {};
  std::vector<std::string> choices;
  size_t start = 0;
  while (start <= head.size()) {
    const size_t end = std::min(head.find('|', start), head.size());
    choices.emplace_back(head.substr(start, end - start));
    start = end + 1;
  }
  return choices;
}

std::string read_value(std::string_view text, std::string& member) {
  if (!is_valid_utf8(text)) return mismatch("text in UTF-8", text);
  if (text.find('\0') != std::string_view::npos) return mismatch("text without NUL", text);
  member = text;
  return "";
}

std::string read_value(std::string_view text, bool& member) {
  const std::string word = lower(strip(text));
  const bool yes = word == "true" || word == "yes" || word == "on";
  const bool no = word == "false" || word == "no" || word == "off";
  if (!yes && !no) return mismatch("true or false", text);
  member = yes;
  return "";
}

std::string read_value(std::string_view text, int& member) {
  return read_whole(text, member);
}
std::string read_value(std::string_view text, int64_t& member) {
  return read_whole(text, member);
}

std::string read_value(std::string_view text, double& member) {
  text = strip(text);
  double number = 0;
  if (!parse_number(text, number) || !std::isfinite(number)) return mismatch("a number", text);
  member = number;
  return "";
}

std::string read_value(std::string_view text, std::vector<std::string>& member) {
  std::string item;
  const std::string complaint = read_value(text, item);
  if (complaint.empty()) member.push_back(item);
  return complaint;
}

std::string yaml_of(const std::string& value) {
  if (is_plain(value)) return value;
  std::string text = "\"";
  for (size_t i = 0; i < value.size(); ++i) {
    const unsigned char byte = static_cast<unsigned char>(value[i]);
    const std::string_view rest = std::string_view(value).substr(i);
    if (byte == '"' || byte == '\\') {
      text += fmt::format("\\{}", value[i]);
    } else if (byte == '\n') {
      text += "\\n";
    } else if (byte == '\t') {
      text += "\\t";
    } else if (byte < 0x20 || byte == 0x7F) {
      text += fmt::format("\\x{:02x}", byte);
    } else if (rest.starts_with("\u0085") || rest.starts_with("\u00A0")) {
      text += rest.starts_with("\u0085") ? "\\u0085" : "\\u00a0";
      i += 1;
    } else if (rest.starts_with("\u2028") || rest.starts_with("\u2029") || rest.starts_with("\uFEFF")) {
      text += rest.starts_with("\u2028") ? "\\u2028" : rest.starts_with("\u2029") ? "\\u2029" : "\\ufeff";
      i += 2;
    } else {
      text += value[i];
    }
  }
  return text + "\"";
}

std::string yaml_of(bool value) {
  return value ? "true" : "false";
}
std::string yaml_of(int value) {
  return fmt::format("{}", value);
}
std::string yaml_of(int64_t value) {
  return fmt::format("{}", value);
}
// The shortest text that reads back to the same double.
std::string yaml_of(double value) {
  return fmt::format("{}", value);
}

std::string yaml_of(const std::vector<std::string>& value) {
  std::string text = "[";
  for (size_t i = 0; i < value.size(); ++i) text += (i > 0 ? ", " : "") + yaml_of(value[i]);
  return text + "]";
}

bool is_half_precision(std::string_view word) {
  const std::string name = lower(word);
  return name == "fp16" || name == "float16" || name == "half";
}

}  // namespace gemtune
