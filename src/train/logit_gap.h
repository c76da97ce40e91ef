// How far two models' logits lie apart on the same rows.
#pragma once

#include "model/model.h"
#include "train/specs.h"

#include <memory>
#include <string>
#include <vector>

namespace gemtune {

// Rows to compare on, as the model takes them, one a batch.
struct SampleRows {
  std::string from;  // "rows of train.jsonl", "built-in rows"
  std::vector<ModelInput> inputs;
};
// The rows of the run that made the adapter (recipe.yaml in its folder or the run's), spread evenly; where they cannot be read,
// built-in conversations, every second one with a picture when the model has a vision tower.
SampleRows sample_rows(const Preparation& prepared, const std::string& adapter_folder, int num_rows, at::Device device);

// fp32 logits at up to 16 places of each row, spread evenly: [places, V] on the CPU.
std::vector<Tensor> logits_on(const Gemma3& model, const SampleRows& rows);

struct LogitGap {
  double max = 0;   // max|a − b| ÷ max|b|
  double mean = 0;  // mean|a − b| ÷ max|b|
  int64_t num_places = 0;
  int64_t num_same_choice = 0;  // places with the same likeliest token
};
LogitGap logit_gap(const std::vector<Tensor>& a, const std::vector<Tensor>& b);

}  // namespace gemtune
