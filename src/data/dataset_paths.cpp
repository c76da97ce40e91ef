// Image names → files. Nothing outside the data set's folder is ever reached through a row.
#include "data/dataset_record.h"

#include <sys/stat.h>

#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

namespace gemtune {
namespace {

namespace fs = std::filesystem;

// realpath(3): "" when the file does not exist or cannot be reached (errno says which).
std::string real_path(const std::string& path) {
  char* resolved = ::realpath(path.c_str(), nullptr);
  if (resolved == nullptr) return "";
  std::string out(resolved);
  std::free(resolved);
  return out;
}

bool is_inside(const std::string& path, const std::string& root) {
  if (root == "/") return true;
  return path.size() > root.size() && path.compare(0, root.size(), root) == 0 && path[root.size()] == '/';
}

// "file" of "file:///x", "" when `name` opens with no scheme. A scheme has two letters at least: "C:\x" is a drive.
std::string scheme_of(const std::string& name) {
  const size_t colon = name.find("://");
  if (colon == std::string::npos || colon < 2) return "";
  for (size_t i = 0; i < colon; ++i) {
    const auto c = static_cast<unsigned char>(name[i]);
    if (std::isalnum(c) == 0 && c != '+' && c != '-' && c != '.') return "";
  }
  return name.substr(0, colon);
}

// True when ".." steps climb above the start, whatever exists on disk.
bool climbs_out(const std::string& name) {
  int depth = 0;
  for (const fs::path& step : fs::path(name)) {
    if (step == "..") {
      if (--depth < 0) return true;
    } else if (!step.empty() && step != ".") {
      ++depth;
    }
  }
  return false;
}

}  // namespace

ImageRoot::ImageRoot(const std::string& folder) {
  std::error_code ignored;
  folder_ = fs::absolute(folder.empty() ? "." : folder, ignored).lexically_normal().string();
  if (folder_.size() > 1 && folder_.back() == '/') folder_.pop_back();
  const std::string real = real_path(folder_);
  real_roots_.push_back(real.empty() ? folder_ : real);
  // The hub's cache holds links: REPO/snapshots/REVISION/… → REPO/blobs/HASH.
  for (fs::path at = real_roots_[0]; at.has_relative_path(); at = at.parent_path()) {
    if (at.parent_path().filename() != "snapshots") continue;
    const std::string blobs = (at.parent_path().parent_path() / "blobs").string();
    if (real_path(blobs) == blobs) real_roots_.push_back(blobs);
    break;
  }
}

ImageRoot::Found ImageRoot::find(const std::string& name) const {
  const auto refused = [](std::string rule, const char* why) { return Found{"", std::move(rule) + kFixRow, why}; };
  if (name.empty()) return refused("names no file", reason::kImageCell);
  if (name.find('\0') != std::string::npos) return refused("the path holds a NUL byte", reason::kImagePath);
  const std::string scheme = scheme_of(name);
  if (!scheme.empty()) {
    return refused(scheme + ":// is not read; name a file in the folder of the file that names it", reason::kImagePath);
  }
  if (name[0] == '/' || (name.size() > 2 && name[1] == ':' && (name[2] == '\\' || name[2] == '/'))) {
    return refused("an absolute path; name a file in the folder of the file that names it", reason::kImagePath);
  }
  if (climbs_out(name)) return refused("leaves the folder of the file that names it", reason::kImagePath);

  const std::string path = folder_ + "/" + name;
  const std::string real = real_path(path);
  if (real.empty()) {
    if (errno == ENOENT || errno == ENOTDIR) return refused("the file does not exist", reason::kMissingFile);
    return refused(std::string("the file cannot be reached: ") + std::strerror(errno), reason::kMissingFile);
  }
  bool inside = false;
  for (const std::string& root : real_roots_) inside = inside || is_inside(real, root);
  if (!inside) {
    return refused("a symbolic link leads out of the folder of the file that names it", reason::kImagePath);
  }
  struct stat info {};
  if (::stat(real.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) {
    return refused("is not a regular file", reason::kImagePath);
  }
  return {path, "", ""};
}

}  // namespace gemtune
