// Inside the tokenizer: byte-pair merges of one stretch of text, and pieces joined to text again.
#pragma once

#include "data/tokenizer.h"
#include "data/tokenizer_tables.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gemtune {

// Keeps its working memory between stretches; one object a thread.
class Bpe {
 public:
  explicit Bpe(const TokenizerTables& tables) : tables_(tables) {}

  // Appends the pieces of text[begin, end), which holds no added tokens.
  void encode(std::string_view text, int64_t begin, int64_t end, std::vector<Tokenizer::Piece>& pieces);

 private:
  // Symbols in text order; a merge takes the right one out of the chain.
  struct Symbol {
    int32_t id;  // -1: merged into its left neighbour
    int32_t previous;
    int32_t next;
    uint32_t pair_rank;  // of the merge with the next symbol, or kNoRank
    int32_t begin;
    int32_t end;
  };
  void add_symbols(std::string_view text, int64_t begin, int64_t end);
  void add_symbol(int32_t id, int64_t begin, int64_t end);
  void merge_symbols();
  void offer(int32_t left);
  void flush(std::vector<Tokenizer::Piece>& pieces);

  const TokenizerTables& tables_;
  std::vector<Symbol> symbols_;
  std::vector<uint64_t> queue_;  // heap of rank << 32 | place, least first
};

// The reference's decoder: "▁" becomes a space, runs of byte pieces become characters.
class PieceJoiner {
 public:
  void add(std::string_view piece);
  std::string finish();

 private:
  void flush_bytes();
  std::string text_;
  std::string bytes_;  // of the run of byte pieces that is open
};

}  // namespace gemtune
