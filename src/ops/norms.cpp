#include "ops/ops.h"
#include "ops/torch.h"

#include <ATen/ops/layer_norm.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/rsqrt.h>

namespace gemtune {

Tensor rms_norm_one_plus(const Tensor& x, const Tensor& weight, double eps) {
  const Tensor x32 = x.to(at::kFloat);
  const Tensor inverse_rms = at::rsqrt(x32.square().mean(-1, /*keepdim=*/true) + eps);
  // numerics: multiplied by (1 + w) in fp32 before the single rounding.
  return (x32 * inverse_rms * (1.0 + weight.to(at::kFloat))).to(x.scalar_type());
}

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  return at::layer_norm(x, {x.size(-1)}, weight.to(x.scalar_type()), bias.to(x.scalar_type()), eps);
}

}  // namespace gemtune
