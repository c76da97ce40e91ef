// What a run needs, from sizes alone: parameters and bytes by part, the peak, the time of a step. And the choice that follows
// from it: what is kept in memory and what is made again. Nothing is loaded.
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

// What memory is spent on to save time. The numbers learned are the same for every choice.
struct MemoryChoice {
  bool keep_expanded = true;      // NF4 weights also in bf16, else expanded for each product
  bool recompute_vision = false;  // blocks run again in the backward pass, else their activations are kept
  bool recompute_language = false;
  std::string describe() const;  // "4-bit weights kept expanded; nothing recomputed"
};

// One micro-batch at its largest, and how many make a step. `longest`: tokens of the longest row; `targets`: tokens of a row that
// carry loss; `images_a_row`: most images in one; cached: the vision tower's outputs are at hand.
struct PlanLoad {
  int64_t micro_batch = 1;
  int64_t accumulation = 1;
  int64_t longest = 0;
  int64_t targets = 0;
  int64_t images_a_row = 0;
  bool cached = false;
};

struct Plan {
  int64_t trainable_parameters = 0;
  int64_t lora_modules = 0;
  std::vector<PlanPart> parts;
  int64_t weight_bytes = 0;      // sum of the parts
  int64_t activation_bytes = 0;  // kept for the backward pass of one micro-batch
  int64_t peak_bytes = 0;        // of allocations on the GPU
  int64_t adapter_bytes = 0;     // one saved adapter
  int64_t checkpoint_bytes = 0;  // adapter and moments
};
// spec.keep_expanded is not looked at: the choice says it.
Plan make_plan(const Dims& dims, const ModelSpec& spec, const PlanLoad& load, const MemoryChoice& choice);

// What a GPU does in practice: rates of large bf16 products, of memory.
struct GpuRates {
  double bf16_tflops = 790;  // H200, measured
  double memory_tbps = 4.27;
};
double step_seconds(const Dims& dims, const ModelSpec& spec, const PlanLoad& load, const MemoryChoice& choice,
                    const GpuRates& rates);

enum class RecomputePolicy { kAuto, kAlways, kNever };
// The fastest choice whose peak fits in `budget_bytes`, or the leanest when none does.
MemoryChoice choose_memory(const Dims& dims, const ModelSpec& spec, const PlanLoad& load, RecomputePolicy policy,
                           int64_t budget_bytes);

}  // namespace gemtune
