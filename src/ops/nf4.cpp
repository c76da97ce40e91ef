#include "ops/cuda.h"
#include "ops/ops.h"
#include "ops/torch.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>

namespace gemtune {
namespace {

constexpr int64_t kBlock = 64;         // elements that share an absmax
constexpr int64_t kNestedBlock = 256;  // absmax values that share a nested absmax

constexpr std::array<float, 16> kValues = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};
// Midpoints; a value strictly above thresholds[i] gets code i + 1 or more.
constexpr std::array<float, 15> kThresholds = {
    -0.8480964004993439f,  -0.6106329262256622f,   -0.4599952697753906f, -0.33967943489551544f, -0.23460740596055984f,
    -0.13791173323988914f, -0.045525018125772476f, 0.03979014977812767f, 0.1202552504837513f,   0.2035212516784668f,
    0.2920137718319893f,   0.3893125355243683f,    0.5016634166240692f,  0.6427869200706482f,   0.8614784181118011f};

uint8_t nearest_code(float x) {
  uint8_t code = 0;
  for (const float threshold : kThresholds) code = uint8_t(code + (x > threshold));
  return code;
}

// Nearest of the 256 ascending values. numerics: a binary search from the middle, then the fp32 midpoint to the neighbour
// decides; ties stay, as bitsandbytes' kernel has it.
uint8_t nearest_code8(const float* map, float x) {
  int pivot = 127;
  int upper = 255;
  int lower = 0;
  float value = map[pivot];
  float upper_value = 1.0f;
  float lower_value = -1.0f;
  for (int step = 64; step > 0; step >>= 1) {
    if (x > value) {
      lower = pivot;
      lower_value = value;
      pivot += step;
    } else {
      upper = pivot;
      upper_value = value;
      pivot -= step;
    }
    value = map[pivot];
  }
  if (upper == 255) upper_value = map[upper];
  if (lower == 0) lower_value = map[lower];
  if (x > value) return uint8_t(x > (upper_value + value) * 0.5f ? upper : pivot);
  return uint8_t(x < (lower_value + value) * 0.5f ? lower : pivot);
}

}  // namespace

int64_t Nf4Tensor::num_bytes() const {
  int64_t total = codes.numel();
  if (nested()) {
    total += absmax_codes.numel() + absmax2.numel() * 4 + code8.numel() * 4;
  } else {
    total += absmax.numel() * 4;
  }
  return total;
}

Nf4Tensor to_device(const Nf4Tensor& weight, at::Device device) {
  Nf4Tensor out = weight;
  for (Tensor* part : {&out.codes, &out.absmax, &out.absmax_codes, &out.absmax2, &out.code8}) {
    if (part->defined()) *part = part->to(device);
  }
  return out;
}

Tensor nf4_values() {
  return at::from_blob(const_cast<float*>(kValues.data()), {16}, at::kFloat).clone();
}

Tensor nf4_dynamic_map() {
  std::vector<float> values = {0.0f, 1.0f};
  for (int i = 0; i < 7; ++i) {
    const int64_t points = (int64_t{1} << i) + 1;
    const Tensor bounds = at::linspace(0.1, 1.0, points, at::kFloat);
    const Tensor middles = (bounds.narrow(0, 0, points - 1) + bounds.narrow(0, 1, points - 1)) / 2.0;
    const Tensor scaled = middles * std::pow(10.0, i - 6);
    for (int64_t j = 0; j < scaled.numel(); ++j) {
      const float v = scaled.const_data_ptr<float>()[j];
      values.push_back(v);
      values.push_back(-v);
    }
  }
  std::sort(values.begin(), values.end());
  return at::from_blob(values.data(), {256}, at::kFloat).clone();
}

static Nf4Tensor quantize_on_cuda(const Tensor& weight, bool double_quant) {
  Nf4Tensor out;
  out.shape = weight.sizes().vec();
  out.dtype = weight.scalar_type();
  const bool fp32 = weight.scalar_type() != at::kBFloat16;
  const Tensor source = (fp32 ? weight.detach().to(at::kFloat) : weight.detach()).contiguous();
  const int64_t n = source.numel();
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  const auto bytes = source.options().dtype(at::kByte);
  const auto floats = source.options().dtype(at::kFloat);
  out.codes = at::empty({(n + 1) / 2}, bytes);
  const Tensor absmax = at::empty({blocks}, floats);
  kernels().nf4_quantize(source.const_data_ptr(), fp32, n, out.codes.mutable_data_ptr<uint8_t>(),
                         absmax.mutable_data_ptr<float>(), stream_of(source));
  if (!double_quant) {
    out.absmax = absmax;
    return out;
  }
  out.offset = absmax.mean().item<float>();
  out.code8 = nf4_dynamic_map().to(source.device());
  out.absmax_codes = at::empty({blocks}, bytes);
  out.absmax2 = at::empty({(blocks + kNestedBlock - 1) / kNestedBlock}, floats);
  kernels().nf4_quantize_absmax(absmax.const_data_ptr<float>(), out.offset, out.code8.const_data_ptr<float>(), blocks,
                                out.absmax_codes.mutable_data_ptr<uint8_t>(), out.absmax2.mutable_data_ptr<float>(),
                                stream_of(source));
  return out;
}

