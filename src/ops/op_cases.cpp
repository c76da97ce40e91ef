#include "ops/op_cases.h"

#include "ops/cuda.h"
#include "ops/torch.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/zeros.h>

namespace gemtune {
namespace {

using Tensors = std::vector<Tensor>;

Tensor numbers(at::IntArrayRef shape, double scale = 1) {
  return (at::randn(shape, at::kFloat) * scale).to(at::kBFloat16).to(at::kFloat);
}

OpCase layer_norm_case(int64_t width) {
  return {fmt::format("layer_norm_stream {}", width),
          {numbers({2, 37, width}), numbers({width}), numbers({width})},
          {},
          [](const Tensors& x, const Tensors&) {
            const auto out = layer_norm_stream(x[0], x[1].detach(), x[2].detach(), 1e-6, 16);
            return Tensors{out.stream * 0.5, out.normed};
          }};
}

OpCase rms_case(int64_t width, bool inner, bool outer) {
  return {fmt::format("rms_norm_stream {}{}{}", width, inner ? " with h" : "", outer ? "" : " without norm"),
          {numbers({2, 37, width}), numbers({2, 37, width}), numbers({width}, 0.3), numbers({width}, 0.3)},
          {},
          [inner, outer](const Tensors& x, const Tensors&) {
            const Tensor none;
            const auto out =
                rms_norm_stream(x[0], inner ? x[1] : none, inner ? x[2].detach() : none, outer ? x[3].detach() : none, 1e-6, 32);
            Tensors outputs = {out.stream};
            if (outer) outputs = {out.stream * 0.5, out.normed};
            return outputs;
          }};
}

OpCase rope_case(int64_t head_size) {
  return {fmt::format("qk_norm_rope {}", head_size),
          {numbers({2, 19, 3 * head_size}), numbers({head_size}, 0.3)},
          {},
          [head_size](const Tensors& x, const Tensors&) {
            const RopeTable rope = make_rope_table(5, 19, head_size, 1e4, 1.0, x[0].scalar_type(), x[0].device());
            // Two heads of three: the rows lie apart.
            const Tensor heads = x[0].narrow(-1, 0, 2 * head_size).reshape({2, 19, 2, head_size}).transpose(1, 2);
            return Tensors{qk_norm_rope(heads, x[1].detach(), 1e-6, rope)};
          }};
}

OpCase attention_case(int64_t heads, int64_t kv_heads, int64_t tokens, int64_t head_size, bool masked) {
  return {
      fmt::format("attention {} heads of {}, {} kv, {} tokens{}", heads, head_size, kv_heads, tokens, masked ? ", masked" : ""),
      {numbers({2, heads, tokens, head_size}), numbers({2, kv_heads, tokens, head_size}),
       numbers({2, kv_heads, tokens, head_size})},
      {},
      [=](const Tensors& x, const Tensors&) {
        Tensor mask;
        if (masked) {
          const Tensor position = at::arange(tokens, x[0].options().dtype(at::kLong));
          Tensor allowed = position.unsqueeze(0) <= position.unsqueeze(1);
          allowed.narrow(0, 3, 7).narrow(1, 3, 7).fill_(true);  // an image
          mask = attention_mask(allowed.expand({2, 1, tokens, tokens}), x[0]);
        }
        return Tensors{attention(x[0], x[1], x[2], mask, 1.0 / std::sqrt(double(head_size)))};
      }};
}

struct LoraCase {
  std::string name;
  std::vector<int64_t> outs;
  int64_t in = 128;
  int64_t rank = 16;
  double dropout = 0.1;
  bool bias = false, residual = false, room = true, nf4 = false, packed = true, x_needs_gradient = true;
};

OpCase lora_case(const LoraCase& c) {
  OpCase out;
  out.name = "lora_linears " + c.name;
  out.activations = {numbers({3, 50, c.in}), numbers({3, 50, c.outs[0]})};
  for (const int64_t o : c.outs) {
    out.activations.push_back(numbers({o, c.in}, 1.0 / std::sqrt(double(c.in))));
    out.activations.push_back(numbers({o}));
    if (c.rank > 0) {
      out.adapters.push_back(at::randn({c.rank, c.in}) / std::sqrt(double(c.in)));
      out.adapters.push_back(at::randn({o, c.rank}) * 0.2);
    }
  }
  out.run = [c](const Tensors& x, const Tensors& adapters) {
    std::vector<LinearArguments> siblings;
    std::vector<LinearWeight*> weights;
    Tensors biases;
    for (size_t i = 0; i < c.outs.size(); ++i) {
      LinearArguments& linear = siblings.emplace_back();
      linear.weight.dense = x[2 + 2 * i].detach();
      if (c.nf4) linear.weight = {Tensor(), nf4_quantize(x[2 + 2 * i].detach(), true)};
      if (c.bias) linear.bias_O = x[3 + 2 * i].detach();
      if (c.rank > 0) linear.lora = {adapters[2 * i], adapters[2 * i + 1], 0.5, c.dropout, {7, 11, uint32_t(i + 1)}};
    }
    for (LinearArguments& linear : siblings) {
      weights.push_back(&linear.weight);
      biases.push_back(linear.bias_O);
    }
    PackedLinears packed;
    if (has_kernels(x[0]) && c.packed) packed = pack_linears(weights, biases, ranks_of(siblings));
    if (has_kernels(x[0]) && !c.packed && c.bias) packed.bias_O = at::cat(biases);
    Tensor input = c.x_needs_gradient ? x[0] : x[0].detach();
    if (c.room) input = gelu_tanh(input, ranks_of(siblings));
    return lora_linears(input, siblings, packed, c.residual ? x[1] : Tensor());
  };
  return out;
}

OpCase head_case(double softcap) {
  return {fmt::format("linear_cross_entropy softcap {}", softcap),
          {numbers({70, 64}), numbers({520, 64}, 0.3)},
          {},
          [softcap](const Tensors& x, const Tensors&) {
            const Tensor targets = (at::arange(70, x[0].options().dtype(at::kLong)) * 37).remainder(520);
            const auto out = linear_cross_entropy(x[0], x[1], targets, softcap);
            return Tensors{out.loss_sum / 70.0};
          }};
}

struct Run {
  Tensors values;  // outputs, then gradients; fp32 on the CPU
  std::vector<std::string> names;
};

Run run_case(const OpCase& op_case, at::Device device, at::ScalarType dtype, const Tensors& seeds) {
  Tensors activations, adapters;
  for (const Tensor& t : op_case.activations) activations.push_back(t.to(device, dtype).clone().set_requires_grad(true));
  for (const Tensor& t : op_case.adapters) adapters.push_back(t.to(device).clone().set_requires_grad(true));
  const Tensors outputs = op_case.run(activations, adapters);
  Run run;
  Tensor objective;
  for (size_t i = 0; i < outputs.size(); ++i) {
    run.values.push_back(outputs[i].detach().to(at::kCPU, at::kFloat));
    run.names.push_back(fmt::format("output {}", i));
    if (!outputs[i].requires_grad()) continue;
    // Seeds are as large as the outputs of this case, whatever their number.
    const Tensor part = (outputs[i].to(at::kFloat) * seeds[i].reshape(outputs[i].sizes()).to(device)).sum();
    objective = objective.defined() ? objective + part : part;
  }
  objective.backward();
  const auto add = [&](const char* kind, const Tensors& tensors) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!tensors[i].grad().defined()) continue;
      run.values.push_back(tensors[i].grad().to(at::kCPU, at::kFloat));
      run.names.push_back(fmt::format("gradient of {} {}", kind, i));
    }
  };
  add("activation", activations);
  add("adapter", adapters);
  return run;
}

