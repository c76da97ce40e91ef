#include "train/vision_cache.h"

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "ops/torch.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstring>

namespace gemtune {
namespace {

constexpr int64_t kSlab = 32;                          // pictures a block of host memory
constexpr int64_t kAtOnce = 16;                        // pictures through the tower at once on a GPU
constexpr int64_t kLeastFreeDisk = int64_t{10} << 30;  // the disk is never filled beyond this
constexpr size_t kDigest = 64;                         // SHA-256 in hexadecimal, behind the values

std::string_view bytes_of(const Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

}  // namespace

std::string vision_cache_folder(const std::string& model_folder, const ModelSpec& spec) {
  const std::string held = !spec.quant.nf4 || !spec.quant.vision ? "dense" : spec.quant.double_quant ? "nf4 double" : "nf4";
  const std::string name = fmt::format("{}\n{}\n{}\n{}", vision_digest(model_folder), held, c10::toString(spec.compute_dtype),
                                       c10::DeviceTypeName(spec.device.type()));
  return join_path(join_path(cache_folder(), "vision"), sha256_of(name).substr(0, 32));
}

VisionCache::VisionCache(const Gemma3& model, VisionCacheOptions options) : model_(model), options_(std::move(options)) {
  if (!model.vision_is_frozen()) throw job_error("the vision tower is trained: its outputs cannot be kept");
  shape_SW_ = {model.dims().tokens_per_image, model.dims().vision->width};
  if (!options_.folder.empty()) make_folders(options_.folder);
}

std::string VisionCache::path_of(const std::string& key) const {
  return join_path(options_.folder, key);
}

Tensor VisionCache::new_slot(const std::string& key) {
  const int64_t index = num_slots_ % kSlab;
  if (index == 0) {
    const auto options = at::TensorOptions().dtype(model_.spec().compute_dtype).pinned_memory(model_.spec().device.is_cuda());
    const std::vector<int64_t> shape = {kSlab, shape_SW_[0], shape_SW_[1]};
    const int64_t slab_bytes = kSlab * shape_SW_[0] * shape_SW_[1] * int64_t(at::elementSize(model_.spec().compute_dtype));
    if (int64_t(slabs_.size() + 1) * slab_bytes > options_.memory_limit) return Tensor();
    slabs_.push_back(at::empty(shape, options));
  }
  ++num_slots_;
  slots_[key] = {slabs_.size() - 1, index};
  return slabs_.back().select(0, index);
}

Tensor VisionCache::kept(const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto found = slots_.find(key);
  return found == slots_.end() ? Tensor() : slabs_[found->second.slab].select(0, found->second.index);
}

// A file that cannot be read whole is as good as none: the picture is made again.
Tensor VisionCache::read(const std::string& key) const {
  if (options_.folder.empty() || !file_exists(path_of(key))) return Tensor();
  std::string file;
  try {
    file = read_file(path_of(key));
  } catch (const Error&) {
    return Tensor();
  }
  const Tensor pooled_SW = at::empty(shape_SW_, at::TensorOptions().dtype(model_.spec().compute_dtype));
  if (file.size() != pooled_SW.nbytes() + kDigest) return Tensor();
  const std::string_view values(file.data(), pooled_SW.nbytes());
  if (file.substr(values.size()) != sha256_of(values)) return Tensor();
  std::memcpy(pooled_SW.mutable_data_ptr(), values.data(), values.size());
  return pooled_SW;
}

void VisionCache::write(const std::string& key, const Tensor& pooled_SW) const {
  if (options_.folder.empty() || file_exists(path_of(key)) || free_bytes(options_.folder) < kLeastFreeDisk) return;
  try {
    const Tensor values = pooled_SW.cpu().contiguous();
    write_file_atomically(path_of(key), std::string(bytes_of(values)) + sha256_of(bytes_of(values)));
  } catch (const Error& error) {
    log_warning("a picture's features are not kept for later runs: {}", error.what());
  }
}

bool VisionCache::is_known(const std::string& picture_key) {
  if (kept(picture_key).defined()) return true;
  const Tensor pooled_SW = read(picture_key);
  if (!pooled_SW.defined()) return false;
  const std::lock_guard lock(mutex_);
  if (slots_.count(picture_key) != 0) return true;
  const Tensor slot = new_slot(picture_key);
  if (!slot.defined()) return false;  // no memory to hold it until it is asked for
  slot.copy_(pooled_SW);
  return true;
}

Tensor VisionCache::pooled(const Batch& batch, const Tensor& pixels_NCHW) {
  const at::NoGradGuard no_grad;
  const at::Device device = model_.spec().device;
  std::map<std::string, Tensor> fresh;
  const auto num_decoded = int64_t(batch.decoded.size());
  const int64_t at_once = device.is_cuda() ? kAtOnce : 1;
  for (int64_t begin = 0; begin < num_decoded; begin += at_once) {
    const int64_t count = std::min(at_once, num_decoded - begin);
    const Tensor made_NSW = model_.pooled_patches(pixels_NCHW.narrow(0, begin, count), Pass{});
    for (int64_t i = 0; i < count; ++i) {
      const std::string& key = batch.picture_keys[size_t(batch.decoded[size_t(begin + i)])];
      const Tensor pooled_SW = made_NSW.select(0, i);
      fresh[key] = pooled_SW;
      write(key, pooled_SW);
      const std::lock_guard lock(mutex_);
      if (slots_.count(key) != 0) continue;
      const Tensor slot = new_slot(key);
      // A GPU's copies out and in follow each other on one stream.
      if (slot.defined()) slot.copy_(pooled_SW, /*non_blocking=*/true);
    }
  }
  const Tensor pooled_NSW = at::empty({batch.num_images, shape_SW_[0], shape_SW_[1]},
                                      at::TensorOptions().dtype(model_.spec().compute_dtype).device(device));
  for (int64_t n = 0; n < batch.num_images; ++n) {
    const std::string& key = batch.picture_keys[size_t(n)];
    const auto made = fresh.find(key);
    const Tensor from = made != fresh.end() ? made->second : kept(key);
    if (!from.defined()) throw job_error("picture {} of the batch was neither decoded nor kept", n);
    pooled_NSW.select(0, n).copy_(from, /*non_blocking=*/true);
  }
  return pooled_NSW;
}

}  // namespace gemtune
