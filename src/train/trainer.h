// THE loop. Reads like the data's way: batches → count targets → forward → loss sum → backward → reduce → clip, AdamW → record.
#pragma once

#include "base/error.h"
#include "dist/group.h"
#include "recipe/recipe.h"

#include <atomic>
#include <string>

namespace gemtune {

struct TrainOptions {
  ResolvedRecipe resolved;
  std::string events;                             // --events
  bool fresh = false;                             // start a new sibling folder instead of resuming
  const std::atomic<int>* stop_signal = nullptr;  // set by SIGTERM and SIGINT: the signal's number
};

struct TrainOutcome {
  ExitCode code = ExitCode::kDone;  // kDone, or kStopped with a complete checkpoint
  std::string run_dir;
  std::string final_dir;
};

// Trains on this rank. Throws Error for everything that stands in the way.
TrainOutcome train(const TrainOptions& options, Group& group);

}  // namespace gemtune
