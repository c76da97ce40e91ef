#include "data/tokenizer_tables.h"

#include "base/error.h"
#include "base/text.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

namespace gemtune {
namespace {

constexpr uint64_t kMagic = 0x31306B6F74746D67;  // "gmttok01"; the layout's version is its end
constexpr uint64_t kNoPair = ~uint64_t{0};
constexpr size_t kNumPages = 0x110000 / 256;

uint64_t pair_of(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}

// Upper bits of a multiplication spread neighbouring ids over the table.
size_t slot_of(uint64_t pair, size_t num_slots) {
  pair ^= pair >> 29;
  return static_cast<size_t>((pair * 0x9E3779B97F4A7C15) >> (64 - std::countr_zero(num_slots)));
}

// FNV-1a: the hash of a concatenation goes on from the hash of its beginning.
constexpr uint32_t kHashStart = 2166136261u;
uint32_t hash_on(uint32_t hash, std::string_view bytes) {
  for (const char c : bytes) hash = (hash ^ static_cast<uint8_t>(c)) * 16777619u;
  return hash;
}
size_t slot_of(uint32_t hash, size_t num_slots) {
  return slot_of(uint64_t{hash} << 7 | 1, num_slots);
}

uint64_t checksum_of(std::span<const uint64_t> words) {
  std::array<uint64_t, 4> lanes = {1, 2, 3, 4};
  size_t i = 0;
  for (; i + 4 <= words.size(); i += 4) {
    for (size_t k = 0; k < 4; ++k) lanes[k] = std::rotl((lanes[k] ^ words[i + k]) * 0x9E3779B97F4A7C15, 29);
  }
  for (; i < words.size(); ++i) lanes[0] = std::rotl((lanes[0] ^ words[i]) * 0x9E3779B97F4A7C15, 29);
  uint64_t sum = words.size();
  for (const uint64_t lane : lanes) sum = std::rotl((sum ^ lane) * 0xBF58476D1CE4E5B9, 31);
  return sum;
}

// The scalar value when `piece` is exactly one valid UTF-8 character, else -1.
int64_t only_scalar(std::string_view piece) {
  if (piece.empty() || piece.size() > 4 || !is_valid_utf8(piece)) return -1;
  const auto byte = [&](size_t i) { return static_cast<uint32_t>(static_cast<uint8_t>(piece[i])); };
  const uint32_t lead = byte(0);
  const size_t length = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  if (length != piece.size()) return -1;
  uint32_t scalar = length == 1 ? lead : lead & (0x7F >> length);
  for (size_t i = 1; i < length; ++i) scalar = scalar << 6 | (byte(i) & 0x3F);
  return scalar;
}

bool is_joined(std::string_view whole, std::string_view left, std::string_view right) {
  return whole.size() == left.size() + right.size() && whole.starts_with(left) && whole.ends_with(right);
}

// Places of the pieces by text, while they are collected.
class PieceIndex {
 public:
  explicit PieceIndex(size_t num_pieces)
      : slots_(std::bit_ceil(std::max<size_t>(16, num_pieces + num_pieces / 2)), Slot{0, -1}) {}

  struct Slot {
    uint32_t hash;
    int32_t id;
  };

  // False when the piece is there already.
  bool add(std::string_view piece, int32_t id) {
    const uint32_t hash = hash_on(kHashStart, piece);
    Slot* slot = find(hash, [&](std::string_view known) { return known == piece; });
    if (slot->id >= 0) return false;
    *slot = {hash, id};
    if (static_cast<size_t>(id) >= pieces_.size()) pieces_.resize(id + 1);
    pieces_[id] = piece;
    return true;
  }
  int32_t id_of(std::string_view piece) {
    return find(hash_on(kHashStart, piece), [&](std::string_view known) { return known == piece; })->id;
  }
  int32_t id_of_joined(std::string_view left, std::string_view right) {
    const uint32_t hash = hash_on(hash_on(kHashStart, left), right);
    return find(hash, [&](std::string_view known) { return is_joined(known, left, right); })->id;
  }
  bool taken(int32_t id) const { return static_cast<size_t>(id) < pieces_.size() && pieces_[id].data() != nullptr; }
  const std::vector<Slot>& slots() const { return slots_; }
  const std::vector<std::string_view>& pieces() const { return pieces_; }

