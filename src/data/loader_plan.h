// Inside the loader: which rows make which micro-batch, and one row made ready.
#pragma once

#include "data/loader.h"

#include <cstdint>
#include <vector>

namespace gemtune {

// The rows of one step on one rank.
struct StepPlan {
  Cursor begin;
  Cursor end;
  int64_t num_micro_batches = 0;                 // over all ranks
  std::vector<int64_t> micro_index;              // of this rank's micro-batches
  std::vector<std::vector<int64_t>> micro_rows;  // positions in the epoch's order
};

// `begin` is normalised first: a position at the end of an epoch is the start of the next one. Throws Error(kInput) for a
// position beyond the end.
StepPlan plan_step(Cursor begin, int64_t num_rows, const LoaderOptions& options);

struct DecodedRow {
  Sample sample;
  std::vector<std::vector<uint8_t>> images_CHW;  // empty planes for a picture that is known
  std::vector<std::string> picture_keys;
};

// Reads, renders and decodes a data set row. Throws RowError, naming the image for a damaged one.
DecodedRow decode_row(const Dataset& dataset, const Chat& chat, const ImageOptions& image_options, int64_t row,
                      const LoaderOptions& options);

// Decodes image k of the row completely. `animated` may be null. Throws RowError.
RgbImage decode_image_of(const Row& row, size_t k, const ImageOptions& image_options, bool* animated);

// 0 = one a core.
int threads_for(int num_workers);

}  // namespace gemtune
