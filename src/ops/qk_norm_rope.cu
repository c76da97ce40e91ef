// Per-head RMSNorm and rotary embedding: one warp a head of one token.
#include "ops/device.cuh"

namespace gemtune {
namespace {

constexpr int kWarpsABlock = 8;

// E ÷ 32 neighbouring elements a lane; the element half a head away lies 16 lanes on.
template <int kEach>
struct HeadPart {
  float x[kEach];
  __device__ __forceinline__ void load(const Bf16* p) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) x[j] = to_float(p[j]);
  }
  __device__ __forceinline__ void store(Bf16* p) const {
#pragma unroll
    for (int j = 0; j < kEach; ++j) p[j] = to_bf16(x[j]);
  }
};
template <>
__device__ __forceinline__ void HeadPart<8>::load(const Bf16* p) {
  const Vec8 v = load8(p);
#pragma unroll
  for (int j = 0; j < 8; ++j) x[j] = v.get(j);
}
template <>
__device__ __forceinline__ void HeadPart<8>::store(Bf16* p) const {
  store8(p, pack8(x));
}

template <int kEach, bool kBackward>
__global__ void qk_norm_rope_kernel(const Bf16* __restrict__ dy, const Bf16* __restrict__ x, int64_t x_stride,
                                    const Bf16* __restrict__ weight, const Bf16* __restrict__ cos, const Bf16* __restrict__ sin,
                                    Bf16* __restrict__ out, int64_t out_stride, int64_t tokens, int64_t positions, int64_t heads,
                                    float eps) {
  constexpr int kHead = kEach * kWarp;
  const int64_t index = int64_t(blockIdx.x) * kWarpsABlock + threadIdx.x / kWarp;
  const int64_t token = index / heads;
  const int64_t head = index - token * heads;
  if (token >= tokens) return;
  const int lane = threadIdx.x % kWarp;
  const int first = lane * kEach;
  const float sign = lane < 16 ? -1.0f : 1.0f;  // rotate_half: the first half takes −second, the second +first

  HeadPart<kEach> value, w, c, s;
  value.load(x + token * x_stride + head * kHead + first);
  w.load(weight + first);
  c.load(cos + (token % positions) * kHead + first);
  s.load(sin + (token % positions) * kHead + first);
  float squares = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) squares += value.x[j] * value.x[j];
  const float inverse = rsqrtf(warp_sum(squares) / float(kHead) + eps);

  HeadPart<kEach> result;
  if constexpr (!kBackward) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      // numerics: the norm is rounded to bf16 as in the reference; the rotation is rounded once.
      const float normed = round_bf16(value.x[j] * inverse * (1.0f + w.x[j]));
      const float other = __shfl_xor_sync(0xFFFFFFFFu, normed, 16);
      result.x[j] = normed * c.x[j] + sign * other * s.x[j];
    }
    result.store(out + token * out_stride + head * kHead + first);
  } else {
    HeadPart<kEach> d;
    d.load(dy + (token * heads + head) * kHead + first);
    float dot = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const float turned = __shfl_xor_sync(0xFFFFFFFFu, d.x[j] * s.x[j], 16);
      d.x[j] = (d.x[j] * c.x[j] - sign * turned) * (1.0f + w.x[j]);
      dot += d.x[j] * value.x[j];
    }
    const float mean_dot = warp_sum(dot) / float(kHead) * inverse * inverse;
#pragma unroll
    for (int j = 0; j < kEach; ++j) result.x[j] = inverse * (d.x[j] - value.x[j] * mean_dot);
    result.store(out + token * out_stride + head * kHead + first);
  }
}

template <bool kBackward>
void launch(const Bf16* dy, const Bf16* x, int64_t x_stride, const Bf16* weight, const Bf16* cos, const Bf16* sin, Bf16* out,
            int64_t out_stride, int64_t tokens, int64_t positions, int64_t heads, int64_t head_size, float eps, void* stream) {
  const unsigned blocks = unsigned(ceil_div(tokens * heads, kWarpsABlock));
  const auto go = [&](auto each) {
    qk_norm_rope_kernel<each.value, kBackward><<<blocks, kWarpsABlock * kWarp, 0, as_stream(stream)>>>(
        dy, x, x_stride, weight, cos, sin, out, out_stride, tokens, positions, heads, eps);
  };
  switch (head_size) {
    case 64:
      go(std::integral_constant<int, 2>());
      break;
    case 128:
      go(std::integral_constant<int, 4>());
      break;
    case 256:
      go(std::integral_constant<int, 8>());
      break;
    default:
      throw std::runtime_error("qk_norm_rope: head size " + std::to_string(head_size) + " is none of 64, 128, 256");
  }
  check_launch("qk_norm_rope");
}

}  // namespace

void Kernels::qk_norm_rope(const Bf16* x, int64_t x_stride, const Bf16* weight, const Bf16* cos, const Bf16* sin, Bf16* y,
                           int64_t tokens, int64_t positions, int64_t heads, int64_t head_size, float eps, void* stream) const {
  launch<false>(nullptr, x, x_stride, weight, cos, sin, y, heads * head_size, tokens, positions, heads, head_size, eps, stream);
}

void Kernels::qk_norm_rope_backward(const Bf16* dy, const Bf16* x, int64_t x_stride, const Bf16* weight, const Bf16* cos,
                                    const Bf16* sin, Bf16* dx, int64_t dx_stride, int64_t tokens, int64_t positions,
                                    int64_t heads, int64_t head_size, float eps, void* stream) const {
  launch<true>(dy, x, x_stride, weight, cos, sin, dx, dx_stride, tokens, positions, heads, head_size, eps, stream);
}

}  // namespace gemtune
