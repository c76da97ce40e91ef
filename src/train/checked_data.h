// The check every run makes before weights load, kept between runs.
#pragma once

#include "data/loader.h"
#include "train/specs.h"

#include <string>
#include <vector>

namespace gemtune {

// check_dataset over the prepared source, or the kept report of the same files and settings.
DataReport check_data(const Recipe& recipe, const Preparation& prepared, CheckDepth depth, const CheckHooks& hooks = {});

// Faults that stop training under the recipe (data.on_bad_row, data.on_too_long), each as its one-line text.
std::vector<std::string> stopping_faults(const Recipe& recipe, const DataReport& report);
// Throws Error(kInput) with the first ten of them and the total, or when no row is left.
void require_usable(const Recipe& recipe, const DataReport& report);

// Rows of the held-out source that are evaluated: usable ones, at most eval.max_rows.
std::vector<int64_t> held_out_rows(const Recipe& recipe, const Preparation& prepared);

}  // namespace gemtune
