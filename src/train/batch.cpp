#include "train/batch.h"

#include "ops/torch.h"

#include <ATen/ops/from_blob.h>

namespace gemtune {
namespace {

template <class T>
Tensor copied(const std::vector<T>& values, at::IntArrayRef shape, at::ScalarType type, at::Device device) {
  const Tensor view = at::from_blob(const_cast<T*>(values.data()), shape, at::TensorOptions().dtype(type));
  // Through page-locked memory, so that a GPU at work is not waited for.
  return device.is_cuda() ? view.pin_memory().to(device, type, /*non_blocking=*/true) : view.clone();
}

}  // namespace

DeviceBatch to_device(const Batch& batch, at::Device device) {
  const int64_t shape[] = {batch.num_rows, batch.num_tokens};
  DeviceBatch out;
  out.input.token_ids_BT = copied(batch.token_ids, shape, at::kLong, device);
  out.input.valid_BT = copied(batch.valid, shape, at::kByte, device).to(at::kBool);
  out.input.image_group_BT = copied(batch.image_group, shape, at::kInt, device);
  // Found here, so that a GPU's loss needs no answer from it.
  out.targets = find_targets(copied(batch.token_ids, shape, at::kLong, at::kCPU),
                             copied(batch.target_mask, shape, at::kByte, at::kCPU).to(at::kBool))
                    .to(device);
  if (!batch.decoded.empty()) {
    out.input.pixels_NCHW =
        copied(batch.pixels_NCHW, {int64_t(batch.decoded.size()), 3, batch.image_size, batch.image_size}, at::kByte, device);
  }
  return out;
}

}  // namespace gemtune
