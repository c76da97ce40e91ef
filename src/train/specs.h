// From a recipe to the plain structs that the layers below take.
#pragma once

#include "data/chat.h"
#include "data/dataset.h"
#include "data/image.h"
#include "data/loader.h"
#include "model/model.h"
#include "recipe/recipe.h"
#include "train/plan.h"

#include <memory>
#include <string>

namespace gemtune {

// The largest of the rows that take part.
struct RowSizes {
  int64_t longest = 0;  // tokens
  int64_t most_targets = 0;
  int64_t most_images = 0;
};
RowSizes row_sizes(const DataReport& report);

// model.path as a folder: itself, or a hub id's snapshot in the hub's cache. Throws Error(kInput).
std::string model_folder(const Recipe& recipe);
// train.device: auto = a GPU when one can be used. Throws Error(kEnvironment) when the recipe asks for one that is not there.
at::Device device_for(const Recipe& recipe, int local_rank);
// bf16 compute on a GPU, fp32 on a CPU.
ModelSpec model_spec(const Recipe& recipe, at::Device device);
// The same, with adapters and tables as an adapter folder has them instead of the recipe's; "" = none, nothing is trained.
ModelSpec model_spec_for(const Recipe& recipe, at::Device device, const std::string& adapter_folder);
// What is kept in a GPU's memory and what is made again, for rows like `load`'s: the fastest that fits in train.memory_gib, or in
// what is free. Throws Error(kEnvironment) when nothing fits, with what would.
MemoryChoice memory_choice(const Recipe& recipe, const Dims& dims, const ModelSpec& spec, const PlanLoad& load);
// The largest micro-batch of checked rows.
PlanLoad plan_load(const Recipe& recipe, const Dims& dims, const RowSizes& sizes, int world);
RecomputePolicy recompute_policy(const Recipe& recipe);
// Settings that make a micro-batch need less, strongest first; two at least.
std::vector<std::string> remedies(const Recipe& recipe, const PlanLoad& load);
RowMapping row_mapping(const Recipe& recipe);
ImageOptions image_options(const Recipe& recipe);
// max_length: the recipe's, or the model's own limit.
ChatOptions chat_options(const Recipe& recipe, const Dims& dims);

// Ids by the names Gemma 3's tokenizer gives them, checked against config.json's. Throws Error(kInput).
ChatTokens chat_tokens(const Tokenizer& tokenizer, const Dims& dims, const std::string& where);

// Everything that can be known of model and data before any weight is loaded.
struct Preparation {
  std::string model_folder;
  Dims dims;
  std::shared_ptr<const Tokenizer> tokenizer;
  std::shared_ptr<const Chat> chat;
  std::shared_ptr<const Dataset> dataset;  // data.train, or null when the recipe names none
};
enum class Source { kTrain, kEval, kNone };
// Reads config.json and the tokenizer, opens the data. Throws Error(kInput) for a recipe that lacks model.path or the source.
Preparation prepare(const Recipe& recipe, Source source);

// Micro-batches a rank makes a step: train.accumulation, or more where dist.workers were meant and fewer ranks run.
// Throws Error(kInput) when the rows of a step cannot be kept.
int accumulation_for(const Recipe& recipe, int world);
int loader_threads(const Recipe& recipe);
int image_size(const Dims& dims);

}  // namespace gemtune
