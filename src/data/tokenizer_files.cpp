#include "data/tokenizer_files.h"

#include "base/error.h"
#include "base/json.h"
#include "base/log.h"
#include "base/text.h"
#include "data/tokenizer.h"
#include "data/tokenizer_source.h"

#include <nlohmann/json.hpp>

#include <sys/stat.h>

#include <filesystem>
#include <optional>
#include <system_error>

namespace gemtune {
namespace {

constexpr int64_t kMaxJsonBytes = int64_t{1} << 28;
// Smaller files are read faster than a cache is found.
constexpr int64_t kMinCachedBytes = int64_t{1} << 20;

// A vocabulary file named there would be read by other tools, and copied with what they export.
void check_config(const std::string& folder) {
  const std::string path = join_path(folder, "tokenizer_config.json");
  if (!file_exists(path)) return;
  const Json config = read_json_file(path);
  if (!config.is_object()) throw input_error("{}: is not a JSON object", path);
  for (const char* key : {"vocab_file", "merges_file", "tokenizer_file", "spm_file"}) {
    const auto found = config.find(key);
    if (found == config.end() || !found->is_string()) continue;
    const std::string name = found->get<std::string>();
    bool leaves = name.starts_with('/') || name.starts_with('\\') || name.find(':') != std::string::npos;
    for (const std::filesystem::path& part : std::filesystem::path(name)) leaves = leaves || part == "..";
    if (leaves) {
      throw input_error("{}: {}: {} is outside of the model's folder; remove the entry", path, key, in_quotes(name));
    }
  }
}

std::string tokenizer_json_path(const std::string& path) {
  if (!folder_exists(path)) return path;
  const std::string file = join_path(path, "tokenizer.json");
  if (!file_exists(file)) {
    throw input_error("{}: holds no tokenizer.json; name the folder or file in model.tokenizer", path);
  }
  check_config(path);
  return file;
}

// Nothing for remote files and for small ones.
std::optional<std::string> cache_path(const std::string& json_path) {
  struct stat info = {};
  if (is_remote(json_path) || ::stat(json_path.c_str(), &info) != 0 || info.st_size < kMinCachedBytes) return std::nullopt;
  std::error_code error;
  const std::filesystem::path full = std::filesystem::canonical(json_path, error);
  if (error) return std::nullopt;
  const std::string key = fmt::format("{}\n{}\n{}.{:09}\n{}.{:09}", full.string(), static_cast<int64_t>(info.st_size),
                                      info.st_mtim.tv_sec, info.st_mtim.tv_nsec, info.st_ctim.tv_sec, info.st_ctim.tv_nsec);
  return join_path(join_path(cache_folder(), "tokenizers"), sha256_of(key).substr(0, 32) + ".bin");
}

}  // namespace

TokenizerTables TokenizerBlock::checked(std::span<const std::byte> block) {
  const std::optional<TokenizerTables> tables = TokenizerTables::view(block);
  if (!tables.has_value()) throw input_error("tokenizer: the tables are damaged");
  return *tables;
}

TokenizerBlock load_tokenizer_block(const std::string& path) {
  const std::string json_path = tokenizer_json_path(path);
  std::optional<std::string> cached;
  try {
    cached = cache_path(json_path);
    if (cached.has_value() && file_exists(*cached)) return TokenizerBlock(std::make_unique<MappedFile>(*cached));
  } catch (const Error&) {
    // Without a usable cache the file itself is read.
  }

  TokenizerBlock block(TokenizerTables::build(parse_tokenizer_source(read_file(json_path, kMaxJsonBytes), json_path), json_path));
  if (cached.has_value()) {
    try {
      make_folders(parent_folder(*cached));
      const std::span<const std::byte> bytes = block.bytes();
      write_file_atomically(*cached, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    } catch (const Error& error) {
      log_warning("the tokenizer's tables cannot be kept for the next start: {}", error.what());
    }
  }
  return block;
}

std::string read_tokenizer_json(const std::string& path) {
  return read_file(tokenizer_json_path(path), kMaxJsonBytes);
}

}  // namespace gemtune
