#include "ops/cuda.h"
#include "ops/ops.h"
#include "ops/torch.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/rsqrt.h>

namespace gemtune {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Tensor row_statistics(const Tensor& x) {
  return at::empty({x.numel() / x.size(-1)}, x.options().dtype(at::kFloat));
}

struct LayerNormStream : torch::autograd::Function<LayerNormStream> {
  static variable_list forward(AutogradContext* context, const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                               int64_t room) {
    const Tensor source = x.contiguous();
    const Tensor y = empty_with_room(x.sizes(), room, x.options());
    const RowMatrix to = rows_of(y);
    const Tensor mean = row_statistics(x);
    const Tensor rstd = row_statistics(x);
    kernels().layer_norm(bf16(source), bf16(weight), bf16(bias), mutable_bf16(y), to.stride, mean.mutable_data_ptr<float>(),
                         rstd.mutable_data_ptr<float>(), to.rows, to.width, float(eps), stream_of(x));
    context->save_for_backward({source, weight, mean, rstd});
    context->set_materialize_grads(false);
    return {x, y};
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor& x = saved[0];
    if (!gradients[1].defined()) return {gradients[0], Tensor(), Tensor(), Tensor(), Tensor()};
    const RowMatrix dy = rows_of(gradients[1]);
    const Tensor dsum = gradients[0].defined() ? gradients[0].contiguous() : Tensor();
    const Tensor dx = at::empty_like(x);
    kernels().layer_norm_backward(bf16(dsum), bf16(dy.tensor), dy.stride, bf16(x), bf16(saved[1]),
                                  saved[2].const_data_ptr<float>(), saved[3].const_data_ptr<float>(), mutable_bf16(dx), dy.rows,
                                  dy.width, stream_of(x));
    return {dx, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

struct RmsNormStream : torch::autograd::Function<RmsNormStream> {
  // What may be undefined goes in as an optional: autograd takes no undefined inputs.
  static variable_list forward(AutogradContext* context, const Tensor& x, const std::optional<Tensor>& maybe_h,
                               const std::optional<Tensor>& maybe_weight_h, const std::optional<Tensor>& maybe_weight, double eps,
                               int64_t room) {
    const Tensor h = maybe_h.value_or(Tensor());
    const Tensor weight_h = maybe_weight_h.value_or(Tensor());
    const Tensor weight = maybe_weight.value_or(Tensor());
    const Tensor source = x.contiguous();
    const Tensor inner = h.defined() ? h.contiguous() : Tensor();
    const Tensor stream = h.defined() ? at::empty_like(source) : source;
    Tensor y, rstd_h, rstd;
    RowMatrix to = rows_of(source);
    if (h.defined()) rstd_h = row_statistics(x);
    if (weight.defined()) {
      y = empty_with_room(x.sizes(), room, x.options());
      to = rows_of(y);
      rstd = row_statistics(x);
    }
    kernels().rms_joint(bf16(source), bf16(inner), bf16(weight_h), bf16(weight), h.defined() ? mutable_bf16(stream) : nullptr,
                        mutable_bf16(y), to.stride, h.defined() ? rstd_h.mutable_data_ptr<float>() : nullptr,
                        weight.defined() ? rstd.mutable_data_ptr<float>() : nullptr, to.rows, to.width, float(eps), stream_of(x));
    context->save_for_backward({stream, inner, weight_h, weight, rstd_h, rstd});
    context->set_materialize_grads(false);
    // An undefined tensor cannot be an output.
    variable_list outputs = {h.defined() ? stream : x};
    if (y.defined()) outputs.push_back(y);
    return outputs;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor& stream = saved[0];
    const Tensor& inner = saved[1];
    const auto pointer = [](const Tensor& t) { return t.defined() ? t.const_data_ptr<float>() : nullptr; };
    variable_list out(6);
    gradients.resize(2);
    if (!gradients[0].defined() && !gradients[1].defined()) return out;
    const Tensor dsum = gradients[0].defined() ? gradients[0].contiguous() : Tensor();
    RowMatrix dy = rows_of(gradients[1].defined() ? gradients[1] : dsum);
    out[0] = at::empty_like(stream);
    if (inner.defined()) out[1] = at::empty_like(stream);
    kernels().rms_joint_backward(bf16(dsum), gradients[1].defined() ? bf16(dy.tensor) : nullptr, dy.stride, bf16(stream),
                                 bf16(saved[3]), pointer(saved[5]), bf16(inner), bf16(saved[2]), pointer(saved[4]),
                                 mutable_bf16(out[0]), mutable_bf16(out[1]), dy.rows, dy.width, stream_of(stream));
    return out;
  }
};

std::optional<Tensor> optional(const Tensor& x) {
  return x.defined() ? std::optional<Tensor>(x) : std::nullopt;
}

bool is_trained(const Tensor& weight) {
  return weight.defined() && weight.requires_grad();
}

}  // namespace

Tensor rms_norm_one_plus(const Tensor& x, const Tensor& weight, double eps) {
  if (has_kernels(x) && !is_trained(weight)) return rms_norm_stream(x, Tensor(), Tensor(), weight, eps, 0).normed;
  const Tensor x32 = x.to(at::kFloat);
  const Tensor inverse_rms = at::rsqrt(x32.square().mean(-1, /*keepdim=*/true) + eps);
  // numerics: multiplied by (1 + w) in fp32 before the single rounding.
  return (x32 * inverse_rms * (1.0 + weight.to(at::kFloat))).to(x.scalar_type());
}

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  if (has_kernels(x) && !is_trained(weight)) return layer_norm_stream(x, weight, bias, eps, 0).normed;
  return at::layer_norm(x, {x.size(-1)}, weight.to(x.scalar_type()), bias.to(x.scalar_type()), eps);
}

NormedStream layer_norm_stream(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, int64_t room) {
  if (has_kernels(x) && !is_trained(weight)) {
    const auto out = LayerNormStream::apply(x, weight, bias, eps, room);
    return {out[0], out[1]};
  }
  return {x, layer_norm(x, weight, bias, eps)};
}

NormedStream rms_norm_stream(const Tensor& x, const Tensor& h, const Tensor& weight_h, const Tensor& weight, double eps,
                             int64_t room) {
  if (has_kernels(x) && !is_trained(weight_h) && !is_trained(weight)) {
    const auto out = RmsNormStream::apply(x, optional(h), optional(weight_h), optional(weight), eps, room);
    return {out[0], out.size() > 1 ? out[1] : Tensor()};
  }
  const Tensor stream = h.defined() ? x + rms_norm_one_plus(h, weight_h, eps) : x;
  return {stream, weight.defined() ? rms_norm_one_plus(stream, weight, eps) : Tensor()};
}

}  // namespace gemtune
