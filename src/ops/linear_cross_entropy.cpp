#include "base/error.h"
#include "ops/cuda.h"
#include "ops/ops.h"
#include "ops/torch.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

namespace gemtune {
namespace {

// Rows whose fp32 logits take about 64 MiB: enough for full-speed products, little beside the weights.
int64_t rows_per_chunk(int64_t vocabulary) {
  return std::max<int64_t>(1, (int64_t{64} << 20) / (4 * vocabulary));
}

// Rows whose bf16 logits take about 2 GiB: the head of sixteen tutorial samples at once.
int64_t rows_per_cuda_chunk(int64_t vocabulary) {
  return std::max<int64_t>(1, (int64_t{2} << 30) / (2 * vocabulary));
}

struct HeadSums {
  Tensor loss_sum, num_correct, gradient_hidden, gradient_weight;
};

// hidden [N, D] and weight [V, D] in bf16 on a GPU.
HeadSums head_on_cuda(const Tensor& hidden, const Tensor& weight, const Tensor& targets, double softcap, bool wants_hidden,
                      bool wants_weight) {
  const Kernels& k = kernels();
  void* stream = stream_of(hidden);
  const int64_t num_rows = hidden.size(0);
  const int64_t width = hidden.size(1);
  const int64_t vocabulary = weight.size(0);
  const int64_t chunk = std::min(num_rows, rows_per_cuda_chunk(vocabulary));
  const Tensor loss = at::empty({num_rows}, hidden.options().dtype(at::kFloat));
  const Tensor correct = at::empty({num_rows}, hidden.options().dtype(at::kInt));
  const Tensor logits = at::empty({chunk, vocabulary}, hidden.options());
  HeadSums out;
  if (wants_hidden) out.gradient_hidden = at::empty_like(hidden);
  if (wants_weight) out.gradient_weight = at::empty_like(weight);
  for (int64_t begin = 0; begin < num_rows; begin += chunk) {
    const int64_t rows = std::min(chunk, num_rows - begin);
    const Bf16* h = bf16(hidden) + begin * width;
    MatrixProduct forward;
    forward.a = h;
    forward.b = bf16(weight);
    forward.d = mutable_bf16(logits);
    forward.m = rows;
    forward.n = vocabulary;
    forward.k = forward.a_stride = forward.b_stride = width;
    forward.d_stride = vocabulary;
    forward.b_transposed = true;
    k.matrix_product(forward, stream);
    k.cross_entropy(mutable_bf16(logits), targets.const_data_ptr<int64_t>() + begin, loss.mutable_data_ptr<float>() + begin,
                    correct.mutable_data_ptr<int32_t>() + begin, rows, vocabulary, float(softcap), wants_hidden || wants_weight,
                    stream);
    if (wants_hidden) {
      MatrixProduct to_hidden;
      to_hidden.a = bf16(logits);
      to_hidden.b = bf16(weight);
      to_hidden.d = mutable_bf16(out.gradient_hidden) + begin * width;
      to_hidden.m = rows;
      to_hidden.n = to_hidden.b_stride = to_hidden.d_stride = width;
      to_hidden.k = to_hidden.a_stride = vocabulary;
      k.matrix_product(to_hidden, stream);
    }
    if (wants_weight) {
      // numerics: chunks add up in bf16, as micro-batches do in the reference.
      MatrixProduct to_weight;
      to_weight.a = bf16(logits);
      to_weight.a_stride = vocabulary;
      to_weight.a_transposed = true;
      to_weight.b = h;
      to_weight.b_stride = width;
      to_weight.d = mutable_bf16(out.gradient_weight);
      to_weight.d_stride = to_weight.c_stride = width;
      to_weight.c = begin > 0 ? to_weight.d : nullptr;
      to_weight.m = vocabulary;
      to_weight.n = width;
      to_weight.k = rows;
      k.matrix_product(to_weight, stream);
    }
  }
  out.loss_sum = loss.sum(at::kDouble).to(at::kFloat);
  out.num_correct = correct.sum(at::kLong);
  return out;
}

struct LinearCrossEntropy : torch::autograd::Function<LinearCrossEntropy> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const Tensor& hidden,
                                                const Tensor& weight, const Tensor& targets, double softcap) {
    const bool wants_hidden = hidden.requires_grad();
    const bool wants_weight = weight.requires_grad();
    if (has_kernels(hidden) && has_kernels(weight) && weight.size(0) % 8 == 0 && weight.size(1) % 8 == 0) {
      const HeadSums sums =
          head_on_cuda(hidden.detach().contiguous(), weight.detach(), targets.contiguous(), softcap, wants_hidden, wants_weight);
      context->saved_data["gradient_hidden"] = sums.gradient_hidden;
      context->saved_data["gradient_weight"] = sums.gradient_weight;
      context->mark_non_differentiable({sums.num_correct});
      return {sums.loss_sum, sums.num_correct};
    }
    const int64_t num_rows = hidden.size(0);
    const int64_t chunk = rows_per_chunk(weight.size(0));
    const Tensor weight_compute = weight.detach().to(hidden.scalar_type());
    Tensor gradient_hidden, gradient_weight;
    if (wants_hidden) gradient_hidden = at::empty_like(hidden);
    if (wants_weight) gradient_weight = at::zeros_like(weight, weight.options().dtype(at::kFloat));

    double loss_sum = 0;
    int64_t num_correct = 0;
    for (int64_t begin = 0; begin < num_rows; begin += chunk) {
      const int64_t rows = std::min(chunk, num_rows - begin);
      const Tensor hidden_chunk = hidden.detach().narrow(0, begin, rows);
      const Tensor targets_chunk = targets.narrow(0, begin, rows);
      // numerics: the product is rounded to the compute dtype first, the loss is fp32, as the reference does.
      Tensor logits = at::matmul(hidden_chunk, weight_compute.t()).to(at::kFloat);
      Tensor cap_slope;
      if (softcap > 0) {
        const Tensor tanh = (logits / softcap).tanh();
        cap_slope = 1.0 - tanh.square();
        logits = tanh * softcap;
      }
      const Tensor log_normaliser = at::logsumexp(logits, {-1});
      const Tensor target_logit = logits.gather(1, targets_chunk.unsqueeze(1)).squeeze(1);
      loss_sum += (log_normaliser - target_logit).sum(at::kDouble).item<double>();
      num_correct += (logits.argmax(-1) == targets_chunk).sum().item<int64_t>();
      if (!wants_hidden && !wants_weight) continue;
      // d loss ÷ d logits = softmax − one-hot, made in place.
      logits.sub_(log_normaliser.unsqueeze(1)).exp_();
      logits.scatter_add_(1, targets_chunk.unsqueeze(1), at::zeros({rows, 1}, logits.options()).fill_(-1.0));
      if (softcap > 0) logits.mul_(cap_slope);
      const Tensor gradient = logits.to(hidden.scalar_type());
      if (wants_hidden) gradient_hidden.narrow(0, begin, rows).copy_(at::matmul(gradient, weight_compute));
      if (wants_weight) gradient_weight.add_(at::matmul(gradient.t(), hidden_chunk));
    }
    if (wants_weight) gradient_weight = gradient_weight.to(weight.scalar_type());
    context->saved_data["gradient_hidden"] = gradient_hidden;
    context->saved_data["gradient_weight"] = gradient_weight;
    const auto on_device = at::TensorOptions().device(hidden.device());
    const Tensor correct = at::empty({}, on_device.dtype(at::kLong)).fill_(num_correct);
    context->mark_non_differentiable({correct});
    return {at::empty({}, on_device.dtype(at::kFloat)).fill_(loss_sum), correct};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    // In place, since a table's gradient is large: so the backward pass can run once.
    const auto scaled = [&](const char* name) {
      const auto found = context->saved_data.find(name);
      if (found == context->saved_data.end()) throw job_error("linear_cross_entropy: a second backward pass over one loss");
      const Tensor value = found->second.isTensor() ? found->second.toTensor() : Tensor();
      context->saved_data.erase(found);
      return value.defined() ? value.mul_(gradients[0].to(value.scalar_type())) : value;
    };
    return {scaled("gradient_hidden"), scaled("gradient_weight"), Tensor(), Tensor()};
  }
};

}  // namespace

CrossEntropySum linear_cross_entropy(const Tensor& hidden_ND, const Tensor& weight_VD, const Tensor& targets_N, double softcap) {
  const auto out = LinearCrossEntropy::apply(hidden_ND, weight_VD, targets_N, softcap);
  return {out[0], out[1]};
}

}  // namespace gemtune
