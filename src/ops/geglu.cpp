#include "ops/ops.h"
#include "ops/torch.h"

#include <ATen/ops/gelu.h>

namespace gemtune {

Tensor gelu_tanh(const Tensor& x) {
  return at::gelu(x, "tanh");
}

Tensor geglu(const Tensor& gate, const Tensor& up) {
  return gelu_tanh(gate) * up;
}

}  // namespace gemtune
