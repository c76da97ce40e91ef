// NF4: quantising and expanding, bit-equal to the plain form in nf4.cpp.
#include "ops/device.cuh"

namespace gemtune {
namespace {

constexpr int kBlock = 64;
constexpr int kNestedBlock = 256;

__constant__ float kValues[16] = {-1.0f,
                                  -0.6961928009986877f,
                                  -0.5250730514526367f,
                                  -0.39491748809814453f,
                                  -0.28444138169288635f,
                                  -0.18477343022823334f,
                                  -0.09105003625154495f,
                                  0.0f,
                                  0.07958029955625534f,
                                  0.16093020141124725f,
                                  0.24611230194568634f,
                                  0.33791524171829224f,
                                  0.44070982933044434f,
                                  0.5626170039176941f,
                                  0.7229568362236023f,
                                  1.0f};
__constant__ float kThresholds[15] = {-0.8480964004993439f,  -0.6106329262256622f,  -0.4599952697753906f,   -0.33967943489551544f,
                                      -0.23460740596055984f, -0.13791173323988914f, -0.045525018125772476f, 0.03979014977812767f,
                                      0.1202552504837513f,   0.2035212516784668f,   0.2920137718319893f,    0.3893125355243683f,
                                      0.5016634166240692f,   0.6427869200706482f,   0.8614784181118011f};

template <class T>
__device__ __forceinline__ float read(const T* p, int64_t i) {
  if constexpr (sizeof(T) == 4) {
    return p[i];
  } else {
    return to_float(p[i]);
  }
}

__device__ __forceinline__ uint32_t nearest_code(float x) {
  uint32_t code = 0;
#pragma unroll
  for (int i = 0; i < 15; ++i) code += x > kThresholds[i];
  return code;
}

// One warp a block of 64: two elements a lane, which share a byte.
template <class T>
__global__ void nf4_quantize_kernel(const T* __restrict__ weight, int64_t n, uint8_t* __restrict__ codes,
                                    float* __restrict__ absmax) {
  const int64_t block = int64_t(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  if (block * kBlock >= n) return;
  const int64_t i = block * kBlock + (threadIdx.x % kWarp) * 2;
  const float even = i < n ? read(weight, i) : 0.0f;
  const float odd = i + 1 < n ? read(weight, i + 1) : 0.0f;
  float largest = fmaxf(fabsf(even), fabsf(odd));
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, offset));
  // numerics: multiplied by the IEEE reciprocal; an all-zero block codes as zeros.
  const float inverse = largest > 0 ? __frcp_rn(largest) : 0.0f;
  const uint32_t odd_code = i + 1 < n ? nearest_code(__fmul_rn(odd, inverse)) : 0;
  if (i < n) codes[i / 2] = uint8_t(nearest_code(__fmul_rn(even, inverse)) << 4 | odd_code);
  if (threadIdx.x % kWarp == 0) absmax[block] = largest;
}

// numerics: see nearest_code8 in nf4.cpp.
__device__ uint8_t nearest_code8(const float* map, float x) {
  int pivot = 127, upper = 255, lower = 0;
  float value = map[pivot], upper_value = 1.0f, lower_value = -1.0f;
  for (int step = 64; step > 0; step >>= 1) {
    if (x > value) {
      lower = pivot;
      lower_value = value;
      pivot += step;
    } else {
      upper = pivot;
      upper_value = value;
      pivot -= step;
    }
    value = map[pivot];
  }
  if (upper == 255) upper_value = map[upper];
  if (lower == 0) lower_value = map[lower];
  if (x > value) return uint8_t(x > __fmul_rn(__fadd_rn(upper_value, value), 0.5f) ? upper : pivot);
  return uint8_t(x < __fmul_rn(__fadd_rn(lower_value, value), 0.5f) ? lower : pivot);
}

__global__ void nf4_quantize_absmax_kernel(const float* __restrict__ absmax, float offset, const float* __restrict__ map,
                                           int64_t blocks, uint8_t* __restrict__ codes8, float* __restrict__ absmax2) {
  __shared__ float largests[kNestedBlock / kWarp];
  const int64_t i = int64_t(blockIdx.x) * kNestedBlock + threadIdx.x;
  const float x = i < blocks ? __fsub_rn(absmax[i], offset) : 0.0f;
  float largest = fabsf(x);
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, o));
  if (threadIdx.x % kWarp == 0) largests[threadIdx.x / kWarp] = largest;
  __syncthreads();
  largest = largests[0];
  for (int w = 1; w < kNestedBlock / kWarp; ++w) largest = fmaxf(largest, largests[w]);
  const float inverse = largest > 0 ? __frcp_rn(largest) : 0.0f;
  if (i < blocks) codes8[i] = nearest_code8(map, __fmul_rn(x, inverse));
  if (threadIdx.x == 0) absmax2[blockIdx.x] = largest;
}

