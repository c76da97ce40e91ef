// Models and data sets in the standard Hugging Face cache, as the `hf` command leaves them. Nothing is downloaded here.
#pragma once

#include <string>
#include <string_view>

namespace gemtune {

// "google/gemma-3-4b-it": two plain names, no path and no data file.
bool looks_like_hub_id(std::string_view text);

enum class HubKind { kModel, kDataset };
// The newest snapshot folder of `id` in $HF_HUB_CACHE, $HF_HOME/hub or ~/.cache/huggingface/hub. Throws Error(kInput) with
// the command that downloads it when it is not there.
std::string find_hub_snapshot(HubKind kind, const std::string& id);

}  // namespace gemtune
