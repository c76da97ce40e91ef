// Element-wise parts of the feed-forward blocks: eight elements a thread.
#include "ops/device.cuh"

namespace gemtune {
namespace {

constexpr int kThreads = 256;

struct Place {
  int64_t row, column;
  bool inside;
};
__device__ __forceinline__ Place place_of_thread(int64_t rows, int64_t vectors) {
  const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = index / vectors;
  return {row, (index - row * vectors) * 8, row < rows};
}

__global__ void geglu_kernel(const Bf16* __restrict__ gate, const Bf16* __restrict__ up, int64_t stride, Bf16* __restrict__ y,
                             int64_t y_stride, int64_t rows, int64_t vectors) {
  const Place at = place_of_thread(rows, vectors);
  if (!at.inside) return;
  const Vec8 g = load8(gate + at.row * stride + at.column);
  const Vec8 u = load8(up + at.row * stride + at.column);
  float out[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) out[j] = round_bf16(gelu_tanh(g.get(j))) * u.get(j);
  store8(y + at.row * y_stride + at.column, pack8(out));
}

__global__ void geglu_backward_kernel(const Bf16* __restrict__ dy, int64_t dy_stride, const Bf16* __restrict__ gate,
                                      const Bf16* __restrict__ up, int64_t stride, Bf16* __restrict__ dgate,
                                      Bf16* __restrict__ dup, int64_t d_stride, int64_t rows, int64_t vectors) {
  const Place at = place_of_thread(rows, vectors);
  if (!at.inside) return;
  const Vec8 d = load8(dy + at.row * dy_stride + at.column);
  const Vec8 g = load8(gate + at.row * stride + at.column);
  const Vec8 u = load8(up + at.row * stride + at.column);
  float to_gate[8], to_up[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    to_gate[j] = d.get(j) * u.get(j) * gelu_tanh_slope(g.get(j));
    to_up[j] = d.get(j) * round_bf16(gelu_tanh(g.get(j)));
  }
  store8(dgate + at.row * d_stride + at.column, pack8(to_gate));
  store8(dup + at.row * d_stride + at.column, pack8(to_up));
}

__global__ void gelu_kernel(const Bf16* __restrict__ x, int64_t x_stride, Bf16* __restrict__ y, int64_t y_stride, int64_t rows,
                            int64_t vectors) {
  const Place at = place_of_thread(rows, vectors);
  if (!at.inside) return;
  const Vec8 v = load8(x + at.row * x_stride + at.column);
  float out[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) out[j] = gelu_tanh(v.get(j));
  store8(y + at.row * y_stride + at.column, pack8(out));
}

__global__ void gelu_backward_kernel(const Bf16* __restrict__ dy, int64_t dy_stride, const Bf16* __restrict__ x, int64_t x_stride,
                                     Bf16* __restrict__ dx, int64_t rows, int64_t vectors) {
  const Place at = place_of_thread(rows, vectors);
  if (!at.inside) return;
  const Vec8 d = load8(dy + at.row * dy_stride + at.column);
  const Vec8 v = load8(x + at.row * x_stride + at.column);
  float out[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) out[j] = d.get(j) * gelu_tanh_slope(v.get(j));
  store8(dx + at.row * vectors * 8 + at.column, pack8(out));
}

unsigned blocks_for(int64_t rows, int64_t width) {
  require(width % 8 == 0, "feed-forward: the width is no multiple of 8");
  return unsigned(ceil_div(rows * (width / 8), kThreads));
}

}  // namespace

void Kernels::geglu(const Bf16* gate, const Bf16* up, int64_t stride, Bf16* y, int64_t y_stride, int64_t rows, int64_t width,
                    void* stream) const {
  geglu_kernel<<<blocks_for(rows, width), kThreads, 0, as_stream(stream)>>>(gate, up, stride, y, y_stride, rows, width / 8);
  check_launch("geglu");
}

void Kernels::geglu_backward(const Bf16* dy, int64_t dy_stride, const Bf16* gate, const Bf16* up, int64_t stride, Bf16* dgate,
                             Bf16* dup, int64_t d_stride, int64_t rows, int64_t width, void* stream) const {
  geglu_backward_kernel<<<blocks_for(rows, width), kThreads, 0, as_stream(stream)>>>(dy, dy_stride, gate, up, stride, dgate, dup,
                                                                                     d_stride, rows, width / 8);
  check_launch("geglu_backward");
}

void Kernels::gelu(const Bf16* x, int64_t x_stride, Bf16* y, int64_t y_stride, int64_t rows, int64_t width, void* stream) const {
  gelu_kernel<<<blocks_for(rows, width), kThreads, 0, as_stream(stream)>>>(x, x_stride, y, y_stride, rows, width / 8);
  check_launch("gelu");
}

void Kernels::gelu_backward(const Bf16* dy, int64_t dy_stride, const Bf16* x, int64_t x_stride, Bf16* dx, int64_t rows,
                            int64_t width, void* stream) const {
  gelu_backward_kernel<<<blocks_for(rows, width), kThreads, 0, as_stream(stream)>>>(dy, dy_stride, x, x_stride, dx, rows,
                                                                                    width / 8);
  check_launch("gelu_backward");
}

}  // namespace gemtune
