#include "model/tensor_file.h"

#include "base/error.h"
#include "ops/torch.h"

#include <ATen/ops/from_blob.h>

namespace gemtune {
namespace {

at::ScalarType scalar_type(DType dtype, const std::string& where) {
  switch (dtype) {
    case DType::kF64:
      return at::kDouble;
    case DType::kF32:
      return at::kFloat;
    case DType::kF16:
      return at::kHalf;
    case DType::kBF16:
      return at::kBFloat16;
    case DType::kI64:
      return at::kLong;
    case DType::kI32:
      return at::kInt;
    case DType::kU8:
      return at::kByte;
    case DType::kBool:
      return at::kBool;
    default:
      throw input_error("{}: dtype {} is not supported; expected BF16, F16, F32 or U8", where, dtype_name(dtype));
  }
}

DType file_dtype(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return DType::kF64;
    case at::kFloat:
      return DType::kF32;
    case at::kHalf:
      return DType::kF16;
    case at::kBFloat16:
      return DType::kBF16;
    case at::kLong:
      return DType::kI64;
    case at::kInt:
      return DType::kI32;
    case at::kByte:
      return DType::kU8;
    case at::kBool:
      return DType::kBool;
    default:
      throw job_error("safetensors: tensors of type {} are not written", c10::toString(type));
  }
}

}  // namespace

Tensor tensor_view(const SafetensorsFile& file, const TensorEntry& entry) {
  const auto bytes = file.bytes(entry);
  const auto type = scalar_type(entry.dtype, file.path() + ": " + entry.name);
  return at::from_blob(const_cast<std::byte*>(bytes.data()), entry.shape, at::TensorOptions().dtype(type));
}

void TensorFileWriter::add(const std::string& name, const Tensor& tensor) {
  tensors_.emplace_back(name, tensor.detach().to(at::kCPU).contiguous());
}

void TensorFileWriter::write(const std::string& path, const std::map<std::string, std::string>& metadata) const {
  std::vector<TensorToWrite> rows;
  rows.reserve(tensors_.size());
  for (const auto& [name, tensor] : tensors_) {
    rows.push_back({name,
                    file_dtype(tensor.scalar_type()),
                    tensor.sizes().vec(),
                    {static_cast<const std::byte*>(tensor.const_data_ptr()), size_t(tensor.nbytes())}});
  }
  write_safetensors(path, rows, metadata);
}

}  // namespace gemtune
