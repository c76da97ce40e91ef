#include "ops/ops.h"
#include "ops/torch.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>

namespace gemtune {
namespace {

// The packed weight, shared with the model and kept by the graph node.
struct HeldNf4 : torch::CustomClassHolder {
  explicit HeldNf4(const Nf4Tensor& w) : weight(w) {}
  Nf4Tensor weight;
};

// x Wᵀ for a frozen NF4 weight: expanded for the forward product and again for the backward one, never saved expanded.
struct Nf4Linear : torch::autograd::Function<Nf4Linear> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const c10::intrusive_ptr<HeldNf4>& held) {
    context->saved_data["weight"] = at::IValue::make_capsule(held);
    return at::linear(x, nf4_dequantize(held->weight, x.scalar_type()));
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto capsule = context->saved_data["weight"].toCapsule();
    const Nf4Tensor& weight = static_cast<const HeldNf4*>(capsule.get())->weight;
    return {at::matmul(gradients[0], nf4_dequantize(weight, gradients[0].scalar_type())), Tensor()};
  }
};

}  // namespace

Tensor lora_linear(const Tensor& x, const LinearWeight& weight, const Tensor& bias, const LoraArguments* lora) {
  const auto dtype = x.scalar_type();
  Tensor y;
  if (weight.dense.defined()) {
    y = bias.defined() ? at::linear(x, weight.dense.to(dtype), bias.to(dtype)) : at::linear(x, weight.dense.to(dtype));
  } else {
    y = Nf4Linear::apply(x, c10::make_intrusive<HeldNf4>(*weight.nf4));
    if (bias.defined()) y = y + bias.to(dtype);
  }
  if (lora == nullptr) return y;
  const Tensor dropped = dropout(x, lora->dropout_p, lora->key);
  Tensor delta = at::linear(at::linear(dropped, lora->a_RI.to(dtype)), lora->b_OR.to(dtype));
  if (lora->scale != 1.0) delta = delta * lora->scale;
  return y + delta;
}

}  // namespace gemtune
