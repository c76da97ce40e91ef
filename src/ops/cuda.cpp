#include "ops/cuda.h"

#include "base/error.h"
#include "ops/ops.h"
#include "ops/torch.h"

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <unistd.h>

#include <climits>

namespace gemtune {
namespace {

constexpr int kLeastCapability = 80;  // bf16 on tensor cores

struct Cuda {
  const Kernels* kernels = nullptr;
  int num_devices = 0;
  std::string fault;
};

std::string folder_of_program() {
  char path[PATH_MAX];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof(path));
  const std::string_view text(path, length > 0 ? size_t(length) : 0);
  return std::string(text.substr(0, text.rfind('/')));
}

Cuda open_cuda() {
  Cuda cuda;
  if (access("/dev/nvidiactl", F_OK) != 0) {
    cuda.fault = "this machine has no NVIDIA GPU (no /dev/nvidiactl); set train.device=cpu";
    return cuda;
  }
  const std::string library = folder_of_program() + "/libgemtune_cuda.so";
  if (access(library.c_str(), F_OK) != 0) {
    cuda.fault = fmt::format(
        "this program was built without CUDA ({} is missing); install the CUDA toolkit (nvcc) and run make build, or set "
        "train.device=cpu",
        library);
    return cuda;
  }
  // LibTorch first: the kernels use the CUDA runtime and cuBLASLt that it brings.
  for (const std::string& name : {std::string("libtorch_cuda.so"), library}) {
    void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (handle == nullptr) {
      cuda.fault = fmt::format("{} cannot be loaded: {}", name, dlerror());
      return cuda;
    }
    if (name != library) continue;
    const auto function = reinterpret_cast<KernelsFunction>(dlsym(handle, kKernelsSymbol));
    if (function == nullptr) {
      cuda.fault = fmt::format("{} lacks {}: it belongs to another build; run make build", library, kKernelsSymbol);
      return cuda;
    }
    cuda.kernels = function();
  }
  cuda.num_devices = at::globalContext().hasCUDA() ? int(at::detail::getCUDAHooks().deviceCount()) : 0;
  if (cuda.num_devices == 0) {
    cuda.fault = "no GPU answers; the driver must be 580 or newer (nvidia-smi shows it), or set train.device=cpu";
    return cuda;
  }
  const int capability = cuda.kernels->capability(0);
  if (capability < kLeastCapability) {
    cuda.fault = fmt::format(
        "this GPU has compute capability {}.{}, gemtune needs 8.0 (Ampere) for bf16; fp16 is not offered because Gemma's "
        "activations exceed its range; set train.device=cpu",
        capability / 10, capability % 10);
  }
  return cuda;
}

const Cuda& cuda() {
  static const Cuda opened = open_cuda();
  return opened;
}

}  // namespace

const std::string& why_no_cuda() {
  return cuda().fault;
}

int num_cuda_devices() {
  return cuda().num_devices;
}

const Kernels& kernels() {
  if (!cuda().fault.empty()) throw environment_error("{}", cuda().fault);
  return *cuda().kernels;
}

bool has_kernels(const Tensor& x) {
  return x.is_cuda() && x.scalar_type() == at::kBFloat16;
}

void* stream_of(const Tensor& x) {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  return guard.getStream(x.device()).native_handle();
}

RowMatrix rows_of(const Tensor& x) {
  const auto fits = [](const Tensor& t) {
    if (t.stride(-1) != 1 || t.dim() == 0) return false;
    for (int64_t i = t.dim() - 3; i >= 0; --i) {
      if (t.size(i) > 1 && t.stride(i) != t.stride(i + 1) * t.size(i + 1)) return false;
    }
    return t.dim() < 2 || (t.stride(-2) % 8 == 0 && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0);
  };
  RowMatrix out;
  out.tensor = fits(x) ? x : x.contiguous();
  out.width = x.size(-1);
  out.rows = x.numel() / std::max<int64_t>(1, out.width);
  out.stride = x.dim() < 2 ? out.width : out.tensor.stride(-2);
  return out;
}

Tensor empty_with_room(at::IntArrayRef shape, int64_t room, const at::TensorOptions& options) {
  std::vector<int64_t> whole = shape.vec();
  whole.back() += room;
  return at::empty(whole, options).narrow(-1, 0, shape.back());
}

bool has_room(const Tensor& x, int64_t room) {
  const int64_t stride = x.size(-1) + room;
  if (x.dim() < 2 || x.storage_offset() != 0) return false;
  const RowMatrix rows = rows_of(x);
  return rows.tensor.is_same(x) && rows.stride == stride &&
         int64_t(x.storage().nbytes()) >= rows.rows * stride * int64_t(x.element_size());
}

}  // namespace gemtune
