#include "io/checkpoint.h"

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/text.h"
#include "io/safetensors.h"

#include <nlohmann/json.hpp>

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <set>

namespace gemtune {
namespace {

namespace fs = std::filesystem;

constexpr const char* kManifest = "manifest.json";
constexpr const char* kTemporary = ".tmp-";
// A name that no reader takes for a checkpoint: a folder on its way out.
constexpr const char* kRemoved = ".old-";
constexpr int64_t kMaxManifestBytes = int64_t{16} << 20;

std::string checkpoints_folder(const std::string& run_dir) {
  return join_path(run_dir, "checkpoints");
}
std::string step_name(int64_t step) {
  return fmt::format("step-{:08}", step);
}

// The step of a name exactly as step_name spells it.
std::optional<int64_t> step_of(std::string_view name) {
  if (!name.starts_with("step-")) return std::nullopt;
  const std::string digits(name.substr(5));
  if (digits.empty() || digits.size() > 18 || digits.find_first_not_of("0123456789") != std::string::npos) return std::nullopt;
  const int64_t step = std::stoll(digits);
  if (step_name(step) != name) return std::nullopt;
  return step;
}

std::string sibling(const std::string& folder, const char* prefix) {
  return join_path(parent_folder(folder), prefix + base_name(folder));
}

// Files of a folder, relative, sorted. Anything that is neither file nor folder cannot be checked later and is refused.
std::vector<std::string> files_under(const std::string& folder) {
  std::vector<std::string> names;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_symlink() || (!entry.is_regular_file() && !entry.is_directory()))
      throw job_error("{}: only plain files and folders can be saved; remove it", entry.path().string());
    if (entry.is_regular_file()) names.push_back(entry.path().lexically_relative(folder).generic_string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

void flush_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const int failed = fd < 0 ? -1 : ::fsync(fd);
  const int cause = errno;
  if (fd >= 0) ::close(fd);
  // Some network file systems do not offer it (EINVAL) and need it not.
  if (failed != 0 && cause != EINVAL) throw environment_error("{}: cannot be flushed to disk: {}", path, std::strerror(cause));
}

void flush_folders(const std::string& folder) {
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_directory()) sync_folder(entry.path().string());
  }
  sync_folder(folder);
}

void remove_quietly(const std::string& path) {
  try {
    remove_recursively(path);
  } catch (const std::exception& error) {
    log_warning("{}: cannot be removed: {}", path, error.what());
  }
}

// First out of sight by one rename, so that a half-removed folder never looks like a checkpoint.
void remove_folder(const std::string& folder) {
  const std::string old = sibling(folder, kRemoved);
  remove_recursively(old);
  rename_path(folder, old);
  remove_recursively(old);
}

// Puts `temporary` in the place of `folder`; what stood there ends at `temporary` or is gone.
void swap_in(const std::string& temporary, const std::string& folder) {
  if (folder_exists(folder) && ::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, folder.c_str(), RENAME_EXCHANGE) != 0) {
    // Some network file systems cannot exchange; the old folder then steps aside first.
    const std::string old = sibling(folder, kRemoved);
    remove_recursively(old);
    rename_path(folder, old);
  }
  if (!folder_exists(folder)) rename_path(temporary, folder);
  sync_folder(parent_folder(folder));
  remove_quietly(temporary);
  remove_quietly(sibling(folder, kRemoved));
}

enum class Depth { kSizes, kChecksums };

