// Between safetensors bytes and tensors.
#pragma once

#include "io/safetensors.h"
#include "ops/ops.h"

#include <string>
#include <vector>

namespace gemtune {

// The mapped bytes as a CPU tensor, valid while `file` is open. Throws Error(kInput) for a dtype no weight can have.
Tensor tensor_view(const SafetensorsFile& file, const TensorEntry& entry);

// Collects tensors (kept alive, moved to the CPU, made contiguous) and writes them to one file.
class TensorFileWriter {
 public:
  void add(const std::string& name, const Tensor& tensor);
  void write(const std::string& path, const std::map<std::string, std::string>& metadata = {}) const;

 private:
  std::vector<std::pair<std::string, Tensor>> tensors_;
};

}  // namespace gemtune
