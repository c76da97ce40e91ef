#include "data/tokenizer.h"

#include "base/error.h"
#include "data/added_tokens.h"
#include "data/bpe.h"
#include "data/tokenizer_files.h"
#include "data/tokenizer_tables.h"

#include <limits>
#include <utility>

namespace gemtune {

struct Tokenizer::Impl {
  explicit Impl(TokenizerBlock block) : storage(std::move(block)), tables(storage.tables()), added(tables) {}

  TokenizerBlock storage;
  const TokenizerTables tables;
  const AddedTokens added;
};

Tokenizer::Tokenizer(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;

std::shared_ptr<const Tokenizer> Tokenizer::load(const std::string& path) {
  auto impl = std::make_unique<const Impl>(load_tokenizer_block(path));
  return std::shared_ptr<const Tokenizer>(new Tokenizer(std::move(impl)));
}

std::shared_ptr<const Tokenizer> Tokenizer::parse(std::string_view json, const std::string& where) {
  auto impl = std::make_unique<const Impl>(TokenizerBlock(TokenizerTables::build(parse_tokenizer_source(json, where), where)));
  return std::shared_ptr<const Tokenizer>(new Tokenizer(std::move(impl)));
}

std::vector<Tokenizer::Piece> Tokenizer::encode_pieces(const std::vector<TextSpan>& spans) const {
  std::string text;
  std::vector<ByteRange> control;
  for (const TextSpan& span : spans) {
    const int64_t begin = static_cast<int64_t>(text.size());
    text += span.text;
    if (!span.may_hold_control || span.text.empty()) continue;
    if (!control.empty() && control.back().end == begin) {
      control.back().end = static_cast<int64_t>(text.size());
    } else {
      control.push_back({begin, static_cast<int64_t>(text.size())});
    }
  }
  if (text.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max())) {
    throw input_error("tokenizer: text of {} bytes, the limit is 2 GiB", text.size());
  }

  std::vector<Piece> pieces;
  Bpe bpe(impl_->tables);
  impl_->added.split(text, control, [&](int64_t begin, int64_t end, int32_t id) {
    if (id >= 0) {
      pieces.push_back({id, begin, end});
    } else {
      bpe.encode(text, begin, end, pieces);
    }
  });
  return pieces;
}

std::vector<int32_t> Tokenizer::encode(const std::vector<TextSpan>& spans) const {
  std::vector<int32_t> ids;
  for (const Piece& piece : encode_pieces(spans)) ids.push_back(piece.id);
  return ids;
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool may_hold_control) const {
  return encode({TextSpan{std::string(text), may_hold_control}});
}

std::string Tokenizer::decode(const std::vector<int32_t>& ids, Special special) const {
  PieceJoiner joiner;
  for (const int32_t id : ids) {
    const std::string_view piece = impl_->tables.piece(id);
    if (piece.empty() || (special == Special::kSkip && is_special(id))) continue;
    joiner.add(piece);
  }
  return joiner.finish();
}

int32_t Tokenizer::vocab_size() const {
  return impl_->tables.num_ids();
}
int32_t Tokenizer::id_of(std::string_view piece) const {
  return impl_->tables.id_of(piece);
}
std::string Tokenizer::piece_of(int32_t id) const {
  return std::string(impl_->tables.piece(id));
}
bool Tokenizer::is_added(int32_t id) const {
  return impl_->added.is_added(id);
}
bool Tokenizer::is_special(int32_t id) const {
  return impl_->added.is_special(id);
}
std::string Tokenizer::find_control(std::string_view text) const {
  return std::string(impl_->added.find_special(text));
}

}  // namespace gemtune