std::string fault_of(const std::string& folder, Depth depth) {
  try {
    const std::string path = join_path(folder, kManifest);
    if (!file_exists(path)) return "manifest.json is missing";
    const Json manifest = parse_json(read_file(path, kMaxManifestBytes), kManifest);
    if (!manifest.is_object() || !manifest.contains("format") || !manifest.contains("files") || !manifest["files"].is_object())
      return "manifest.json has no format and files";
    if (manifest["format"] != 1)
      return fmt::format("manifest.json has format {}, this version reads 1", manifest["format"].dump());
    // Sizes first: they find most damage without reading gigabytes.
    for (const auto& [name, file] : manifest["files"].items()) {
      const fs::path relative(name);
      if (name.empty() || relative.is_absolute() || std::find(relative.begin(), relative.end(), "..") != relative.end())
        return fmt::format("manifest.json names {}, which is outside the folder", in_quotes(name));
      if (!file.is_object() || !file.contains("size") || !file["size"].is_number_integer() || !file.contains("sha256") ||
          !file["sha256"].is_string())
        return fmt::format("manifest.json has no size and sha256 for {}", name);
      const std::string file_path = join_path(folder, name);
      if (!file_exists(file_path)) return fmt::format("{} is missing", name);
      if (file_size(file_path) != file["size"].get<int64_t>())
        return fmt::format("{} has {} bytes, its manifest says {}", name, file_size(file_path), file["size"].get<int64_t>());
    }
    for (const std::string& name : files_under(folder)) {
      if (is_pickle_name(name) && !manifest["files"].contains(name))
        return fmt::format("{} is a pickle file that the manifest does not list; remove it", name);
    }
    if (depth == Depth::kSizes) return "";
    for (const auto& [name, file] : manifest["files"].items()) {
      const std::string got = sha256_of_file(join_path(folder, name));
      if (got != file["sha256"].get<std::string>())
        return fmt::format("{} has checksum {}, its manifest says {}", name, got.substr(0, 12),
                           file["sha256"].get<std::string>().substr(0, 12));
    }
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

// Where a swap in two renames was cut between them, the old folder comes back.
void restore_interrupted_swap(const std::string& folder) {
  const std::string old = sibling(folder, kRemoved);
  if (!folder_exists(folder) && folder_exists(old) && fault_of(old, Depth::kChecksums).empty()) rename_path(old, folder);
}

}  // namespace

std::string checkpoint_folder(const std::string& run_dir, int64_t step) {
  return join_path(checkpoints_folder(run_dir), step_name(step));
}

std::string save_checkpoint(const std::string& run_dir, int64_t step, const std::function<void(const std::string&)>& fill) {
  const std::string folder = checkpoint_folder(run_dir, step);
  commit_folder(folder, fill);
  return folder;
}

void commit_folder(const std::string& folder, const std::function<void(const std::string&)>& fill) {
  make_folders(parent_folder(folder));
  restore_interrupted_swap(folder);
  const std::string temporary = sibling(folder, kTemporary);
  remove_recursively(temporary);
  make_folders(temporary);
  try {
    fill(temporary);
    write_manifest(temporary);
  } catch (...) {
    remove_quietly(temporary);
    throw;
  }
  swap_in(temporary, folder);
}

void write_manifest(const std::string& folder) {
  Json files = Json::object();
  for (const std::string& name : files_under(folder)) {
    if (name == kManifest) continue;
    const std::string path = join_path(folder, name);
    flush_file(path);
    files[name] = {{"size", file_size(path)}, {"sha256", sha256_of_file(path)}};
  }
  flush_folders(folder);
  write_file_atomically(join_path(folder, kManifest), Json{{"format", 1}, {"files", files}}.dump(2) + "\n");
  flush_file(join_path(folder, kManifest));
  sync_folder(folder);
}

std::string verify_manifest(const std::string& folder) {
  return fault_of(folder, Depth::kChecksums);
}

bool find_newest_checkpoint(const std::string& run_dir, CheckpointInfo* found, std::vector<std::string>* ignored) {
  const std::string parent = checkpoints_folder(run_dir);
  if (!folder_exists(parent)) return false;
  // Newest first; of one step, the finished folder before its unfinished successor.
  std::vector<std::pair<int64_t, std::string>> candidates;
  for (const std::string& name : list_folder(parent)) {
    const std::string_view bare = name.starts_with(kTemporary) ? std::string_view(name).substr(std::strlen(kTemporary)) : name;
    if (const auto step = step_of(bare)) candidates.emplace_back(*step, name);
  }
  std::sort(candidates.begin(), candidates.end(), std::greater<>());
  for (const auto& [step, name] : candidates) {
    const bool unfinished = name.starts_with(kTemporary);
    const std::string fault = unfinished ? "a save that did not finish" : verify_manifest(join_path(parent, name));
    if (fault.empty()) {
      *found = {join_path(parent, name), step};
      return true;
    }
    if (ignored) ignored->push_back(fmt::format("{}: {}", name, fault));
  }
  return false;
}

void prune_checkpoints(const std::string& run_dir, int keep) {
  const std::string parent = checkpoints_folder(run_dir);
  if (!folder_exists(parent)) return;
  std::vector<int64_t> steps;
  for (const std::string& name : list_folder(parent)) {
    if (const auto step = step_of(name)) steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end(), std::greater<>());
  int num_complete = 0;
  int64_t newest_complete = -1;
  for (const int64_t step : steps) {
    const std::string folder = checkpoint_folder(run_dir, step);
    // Nothing is removed before one checkpoint is known to be good byte for byte; for the others sizes do, since hashing all
    // of them after each save would stop training for long.
    const Depth depth = num_complete == 0 ? Depth::kChecksums : Depth::kSizes;
    if (num_complete >= std::max(keep, 1)) {
      remove_folder(folder);
    } else if (fault_of(folder, depth).empty()) {
      ++num_complete;
      newest_complete = std::max(newest_complete, step);
    }
  }
  for (const std::string& name : list_folder(parent)) {
    const bool removed = name.starts_with(kRemoved);
    if (!removed && !name.starts_with(kTemporary)) continue;
    const auto step = step_of(std::string_view(name).substr(std::strlen(removed ? kRemoved : kTemporary)));
    if (step && *step <= newest_complete) remove_recursively(join_path(parent, name));
  }
}

}  // namespace gemtune
