// What the kernels share: bf16 in vectors of eight, sums over a warp, launch errors, the class whose methods they are.
#pragma once

#include "ops/kernels.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace gemtune {

constexpr int kWarp = 32;

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}
inline void check_launch(const char* what) {
  check(cudaGetLastError(), what);
}
inline cudaStream_t as_stream(void* stream) {
  return static_cast<cudaStream_t>(stream);
}
inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
inline bool is_aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}
inline void require(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

__device__ __forceinline__ float to_float(Bf16 x) {
  return __uint_as_float(uint32_t(x) << 16);
}
__device__ __forceinline__ Bf16 to_bf16(float x) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}
__device__ __forceinline__ float low_half(uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float high_half(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  return uint32_t(to_bf16(low)) | uint32_t(to_bf16(high)) << 16;
}
__device__ __forceinline__ float round_bf16(float x) {
  return to_float(to_bf16(x));
}

// Eight neighbouring bf16 values: one 16-byte access.
struct Vec8 {
  uint32_t pairs[4];
  __device__ __forceinline__ float get(int i) const { return i % 2 == 0 ? low_half(pairs[i / 2]) : high_half(pairs[i / 2]); }
};
__device__ __forceinline__ Vec8 load8(const Bf16* p) {
  const uint4 raw = *reinterpret_cast<const uint4*>(p);
  return {{raw.x, raw.y, raw.z, raw.w}};
}
__device__ __forceinline__ Vec8 load8_const(const Bf16* p) {
  const uint4 raw = __ldg(reinterpret_cast<const uint4*>(p));
  return {{raw.x, raw.y, raw.z, raw.w}};
}
__device__ __forceinline__ void store8(Bf16* p, const Vec8& v) {
  *reinterpret_cast<uint4*>(p) = make_uint4(v.pairs[0], v.pairs[1], v.pairs[2], v.pairs[3]);
}
__device__ __forceinline__ Vec8 pack8(const float (&x)[8]) {
  return {{pack_pair(x[0], x[1]), pack_pair(x[2], x[3]), pack_pair(x[4], x[5]), pack_pair(x[6], x[7])}};
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, offset);
  return x;
}

// gelu(x) = ½ x (1 + tanh(√(2/π) (x + 0.044715 x³))), and its slope.
__device__ __forceinline__ float gelu_inner(float x) {
  return 0.7978845608028654f * (x + 0.044715f * x * x * x);
}
__device__ __forceinline__ float gelu_tanh(float x) {
  return 0.5f * x * (1.0f + tanhf(gelu_inner(x)));
}
__device__ __forceinline__ float gelu_tanh_slope(float x) {
  const float t = tanhf(gelu_inner(x));
  return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * 0.7978845608028654f * (1.0f + 0.134145f * x * x);
}

// Philox 4×32-7: see dropout.cpp, which states the scheme.
__device__ __forceinline__ uint4 philox(uint4 counter, uint32_t key0, uint32_t key1) {
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * counter.x;
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter.z;
    counter = make_uint4(uint32_t(product1 >> 32) ^ counter.y ^ key0, uint32_t(product1),
                         uint32_t(product0 >> 32) ^ counter.w ^ key1, uint32_t(product0));
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// The draws of (key, block): block = index of eight neighbouring elements, one 15-bit draw each in the low bits of a half word.
struct DropoutMask {
  uint32_t seed_low, seed_high, micro_low, micro_high;
  uint32_t carry;  // in both halves: what makes a draw at the threshold or above reach bit 15
};
__device__ __forceinline__ uint4 dropout_draws(const DropoutMask& mask, uint32_t module, uint64_t block) {
  return philox(make_uint4(uint32_t(block), module, mask.micro_low, mask.micro_high), mask.seed_low,
                mask.seed_high ^ uint32_t(block >> 32));
}
// Which of a pair of elements is kept, as masks of halves: both draws compared at once.
__device__ __forceinline__ uint32_t kept_halves(uint32_t draws, const DropoutMask& mask) {
  const uint32_t reached = (draws & 0x7FFF7FFFu) + mask.carry;
  uint32_t kept;
  asm("prmt.b32 %0, %1, 0, 0xBB99;\n" : "=r"(kept) : "r"(reached));  // bits 15 and 31 spread over their halves
  return kept;
}
inline uint32_t dropout_threshold(float p) {
  return uint32_t(p * 32768.0f + 0.5f);
}
inline DropoutMask make_mask(float p, uint64_t seed, uint64_t micro) {
  return {uint32_t(seed), uint32_t(seed >> 32), uint32_t(micro), uint32_t(micro >> 32),
          (0x8000u - dropout_threshold(p)) * 0x10001u};
}
// What kept elements are multiplied by. numerics: from the threshold, so that the mean is kept exactly.
inline float dropout_scale(float p) {
  return 32768.0f / (32768.0f - float(dropout_threshold(p)));
}

}  // namespace gemtune
