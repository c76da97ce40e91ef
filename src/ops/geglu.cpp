#include "ops/cuda.h"
#include "ops/ops.h"
#include "ops/torch.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>

namespace gemtune {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Geglu : torch::autograd::Function<Geglu> {
  static Tensor forward(AutogradContext* context, const Tensor& gate, const Tensor& up, int64_t room) {
    RowMatrix g = rows_of(gate);
    RowMatrix u = rows_of(up);
    if (g.stride != u.stride) {
      g = rows_of(gate.contiguous());
      u = rows_of(up.contiguous());
    }
    const Tensor y = empty_with_room(gate.sizes(), room, gate.options());
    kernels().geglu(bf16(g.tensor), bf16(u.tensor), g.stride, mutable_bf16(y), g.width + room, g.rows, g.width, stream_of(gate));
    context->save_for_backward({g.tensor, u.tensor});
    return y;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const RowMatrix g = rows_of(saved[0]);
    const RowMatrix u = rows_of(saved[1]);
    const RowMatrix dy = rows_of(gradients[0]);
    // Side by side, as lora_linears' backward pass likes its outputs' gradients.
    std::vector<int64_t> shape = saved[0].sizes().vec();
    shape.back() *= 2;
    const Tensor both = at::empty(shape, saved[0].options());
    const Tensor dgate = both.narrow(-1, 0, g.width);
    const Tensor dup = both.narrow(-1, g.width, g.width);
    kernels().geglu_backward(bf16(dy.tensor), dy.stride, bf16(g.tensor), bf16(u.tensor), g.stride, mutable_bf16(dgate),
                             mutable_bf16(dup), 2 * g.width, g.rows, g.width, stream_of(both));
    return {dgate, dup, Tensor()};
  }
};

struct Gelu : torch::autograd::Function<Gelu> {
  static Tensor forward(AutogradContext* context, const Tensor& x, int64_t room) {
    const RowMatrix from = rows_of(x);
    const Tensor y = empty_with_room(x.sizes(), room, x.options());
    kernels().gelu(bf16(from.tensor), from.stride, mutable_bf16(y), from.width + room, from.rows, from.width, stream_of(x));
    context->save_for_backward({from.tensor});
    return y;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const Tensor x = context->get_saved_variables()[0];
    const RowMatrix from = rows_of(x);
    const RowMatrix dy = rows_of(gradients[0]);
    const Tensor dx = at::empty(x.sizes(), x.options());
    kernels().gelu_backward(bf16(dy.tensor), dy.stride, bf16(from.tensor), from.stride, mutable_bf16(dx), dy.rows, dy.width,
                            stream_of(x));
    return {dx, Tensor()};
  }
};

}  // namespace

Tensor gelu_tanh(const Tensor& x, int64_t room) {
  if (has_kernels(x)) return Gelu::apply(x, room);
  return at::gelu(x, "tanh");
}

Tensor geglu(const Tensor& gate, const Tensor& up, int64_t room) {
  if (has_kernels(gate)) return Geglu::apply(gate, up, room);
  return gelu_tanh(gate, 0) * up;
}

}  // namespace gemtune
