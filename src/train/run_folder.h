// RUN_DIR: what lies in it, whether a run begins, goes on or is finished, and what a checkpoint holds.
#pragma once

#include "data/loader.h"
#include "model/model.h"
#include "recipe/recipe.h"
#include "train/optimizer.h"

#include <cstdint>
#include <string>

namespace gemtune {

// Everything besides weights and moments that training resumes from: trainer_state.json.
struct TrainerState {
  int64_t step = 0;
  Cursor cursor;
  int64_t num_tokens = 0;
  int64_t skipped_steps = 0;  // updates not made because a gradient was not finite
  int64_t global_batch = 0;   // rows an optimizer step
};

struct RunPlace {
  std::string run_dir;
  std::string checkpoint;          // the newest complete one to go on from, "" = none
  bool has_final = false;          // final/ is there and complete
  std::vector<std::string> notes;  // ignored checkpoints, for the log
};
// Looks at output.dir. A folder that holds a run of the same recipe is gone on with; one with another recipe is an
// Error(kInput) that lists the differences. `fresh` picks a new sibling ("-2", "-3", …) instead.
RunPlace find_run_place(const Recipe& recipe, bool fresh);

// Copies tokenizer, processor and generation files from the model folder, so that the target loads alone.
void copy_side_files(const std::string& model_folder, const std::string& tokenizer, const std::string& to);

// Fills a checkpoint folder / reads it back.
void fill_checkpoint(const std::string& folder, const Gemma3& model, const Optimizer& optimizer, const TrainerState& state,
                     const Recipe& recipe, const std::string& model_folder);
TrainerState read_trainer_state(const std::string& folder);
// final/: adapter, or the whole model when every weight was trained.
void fill_final(const std::string& folder, const Gemma3& model, const Recipe& recipe, const std::string& model_folder);

}  // namespace gemtune
