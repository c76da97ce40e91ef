// AdamW over many tensors a launch: eight elements a thread, each array read once and written once.
#include "ops/device.cuh"

#include <algorithm>

namespace gemtune {
namespace {

constexpr int kThreads = 256;
constexpr int kEntries = 48;
constexpr int64_t kElementsABlock = int64_t{kThreads} * 8 * 8;

// Tensors with the number of the first block that works on each.
struct Entries {
  AdamwEntry entry[kEntries];
  unsigned first_block[kEntries + 1];
  int count;
};

__device__ __forceinline__ void load(const float* p, float (&x)[8]) {
  const float4 a = reinterpret_cast<const float4*>(p)[0];
  const float4 b = reinterpret_cast<const float4*>(p)[1];
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
__device__ __forceinline__ void load(const Bf16* p, float (&x)[8]) {
  const Vec8 v = load8(p);
#pragma unroll
  for (int j = 0; j < 8; ++j) x[j] = v.get(j);
}
__device__ __forceinline__ void store(float* p, const float (&x)[8]) {
  reinterpret_cast<float4*>(p)[0] = make_float4(x[0], x[1], x[2], x[3]);
  reinterpret_cast<float4*>(p)[1] = make_float4(x[4], x[5], x[6], x[7]);
}
__device__ __forceinline__ void store(Bf16* p, const float (&x)[8]) {
  store8(p, pack8(x));
}
__device__ __forceinline__ float rounded(float x, const float*) {
  return x;
}
__device__ __forceinline__ float rounded(float x, const Bf16*) {
  return round_bf16(x);
}

template <class T>
__device__ __forceinline__ void update(float& w, float g, float& m, float& v, const AdamwScalars& s) {
  // numerics: no product is fused into a sum, so that the plain form's roundings are repeated.
  const float gradient = rounded(__fmul_rn(g, s.gradient_scale), static_cast<const T*>(nullptr));
  m = __fadd_rn(m, __fmul_rn(__fsub_rn(gradient, m), 1.0f - s.beta1));
  v = __fadd_rn(__fmul_rn(v, s.beta2), __fmul_rn(__fmul_rn(gradient, gradient), 1.0f - s.beta2));
  const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), s.root_correction), s.eps);
  w = __fsub_rn(__fmul_rn(w, s.keep), __fdiv_rn(__fmul_rn(s.step_size, m), denominator));
}

template <class T>
__device__ __forceinline__ float element(const T* p, int64_t i) {
  if constexpr (sizeof(T) == 4)
    return p[i];
  else
    return to_float(p[i]);
}
template <class T>
__device__ __forceinline__ void set_element(T* p, int64_t i, float x) {
  if constexpr (sizeof(T) == 4)
    p[i] = x;
  else
    p[i] = to_bf16(x);
}

template <class T>
__global__ void __launch_bounds__(kThreads) adamw_kernel(const __grid_constant__ Entries all, const AdamwScalars scalars) {
  int e = 0;
  while (e + 1 < all.count && blockIdx.x >= all.first_block[e + 1]) ++e;
  const AdamwEntry& entry = all.entry[e];
  T* weight = static_cast<T*>(entry.weight);
  const T* gradient = static_cast<const T*>(entry.gradient);
  T* moment1 = static_cast<T*>(entry.moment1);
  T* moment2 = static_cast<T*>(entry.moment2);
  const int64_t begin = int64_t(blockIdx.x - all.first_block[e]) * kElementsABlock;
  for (int64_t i = begin + int64_t(threadIdx.x) * 8; i < min(begin + kElementsABlock, entry.n); i += kThreads * 8) {
    if (i + 8 <= entry.n) {
      float w[8], g[8], m[8], v[8];
      load(gradient + i, g);
      load(moment1 + i, m);
      load(moment2 + i, v);
      load(weight + i, w);
#pragma unroll
      for (int j = 0; j < 8; ++j) update<T>(w[j], g[j], m[j], v[j], scalars);
      store(weight + i, w);
      store(moment1 + i, m);
      store(moment2 + i, v);
    } else {
      for (int64_t j = i; j < entry.n; ++j) {
        float w = element(weight, j), m = element(moment1, j), v = element(moment2, j);
        update<T>(w, element(gradient, j), m, v, scalars);
        set_element(weight, j, w);
        set_element(moment1, j, m);
        set_element(moment2, j, v);
      }
    }
  }
}

}  // namespace

void Kernels::adamw(const AdamwEntry* entries, int count, bool fp32, const AdamwScalars& scalars, void* stream) const {
  for (int first = 0; first < count; first += kEntries) {
    Entries all = {};
    all.count = std::min(kEntries, count - first);
    for (int i = 0; i < all.count; ++i) {
      all.entry[i] = entries[first + i];
      for (const void* p : {static_cast<const void*>(all.entry[i].weight), all.entry[i].gradient,
                            static_cast<const void*>(all.entry[i].moment1), static_cast<const void*>(all.entry[i].moment2)}) {
        require(is_aligned(p), "adamw: a tensor does not begin at a multiple of 16 bytes");
      }
      all.first_block[i + 1] = all.first_block[i] + unsigned(ceil_div(all.entry[i].n, kElementsABlock));
    }
    if (fp32) {
      adamw_kernel<float><<<all.first_block[all.count], kThreads, 0, as_stream(stream)>>>(all, scalars);
    } else {
      adamw_kernel<Bf16><<<all.first_block[all.count], kThreads, 0, as_stream(stream)>>>(all, scalars);
    }
    check_launch("adamw");
  }
}

}  // namespace gemtune
