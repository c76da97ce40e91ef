// libFuzzer entry: whatever the bytes, the parser gives a file whose tensors tile the data, or an Error.
#include "base/error.h"
#include "io/safetensors.h"

#include <cstddef>
#include <cstdint>
#include <span>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const gemtune::SafetensorsHeader header = gemtune::parse_safetensors(std::as_bytes(std::span(data, size)), "fuzz");
    int64_t covered = 0;
    for (const gemtune::TensorEntry& entry : header.entries) covered += entry.end - entry.begin;
    if (header.data_begin + covered != static_cast<int64_t>(size)) __builtin_trap();
  } catch (const gemtune::Error&) {
  }
  return 0;
}
