#include "data/added_tokens.h"

#include <algorithm>
#include <string>

namespace gemtune {
namespace {

constexpr std::string_view kSpaceMark = "▁";

// Ends of the control ranges, asked for at ascending places.
class ControlScan {
 public:
  explicit ControlScan(const std::vector<ByteRange>& ranges) : ranges_(ranges) {}
  bool holds(int64_t begin, int64_t end) {
    while (next_ < ranges_.size() && ranges_[next_].end <= begin) ++next_;
    return next_ < ranges_.size() && ranges_[next_].begin <= begin && end <= ranges_[next_].end;
  }

 private:
  const std::vector<ByteRange>& ranges_;
  size_t next_ = 0;
};

}  // namespace

ByteTrie::ByteTrie() : nodes_(1) {
  root_.fill(-1);
}

int32_t ByteTrie::child(int32_t node, uint8_t byte) const {
  for (const auto& [edge, next] : nodes_[node].children) {
    if (edge == byte) return next;
  }
  return -1;
}

void ByteTrie::add(std::string_view text, int32_t value) {
  int32_t node = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<uint8_t>(text[i]);
    int32_t next = i == 0 ? root_[byte] : child(node, byte);
    if (next < 0) {
      next = static_cast<int32_t>(nodes_.size());
      nodes_.emplace_back();
      if (i == 0) {
        root_[byte] = next;
      } else {
        nodes_[node].children.emplace_back(byte, next);
      }
    }
    node = next;
  }
  nodes_[node].value = value;
}

AddedTokens::AddedTokens(const TokenizerTables& tables) : tables_(tables) {
  for (const TokenizerTables::Added& token : tables.added()) {
    if (special_.size() <= static_cast<size_t>(token.id)) {
      added_.resize(token.id + 1);
      special_.resize(token.id + 1);
    }
    added_[token.id] = true;
    special_[token.id] = token.special != 0;
    if (token.normalized == 0) {
      raw_.add(tables.piece(token.id), token.id);
      continue;
    }
    std::string text;
    for (const char c : tables.piece(token.id)) {
      if (c == ' ' && tables.replace_space()) {
        text += kSpaceMark;
      } else {
        text += c;
      }
    }
    normalized_.add(text, token.id);
  }
}

void AddedTokens::split(std::string_view text, const std::vector<ByteRange>& control, const Visit& visit) const {
  ControlScan scan(control);
  const auto stretch = [&](size_t begin, size_t end) {
    if (begin == end) return;
    if (normalized_.empty()) {
      visit(static_cast<int64_t>(begin), static_cast<int64_t>(end), -1);
    } else {
      split_normalized(text, static_cast<int64_t>(begin), static_cast<int64_t>(end), control, visit);
    }
  };
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    size_t best_length = 0;
    int32_t best_id = -1;
    raw_.match(text, at, [&](size_t length, int32_t id) {
      if (is_special(id) && !scan.holds(static_cast<int64_t>(at), static_cast<int64_t>(at + length))) return;
      best_length = length;
      best_id = id;
    });
    if (best_id < 0) {
      ++at;
      continue;
    }
    stretch(done, at);
    visit(static_cast<int64_t>(at), static_cast<int64_t>(at + best_length), best_id);
    at += best_length;
    done = at;
  }
  stretch(done, text.size());
}

void AddedTokens::split_normalized(std::string_view text, int64_t begin, int64_t end, const std::vector<ByteRange>& control,
                                   const Visit& visit) const {
  std::string normal;
  std::vector<int64_t> place;  // of each byte of `normal` in `text`
  for (int64_t i = begin; i < end; ++i) {
    const size_t size = normal.size();
    if (text[i] == ' ' && tables_.replace_space()) {
      normal += kSpaceMark;
    } else {
      normal += text[i];
    }
    place.resize(place.size() + normal.size() - size, i);
  }
  place.push_back(end);

  ControlScan scan(control);
  int64_t done = begin;
  for (size_t at = 0; at < normal.size();) {
    size_t best_length = 0;
    int32_t best_id = -1;
    normalized_.match(normal, at, [&](size_t length, int32_t id) {
      if (is_special(id) && !scan.holds(place[at], place[at + length])) return;
      best_length = length;
      best_id = id;
    });
    if (best_id < 0) {
      ++at;
      continue;
    }
    if (done < place[at]) visit(done, place[at], -1);
    at += best_length;
    visit(place[at - best_length], place[at], best_id);
    done = place[at];
  }
  if (done < end) visit(done, end, -1);
}

std::string_view AddedTokens::find_special(std::string_view text) const {
  for (size_t at = 0; at < text.size(); ++at) {
    std::string_view found;
    const auto longest = [&](size_t, int32_t id) {
      if (is_special(id)) found = tables_.piece(id);
    };
    raw_.match(text, at, longest);
    if (!normalized_.empty()) normalized_.match(text, at, longest);
    if (!found.empty()) return found;
  }
  return {};
}

}  // namespace gemtune
