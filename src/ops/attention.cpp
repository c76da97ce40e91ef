#include "ops/cuda.h"
#include "ops/ops.h"
#include "ops/torch.h"

#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>

#include <limits>

namespace gemtune {

Tensor attention_mask(const Tensor& allowed_B1TS, const Tensor& like) {
  if (!has_kernels(like)) return allowed_B1TS;
  // Added to the scores; rows at a distance that cuDNN's vector accesses like.
  const int64_t stride = (allowed_B1TS.size(3) + 7) / 8 * 8;
  const Tensor mask = at::zeros({allowed_B1TS.size(0), 1, allowed_B1TS.size(2), stride}, like.options());
  return mask.narrow(3, 0, allowed_B1TS.size(3))
      .masked_fill_(allowed_B1TS.logical_not(), -std::numeric_limits<float>::infinity());
}

Tensor attention(const Tensor& q_BHTE, const Tensor& k_BKSE, const Tensor& v_BKSE, const Tensor& mask_B1TS, double scale) {
  const int64_t group = q_BHTE.size(1) / k_BKSE.size(1);
  const Tensor k = group == 1 ? k_BKSE : k_BKSE.repeat_interleave(group, 1);
  const Tensor v = group == 1 ? v_BKSE : v_BKSE.repeat_interleave(group, 1);
  std::optional<Tensor> mask;
  Tensor out_BHTE;
  if (has_kernels(q_BHTE)) {
    if (mask_B1TS.defined()) mask = mask_B1TS.expand({-1, q_BHTE.size(1), -1, -1});
    const bool with_gradient = at::GradMode::is_enabled() && (q_BHTE.requires_grad() || k.requires_grad() || v.requires_grad());
    out_BHTE = std::get<0>(at::_scaled_dot_product_cudnn_attention(q_BHTE, k, v, mask, /*compute_log_sumexp=*/with_gradient,
                                                                   /*dropout_p=*/0.0, /*is_causal=*/false,
                                                                   /*return_debug_mask=*/false, scale));
  } else {
    if (mask_B1TS.defined()) mask = mask_B1TS;
    out_BHTE = at::scaled_dot_product_attention(q_BHTE, k, v, mask, /*dropout_p=*/0.0, /*is_causal=*/false, scale);
  }
  return out_BHTE.transpose(1, 2).reshape({q_BHTE.size(0), q_BHTE.size(2), q_BHTE.size(1) * q_BHTE.size(3)});
}

}  // namespace gemtune
