// Cross entropy over rows of bf16 logits, which become their own gradient: one block a row, two reads and one write.
#include "ops/device.cuh"

#include <cfloat>

namespace gemtune {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;

// Running maximum with its place, and the sum of exponentials relative to it.
struct Running {
  float largest = -FLT_MAX;
  float sum = 0;
  int64_t place = 0;
  __device__ void add(float x, int64_t at) {
    if (x > largest) {
      sum = sum * __expf(largest - x) + 1.0f;
      largest = x;
      place = at;
    } else {
      sum += __expf(x - largest);
    }
  }
  // numerics: of equal maxima the first place wins, as arg-max has it.
  __device__ void merge(float other_largest, float other_sum, int64_t other_place) {
    const float top = fmaxf(largest, other_largest);
    sum = sum * __expf(largest - top) + other_sum * __expf(other_largest - top);
    if (other_largest > largest || (other_largest == largest && other_place < place)) place = other_place;
    largest = top;
  }
};

__device__ __forceinline__ float capped(float x, float softcap) {
  return softcap > 0 ? softcap * tanhf(x / softcap) : x;
}

__global__ void __launch_bounds__(kThreads)
    cross_entropy_kernel(Bf16* __restrict__ logits, const int64_t* __restrict__ targets, float* __restrict__ loss,
                         int32_t* __restrict__ correct, int64_t vocabulary, float softcap, bool gradient) {
  Bf16* row = logits + int64_t(blockIdx.x) * vocabulary;
  Running running;
  for (int64_t i = int64_t(threadIdx.x) * 8; i < vocabulary; i += kThreads * 8) {
    const Vec8 v = load8(row + i);
#pragma unroll
    for (int j = 0; j < 8; ++j) running.add(capped(v.get(j), softcap), i + j);
  }
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const float largest = __shfl_xor_sync(0xFFFFFFFFu, running.largest, offset);
    const float sum = __shfl_xor_sync(0xFFFFFFFFu, running.sum, offset);
    const int64_t place = __shfl_xor_sync(0xFFFFFFFFu, running.place, offset);
    running.merge(largest, sum, place);
  }
  __shared__ float largests[kWarps], sums[kWarps];
  __shared__ int64_t places[kWarps];
  if (threadIdx.x % kWarp == 0) {
    largests[threadIdx.x / kWarp] = running.largest;
    sums[threadIdx.x / kWarp] = running.sum;
    places[threadIdx.x / kWarp] = running.place;
  }
  __syncthreads();
  Running all;
  for (int i = 0; i < kWarps; ++i) {
    if (i == 0) {
      all.largest = largests[0];
      all.sum = sums[0];
      all.place = places[0];
    } else {
      all.merge(largests[i], sums[i], places[i]);
    }
  }
  const int64_t target = targets[blockIdx.x];
  const float log_normaliser = all.largest + logf(all.sum);
  if (threadIdx.x == 0) {
    loss[blockIdx.x] = log_normaliser - capped(to_float(row[target]), softcap);
    correct[blockIdx.x] = all.place == target ? 1 : 0;
  }
  if (!gradient) return;
  __syncthreads();  // row[target] is read before it is overwritten
  for (int64_t i = int64_t(threadIdx.x) * 8; i < vocabulary; i += kThreads * 8) {
    const Vec8 v = load8(row + i);
    float out[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float slope = 1.0f;
      float x = v.get(j);
      if (softcap > 0) {
        const float t = tanhf(x / softcap);
        x = softcap * t;
        slope = 1.0f - t * t;
      }
      out[j] = (__expf(x - log_normaliser) - (i + j == target ? 1.0f : 0.0f)) * slope;
    }
    store8(row + i, pack8(out));
  }
}

}  // namespace

void Kernels::cross_entropy(Bf16* logits, const int64_t* targets, float* loss, int32_t* correct, int64_t rows, int64_t vocabulary,
                            float softcap, bool gradient, void* stream) const {
  require(vocabulary % 8 == 0, "cross_entropy: the vocabulary is no multiple of 8");
  cross_entropy_kernel<<<unsigned(rows), kThreads, 0, as_stream(stream)>>>(logits, targets, loss, correct, vocabulary, softcap,
                                                                           gradient);
  check_launch("cross_entropy");
}

}  // namespace gemtune
