#include "train/optimizer.h"

#include "base/error.h"
#include "ops/torch.h"

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <map>
#include <numbers>
#include <tuple>

namespace gemtune {

double schedule_factor(const OptimizerSpec& spec, int64_t step) {
  // numerics: with a warm-up of w steps, update k (from 1) of it runs at k ÷ w, so that no update is made with rate 0.
  if (step <= spec.warmup_steps) return double(step) / double(spec.warmup_steps);
  if (spec.schedule == Schedule::kConstant) return 1.0;
  const int64_t decay_steps = std::max<int64_t>(1, spec.total_steps - spec.warmup_steps);
  const double progress = std::min(1.0, double(step - 1 - spec.warmup_steps) / double(decay_steps));
  if (spec.schedule == Schedule::kLinear) return 1.0 - progress;
  return 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
}

Optimizer::Optimizer(std::vector<Parameter> parameters, const OptimizerSpec& spec)
    : parameters_(std::move(parameters)), spec_(spec) {
  for (const Parameter& parameter : parameters_) {
    moment1_.push_back(at::zeros_like(parameter.value.detach()));
    moment2_.push_back(at::zeros_like(parameter.value.detach()));
  }
}

double Optimizer::gradient_norm() const {
  const at::NoGradGuard no_grad;
  std::map<at::ScalarType, std::vector<Tensor>> gradients;
  for (const Parameter& parameter : parameters_) {
    const Tensor& gradient = parameter.value.grad();
    if (gradient.defined()) gradients[gradient.scalar_type()].push_back(gradient);
  }
  double sum = 0;
  for (const auto& [dtype, same] : gradients) {
    // numerics: a bf16 tensor contributes its bf16-rounded norm, as torch's clip_grad_norm_ computes it.
    const Tensor norms = at::stack(at::_foreach_norm(same, 2.0)).to(at::kCPU, at::kDouble);
    for (int64_t i = 0; i < norms.numel(); ++i) sum += std::pow(norms.const_data_ptr<double>()[i], 2);
  }
  return std::sqrt(sum);
}

void Optimizer::update(int64_t step, double norm) {
  const at::NoGradGuard no_grad;
  AdamwArguments arguments;
  arguments.beta1 = spec_.beta1;
  arguments.beta2 = spec_.beta2;
  arguments.eps = spec_.eps;
  arguments.step = step;
  if (spec_.max_grad_norm > 0) arguments.gradient_scale = std::min(1.0, spec_.max_grad_norm / (norm + 1e-6));
  const double factor = schedule_factor(spec_, step);
  // Tensors that share rate and decay are updated together.
  std::map<std::pair<double, double>, std::vector<AdamwTensors>> groups;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = parameters_[i];
    const Tensor& gradient = parameter.value.grad();
    if (!gradient.defined()) continue;
    const bool own_rate = parameter.kind == TrainedKind::kVisionLora && spec_.vision_learning_rate > 0;
    const double rate = (own_rate ? spec_.vision_learning_rate : spec_.learning_rate) * factor;
    const double decay = parameter.decays ? spec_.weight_decay : 0.0;
    groups[{rate, decay}].push_back({parameter.value.detach(), gradient.contiguous(), moment1_[i], moment2_[i]});
  }
  for (const auto& [key, tensors] : groups) {
    std::tie(arguments.learning_rate, arguments.weight_decay) = key;
    adamw_(tensors, arguments);
  }
  drop_gradients();
}

void Optimizer::drop_gradients() {
  for (const Parameter& parameter : parameters_) parameter.value.mutable_grad() = Tensor();
}

void Optimizer::save(const std::string& path) const {
  TensorFileWriter file;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    file.add(parameters_[i].key + ".exp_avg", moment1_[i]);
    file.add(parameters_[i].key + ".exp_avg_sq", moment2_[i]);
  }
  file.write(path);
}

void Optimizer::load(const std::string& path) {
  const SafetensorsFile file(path);
  const auto restore = [&](const std::string& name, Tensor& moment) {
    const TensorEntry* entry = file.find(name);
    if (entry == nullptr)
      throw input_error("{}: {} is missing; this checkpoint was written with other trained tensors", path, name);
    const Tensor stored = tensor_view(file, *entry);
    if (stored.sizes() != moment.sizes() || stored.scalar_type() != moment.scalar_type()) {
      throw input_error("{}: {} has another shape or dtype than the trained tensor; the recipe was changed", path, name);
    }
    moment.copy_(stored);
  };
  for (size_t i = 0; i < parameters_.size(); ++i) {
    restore(parameters_[i].key + ".exp_avg", moment1_[i]);
    restore(parameters_[i].key + ".exp_avg_sq", moment2_[i]);
  }
}

}  // namespace gemtune
