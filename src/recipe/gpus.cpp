#include "recipe/gpus.h"

#include <yaml-cpp/yaml.h>

#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "recipe/leaves.h"

namespace gemtune {

// The one source of these values; recipes/gpus.yaml is this text, and a test compares them.
const char* const kGpusYaml =
    R"yaml(# GPUs that `gemtune plan` knows. Prices change: correct them here and pass this file with --gpus.
#
# memory_gib: usable memory; bf16_tflops: rate of large bf16 products in practice, about 80 % of the data sheet's; memory_tbps: of
# its memory, in practice; usd_per_hour: one GPU's share of its machine on demand, Google Cloud us-central1, 0 = not known.
prices_as_of: 2025-06
gpus:
  h200: { memory_gib: 139, bf16_tflops: 790, memory_tbps: 4.27, usd_per_hour: 10.60 }
  h100: { memory_gib: 79, bf16_tflops: 790, memory_tbps: 3.0, usd_per_hour: 11.06 }
  b200: { memory_gib: 178, bf16_tflops: 1800, memory_tbps: 7.2, usd_per_hour: 0 }
  a100-80: { memory_gib: 79, bf16_tflops: 250, memory_tbps: 1.8, usd_per_hour: 5.07 }
  a100-40: { memory_gib: 39, bf16_tflops: 250, memory_tbps: 1.4, usd_per_hour: 3.67 }
  l4: { memory_gib: 22, bf16_tflops: 97, memory_tbps: 0.27, usd_per_hour: 0.71 }
  rtx-4090: { memory_gib: 23.5, bf16_tflops: 130, memory_tbps: 0.9, usd_per_hour: 0 }
)yaml";

const GpuOffer& GpuTable::find(const std::string& name) const {
  std::vector<std::string> names;
  for (const GpuOffer& gpu : gpus) {
    if (gpu.name == name) return gpu;
    names.push_back(gpu.name);
  }
  const std::string guess = did_you_mean(name, names);
  throw input_error("no GPU {} in the table; it has {}{}", in_quotes(name), join_some(names, 20),
                    guess.empty() ? "" : "; did you mean " + guess + "?");
}

GpuTable read_gpu_table(const std::string& path) {
  const std::string where = path.empty() ? "recipes/gpus.yaml" : path;
  GpuTable table;
  try {
    const YAML::Node root = YAML::Load(path.empty() ? kGpusYaml : read_file(path));
    table.prices_as_of = root["prices_as_of"].as<std::string>();
    for (const auto& entry : root["gpus"]) {
      const YAML::Node& values = entry.second;
      GpuOffer gpu;
      gpu.name = entry.first.as<std::string>();
      const auto number = [&](const char* key, bool may_be_zero) {
        const double value = values[key].as<double>();
        if (value < 0 || (value == 0 && !may_be_zero)) {
          throw input_error("{}: gpus.{}.{}: expected a number above 0, got {}", where, gpu.name, key, value);
        }
        return value;
      };
      gpu.memory_gib = number("memory_gib", false);
      gpu.bf16_tflops = number("bf16_tflops", false);
      gpu.memory_tbps = number("memory_tbps", false);
      gpu.usd_per_hour = number("usd_per_hour", true);
      table.gpus.push_back(gpu);
    }
  } catch (const YAML::Exception& error) {
    throw input_error(
        "{}:{}: {}; each GPU needs memory_gib, bf16_tflops, memory_tbps and usd_per_hour, and the file prices_as_of", where,
        error.mark.line + 1, error.msg);
  }
  if (table.gpus.empty()) throw input_error("{}: names no GPU", where);
  return table;
}

}  // namespace gemtune