 private:
  template <class Same>
  Slot* find(uint32_t hash, const Same& same) {
    size_t at = slot_of(hash, slots_.size());
    while (slots_[at].id >= 0 && !(slots_[at].hash == hash && same(pieces_[slots_[at].id]))) at = (at + 1) & (slots_.size() - 1);
    return &slots_[at];
  }

  std::vector<Slot> slots_;
  std::vector<std::string_view> pieces_;
};

}  // namespace

struct TokenizerTables::Header {
  uint64_t magic;
  uint64_t checksum;  // of everything behind this field
  uint64_t num_words;
  uint64_t num_merge_slots;
  uint64_t num_piece_slots;
  uint64_t num_products;
  uint64_t num_scalar_ids;
  uint64_t num_ids;
  uint64_t num_added;
  uint64_t num_piece_bytes;
  int32_t unknown_id;
  uint32_t fuse_unknown;
  uint32_t replace_space;
  uint32_t split_after_space;
  int32_t byte_ids[256];
};

// Where each table stands in the block, in words of 8 bytes. The sizes are bounded, so nothing overflows.
struct TokenizerTables::Layout {
  explicit Layout(const Header& header) {
    const auto place = [this](uint64_t bytes) {
      const size_t at = num_words;
      num_words += (bytes + 7) / 8;
      return at;
    };
    place(sizeof(Header));
    merge_slots = place(header.num_merge_slots * sizeof(MergeSlot));
    piece_slots = place(header.num_piece_slots * sizeof(PieceSlot));
    products = place(header.num_products * sizeof(int32_t));
    scalar_pages = place(kNumPages * sizeof(int32_t));
    scalar_ids = place(header.num_scalar_ids * sizeof(int32_t));
    piece_begins = place((header.num_ids + 1) * sizeof(uint32_t));
    added = place(header.num_added * sizeof(Added));
    piece_bytes = place(header.num_piece_bytes);
  }
  size_t num_words = 0;
  size_t merge_slots, piece_slots, products, scalar_pages, scalar_ids, piece_begins, added, piece_bytes;
};

std::vector<uint64_t> TokenizerTables::build(const TokenizerSource& source, const std::string& where) {
  PieceIndex index(source.pieces.size() + source.added.size());
  for (size_t i = 0; i < source.pieces.size(); ++i) {
    const std::string_view piece = source.pieces[i];
    const int32_t id = source.piece_ids[i];
    if (index.taken(id)) {
      throw input_error("{}: model.vocab: pieces {} and {} have the same id {}", where, in_quotes(index.pieces()[id]),
                        in_quotes(piece), id);
    }
    if (!index.add(piece, id)) throw input_error("{}: model.vocab: piece {} stands there twice", where, in_quotes(piece));
  }
  std::vector<bool> special_ids;
  for (const AddedToken& token : source.added) {
    if (special_ids.size() <= static_cast<size_t>(token.id)) special_ids.resize(token.id + 1);
    special_ids[token.id] = token.special;
  }
  // Ordinary text never becomes a control token: neither by a merge nor as a single character.
  const auto is_special = [&](int32_t id) { return static_cast<size_t>(id) < special_ids.size() && special_ids[id]; };

  const size_t num_merges = source.merge_sides.size() / 2;
  std::vector<MergeSlot> merge_slots(std::bit_ceil(std::max<size_t>(16, num_merges * 2)), MergeSlot{kNoPair, 0, 0});
  std::vector<int32_t> products(num_merges, -1);
  int32_t product = -1;
  for (size_t rank = 0; rank < num_merges; ++rank) {
    const std::string_view left = source.merge_sides[2 * rank];
    const std::string_view right = source.merge_sides[2 * rank + 1];
    const int32_t left_id = index.id_of(left);
    const int32_t right_id = index.id_of(right);
    // The ways to make one piece mostly stand together.
    if (product < 0 || !is_joined(index.pieces()[product], left, right)) product = index.id_of_joined(left, right);
    if (left_id < 0 || right_id < 0 || product < 0) {
      const std::string missing = left_id < 0    ? std::string(left)
                                  : right_id < 0 ? std::string(right)
                                                 : std::string(left) + std::string(right);
      throw input_error("{}: model.merges[{}]: joins {} and {}, but model.vocab has no piece {}", where, rank, in_quotes(left),
                        in_quotes(right), in_quotes(missing));
    }
    products[rank] = product;
    if (is_special(product)) continue;
    const uint64_t pair = pair_of(left_id, right_id);
    size_t at = slot_of(pair, merge_slots.size());
    while (merge_slots[at].pair != kNoPair && merge_slots[at].pair != pair) at = (at + 1) & (merge_slots.size() - 1);
    merge_slots[at] = {pair, static_cast<uint32_t>(rank), product};
  }

  Header header = {};
  header.magic = kMagic;
  header.unknown_id = source.unknown_piece.empty() ? -1 : index.id_of(source.unknown_piece);
  if (!source.unknown_piece.empty() && header.unknown_id < 0) {
    throw input_error("{}: model.unk_token: {} is not in model.vocab", where, in_quotes(source.unknown_piece));
  }
  header.fuse_unknown = source.fuse_unknown;
  header.replace_space = source.replace_space;
  header.split_after_space = source.split_after_space;
  std::fill(std::begin(header.byte_ids), std::end(header.byte_ids), -1);
  if (source.byte_fallback) {
    for (int byte = 0; byte < 256; ++byte) {
      const std::string piece = fmt::format("<0x{:02X}>", byte);
      header.byte_ids[byte] = index.id_of(piece);
      if (header.byte_ids[byte] < 0) {
        throw input_error("{}: model.vocab: has no piece {}, which model.byte_fallback needs", where, in_quotes(piece));
      }
    }
  } else if (header.unknown_id < 0) {
    throw input_error("{}: model.byte_fallback: is not true and model.unk_token is not set, so unknown characters would be lost",
                      where);
  }

  // Behind the merges and single pieces: an added token outside of model.vocab is nothing that text is made of.
  std::vector<Added> added;
  for (size_t i = 0; i < source.added.size(); ++i) {
    const AddedToken& token = source.added[i];
    const int32_t known = index.id_of(token.content);
    if (known >= 0 && known != token.id) {
      throw input_error("{}: added_tokens[{}]: {} has id {}, model.vocab or an earlier added token gives it {}", where, i,
                        in_quotes(token.content), token.id, known);
    }
    if (known < 0 && index.taken(token.id)) {
      throw input_error("{}: added_tokens[{}]: {} has id {}, which is the id of {}", where, i, in_quotes(token.content), token.id,
                        in_quotes(index.pieces()[token.id]));
    }
    if (known < 0) index.add(token.content, token.id);
    added.push_back({token.id, token.special, token.normalized});
  }

  std::vector<int32_t> scalar_pages(kNumPages, -1);
  std::vector<int32_t> scalar_ids;
  std::vector<uint32_t> piece_begins;
  std::string piece_bytes;
  for (size_t id = 0; id < index.pieces().size(); ++id) {
    const std::string_view piece = index.pieces()[id];
    piece_begins.push_back(static_cast<uint32_t>(piece_bytes.size()));
    piece_bytes += piece;
    if (piece_bytes.size() > UINT32_MAX) throw input_error("{}: model.vocab: has more than 4 GiB of text", where);
    const int64_t scalar = only_scalar(piece);
    if (scalar < 0 || is_special(static_cast<int32_t>(id))) continue;
    int32_t& page = scalar_pages[scalar / 256];
    if (page < 0) {
      page = static_cast<int32_t>(scalar_ids.size());
      scalar_ids.resize(scalar_ids.size() + 256, -1);
    }
    scalar_ids[page + scalar % 256] = static_cast<int32_t>(id);
  }
  piece_begins.push_back(static_cast<uint32_t>(piece_bytes.size()));

  header.num_merge_slots = merge_slots.size();
  header.num_piece_slots = index.slots().size();
  header.num_products = products.size();
  header.num_scalar_ids = scalar_ids.size();
  header.num_ids = index.pieces().size();
  header.num_added = added.size();
  header.num_piece_bytes = piece_bytes.size();
  const Layout layout(header);
  header.num_words = layout.num_words;

  std::vector<uint64_t> block(layout.num_words, 0);
  const auto put = [&](size_t at, const void* data, size_t bytes) {
    if (bytes > 0) std::memcpy(block.data() + at, data, bytes);
  };
  put(0, &header, sizeof(header));
  put(layout.merge_slots, merge_slots.data(), merge_slots.size() * sizeof(MergeSlot));
  static_assert(sizeof(PieceIndex::Slot) == sizeof(PieceSlot));
  put(layout.piece_slots, index.slots().data(), index.slots().size() * sizeof(PieceSlot));
  put(layout.products, products.data(), products.size() * sizeof(int32_t));
  put(layout.scalar_pages, scalar_pages.data(), scalar_pages.size() * sizeof(int32_t));
  put(layout.scalar_ids, scalar_ids.data(), scalar_ids.size() * sizeof(int32_t));
  put(layout.piece_begins, piece_begins.data(), piece_begins.size() * sizeof(uint32_t));
  put(layout.added, added.data(), added.size() * sizeof(Added));
  put(layout.piece_bytes, piece_bytes.data(), piece_bytes.size());
  block[1] = checksum_of(std::span(block).subspan(2));
  return block;
}

std::optional<TokenizerTables> TokenizerTables::view(std::span<const std::byte> block) {
  if (block.size() < sizeof(Header) || block.size() % 8 != 0) return std::nullopt;
  const std::span<const uint64_t> words(reinterpret_cast<const uint64_t*>(block.data()), block.size() / 8);
  const auto* header = reinterpret_cast<const Header*>(block.data());
  if (header->magic != kMagic || header->num_words != words.size()) return std::nullopt;
  if (checksum_of(words.subspan(2)) != header->checksum) return std::nullopt;
  const Layout layout(*header);
  if (layout.num_words != words.size()) return std::nullopt;

  TokenizerTables tables;
  const auto at = [&]<class T>(size_t word, uint64_t count, std::span<const T>& out) {
    out = {reinterpret_cast<const T*>(words.data() + word), static_cast<size_t>(count)};
  };
  tables.header_ = header;
  at(layout.merge_slots, header->num_merge_slots, tables.merge_slots_);
  at(layout.piece_slots, header->num_piece_slots, tables.piece_slots_);
  at(layout.products, header->num_products, tables.products_);
  at(layout.scalar_pages, kNumPages, tables.scalar_pages_);
  at(layout.scalar_ids, header->num_scalar_ids, tables.scalar_ids_);
  at(layout.piece_begins, header->num_ids + 1, tables.piece_begins_);
  at(layout.added, header->num_added, tables.added_);
  tables.piece_bytes_ = {reinterpret_cast<const char*>(words.data() + layout.piece_bytes), header->num_piece_bytes};
  return tables;
}

int32_t TokenizerTables::num_ids() const {
  return static_cast<int32_t>(header_->num_ids);
}

std::string_view TokenizerTables::piece(int32_t id) const {
  if (id < 0 || id >= num_ids()) return {};
  return piece_bytes_.substr(piece_begins_[id], piece_begins_[id + 1] - piece_begins_[id]);
}

int32_t TokenizerTables::id_of(std::string_view text) const {
  const uint32_t hash = hash_on(kHashStart, text);
  size_t at = slot_of(hash, piece_slots_.size());
  while (piece_slots_[at].id >= 0) {
    if (piece_slots_[at].hash == hash && piece(piece_slots_[at].id) == text) return piece_slots_[at].id;
    at = (at + 1) & (piece_slots_.size() - 1);
  }
  return -1;
}

int32_t TokenizerTables::id_of_scalar(uint32_t scalar) const {
  const int32_t page = scalar_pages_[scalar / 256];
  return page < 0 ? -1 : scalar_ids_[page + scalar % 256];
}

int32_t TokenizerTables::id_of_byte(uint8_t byte) const {
  return header_->byte_ids[byte];
}
int32_t TokenizerTables::unknown_id() const {
  return header_->unknown_id;
}
bool TokenizerTables::fuse_unknown() const {
  return header_->fuse_unknown != 0;
}
bool TokenizerTables::replace_space() const {
  return header_->replace_space != 0;
}
bool TokenizerTables::split_after_space() const {
  return header_->split_after_space != 0;
}

TokenizerTables::Merge TokenizerTables::merge(int32_t left, int32_t right) const {
  const uint64_t pair = pair_of(left, right);
  size_t at = slot_of(pair, merge_slots_.size());
  while (merge_slots_[at].pair != kNoPair) {
    if (merge_slots_[at].pair == pair) return {merge_slots_[at].rank, merge_slots_[at].product};
    at = (at + 1) & (merge_slots_.size() - 1);
  }
  return {};
}

}  // namespace gemtune
