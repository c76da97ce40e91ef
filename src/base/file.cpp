#include "base/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <system_error>

#include "base/error.h"
#include "base/text.h"

namespace gemtune {
namespace {

// Where the part that names files begins: after "gs://bucket", else at the start.
size_t start_of_names(std::string_view path) {
  const size_t scheme = path.find("://");
  if (scheme == std::string_view::npos) return 0;
  return std::min(path.find('/', scheme + 3), path.size());
}

std::string_view without_end_slashes(std::string_view path) {
  const size_t least = std::max<size_t>(start_of_names(path), 1);
  while (path.size() > least && path.back() == '/') path.remove_suffix(1);
  return path;
}

std::string reason(int error) {
  return std::generic_category().message(error);
}

void refuse_remote(const std::string& path) {
  if (is_remote(path)) {
    throw environment_error("{}: this build reads and writes local folders only; mount the bucket or give a local path", path);
  }
}

// "" is the current folder, as in a path without a folder.
std::string or_current(const std::string& folder) {
  return folder.empty() ? "." : folder;
}

[[noreturn]] void throw_unreadable(const std::string& path, int error) {
  if (error == ENOENT || error == ENOTDIR) throw input_error("{}: no such file; check the path", path);
  if (error == EISDIR) throw input_error("{}: is a folder, expected a file; name a file in it", path);
  throw input_error("{}: cannot be read: {}; check its permissions and the disk", path, reason(error));
}

bool is_full(int error) {
  return error == ENOSPC || error == EDQUOT;
}

[[noreturn]] void throw_unwritable(const std::string& path, int error, int64_t needed) {
  if (is_full(error)) {
    throw environment_error("{}: the disk is full: {} bytes needed, {} bytes free; free some space or choose another folder",
                            path, needed, free_bytes(parent_folder(path)));
  }
  throw environment_error("{}: cannot be written: {}; check the folder's permissions", path, reason(error));
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

int open_to_read(const std::string& path, struct stat* status) {
  refuse_remote(path);
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw_unreadable(path, errno);
  if (::fstat(fd, status) != 0 || S_ISDIR(status->st_mode)) {
    const int error = S_ISDIR(status->st_mode) ? EISDIR : errno;
    ::close(fd);
    throw_unreadable(path, error);
  }
  return fd;
}

// Up to `size` bytes; fewer only at the end of the file.
size_t read_some(int fd, char* out, size_t size, const std::string& path) {
  size_t done = 0;
  while (done < size) {
    const ssize_t got = ::read(fd, out + done, size - done);
    if (got == 0) break;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_unreadable(path, errno);
    done += static_cast<size_t>(got);
  }
  return done;
}

// 0 or errno.
int write_all(int fd, std::string_view content) {
  while (!content.empty()) {
    const ssize_t put = ::write(fd, content.data(), content.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return errno;
    content.remove_prefix(static_cast<size_t>(put));
  }
  return ::fsync(fd) == 0 ? 0 : errno;
}

// Unique across processes and across machines that share the folder.
std::string temporary_beside(const std::string& path) {
  std::random_device device;
  const uint64_t number = uint64_t{device()} << 32 | device();
  return join_path(parent_folder(path), fmt::format(".tmp-{:016x}", number));
}

class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new()) {
    if (context_ == nullptr || EVP_DigestInit_ex(context_, EVP_sha256(), nullptr) != 1) {
      EVP_MD_CTX_free(context_);
      throw environment_error("OpenSSL offers no SHA-256; install a libcrypto that has it");
    }
  }
  ~Sha256() { EVP_MD_CTX_free(context_); }
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void add(std::string_view bytes) { EVP_DigestUpdate(context_, bytes.data(), bytes.size()); }
  std::string finish() {
    std::array<unsigned char, EVP_MAX_MD_SIZE> digest;
    unsigned int size = 0;
    EVP_DigestFinal_ex(context_, digest.data(), &size);
    std::string text;
    for (unsigned int i = 0; i < size; ++i) text += fmt::format("{:02x}", digest[i]);
    return text;
  }

 private:
  EVP_MD_CTX* context_;
};

}  // namespace

bool is_remote(std::string_view path) {
  return path.starts_with("gs://") || path.starts_with("s3://");
}

std::string join_path(std::string_view folder, std::string_view name) {
  const bool stands_alone = name.starts_with('/') || name.find("://") != std::string_view::npos;
  if (stands_alone || folder.empty() || folder == ".") return std::string(name.empty() ? folder : name);
  if (name.empty()) return std::string(folder);
  std::string path(folder);
  if (path.back() != '/') path += '/';
  return path.append(name);
}

std::string parent_folder(std::string_view path) {
  path = without_end_slashes(path);
  const size_t start = start_of_names(path);
  const size_t slash = path.rfind('/');
  if (start > 0) return std::string(without_end_slashes(path.substr(0, slash < start ? start : slash)));
  if (slash == std::string_view::npos) return ".";
  return std::string(without_end_slashes(path.substr(0, slash == 0 ? 1 : slash)));
}

std::string base_name(std::string_view path) {
  path = without_end_slashes(path);
  const size_t slash = path.rfind('/');
  return std::string(slash == std::string_view::npos || path == "/" ? path : path.substr(slash + 1));
}

bool file_exists(const std::string& path) {
  refuse_remote(path);
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && !S_ISDIR(status.st_mode);
}

bool folder_exists(const std::string& path) {
  refuse_remote(path);
  struct stat status {};
  return ::stat(or_current(path).c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

int64_t file_size(const std::string& path) {
  refuse_remote(path);
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) throw_unreadable(path, errno);
  if (S_ISDIR(status.st_mode)) throw_unreadable(path, EISDIR);
  return status.st_size;
}

std::string read_file(const std::string& path, int64_t max_bytes) {
  struct stat status {};
  const Descriptor file(open_to_read(path, &status));
  const auto limit = static_cast<size_t>(std::max<int64_t>(max_bytes, 0));
  const auto too_large = [&](int64_t size) {
    return input_error("{}: {} bytes, expected at most {}; this is not the file it is taken for", path, size, max_bytes);
  };
  if (status.st_size > max_bytes) throw too_large(status.st_size);
  // A pipe or a file under /proc has no size, and a file may grow while it is read: read until the end.
  std::string content;
  size_t chunk = static_cast<size_t>(status.st_size) + 1;
  while (true) {
    const size_t before = content.size();
    content.resize(before + chunk);
    const size_t got = read_some(file.get(), content.data() + before, chunk, path);
    content.resize(before + got);
    if (content.size() > limit) throw too_large(static_cast<int64_t>(content.size()));
    if (got < chunk) return content;
    chunk = size_t{1} << 20;
  }
}

void write_file_atomically(const std::string& path, std::string_view content) {
  refuse_remote(path);
  if (folder_exists(path)) throw environment_error("{}: is a folder, expected a file; remove it or choose another name", path);
  const std::string temporary = temporary_beside(path);
  const auto needed = static_cast<int64_t>(content.size());
  Descriptor file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (file.get() < 0) throw_unwritable(path, errno, needed);
  int error = write_all(file.get(), content);
  if (::close(file.release()) != 0 && error == 0) error = errno;
  if (error == 0 && ::rename(temporary.c_str(), path.c_str()) != 0) error = errno;
  if (error != 0) {
    ::unlink(temporary.c_str());
    throw_unwritable(path, error, needed);
  }
  sync_folder(parent_folder(path));
}

std::vector<std::string> list_folder(const std::string& path) {
  refuse_remote(path);
  DIR* folder = ::opendir(or_current(path).c_str());
  if (folder == nullptr) {
    if (errno == ENOENT) throw input_error("{}: no such folder; check the path", path);
    if (errno == ENOTDIR) throw input_error("{}: is a file, expected a folder; check the path", path);
    throw input_error("{}: cannot be read: {}; check its permissions", path, reason(errno));
  }
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = ::readdir(folder)) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
    errno = 0;
  }
  const int error = errno;
  ::closedir(folder);
  if (error != 0) throw input_error("{}: cannot be read: {}; check the disk", path, reason(error));
  std::sort(names.begin(), names.end());
  return names;
}

