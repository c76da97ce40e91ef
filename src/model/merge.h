// An adapter added to the weights it was trained on: a model folder that stands alone.
#pragma once

#include "model/model.h"

#include <optional>
#include <string>

namespace gemtune {

struct MergeReport {
  int64_t num_tensors = 0;
  int64_t num_bytes = 0;
  int64_t num_merged = 0;  // linear layers
  int64_t num_tables = 0;  // trained embedding tables
  bool untied = false;     // the tables were one and are two now
};

// Writes the base's safetensors files into `out` under the same names, dtypes, order and index: W + scale · B A summed in fp32
// and rounded once to W's dtype, trained tables in the place of the base's; everything else byte for byte. A tied base with two
// different trained tables gets a lm_head.weight and tie_word_embeddings false. config.json is written too, nothing else.
// `onto`: weights that were quantised while training are replaced by what the adapter saw of them (NF4 and back) before the sum.
// One file's changed tensors are in memory at a time. Throws Error(kInput) for 4-bit folders, for adapters that do not fit
// (every fault, with counts) and for settings that are no plain sum (DoRA, …).
MergeReport merge_adapter(const std::string& model_folder, const std::string& adapter_folder, const std::string& out,
                          const std::optional<QuantSpec>& onto = std::nullopt);

}  // namespace gemtune
