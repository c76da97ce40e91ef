// THE catalogue of operations: what each computes, in which shapes and dtypes, and where it accumulates.
//
// Shape letters: see model/model.h. Every function has a plain LibTorch form, the twin that states the mathematics: it runs on
// CPUs, and on GPUs for what is not bf16. bf16 tensors on a GPU go through gemtune's kernels (kernels.h). All are
// differentiable where a gradient makes sense. "Compute dtype" is the dtype of the activations: float32 on the CPU, bfloat16
// on GPUs.
//
// `room`: elements of free space behind each row of the result. On a GPU, lora_linears puts the products with its adapters' A
// there, so that base weight and adapters are one product; ranks_of() tells how much it wants. Elsewhere it is ignored.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace gemtune {

using at::Tensor;

// --- norms ------------------------------------------------------------------------------------------------------------

// Gemma's RMSNorm over the last dimension: x · rsqrt(mean(x²) + eps) · (1 + weight), all in fp32, rounded once to x's dtype.
// x […, D], weight [D] (stored as the offset from one; the one is never folded in). Source: transformers Gemma3RMSNorm.
Tensor rms_norm_one_plus(const Tensor& x, const Tensor& weight, double eps);

// LayerNorm over the last dimension with bias, statistics in fp32. x […, W], weight and bias [W].
Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps);

// The residual stream and the norm that the next block reads. One operation, so that the gradients of both meet in one pass.
struct NormedStream {
  Tensor stream;
  Tensor normed;
};
// stream = x, normed = layer_norm(x).
NormedStream layer_norm_stream(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, int64_t room);
// stream = x + rms_norm_one_plus(h, weight_h), or x without h; normed = rms_norm_one_plus(stream, weight), or undefined without
// weight.
NormedStream rms_norm_stream(const Tensor& x, const Tensor& h, const Tensor& weight_h, const Tensor& weight, double eps,
                             int64_t room);

// --- attention --------------------------------------------------------------------------------------------------------

// Rotary tables for positions first … first + num_positions − 1: angle = position · theta^(−2k/E) ÷ scaling in fp32,
// laid out twice (half-split layout), rounded to `dtype`. cos, sin [T, E].
struct RopeTable {
  Tensor cos_TE;
  Tensor sin_TE;
};
RopeTable make_rope_table(int64_t first, int64_t num_positions, int64_t head_size, double theta, double scaling,
                          at::ScalarType dtype, at::Device device);

// Per-head RMSNorm over E, then rotation: q' = q · cos + rotate_half(q) · sin. x [B, H, T, E], weight [E].
Tensor qk_norm_rope(const Tensor& x_BHTE, const Tensor& weight_E, double eps, const RopeTable& rope);

// softmax(q kᵀ · scale + mask) v with softmax in fp32. q [B, H, T, E]; k, v [B, K, S, E], query head j reads kv head
// j ÷ (H ÷ K). mask: attention_mask()'s, or undefined = everywhere. Returns [B, T, H · E].
Tensor attention(const Tensor& q_BHTE, const Tensor& k_BKSE, const Tensor& v_BKSE, const Tensor& mask_B1TS, double scale);
// allowed: bool [B, 1, T, S], true where a query may look, at least one true a row → the form that attention takes for
// activations like `like`; made once for all layers.
Tensor attention_mask(const Tensor& allowed_B1TS, const Tensor& like);

// --- feed-forward -----------------------------------------------------------------------------------------------------

// gelu_tanh(gate) · up; shapes alike.
Tensor geglu(const Tensor& gate, const Tensor& up, int64_t room);
Tensor gelu_tanh(const Tensor& x, int64_t room);

// --- linear layers ----------------------------------------------------------------------------------------------------

// A matrix in 4-bit NormalFloat, blocks of 64 consecutive elements of the row-major matrix, bit-equal to bitsandbytes' CUDA
// kernels (docs/numerics.md). codes: even element in the high nibble. Un-nested: absmax fp32 [blocks]. Nested (double
// quantisation): absmax_codes uint8 [blocks], absmax2 fp32 [ceil(blocks ÷ 256)], code8 fp32 [256], offset.
struct Nf4Tensor {
  std::vector<int64_t> shape;            // [out, in]
  at::ScalarType dtype = at::kBFloat16;  // what dequantised values are rounded to
  Tensor codes;                          // uint8 [ceil(n ÷ 2)]
  Tensor absmax;                         // fp32 [blocks], undefined when nested
  Tensor absmax_codes, absmax2, code8;   // nested only
  float offset = 0;                      // nested only
  bool nested() const { return absmax_codes.defined(); }
  int64_t num_bytes() const;
};
// On the weight's device.
Nf4Tensor nf4_quantize(const Tensor& weight, bool double_quant);
Nf4Tensor to_device(const Nf4Tensor& weight, at::Device device);
// → [out, in] in `dtype`'s rounding, returned in `out_dtype`.
Tensor nf4_dequantize(const Nf4Tensor& weight, at::ScalarType out_dtype);
// The same into `to` [out, in], whose rows may lie apart.
void nf4_dequantize_into(const Nf4Tensor& weight, const Tensor& to);
// The 256 values of bitsandbytes' signed dynamic map and the 16 NF4 values, fp32, ascending.
Tensor nf4_dynamic_map();
Tensor nf4_values();

