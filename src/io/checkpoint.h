// Checkpoint folders: complete or absent. manifest.json, with every file's size and SHA-256, is written last.
// One rank writes (save, commit, prune); any may read. Which checkpoint to resume is decided on one rank and broadcast.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace gemtune {

// RUN_DIR/checkpoints/step-00000060
std::string checkpoint_folder(const std::string& run_dir, int64_t step);

// Makes RUN_DIR/checkpoints/.tmp-step-…, calls `fill(folder)`, writes the manifest, flushes, renames into place; returns the
// folder. Leftovers of an earlier interrupted save of that step are removed first; a checkpoint of that step that exists is
// replaced in one move. `fill` may write files in any way and in sub-folders. When it throws, or the disk is full
// (Error(kEnvironment), bytes needed and free), the temporary folder is removed and the earlier checkpoints stay whole.
std::string save_checkpoint(const std::string& run_dir, int64_t step, const std::function<void(const std::string& folder)>& fill);

// Same for any folder of finished files (final/): fill a temporary sibling, manifest, swap in.
void commit_folder(const std::string& folder, const std::function<void(const std::string& temporary)>& fill);

struct CheckpointInfo {
  std::string folder;
  int64_t step = 0;
};
// Newest checkpoint whose manifest and files agree in size and checksum. Newer ones that are broken or unfinished are
// skipped and named in `ignored` (may be null):
// "step-00000060: optimizer.safetensors has 17 bytes, its manifest says 4096", ".tmp-step-00000080: a save that did not finish".
bool find_newest_checkpoint(const std::string& run_dir, CheckpointInfo* found, std::vector<std::string>* ignored);

// manifest.json of a filled folder: {"format": 1, "files": {"name": {"size": 17, "sha256": "…"}}}, flushed to disk after all
// the files it lists. Names are relative, with '/' between folders.
void write_manifest(const std::string& folder);

// "" when the folder is complete, else what is wrong with it, for a line that starts with the folder. Files beside those of
// the manifest are allowed, except pickles.
std::string verify_manifest(const std::string& folder);

// Removes all but the newest `keep` complete checkpoints (keep ≥ 1, never the newest one) and what interrupted saves and
// prunes left behind. Broken checkpoints newer than the oldest kept one stay, for a person to look at.
void prune_checkpoints(const std::string& run_dir, int keep);

}  // namespace gemtune
