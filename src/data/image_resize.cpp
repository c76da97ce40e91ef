#include "data/image.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/_upsample_bilinear2d_aa.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

namespace gemtune {

// numerics: ATen's antialiased bilinear on 8-bit values, as the reference's fast processor calls it on CPUs: fixed-point weights,
// rounded to 8 bits after each axis. It runs on the calling thread alone, so loader threads do not multiply.
std::vector<uint8_t> resize_to_planes_CHW(const RgbImage& image, int size) {
  const size_t plane = static_cast<size_t>(size) * static_cast<size_t>(size);
  std::vector<uint8_t> planes(plane * 3);
  const auto split = [&](const uint8_t* interleaved) {
    for (size_t i = 0; i < plane; ++i) {
      for (size_t c = 0; c < 3; ++c) planes[c * plane + i] = interleaved[i * 3 + c];
    }
  };
  if (image.width == size && image.height == size) {
    split(image.data.data());
    return planes;
  }
  const c10::InferenceMode guard;
  const int64_t h = image.height, w = image.width;
  // Read only; from_blob takes no const pointer.
  uint8_t* const data = const_cast<uint8_t*>(image.data.data());
  const at::Tensor input = at::from_blob(data, {1, 3, h, w}, {h * w * 3, 1, w * 3, 3}, at::TensorOptions().dtype(at::kByte));
  const at::Tensor output = at::_upsample_bilinear2d_aa(input, {size, size}, /*align_corners=*/false);
  split(output.permute({0, 2, 3, 1}).contiguous().const_data_ptr<uint8_t>());
  return planes;
}

}  // namespace gemtune
