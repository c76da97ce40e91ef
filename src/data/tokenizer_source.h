// Inside the tokenizer: what tokenizer.json says, checked field by field, before any table is built from it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gemtune {

// Many short strings in one block of memory.
class StringList {
 public:
  void add(std::string_view text) {
    bytes_.append(text);
    ends_.push_back(bytes_.size());
  }
  std::string_view operator[](size_t i) const {
    const size_t begin = i == 0 ? 0 : ends_[i - 1];
    return std::string_view(bytes_).substr(begin, ends_[i] - begin);
  }
  size_t size() const { return ends_.size(); }

 private:
  std::string bytes_;
  std::vector<size_t> ends_;
};

struct AddedToken {
  int32_t id = -1;
  std::string content;
  bool special = false;
  bool normalized = false;  // matched after spaces became "▁", and after all tokens that are matched on the raw text
};

struct TokenizerSource {
  StringList pieces;
  std::vector<int32_t> piece_ids;  // aligned with pieces
  StringList merge_sides;          // merge k joins sides 2k and 2k + 1; k is its rank
  std::vector<AddedToken> added;
  std::string unknown_piece;  // "" = none
  bool byte_fallback = false;
  bool fuse_unknown = false;
  bool replace_space = false;      // normalizer: " " → "▁"
  bool split_after_space = false;  // pre-tokenizer: a space ends a word (no effect where spaces are replaced)
};

// Ids above this are refused before anything is allocated by them.
inline constexpr int64_t kMaxTokenId = (int64_t{1} << 22) - 1;

// `where` opens every message. Throws Error(kInput) naming the field that is not as Gemma's kind of tokenizer has it.
TokenizerSource parse_tokenizer_source(std::string_view json, const std::string& where);

}  // namespace gemtune