// Eight elements a thread: four bytes of codes, one absmax.
template <class T>
__global__ void nf4_dequantize_kernel(const uint8_t* __restrict__ codes, const float* __restrict__ absmax,
                                      const uint8_t* __restrict__ codes8, const float* __restrict__ absmax2,
                                      const float* __restrict__ map, float offset, T* __restrict__ to, bool round, int64_t rows,
                                      int64_t width, int64_t stride) {
  __shared__ float values[16];
  if (threadIdx.x < 16) values[threadIdx.x] = kValues[threadIdx.x];
  __syncthreads();
  const int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  if (i >= rows * width) return;
  const int64_t block = i / kBlock;
  // numerics: rounded after the product and after the sum.
  const float scale =
      absmax != nullptr ? absmax[block] : __fadd_rn(__fmul_rn(map[codes8[block]], absmax2[block / kNestedBlock]), offset);
  const uint32_t packed = *reinterpret_cast<const uint32_t*>(codes + i / 2);
  float out[8];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t byte = (packed >> (8 * j)) & 0xFFu;
    out[2 * j] = __fmul_rn(values[byte >> 4], scale);
    out[2 * j + 1] = __fmul_rn(values[byte & 15u], scale);
  }
  const int64_t row = i / width;
  T* place = to + row * stride + (i - row * width);
  if constexpr (sizeof(T) == 2) {
    store8(place, pack8(out));
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) place[j] = round ? round_bf16(out[j]) : out[j];
  }
}

constexpr int kThreads = 256;

}  // namespace

void Kernels::nf4_quantize(const void* weight, bool fp32, int64_t n, uint8_t* codes, float* absmax, void* stream) const {
  const unsigned blocks = unsigned(ceil_div(n, kBlock * (kThreads / kWarp)));
  if (fp32) {
    nf4_quantize_kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const float*>(weight), n, codes, absmax);
  } else {
    nf4_quantize_kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const Bf16*>(weight), n, codes, absmax);
  }
  check_launch("nf4_quantize");
}

void Kernels::nf4_quantize_absmax(const float* absmax, float offset, const float* map, int64_t blocks, uint8_t* codes8,
                                  float* absmax2, void* stream) const {
  nf4_quantize_absmax_kernel<<<unsigned(ceil_div(blocks, kNestedBlock)), kNestedBlock, 0, as_stream(stream)>>>(
      absmax, offset, map, blocks, codes8, absmax2);
  check_launch("nf4_quantize_absmax");
}

void Kernels::nf4_dequantize(const uint8_t* codes, const float* absmax, const uint8_t* codes8, const float* absmax2,
                             const float* map, float offset, void* to, bool fp32_out, bool round_bf16, int64_t rows,
                             int64_t width, int64_t stride, void* stream) const {
  require(width % 8 == 0 && stride % 8 == 0, "nf4_dequantize: rows are no multiple of 8");
  const unsigned blocks = unsigned(ceil_div(rows * width, kThreads * 8));
  if (fp32_out) {
    nf4_dequantize_kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(codes, absmax, codes8, absmax2, map, offset,
                                                                      static_cast<float*>(to), round_bf16, rows, width, stride);
  } else {
    nf4_dequantize_kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(codes, absmax, codes8, absmax2, map, offset,
                                                                      static_cast<Bf16*>(to), round_bf16, rows, width, stride);
  }
  check_launch("nf4_dequantize");
}

}  // namespace gemtune
