// What a run will need, from sizes alone: parameters and bytes by part, steps. Nothing is loaded.
#pragma once

#include "model/model.h"

#include <cstdint>
#include <string>
#include <vector>

namespace gemtune {

struct PlanPart {
  std::string name;  // "language linears (NF4)", "vision adapters", …
  int64_t parameters = 0;
  int64_t bytes = 0;     // resident while training, without activations
  bool trained = false;  // gradients and moments are parts of their own
};

struct Plan {
  int64_t trainable_parameters = 0;
  int64_t lora_modules = 0;
  std::vector<PlanPart> parts;
  int64_t weight_bytes = 0;      // sum of the parts
  int64_t peak_bytes = 0;        // with gradients, moments and activations of one micro-batch
  int64_t adapter_bytes = 0;     // one saved adapter
  int64_t checkpoint_bytes = 0;  // adapter and moments
};

// `longest`: tokens of the longest row; `images_a_row`: most images in one.
struct PlanLoad {
  int64_t micro_batch = 1;
  int64_t longest = 0;
  int64_t images_a_row = 0;
  bool recompute = false;
};
Plan make_plan(const Dims& dims, const ModelSpec& spec, const PlanLoad& load);

}  // namespace gemtune
