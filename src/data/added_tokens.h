// Inside the tokenizer: cuts text at added tokens, leftmost first, the longest of those that begin at one place.
#pragma once

#include "data/tokenizer_tables.h"

#include <array>
#include <cstdint>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

namespace gemtune {

struct ByteRange {
  int64_t begin;
  int64_t end;
};

// Strings with values, matched byte by byte.
class ByteTrie {
 public:
  ByteTrie();
  void add(std::string_view text, int32_t value);
  bool empty() const { return nodes_.size() == 1; }
  // Calls accept(length, value) for every string that begins at text[at], shortest first.
  template <class Accept>
  void match(std::string_view text, size_t at, const Accept& accept) const {
    int32_t node = root_[static_cast<uint8_t>(text[at])];
    for (size_t next = at + 1; node >= 0; ++next) {
      if (nodes_[node].value >= 0) accept(next - at, nodes_[node].value);
      if (next >= text.size()) return;
      node = child(node, static_cast<uint8_t>(text[next]));
    }
  }

 private:
  struct Node {
    int32_t value = -1;
    std::vector<std::pair<uint8_t, int32_t>> children;
  };
  int32_t child(int32_t node, uint8_t byte) const;

  std::array<int32_t, 256> root_;
  std::vector<Node> nodes_;  // nodes_[0] stands for the root
};

class AddedTokens {
 public:
  explicit AddedTokens(const TokenizerTables& tables);

  // Calls visit(begin, end, id) in order for the added tokens in `text`, and with id -1 for each stretch between them.
  // Special tokens match only inside one of the `control` ranges (ascending, apart).
  using Visit = std::function<void(int64_t begin, int64_t end, int32_t id)>;
  void split(std::string_view text, const std::vector<ByteRange>& control, const Visit& visit) const;

  bool is_added(int32_t id) const {
    return id >= 0 && static_cast<size_t>(id) < added_.size() && added_[static_cast<size_t>(id)];
  }
  bool is_special(int32_t id) const {
    return id >= 0 && static_cast<size_t>(id) < special_.size() && special_[static_cast<size_t>(id)];
  }
  // The first special token in `text`, or "".
  std::string_view find_special(std::string_view text) const;

 private:
  // Like split(), for the tokens that are matched after normalization; [begin, end) holds no others.
  void split_normalized(std::string_view text, int64_t begin, int64_t end, const std::vector<ByteRange>& control,
                        const Visit& visit) const;

  const TokenizerTables& tables_;
  ByteTrie raw_;
  ByteTrie normalized_;
  std::vector<bool> added_;    // by id
  std::vector<bool> special_;  // by id
};

}  // namespace gemtune
