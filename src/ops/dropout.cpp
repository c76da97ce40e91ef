#include "ops/cuda.h"
#include "ops/ops.h"
#include "ops/torch.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <array>

namespace gemtune {
namespace {

// Philox 4×32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; seven rounds are their fastest that
// passes every test of BigCrush): four 32-bit words a counter.
std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 7; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {uint32_t(product1 >> 32) ^ counter[1] ^ key0, uint32_t(product1), uint32_t(product0 >> 32) ^ counter[3] ^ key1,
               uint32_t(product0)};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

// y = x · mask ÷ (1 − p). Elements go in blocks of eight: element i is dropped when draw i mod 8 of the counter (i div 8,
// module, micro), the low 15 bits of a half word, is below p · 2¹⁵. numerics: p in steps of 2⁻¹⁵, the scale from the rounded p.
Tensor apply_mask(const Tensor& x, double p, const DropoutKey& key) {
  if (x.is_cuda() && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16)) {
    const Tensor source = x.contiguous();
    Tensor out = at::empty_like(source);
    kernels().dropout(source.const_data_ptr(), out.mutable_data_ptr(), x.scalar_type() == at::kFloat, source.numel(), float(p),
                      key.seed, key.micro, key.module, stream_of(x));
    return out;
  }
  const Tensor source = x.to(at::kFloat).contiguous();
  Tensor out = at::empty_like(source);
  const float* in = source.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const int64_t n = source.numel();
  const uint32_t threshold = uint32_t(float(p) * 32768.0f + 0.5f);
  const float scale = 32768.0f / (32768.0f - float(threshold));
  at::parallel_for(0, (n + 7) / 8, 2048, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const auto words = philox({uint32_t(block), key.module, uint32_t(key.micro), uint32_t(key.micro >> 32)}, uint32_t(key.seed),
                                uint32_t(key.seed >> 32) ^ uint32_t(uint64_t(block) >> 32));
      const int64_t last = std::min<int64_t>(8, n - block * 8);
      for (int64_t j = 0; j < last; ++j) {
        const uint32_t draw = (words[size_t(j / 2)] >> (16 * (j % 2))) & 0x7FFF;
        to[block * 8 + j] = draw >= threshold ? in[block * 8 + j] * scale : 0.0f;
      }
    }
  });
  return out.to(x.scalar_type());
}

struct Dropout : torch::autograd::Function<Dropout> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, double p, int64_t seed, int64_t micro,
                        int64_t module) {
    context->saved_data["p"] = p;
    context->saved_data["seed"] = seed;
    context->saved_data["micro"] = micro;
    context->saved_data["module"] = module;
    return apply_mask(x, p, {uint64_t(seed), uint64_t(micro), uint32_t(module)});
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const DropoutKey key{uint64_t(context->saved_data["seed"].toInt()), uint64_t(context->saved_data["micro"].toInt()),
                         uint32_t(context->saved_data["module"].toInt())};
    return {apply_mask(gradients[0], context->saved_data["p"].toDouble(), key), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

Tensor dropout(const Tensor& x, double p, const DropoutKey& key) {
  if (p == 0) return x;
  return Dropout::apply(x, p, int64_t(key.seed), int64_t(key.micro), int64_t(key.module));
}

}  // namespace gemtune
