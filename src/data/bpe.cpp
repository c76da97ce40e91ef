#include "data/bpe.h"

#include "base/text.h"

#include <algorithm>
#include <functional>

namespace gemtune {
namespace {

constexpr uint32_t kSpaceMark = 0x2581;  // "▁"
constexpr std::string_view kSpaceMarkText = "▁";
constexpr int32_t kNone = -1;

// The character at text[at]: its scalar value and length, or length 0 when the bytes there are no valid UTF-8.
struct Character {
  uint32_t scalar;
  int length;
};
Character character_at(std::string_view text, int64_t at, int64_t end) {
  const auto byte = [&](int64_t i) { return static_cast<uint32_t>(static_cast<uint8_t>(text[i])); };
  const uint32_t lead = byte(at);
  if (lead < 0x80) return {lead, 1};
  const int length = lead >= 0xC2 && lead < 0xE0 ? 2 : lead >= 0xE0 && lead < 0xF0 ? 3 : lead >= 0xF0 && lead < 0xF5 ? 4 : 0;
  if (length == 0 || at + length > end) return {0, 0};
  uint32_t scalar = lead & (0x7F >> length);
  for (int i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xC0) != 0x80) return {0, 0};
    scalar = scalar << 6 | (byte(at + i) & 0x3F);
  }
  const bool overlong = (length == 3 && scalar < 0x800) || (length == 4 && scalar < 0x10000);
  if (overlong || scalar > 0x10FFFF || (scalar >= 0xD800 && scalar < 0xE000)) return {0, 0};
  return {scalar, length};
}

}  // namespace

void Bpe::add_symbol(int32_t id, int64_t begin, int64_t end) {
  const auto place = static_cast<int32_t>(symbols_.size());
  if (place > 0) symbols_.back().next = place;
  symbols_.push_back({id, place - 1, kNone, TokenizerTables::kNoRank, static_cast<int32_t>(begin), static_cast<int32_t>(end)});
}

void Bpe::add_symbols(std::string_view text, int64_t begin, int64_t end) {
  bool after_unknown = false;
  for (int64_t at = begin; at < end;) {
    const Character character = character_at(text, at, end);
    const bool is_space = character.length == 1 && character.scalar == ' ' && tables_.replace_space();
    const int64_t next = at + std::max(1, character.length);
    const int32_t id = character.length == 0 ? kNone : tables_.id_of_scalar(is_space ? kSpaceMark : character.scalar);
    if (id >= 0) {
      add_symbol(id, at, next);
      after_unknown = false;
    } else if (tables_.id_of_byte(0) >= 0) {
      const std::string_view bytes = is_space ? kSpaceMarkText : text.substr(at, next - at);
      for (size_t i = 0; i < bytes.size(); ++i) {
        const int64_t place = at + std::min<int64_t>(static_cast<int64_t>(i), next - at);
        add_symbol(tables_.id_of_byte(static_cast<uint8_t>(bytes[i])), place, std::min(place + 1, next));
      }
    } else if (after_unknown && tables_.fuse_unknown()) {
      symbols_.back().end = static_cast<int32_t>(next);
    } else {
      add_symbol(tables_.unknown_id(), at, next);
      after_unknown = true;
    }
    at = next;
  }
}

// Looks up the pair that begins at `left` and queues it when it merges.
void Bpe::offer(int32_t left) {
  Symbol& symbol = symbols_[left];
  symbol.pair_rank = symbol.next == kNone ? TokenizerTables::kNoRank : tables_.merge(symbol.id, symbols_[symbol.next].id).rank;
  if (symbol.pair_rank == TokenizerTables::kNoRank) return;
  queue_.push_back(uint64_t{symbol.pair_rank} << 32 | static_cast<uint32_t>(left));
}

void Bpe::merge_symbols() {
  queue_.clear();
  for (size_t i = 0; i + 1 < symbols_.size(); ++i) offer(static_cast<int32_t>(i));
  std::make_heap(queue_.begin(), queue_.end(), std::greater<>());
  const auto offer_late = [this](int32_t left) {
    const size_t before = queue_.size();
    offer(left);
    if (queue_.size() > before) std::push_heap(queue_.begin(), queue_.end(), std::greater<>());
  };
  while (!queue_.empty()) {
    const uint64_t best = queue_.front();
    std::pop_heap(queue_.begin(), queue_.end(), std::greater<>());
    queue_.pop_back();
    const auto rank = static_cast<uint32_t>(best >> 32);
    const auto place = static_cast<int32_t>(best & 0xFFFFFFFF);
    Symbol& left = symbols_[place];
    if (left.id == kNone || left.pair_rank == TokenizerTables::kNoRank) continue;
    // The pair may have changed since it was queued. Like the reference, an entry still counts when the pair that stands
    // there now makes the same piece, even by a merge of another rank.
    if (left.pair_rank != rank && tables_.product(left.pair_rank) != tables_.product(rank)) continue;
    Symbol& right = symbols_[left.next];
    left.id = tables_.product(rank);
    left.end = right.end;
    left.next = right.next;
    right.id = kNone;
    if (left.next != kNone) symbols_[left.next].previous = place;
    if (left.previous != kNone) offer_late(left.previous);
    offer_late(place);
  }
}

void Bpe::flush(std::vector<Tokenizer::Piece>& pieces) {
  if (symbols_.empty()) return;
  merge_symbols();
  for (int32_t at = 0; at != kNone; at = symbols_[at].next) {
    pieces.push_back({symbols_[at].id, symbols_[at].begin, symbols_[at].end});
  }
  symbols_.clear();
}

void Bpe::encode(std::string_view text, int64_t begin, int64_t end, std::vector<Tokenizer::Piece>& pieces) {
  while (begin < end) {
    int64_t word_end = end;
    if (tables_.split_after_space()) {
      const size_t space = text.substr(0, end).find(' ', begin);
      if (space != std::string_view::npos) word_end = static_cast<int64_t>(space) + 1;
    }
    add_symbols(text, begin, word_end);
    flush(pieces);
    begin = word_end;
  }
}

void PieceJoiner::flush_bytes() {
  if (is_valid_utf8(bytes_)) {
    text_ += bytes_;
  } else {
    for (size_t i = 0; i < bytes_.size(); ++i) text_ += "\uFFFD";
  }
  bytes_.clear();
}

void PieceJoiner::add(std::string_view piece) {
  const auto digit = [&](size_t at) {
    const char c = piece[at];
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
  };
  if (piece.size() == 6 && piece.starts_with("<0x") && piece[5] == '>' && digit(3) >= 0 && digit(4) >= 0) {
    bytes_ += static_cast<char>(digit(3) * 16 + digit(4));
    return;
  }
  if (!bytes_.empty()) flush_bytes();
  for (size_t at = 0; at < piece.size();) {
    const size_t mark = piece.find(kSpaceMarkText, at);
    text_ += piece.substr(at, mark - at);
    if (mark == std::string_view::npos) return;
    text_ += ' ';
    at = mark + kSpaceMarkText.size();
  }
}

std::string PieceJoiner::finish() {
  flush_bytes();
  return std::move(text_);
}

}  // namespace gemtune
