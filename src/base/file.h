// The one seam to files: local folders now and object stores (gs://, s3://) by the same calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gemtune {

// True for gs://… and s3://….
bool is_remote(std::string_view path);

// `name` under `folder`; an absolute `name` or a URI is returned as it is. Works for URIs and local paths.
std::string join_path(std::string_view folder, std::string_view name);
std::string parent_folder(std::string_view path);
std::string base_name(std::string_view path);

bool file_exists(const std::string& path);
bool folder_exists(const std::string& path);
int64_t file_size(const std::string& path);

// Whole file in memory. Throws Error(kInput) naming the path when it cannot be read, and when it is larger than `max_bytes`.
std::string read_file(const std::string& path, int64_t max_bytes = int64_t{1} << 40);

// Writes beside the target, flushes to disk, renames: a reader sees the old content or the new, never a part.
// Throws Error(kEnvironment) with the bytes needed and free when the disk is full.
void write_file_atomically(const std::string& path, std::string_view content);

// Names (not paths) in a folder, sorted.
std::vector<std::string> list_folder(const std::string& path);
void make_folders(const std::string& path);
void remove_recursively(const std::string& path);
void rename_path(const std::string& from, const std::string& to);
// Flushes a folder's entries to disk, so that a rename in it survives a power cut.
void sync_folder(const std::string& path);
int64_t free_bytes(const std::string& path);

// Read-only memory map of a local file; nothing is read until it is touched.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Lower-case hexadecimal SHA-256.
std::string sha256_of(std::string_view content);
std::string sha256_of_file(const std::string& path);

// ${XDG_CACHE_HOME:-~/.cache}/gemtune, made when absent.
std::string cache_folder();

}  // namespace gemtune