// Where a dropout mask comes from: a counter-based generator (Philox 4×32-7), so a mask is a function of these numbers and the
// element's index alone: it is never stored, and recompute, resume, other rank counts and other devices draw the same one.
struct DropoutKey {
  uint64_t seed = 0;
  uint64_t micro = 0;   // global number of the micro-batch since the start of training
  uint32_t module = 0;  // number of the adapted layer
};
// Inverted dropout: element kept with probability 1 − p and scaled by 1 ÷ (1 − p).
Tensor dropout(const Tensor& x, double p, const DropoutKey& key);

// The frozen or trained weight of a linear layer: dense, or NF4 with an optional resident expansion in the compute dtype.
struct LinearWeight {
  Tensor dense;  // [out, in]; defined when not quantised, or when the expansion is kept resident
  std::optional<Nf4Tensor> nf4;
};
struct LoraArguments {
  Tensor a_RI;  // fp32 [R, in]
  Tensor b_OR;  // fp32 [out, R]
  double scale = 1;
  double dropout_p = 0;  // 0 = none
  DropoutKey key;
};
struct LinearArguments {
  LinearWeight weight;
  Tensor bias_O;  // or undefined
  std::optional<LoraArguments> lora;
};

// What a GPU multiplies with instead of the siblings one by one: [W | scale · B] side by side, siblings below each other.
struct PackedLinears {
  Tensor weight_OX;  // bf16 [Σ out, in + ranks]; the siblings' dense weights are views of it. Undefined: made anew each time
  Tensor bias_O;     // bf16 [Σ out] or undefined
};
// Allocates and fills it from the siblings' weights (NF4 or dense); `siblings` get views of it as their dense weights.
PackedLinears pack_linears(std::vector<LinearWeight*> weights, const std::vector<Tensor>& biases, int64_t ranks);
// The room that lora_linears wants behind its input's rows: the siblings' ranks, each rounded up to a chunk of 16.
int64_t ranks_of(const std::vector<LinearArguments>& siblings);

// Linear layers that read one input (q, k, v; gate, up; or one alone), each y = x Wᵀ + bias + scale · (dropout(x) Aᵀ) Bᵀ.
// x […, in] → one […, out] a layer. `residual` (undefined, or with a single layer) is added to its output.
// Gradients: x, residual, dense weight and bias where they require it, A, B. An NF4 weight that is not kept expanded is
// expanded again in the backward pass.
std::vector<Tensor> lora_linears(const Tensor& x, const std::vector<LinearArguments>& siblings, const PackedLinears& packed,
                                 const Tensor& residual);

// --- head -------------------------------------------------------------------------------------------------------------

// Cross entropy of hidden · weightᵀ against targets, summed, without ever holding all logits: rows go through in chunks and
// their gradient is made on the way. hidden [N, D], weight [V, D], targets int64 [N]; softcap 0 = none, else
// logits = cap · tanh(logits ÷ cap). loss_sum: fp32 scalar (accumulated in fp64), differentiable; num_correct: int64 scalar, rows
// whose arg-max is the target. Both stay on the device.
struct CrossEntropySum {
  Tensor loss_sum;
  Tensor num_correct;
};
CrossEntropySum linear_cross_entropy(const Tensor& hidden_ND, const Tensor& weight_VD, const Tensor& targets_N, double softcap);

// --- optimizer --------------------------------------------------------------------------------------------------------

struct AdamwArguments {
  double learning_rate = 0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  int64_t step = 1;           // from 1
  double gradient_scale = 1;  // the clip factor
};
struct AdamwTensors {
  Tensor weight, gradient, moment1, moment2;  // contiguous, of one shape and dtype: fp32, or bf16 updated in fp32 and rounded
};
// In place, all tensors by the same arguments. Source: torch.optim.AdamW (fused).
void adamw_(const std::vector<AdamwTensors>& tensors, const AdamwArguments& arguments);

}  // namespace gemtune
