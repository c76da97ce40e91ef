// Inside the tokenizer: flat look-up tables in one block of memory, so that the block can be kept in a file and mapped.
#pragma once

#include "data/tokenizer_source.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gemtune {

// A view of the block; owns nothing.
class TokenizerTables {
 public:
  struct Merge {
    uint32_t rank = kNoRank;
    int32_t product = -1;
  };
  static constexpr uint32_t kNoRank = 0xFFFFFFFF;
  struct Added {
    int32_t id;
    uint32_t special;
    uint32_t normalized;
  };

  // The block for `source`. Throws Error(kInput), opened by `where`, when its parts contradict each other.
  static std::vector<uint64_t> build(const TokenizerSource& source, const std::string& where);
  // Nothing when the block is of another layout, cut or damaged.
  static std::optional<TokenizerTables> view(std::span<const std::byte> block);

  int32_t num_ids() const;                   // largest id + 1
  std::string_view piece(int32_t id) const;  // "" where no piece has the id
  int32_t id_of(std::string_view piece) const;
  // Id of a one-character piece that ordinary text may become, or -1.
  int32_t id_of_scalar(uint32_t scalar) const;
  int32_t id_of_byte(uint8_t byte) const;  // of <0xNN>, or -1 without byte fallback
  int32_t unknown_id() const;              // or -1
  bool fuse_unknown() const;
  bool replace_space() const;
  bool split_after_space() const;
  std::span<const Added> added() const { return added_; }

  Merge merge(int32_t left, int32_t right) const;
  int32_t product(uint32_t rank) const { return products_[rank]; }

 private:
  struct Header;
  struct MergeSlot {
    uint64_t pair;
    uint32_t rank;
    int32_t product;
  };
  struct PieceSlot {
    uint32_t hash;
    int32_t id;
  };
  struct Layout;

  const Header* header_ = nullptr;
  std::span<const MergeSlot> merge_slots_;
  std::span<const PieceSlot> piece_slots_;
  std::span<const int32_t> products_;
  std::span<const int32_t> scalar_pages_;  // page of 256 scalars → its place in scalar_ids_, or -1
  std::span<const int32_t> scalar_ids_;
  std::span<const uint32_t> piece_begins_;  // num_ids + 1
  std::span<const Added> added_;
  std::string_view piece_bytes_;
};

}  // namespace gemtune
