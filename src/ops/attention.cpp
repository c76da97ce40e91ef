#include "ops/ops.h"
#include "ops/torch.h"

#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/scaled_dot_product_attention.h>

namespace gemtune {

Tensor attention(const Tensor& q_BHTE, const Tensor& k_BKSE, const Tensor& v_BKSE, const Tensor& allowed_B1TS, double scale) {
  const int64_t group = q_BHTE.size(1) / k_BKSE.size(1);
  const Tensor k = group == 1 ? k_BKSE : k_BKSE.repeat_interleave(group, 1);
  const Tensor v = group == 1 ? v_BKSE : v_BKSE.repeat_interleave(group, 1);
  std::optional<Tensor> mask;
  if (allowed_B1TS.defined()) mask = allowed_B1TS;
  const Tensor out_BHTE = at::scaled_dot_product_attention(q_BHTE, k, v, mask, /*dropout_p=*/0.0, /*is_causal=*/false, scale);
  return out_BHTE.transpose(1, 2).reshape({q_BHTE.size(0), q_BHTE.size(2), q_BHTE.size(1) * q_BHTE.size(3)});
}

}  // namespace gemtune