Nf4Tensor nf4_quantize(const Tensor& weight, bool double_quant) {
  if (weight.is_cuda()) return quantize_on_cuda(weight, double_quant);
  Nf4Tensor out;
  out.shape = weight.sizes().vec();
  out.dtype = weight.scalar_type();
  const Tensor source = weight.detach().to(at::kFloat).contiguous();
  const float* w = source.const_data_ptr<float>();
  const int64_t n = source.numel();
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  out.codes = at::zeros({(n + 1) / 2}, at::kByte);
  Tensor absmax = at::empty({blocks}, at::kFloat);
  uint8_t* codes = out.codes.mutable_data_ptr<uint8_t>();
  float* block_max = absmax.mutable_data_ptr<float>();
  at::parallel_for(0, blocks, 64, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      const int64_t begin = block * kBlock;
      const int64_t end = std::min(begin + kBlock, n);
      float largest = 0;
      for (int64_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(w[i]));
      block_max[block] = largest;
      // numerics: multiplied by the reciprocal, as the CUDA kernel does; an all-zero block codes as zeros.
      const float inverse = largest > 0 ? 1.0f / largest : 0.0f;
      for (int64_t i = begin; i < end; ++i) {
        const uint8_t code = nearest_code(w[i] * inverse);
        codes[i / 2] = uint8_t(i % 2 == 0 ? code << 4 : codes[i / 2] | code);
      }
    }
  });
  if (!double_quant) {
    out.absmax = absmax;
    return out;
  }
  out.offset = absmax.mean().item<float>();
  out.code8 = nf4_dynamic_map();
  const Tensor centred = absmax - out.offset;
  const float* v = centred.const_data_ptr<float>();
  const float* map = out.code8.const_data_ptr<float>();
  const int64_t nested = (blocks + kNestedBlock - 1) / kNestedBlock;
  out.absmax2 = at::empty({nested}, at::kFloat);
  out.absmax_codes = at::empty({blocks}, at::kByte);
  for (int64_t block = 0; block < nested; ++block) {
    const int64_t begin = block * kNestedBlock;
    const int64_t end = std::min(begin + kNestedBlock, blocks);
    float largest = 0;
    for (int64_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(v[i]));
    out.absmax2.mutable_data_ptr<float>()[block] = largest;
    const float inverse = largest > 0 ? 1.0f / largest : 0.0f;
    for (int64_t i = begin; i < end; ++i) out.absmax_codes.mutable_data_ptr<uint8_t>()[i] = nearest_code8(map, v[i] * inverse);
  }
  return out;
}

void nf4_dequantize_into(const Nf4Tensor& weight, const Tensor& to) {
  const bool fp32 = to.scalar_type() == at::kFloat;
  const bool direct = (fp32 || to.scalar_type() == at::kBFloat16) && weight.dtype != at::kHalf && weight.shape[1] % 8 == 0;
  if (!weight.codes.is_cuda() || !direct) {
    to.copy_(nf4_dequantize(weight, to.scalar_type()));
    return;
  }
  const bool nested = weight.nested();
  kernels().nf4_dequantize(weight.codes.const_data_ptr<uint8_t>(), nested ? nullptr : weight.absmax.const_data_ptr<float>(),
                           nested ? weight.absmax_codes.const_data_ptr<uint8_t>() : nullptr,
                           nested ? weight.absmax2.const_data_ptr<float>() : nullptr,
                           nested ? weight.code8.const_data_ptr<float>() : nullptr, weight.offset, to.mutable_data_ptr(), fp32,
                           weight.dtype == at::kBFloat16, to.size(0), to.size(1), to.stride(0), stream_of(to));
}

Tensor nf4_dequantize(const Nf4Tensor& weight, at::ScalarType out_dtype) {
  if (weight.codes.is_cuda()) {
    const bool direct = (out_dtype == at::kFloat || out_dtype == at::kBFloat16) && weight.dtype != at::kHalf;
    const Tensor out = at::empty(weight.shape, weight.codes.options().dtype(direct ? out_dtype : at::kFloat));
    if (weight.shape[1] % 8 == 0 && direct) {
      nf4_dequantize_into(weight, out);
      return out;
    }
    const Tensor on_cpu = nf4_dequantize(to_device(weight, at::kCPU), out_dtype);
    return on_cpu.to(weight.codes.device());
  }
  int64_t n = 1;
  for (const int64_t size : weight.shape) n *= size;
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  const uint8_t* codes = weight.codes.const_data_ptr<uint8_t>();
  Tensor absmax = weight.absmax;
  if (weight.nested()) {
    absmax = at::empty({blocks}, at::kFloat);
    const uint8_t* absmax_codes = weight.absmax_codes.const_data_ptr<uint8_t>();
    const float* map = weight.code8.const_data_ptr<float>();
    const float* absmax2 = weight.absmax2.const_data_ptr<float>();
    float* to = absmax.mutable_data_ptr<float>();
    for (int64_t i = 0; i < blocks; ++i) {
      const float scaled = map[absmax_codes[i]] * absmax2[i / kNestedBlock];
      to[i] = scaled + weight.offset;  // numerics: rounded after the product and after the sum
    }
  }
  const float* block_max = absmax.const_data_ptr<float>();
  Tensor out = at::empty(weight.shape, at::kFloat);
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, blocks, 256, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      const int64_t end = std::min((block + 1) * kBlock, n);
      for (int64_t i = block * kBlock; i < end; ++i) {
        const uint8_t pair = codes[i / 2];
        to[i] = kValues[size_t(i % 2 == 0 ? pair >> 4 : pair & 15)] * block_max[block];
      }
    }
  });
  return out.to(weight.dtype).to(out_dtype);
}

}  // namespace gemtune
