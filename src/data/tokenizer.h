// Gemma's tokenizer, read from tokenizer.json: added tokens first, then rank-ordered BPE with byte fallback.
// Source: the tokenizers crate's behaviour (docs/chat-format.md); oracle: PyPI `tokenizers`.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace gemtune {

// A stretch of text. Control strings (added tokens with special=true) are recognised only inside stretches that may hold
// them (neighbouring ones count as one); all other added tokens (newline runs, HTML tags) match anywhere, also across
// stretches. Without that permission the characters of a control string are ordinary text: its id never comes of them.
struct TextSpan {
  std::string text;
  bool may_hold_control = false;
};

class Tokenizer {
 public:
  // `path`: a tokenizer.json or a folder that holds one. Throws Error(kInput) for a file that is not a BPE tokenizer.json
  // of Gemma's kind, naming the field, and for a folder whose tokenizer_config.json names a vocabulary file elsewhere.
  // Tables of large files are kept in cache_folder()/tokenizers, keyed by path, size and mtime; a damaged or unwritable
  // cache is ignored.
  static std::shared_ptr<const Tokenizer> load(const std::string& path);
  // The content of a tokenizer.json; `where` opens every message. Touches no files.
  static std::shared_ptr<const Tokenizer> parse(std::string_view json, const std::string& where);
  ~Tokenizer();

  // Ids of the joined spans. Adds no bos. n log n in the length; safe from several threads. Bytes that are no UTF-8 become
  // their <0xNN> pieces. Throws Error(kInput) for 2 GiB of text or more.
  std::vector<int32_t> encode(const std::vector<TextSpan>& spans) const;
  // With may_hold_control: the reference's encode(text, add_special_tokens=False).
  std::vector<int32_t> encode(std::string_view text, bool may_hold_control = true) const;

  // Also gives the byte range [begin, end) of the joined text that each token covers.
  struct Piece {
    int32_t id;
    int64_t begin;
    int64_t end;
  };
  std::vector<Piece> encode_pieces(const std::vector<TextSpan>& spans) const;

  // Text of ids; a run of byte pieces that is no UTF-8 becomes one U+FFFD a byte; ids without a piece are left out.
  // kSkip drops added tokens with special=true.
  enum class Special { kKeep, kSkip };
  std::string decode(const std::vector<int32_t>& ids, Special special) const;

  int32_t vocab_size() const;  // base vocabulary and added tokens: largest id + 1
  // Id of a piece or added token, or -1.
  int32_t id_of(std::string_view piece) const;
  std::string piece_of(int32_t id) const;  // "" where there is none
  bool is_added(int32_t id) const;         // matched as a whole, before any merges
  bool is_special(int32_t id) const;       // an added token with special=true: a control token
  // First special token whose text occurs in `text` ("" = none): for data.special_tokens=reject.
  std::string find_control(std::string_view text) const;

  struct Impl;

 private:
  explicit Tokenizer(std::unique_ptr<const Impl> impl);
  std::unique_ptr<const Impl> impl_;
};

// tokenizer.json's text as it was read (saved beside adapters). `path` as in Tokenizer::load.
std::string read_tokenizer_json(const std::string& path);

}  // namespace gemtune
