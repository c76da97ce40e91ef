// GPUs: opened when a run asks for one, and what operations need to start a kernel.
#pragma once

#include "ops/kernels.h"

#include <ATen/core/Tensor.h>

#include <string>

namespace gemtune {

// Why no GPU can be used here, in one line with the remedy; "" = one can. Loads LibTorch's CUDA half and gemtune's kernels
// the first time.
const std::string& why_no_cuda();
int num_cuda_devices();
// Throws Error(kEnvironment) with why_no_cuda().
const Kernels& kernels();

// Whether the operations' own kernels take x: a bf16 tensor on a GPU. Everything else runs in the plain form.
bool has_kernels(const at::Tensor& x);
// The stream of x's device that PyTorch's operations run on in this thread.
void* stream_of(const at::Tensor& x);

inline const Bf16* bf16(const at::Tensor& x) {
  return x.defined() ? static_cast<const Bf16*>(x.const_data_ptr()) : nullptr;
}
inline Bf16* mutable_bf16(const at::Tensor& x) {
  return x.defined() ? static_cast<Bf16*>(x.mutable_data_ptr()) : nullptr;
}

// x as [rows, last]: rows at one distance, elements of a row side by side. Copies when x lies otherwise.
struct RowMatrix {
  at::Tensor tensor;  // keeps the memory
  int64_t rows = 0;
  int64_t width = 0;
  int64_t stride = 0;
};
RowMatrix rows_of(const at::Tensor& x);

// A new tensor of `shape` whose rows have `room` elements of free space behind them: for lora_linears, which puts its
// adapters' inputs there.
at::Tensor empty_with_room(at::IntArrayRef shape, int64_t room, const at::TensorOptions& options);
bool has_room(const at::Tensor& x, int64_t room);

}  // namespace gemtune