void make_folders(const std::string& path) {
  refuse_remote(path);
  std::error_code error;
  std::filesystem::create_directories(or_current(path), error);
  // Another rank or a shared disk may have made it meanwhile.
  if (folder_exists(path)) return;
  if (is_full(error.value())) throw_unwritable(path, error.value(), 4096);
  throw environment_error("{}: the folder cannot be made: {}; check the permissions above it", path,
                          reason(error ? error.value() : EEXIST));
}

void remove_recursively(const std::string& path) {
  refuse_remote(path);
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (error && error.value() != ENOENT) {
    throw environment_error("{}: cannot be removed: {}; check its permissions", path, reason(error.value()));
  }
}

void rename_path(const std::string& from, const std::string& to) {
  refuse_remote(from);
  refuse_remote(to);
  if (::rename(from.c_str(), to.c_str()) == 0) return;
  const int error = errno;
  if (is_full(error)) throw_unwritable(to, error, 4096);
  throw environment_error("{}: cannot be renamed to {}: {}; check both folders", from, to, reason(error));
}

void sync_folder(const std::string& path) {
  refuse_remote(path);
  const Descriptor folder(::open(or_current(path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() < 0)
    throw environment_error("{}: the folder cannot be opened: {}; check its permissions", path, reason(errno));
  // Some network file systems do not offer it (EINVAL) and need it not.
  if (::fsync(folder.get()) != 0 && errno != EINVAL) {
    throw environment_error("{}: cannot be flushed to disk: {}; check the disk", path, reason(errno));
  }
}

int64_t free_bytes(const std::string& path) {
  refuse_remote(path);
  // A folder that will be made lies on the disk of its nearest ancestor.
  std::filesystem::path folder = std::filesystem::absolute(or_current(path));
  struct statvfs status {};
  while (::statvfs(folder.c_str(), &status) != 0) {
    if (errno == EINTR) continue;
    if (!folder.has_relative_path() || (errno != ENOENT && errno != ENOTDIR)) {
      throw environment_error("{}: free space cannot be read: {}; check the path", path, reason(errno));
    }
    folder = folder.parent_path();
  }
  return static_cast<int64_t>(status.f_bavail) * static_cast<int64_t>(status.f_frsize);
}

MappedFile::MappedFile(const std::string& path) {
  struct stat status {};
  const Descriptor file(open_to_read(path, &status));
  size_ = static_cast<size_t>(status.st_size);
  if (size_ == 0) return;  // mmap refuses an empty range
  void* data = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.get(), 0);
  if (data == MAP_FAILED) throw_unreadable(path, errno);
  data_ = static_cast<const std::byte*>(data);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

std::string sha256_of(std::string_view content) {
  Sha256 sum;
  sum.add(content);
  return sum.finish();
}

std::string sha256_of_file(const std::string& path) {
  struct stat status {};
  const Descriptor file(open_to_read(path, &status));
  Sha256 sum;
  std::string chunk(size_t{1} << 20, '\0');
  while (const size_t got = read_some(file.get(), chunk.data(), chunk.size(), path)) sum.add({chunk.data(), got});
  return sum.finish();
}

std::string cache_folder() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value != nullptr && value[0] == '/' ? value : "");
  };
  std::string root = variable("XDG_CACHE_HOME");
  if (root.empty() && !variable("HOME").empty()) root = join_path(variable("HOME"), ".cache");
  if (root.empty()) {
    throw environment_error("the cache folder is unknown: HOME and XDG_CACHE_HOME are not absolute paths; set one of them");
  }
  const std::string folder = join_path(root, "gemtune");
  make_folders(folder);
  return folder;
}

}  // namespace gemtune
