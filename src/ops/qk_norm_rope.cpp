#include "ops/ops.h"
#include "ops/torch.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>

namespace gemtune {

RopeTable make_rope_table(int64_t first, int64_t num_positions, int64_t head_size, double theta, double scaling,
                          at::ScalarType dtype, at::Device device) {
  const auto fp32 = at::TensorOptions().dtype(at::kFloat).device(device);
  // numerics: exponent, power and division in fp32, as the reference builds inv_freq.
  const Tensor exponent =
      at::arange(0, head_size, 2, at::TensorOptions().dtype(at::kLong).device(device)).to(at::kFloat) / double(head_size);
  Tensor inverse_frequency = 1.0 / at::pow(theta, exponent);
  if (scaling != 1.0) inverse_frequency = inverse_frequency / scaling;
  const Tensor position = at::arange(first, first + num_positions, fp32);
  const Tensor angle = at::outer(position, inverse_frequency);
  const Tensor angle_TE = at::cat({angle, angle}, -1);
  return {angle_TE.cos().to(dtype), angle_TE.sin().to(dtype)};
}

Tensor qk_norm_rope(const Tensor& x_BHTE, const Tensor& weight_E, double eps, const RopeTable& rope) {
  const Tensor x = rms_norm_one_plus(x_BHTE, weight_E, eps);
  const int64_t half = x.size(-1) / 2;
  const Tensor rotated = at::cat({-x.narrow(-1, half, half), x.narrow(-1, 0, half)}, -1);
  return x * rope.cos_TE + rotated * rope.sin_TE;
}

}  // namespace gemtune
