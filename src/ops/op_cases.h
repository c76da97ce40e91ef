// One list of cases for the fused operations: what the GPU tests, debug builds and `gemtune doctor` compare with the plain form.
#pragma once

#include "ops/ops.h"

#include <functional>
#include <string>
#include <vector>

namespace gemtune {

// Inputs are fp32 on the CPU with values that bf16 holds exactly; `run` gets them in another dtype or on another device.
struct OpCase {
  std::string name;
  std::vector<Tensor> activations;  // in the compute dtype of the run
  std::vector<Tensor> adapters;     // fp32 in every run
  // → outputs, the first ones differentiable.
  std::function<std::vector<Tensor>(const std::vector<Tensor>& activations, const std::vector<Tensor>& adapters)> run;
};
std::vector<OpCase> op_cases();

// Relative errors ‖a − b‖ ÷ ‖b‖ of every output and every gradient against the fp32 plain form.
struct OpError {
  std::string what;  // "output 0", "gradient of activation 1", …
  double fused = 0;  // bf16 on the GPU
  double plain = 0;  // bf16, plain form
  // Twice the plain form's error, and half a unit in bf16's last place.
  bool holds() const { return fused <= 2 * plain + 1.0 / 512; }
};
// Throws Error(kEnvironment) without a GPU.
std::vector<OpError> compare(const OpCase& op_case);

}  // namespace gemtune
