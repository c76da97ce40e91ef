#include "base/error.h"
#include "base/text.h"
#include "io/safetensors.h"

#include <nlohmann/json.hpp>

#include <fmt/format.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <utility>

namespace gemtune {
namespace {

using Json = nlohmann::json;

// A file under a temporary name that takes its place only by commit().
class PendingFile {
 public:
  PendingFile(const std::string& path, int64_t total_bytes)
      : path_(path),
        total_bytes_(total_bytes),
        temporary_(join_path(parent_folder(path), fmt::format(".{}.tmp-{}", base_name(path), ::getpid()))) {
    fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd_ < 0) fail("cannot be opened");
  }
  ~PendingFile() {
    if (fd_ >= 0) ::close(fd_);
    if (!committed_) ::unlink(temporary_.c_str());
  }
  PendingFile(const PendingFile&) = delete;
  PendingFile& operator=(const PendingFile&) = delete;

  void write(const void* data, size_t size) {
    const auto* at = static_cast<const char*>(data);
    // Linux moves at most 2 GiB a call; smaller pieces keep the page cache's write-back going.
    constexpr size_t kPiece = size_t{64} << 20;
    while (size > 0) {
      const ssize_t written = ::write(fd_, at, std::min(size, kPiece));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail("cannot be written");
      at += written;
      size -= static_cast<size_t>(written);
    }
  }

  void commit() {
    if (::fsync(fd_) != 0) fail("cannot be flushed");
    const int fd = std::exchange(fd_, -1);
    if (::close(fd) != 0) fail("cannot be closed");
    rename_path(temporary_, path_);
    committed_ = true;
    sync_folder(parent_folder(path_));
  }

 private:
  [[noreturn]] void fail(const char* what) {
    const int cause = errno;
    if (cause == ENOSPC || cause == EDQUOT) {
      // What this file holds already counts as free again.
      if (fd_ >= 0 && ::ftruncate(fd_, 0) != 0) errno = cause;
      throw environment_error("{}: the disk is full: {} bytes needed, {} bytes free; free some space or choose another folder",
                              path_, total_bytes_, free_bytes(parent_folder(path_)));
    }
    throw environment_error("{}: {}: {}", path_, what, std::strerror(cause));
  }

  std::string path_;
  int64_t total_bytes_ = 0;
  std::string temporary_;
  int fd_ = -1;
  bool committed_ = false;
};

std::string json_string(const std::string& text, const std::string& path) {
  if (!is_valid_utf8(text))
    throw input_error("{}: {} is not valid UTF-8 and cannot be a name in a safetensors file", path, in_quotes(text));
  return Json(text).dump();
}

std::string header_text(const std::string& path, const std::vector<TensorToWrite>& tensors,
                        std::map<std::string, std::string> metadata, int64_t* data_bytes) {
  metadata.emplace("format", "pt");
  std::string text = "{\"__metadata__\":{";
  for (const auto& [key, value] : metadata) {
    if (text.back() != '{') text += ',';
    text += json_string(key, path) + ":" + json_string(value, path);
  }
  text += '}';

  std::set<std::string> names;
  int64_t offset = 0;
  for (const TensorToWrite& tensor : tensors) {
    if (tensor.name == "__metadata__" || !names.insert(tensor.name).second)
      throw input_error("{}: tensor name {} is {}; choose another", path, in_quotes(tensor.name),
                        tensor.name == "__metadata__" ? "reserved" : "used twice");
    int64_t expected = dtype_size(tensor.dtype);
    bool fits = true;
    for (const int64_t size : tensor.shape) fits = fits && size >= 0 && !__builtin_mul_overflow(expected, size, &expected);
    const auto got = static_cast<int64_t>(tensor.bytes.size());
    if (!fits || expected != got)
      throw input_error("{}: tensor {}: {} [{}] needs {} bytes, got {}", path, in_quotes(tensor.name), dtype_name(tensor.dtype),
                        fmt::join(tensor.shape, ", "), fits ? std::to_string(expected) : "too many", got);
    text += fmt::format(",{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}", json_string(tensor.name, path),
                        dtype_name(tensor.dtype), fmt::join(tensor.shape, ","), offset, offset + got);
    offset += got;
  }
  text += '}';
  text.append((8 - text.size() % 8) % 8, ' ');
  *data_bytes = offset;
  return text;
}

}  // namespace

void write_safetensors(const std::string& path, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  if (is_remote(path))
    throw environment_error("{}: safetensors files are written to a local folder and uploaded from there", path);
  int64_t data_bytes = 0;
  const std::string header = header_text(path, tensors, metadata, &data_bytes);
  PendingFile file(path, static_cast<int64_t>(8 + header.size()) + data_bytes);
  const uint64_t length = header.size();
  file.write(&length, 8);
  file.write(header.data(), header.size());
  for (const TensorToWrite& tensor : tensors) file.write(tensor.bytes.data(), tensor.bytes.size());
  file.commit();
}

}  // namespace gemtune
