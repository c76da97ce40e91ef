// What a frozen vision tower makes of each picture, kept: made once, read in every later epoch and for every other question
// about the same picture.
#pragma once

#include "data/loader.h"
#include "model/model.h"

#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace gemtune {

struct VisionCacheOptions {
  // Host memory it may take (page-locked where a GPU reads it). Full: further pictures are made again each time.
  int64_t memory_limit = 0;
  // Also kept there over runs, one file a picture: FOLDER/<key>. "" = not. The folder must be named after all that the
  // tower's outputs depend on (vision_cache_folder).
  std::string folder;
};

// cache_folder()/vision/<weights, quantisation, compute dtype and kind of device>.
std::string vision_cache_folder(const std::string& model_folder, const ModelSpec& spec);

class VisionCache {
 public:
  // `model` must have a frozen vision tower and outlive the cache.
  VisionCache(const Gemma3& model, VisionCacheOptions options);

  // Whether pooled() needs no pixels for this picture; true stays true. Called by the loader's threads.
  bool is_known(const std::string& picture_key);
  // Pooled patches [N, S, W] of all the batch's images, on the model's device. pixels_NCHW: those of batch.decoded.
  // numerics: on a CPU each picture goes through the tower alone, so that its features do not depend on its neighbours.
  Tensor pooled(const Batch& batch, const Tensor& pixels_NCHW);

 private:
  struct Slot {
    size_t slab = 0;
    int64_t index = 0;
  };
  Tensor new_slot(const std::string& key);    // undefined when memory is full; with the mutex held
  Tensor kept(const std::string& key);        // from memory, undefined when it is not there
  Tensor read(const std::string& key) const;  // from disk, undefined when it is not there
  void write(const std::string& key, const Tensor& pooled_SW) const;
  std::string path_of(const std::string& key) const;

  const Gemma3& model_;
  const VisionCacheOptions options_;
  std::vector<int64_t> shape_SW_;
  std::mutex mutex_;
  std::vector<Tensor> slabs_;  // [kSlab, S, W] each
  int64_t num_slots_ = 0;
  std::map<std::string, Slot> slots_;
};

}  // namespace gemtune
