// GPUs by name: memory, speed, price. For estimates before a machine is there.
#pragma once

#include <string>
#include <vector>

namespace gemtune {

struct GpuOffer {
  std::string name;  // "h200"
  double memory_gib = 0;
  double bf16_tflops = 0;
  double memory_tbps = 0;
  double usd_per_hour = 0;  // 0 = not known
};

struct GpuTable {
  std::string prices_as_of;  // "2025-06"
  std::vector<GpuOffer> gpus;
  // Throws Error(kInput) naming the known ones.
  const GpuOffer& find(const std::string& name) const;
};

// A file in the form of recipes/gpus.yaml; "" = that one, which the program carries. Throws Error(kInput) with file and key.
GpuTable read_gpu_table(const std::string& path);

}  // namespace gemtune
