// AdamW over a model's trained tensors: learning-rate schedule, clipping, moments that are saved and restored exactly.
#pragma once

#include "model/model.h"
#include "model/tensor_file.h"

#include <string>
#include <vector>

namespace gemtune {

enum class Schedule { kConstant, kLinear, kCosine };

struct OptimizerSpec {
  double learning_rate = 2e-4;
  double vision_learning_rate = 0;  // vision adapters; 0 = learning_rate
  Schedule schedule = Schedule::kConstant;
  int64_t warmup_steps = 0;
  int64_t total_steps = 1;
  double max_grad_norm = 0.3;  // 0 = never clip
  double weight_decay = 0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
};

// Factor on the learning rate of update `step` (from 1): rises linearly over the warm-up, then follows the schedule down to
// 0 at the end (constant: stays 1). Source: transformers.optimization, whose scheduler has made step − 1 calls by then.
double schedule_factor(const OptimizerSpec& spec, int64_t step);

class Optimizer {
 public:
  Optimizer(std::vector<Parameter> parameters, const OptimizerSpec& spec);

  // L2 norm over all gradients: of the tensors' norms, as torch's clip_grad_norm_. Tensors without a gradient count as 0.
  double gradient_norm() const;
  // Clips by `norm` (the value above), updates every tensor that has a gradient, drops the gradients. `step` from 1.
  void update(int64_t step, double norm);
  void drop_gradients();
  double learning_rate(int64_t step) const { return spec_.learning_rate * schedule_factor(spec_, step); }

  const std::vector<Parameter>& parameters() const { return parameters_; }
  // optimizer.safetensors: KEY.exp_avg and KEY.exp_avg_sq for every parameter.
  void save(const std::string& path) const;
  void load(const std::string& path);

 private:
  std::vector<Parameter> parameters_;
  std::vector<Tensor> moment1_, moment2_;
  OptimizerSpec spec_;
};

}  // namespace gemtune
