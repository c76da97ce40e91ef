// Inside the tokenizer: tokenizer.json on disk, and the cache of tables made from it.
#pragma once

#include "base/file.h"
#include "data/tokenizer_tables.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace gemtune {

// TokenizerTables with the memory behind them: built in this process, or mapped from the cache.
class TokenizerBlock {
 public:
  // Throws Error(kInput) when the memory holds no undamaged tables.
  explicit TokenizerBlock(std::vector<uint64_t> words) : words_(std::move(words)), tables_(checked(bytes())) {}
  explicit TokenizerBlock(std::unique_ptr<MappedFile> file) : file_(std::move(file)), tables_(checked(bytes())) {}

  const TokenizerTables& tables() const { return tables_; }
  std::span<const std::byte> bytes() const { return file_ ? file_->bytes() : std::as_bytes(std::span(words_)); }

 private:
  static TokenizerTables checked(std::span<const std::byte> block);

  std::vector<uint64_t> words_;  // moves with the object, its memory does not
  std::unique_ptr<MappedFile> file_;
  TokenizerTables tables_;
};

// `path`: a tokenizer.json or a folder that holds one.
TokenizerBlock load_tokenizer_block(const std::string& path);

}  // namespace gemtune