double relative_error(const Tensor& a, const Tensor& b) {
  const double size = b.to(at::kDouble).norm().item<double>();
  const double error = (a.to(at::kDouble) - b.to(at::kDouble)).norm().item<double>() / std::max(size, 1e-30);
  return std::isfinite(error) ? error : INFINITY;
}

}  // namespace

std::vector<OpCase> op_cases() {
  return {
      layer_norm_case(64),
      layer_norm_case(1152),
      rms_case(2560, false, true),
      rms_case(2560, true, true),
      rms_case(640, true, false),
      rms_case(5376, true, true),
      rope_case(64),
      rope_case(128),
      rope_case(256),
      attention_case(4, 4, 64, 72, false),
      attention_case(4, 2, 37, 256, true),
      attention_case(4, 2, 412, 256, true),
      attention_case(4, 1, 40, 64, true),
      {"geglu",
       {numbers({2, 37, 2 * 136}, 2)},
       {},
       [](const Tensors& x, const Tensors&) { return Tensors{geglu(x[0].narrow(-1, 0, 136), x[0].narrow(-1, 136, 136), 16)}; }},
      {"gelu_tanh",
       {numbers({2, 37, 136}, 2)},
       {},
       [](const Tensors& x, const Tensors&) { return Tensors{gelu_tanh(x[0], 16)}; }},
      lora_case({"one", {128}}),
      lora_case({"one without dropout", {136}, 72, 16, 0.0}),
      lora_case({"one with bias and residual", {128}, 128, 16, 0.1, true, true}),
      lora_case({"three with bias", {128, 64, 64}, 128, 16, 0.1, true}),
      lora_case({"two, rank 8", {136, 136}, 72, 8}),
      lora_case({"two, rank 64", {128, 128}, 128, 64}),
      lora_case({"one without room", {128}, 128, 16, 0.1, false, false, false}),
      lora_case({"three, nf4 expanded each time", {128, 64, 64}, 128, 16, 0.1, true, false, true, true, false}),
      lora_case({"two, nf4 kept expanded", {128, 128}, 128, 16, 0.1, false, false, true, true, true}),
      lora_case({"without adapters", {128, 64}, 128, 0, 0.0, true}),
      lora_case({"x without gradient", {128, 64}, 128, 16, 0.1, true, false, true, false, true, false}),
      head_case(0),
      head_case(5),
  };
}

std::vector<OpError> compare(const OpCase& op_case) {
  kernels();
  Tensors seeds;
  {
    const at::NoGradGuard no_grad;
    for (const Tensor& output : op_case.run(op_case.activations, op_case.adapters)) seeds.push_back(at::randn_like(output));
  }
  const Run exact = run_case(op_case, at::kCPU, at::kFloat, seeds);
  const Run plain = run_case(op_case, at::kCPU, at::kBFloat16, seeds);
  const Run fused = run_case(op_case, at::Device(at::kCUDA, 0), at::kBFloat16, seeds);
  std::vector<OpError> errors;
  for (size_t i = 0; i < exact.values.size(); ++i) {
    if (i >= fused.values.size() || fused.names[i] != exact.names[i]) {
      errors.push_back({exact.names[i] + ": missing on the GPU", INFINITY, 0});
      continue;
    }
    errors.push_back(
        {exact.names[i], relative_error(fused.values[i], exact.values[i]), relative_error(plain.values[i], exact.values[i])});
  }
  return errors;
}

}  // namespace gemtune
