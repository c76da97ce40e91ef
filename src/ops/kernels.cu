// The library's one exported symbol, and what it knows of devices.
#include "ops/device.cuh"

namespace gemtune {

int Kernels::capability(int device) const {
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
  return major * 10 + minor;
}

void Kernels::memory(int device, int64_t* free_bytes, int64_t* total_bytes) const {
  check(cudaSetDevice(device), "cudaSetDevice");
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  *free_bytes = int64_t(free);
  *total_bytes = int64_t(total);
}

}  // namespace gemtune

extern "C" __attribute__((visibility("default"))) const gemtune::Kernels* gemtune_kernels() {
  static const gemtune::Kernels kernels;
  return &kernels;
}
