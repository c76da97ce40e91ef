#include "base/hub.h"

#include "base/error.h"
#include "base/file.h"
#include "base/text.h"

#include <algorithm>
#include <cstdlib>

namespace gemtune {
namespace {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

std::string hub_cache() {
  if (const std::string cache = environment("HF_HUB_CACHE"); !cache.empty()) return cache;
  if (const std::string home = environment("HF_HOME"); !home.empty()) return join_path(home, "hub");
  if (const std::string cache = environment("XDG_CACHE_HOME"); !cache.empty()) return join_path(cache, "huggingface/hub");
  return join_path(environment("HOME"), ".cache/huggingface/hub");
}

bool is_plain_name(std::string_view name) {
  return !name.empty() && name[0] != '.' && name[0] != '-' && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' || c == '.';
  });
}

}  // namespace

bool looks_like_hub_id(std::string_view text) {
  const size_t slash = text.find('/');
  for (const char* ending : {".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".safetensors"}) {
    if (text.ends_with(ending)) return false;
  }
  return slash != std::string_view::npos && is_plain_name(text.substr(0, slash)) && is_plain_name(text.substr(slash + 1));
}

std::string find_hub_snapshot(HubKind kind, const std::string& id) {
  const bool model = kind == HubKind::kModel;
  std::string folder = id;
  folder.replace(folder.find('/'), 1, "--");
  folder = join_path(hub_cache(), (model ? "models--" : "datasets--") + folder);
  const std::string ref = join_path(folder, "refs/main");
  if (file_exists(ref)) {
    const std::string revision(strip(read_file(ref, 4096)));
    const std::string snapshot = join_path(join_path(folder, "snapshots"), base_name(revision));
    if (folder_exists(snapshot)) return snapshot;
  }
  throw input_error("{}: neither a folder here nor in the hub's cache ({}); download it first: hf download {}{}", id, hub_cache(),
                    model ? "" : "--repo-type dataset ", id);
}

}  // namespace gemtune
