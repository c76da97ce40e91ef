#include "ops/cuda.h"
#include "ops/ops.h"
#include "ops/torch.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>

namespace gemtune {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// [B, T, H, E] with the heads of a token side by side.
struct Heads {
  Tensor x_BTHE;
  int64_t tokens, heads, head_size, stride;
};
Heads heads_of(const Tensor& x_BHTE) {
  Tensor x = x_BHTE.transpose(1, 2);
  const auto fits = [](const Tensor& t) {
    return t.stride(3) == 1 && t.stride(2) == t.size(3) && (t.size(0) == 1 || t.stride(0) == t.stride(1) * t.size(1)) &&
           t.stride(1) % 8 == 0 && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  };
  if (!fits(x)) x = x.contiguous();
  return {x, x.size(0) * x.size(1), x.size(2), x.size(3), x.size(1) == 1 ? x.stride(0) : x.stride(1)};
}

struct QkNormRope : torch::autograd::Function<QkNormRope> {
  static Tensor forward(AutogradContext* context, const Tensor& x_BHTE, const Tensor& weight_E, double eps, const Tensor& cos_TE,
                        const Tensor& sin_TE) {
    const Heads x = heads_of(x_BHTE);
    const Tensor y_BTHE = at::empty(x.x_BTHE.sizes(), x.x_BTHE.options());
    kernels().qk_norm_rope(bf16(x.x_BTHE), x.stride, bf16(weight_E), bf16(cos_TE), bf16(sin_TE), mutable_bf16(y_BTHE), x.tokens,
                           x.x_BTHE.size(1), x.heads, x.head_size, float(eps), stream_of(x_BHTE));
    context->save_for_backward({x.x_BTHE, weight_E, cos_TE, sin_TE});
    context->saved_data["eps"] = eps;
    return y_BTHE.transpose(1, 2);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Heads x = heads_of(saved[0].transpose(1, 2));
    const Tensor dy_BTHE = gradients[0].transpose(1, 2).contiguous();
    const Tensor dx_BTHE = at::empty(x.x_BTHE.sizes(), x.x_BTHE.options());
    kernels().qk_norm_rope_backward(bf16(dy_BTHE), bf16(x.x_BTHE), x.stride, bf16(saved[1]), bf16(saved[2]), bf16(saved[3]),
                                    mutable_bf16(dx_BTHE), x.heads * x.head_size, x.tokens, x.x_BTHE.size(1), x.heads,
                                    x.head_size, float(context->saved_data["eps"].toDouble()), stream_of(dy_BTHE));
    return {dx_BTHE.transpose(1, 2), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

bool has_head_kernel(int64_t head_size) {
  return head_size == 64 || head_size == 128 || head_size == 256;
}

}  // namespace

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
  if (has_kernels(x_BHTE) && !weight_E.requires_grad() && has_head_kernel(x_BHTE.size(3))) {
    return QkNormRope::apply(x_BHTE, weight_E, eps, rope.cos_TE, rope.sin_TE);
  }
  const Tensor x = rms_norm_one_plus(x_BHTE, weight_E, eps);
  const int64_t half = x.size(-1) / 2;
  const Tensor rotated = at::cat({-x.narrow(-1, half, half), x.narrow(-1, 0, half)}, -1);
  return x * rope.cos_TE + rotated * rope.sin_TE;
}

}  // namespace gemtune
