// LayerNorm and RMSNorm with their residual sums: one warp a row, the row in registers, one read and one write of each array.
#include "ops/device.cuh"

namespace gemtune {
namespace {

constexpr int kWarpsABlock = 4;

// Vector i of this lane, or nothing past the end.
template <int kVectors, class F>
__device__ __forceinline__ void for_each_vector(int64_t width, F f) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t column = (int64_t(i) * kWarp + lane) * 8;
    if (column < width) f(i, column);
  }
}

__device__ __forceinline__ int64_t row_of_warp() {
  return int64_t(blockIdx.x) * kWarpsABlock + threadIdx.x / kWarp;
}

template <int kVectors>
__global__ void layer_norm_kernel(const Bf16* __restrict__ x, const Bf16* __restrict__ weight, const Bf16* __restrict__ bias,
                                  Bf16* __restrict__ y, int64_t y_stride, float* __restrict__ mean, float* __restrict__ rstd,
                                  int64_t rows, int64_t width, float eps) {
  const int64_t row = row_of_warp();
  if (row >= rows) return;
  Vec8 values[kVectors];
  float sum = 0;
  for_each_vector<kVectors>(width, [&](int i, int64_t column) {
    values[i] = load8(x + row * width + column);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += values[i].get(j);
  });
  const float mu = warp_sum(sum) / float(width);
  float squares = 0;
  for_each_vector<kVectors>(width, [&](int i, int64_t) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float centred = values[i].get(j) - mu;
      squares += centred * centred;
    }
  });
  const float inverse = rsqrtf(warp_sum(squares) / float(width) + eps);
  for_each_vector<kVectors>(width, [&](int i, int64_t column) {
    const Vec8 w = load8_const(weight + column);
    const Vec8 b = load8_const(bias + column);
    float out[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) out[j] = (values[i].get(j) - mu) * inverse * w.get(j) + b.get(j);
    store8(y + row * y_stride + column, pack8(out));
  });
  if (threadIdx.x % kWarp == 0) {
    mean[row] = mu;
    rstd[row] = inverse;
  }
}

template <int kVectors>
__global__ void layer_norm_backward_kernel(const Bf16* __restrict__ dsum, const Bf16* __restrict__ dy, int64_t dy_stride,
                                           const Bf16* __restrict__ x, const Bf16* __restrict__ weight,
                                           const float* __restrict__ mean, const float* __restrict__ rstd, Bf16* __restrict__ dx,
                                           int64_t rows, int64_t width) {
  const int64_t row = row_of_warp();
  if (row >= rows) return;
  const float mu = mean[row];
  const float inverse = rstd[row];
  Vec8 values[kVectors], gradients[kVectors];
  float sum_g = 0, sum_gx = 0;
  for_each_vector<kVectors>(width, [&](int i, int64_t column) {
    values[i] = load8(x + row * width + column);
    gradients[i] = load8(dy + row * dy_stride + column);
    const Vec8 w = load8_const(weight + column);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float g = gradients[i].get(j) * w.get(j);
      sum_g += g;
      sum_gx += g * (values[i].get(j) - mu) * inverse;
    }
  });
  const float mean_g = warp_sum(sum_g) / float(width);
  const float mean_gx = warp_sum(sum_gx) / float(width);
  for_each_vector<kVectors>(width, [&](int i, int64_t column) {
    const Vec8 w = load8_const(weight + column);
    Vec8 residual = {};
    if (dsum != nullptr) residual = load8(dsum + row * width + column);
    float out[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float normed = (values[i].get(j) - mu) * inverse;
      out[j] = residual.get(j) + inverse * (gradients[i].get(j) * w.get(j) - mean_g - normed * mean_gx);
    }
    store8(dx + row * width + column, pack8(out));
  });
}

template <int kVectors>
__device__ __forceinline__ float inverse_rms(const Vec8 (&values)[kVectors], int64_t width, float eps) {
  float squares = 0;
  for_each_vector<kVectors>(width, [&](int i, int64_t) {
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += values[i].get(j) * values[i].get(j);
  });
  return rsqrtf(warp_sum(squares) / float(width) + eps);
}

template <int kVectors>
__global__ void rms_joint_kernel(const Bf16* __restrict__ x, const Bf16* __restrict__ h, const Bf16* __restrict__ weight_h,
                                 const Bf16* __restrict__ weight, Bf16* __restrict__ sum, Bf16* __restrict__ y, int64_t y_stride,
                                 float* __restrict__ rstd_h, float* __restrict__ rstd, int64_t rows, int64_t width, float eps) {
  const int64_t row = row_of_warp();
  if (row >= rows) return;
  Vec8 values[kVectors];
  if (h != nullptr) {
    for_each_vector<kVectors>(width, [&](int i, int64_t column) { values[i] = load8(h + row * width + column); });
    const float inverse = inverse_rms(values, width, eps);
    if (threadIdx.x % kWarp == 0) rstd_h[row] = inverse;
    for_each_vector<kVectors>(width, [&](int i, int64_t column) {
      const Vec8 w = load8_const(weight_h + column);
      const Vec8 residual = load8(x + row * width + column);
      float out[8];
      // numerics: the normed value is rounded before the sum, as in the reference.
#pragma unroll
      for (int j = 0; j < 8; ++j) out[j] = residual.get(j) + round_bf16(values[i].get(j) * inverse * (1.0f + w.get(j)));
      values[i] = pack8(out);
      store8(sum + row * width + column, values[i]);
    });
  } else {
    for_each_vector<kVectors>(width, [&](int i, int64_t column) { values[i] = load8(x + row * width + column); });
  }
  if (y == nullptr) return;
  const float inverse = inverse_rms(values, width, eps);
  if (threadIdx.x % kWarp == 0) rstd[row] = inverse;
  for_each_vector<kVectors>(width, [&](int i, int64_t column) {
    const Vec8 w = load8_const(weight + column);
    float out[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) out[j] = values[i].get(j) * inverse * (1.0f + w.get(j));
    store8(y + row * y_stride + column, pack8(out));
  });
}

template <int kVectors>
__global__ void rms_joint_backward_kernel(const Bf16* __restrict__ dsum, const Bf16* __restrict__ dy, int64_t dy_stride,
                                          const Bf16* __restrict__ sum, const Bf16* __restrict__ weight,
                                          const float* __restrict__ rstd, const Bf16* __restrict__ h,
                                          const Bf16* __restrict__ weight_h, const float* __restrict__ rstd_h,
                                          Bf16* __restrict__ dx, Bf16* __restrict__ dh, int64_t rows, int64_t width) {
  const int64_t row = row_of_warp();
  if (row >= rows) return;
  Vec8 gradients[kVectors];  // of the sum
  if (dy != nullptr) {
    const float inverse = rstd[row];
    Vec8 values[kVectors];
    float dot = 0;
    for_each_vector<kVectors>(width, [&](int i, int64_t column) {
      values[i] = load8(sum + row * width + column);
      gradients[i] = load8(dy + row * dy_stride + column);
      const Vec8 w = load8_const(weight + column);
#pragma unroll
      for (int j = 0; j < 8; ++j) dot += gradients[i].get(j) * (1.0f + w.get(j)) * values[i].get(j);
    });
    const float mean_dot = warp_sum(dot) / float(width) * inverse * inverse;
    for_each_vector<kVectors>(width, [&](int i, int64_t column) {
      const Vec8 w = load8_const(weight + column);
      Vec8 residual = {};
      if (dsum != nullptr) residual = load8(dsum + row * width + column);
      float out[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        out[j] = residual.get(j) + inverse * (gradients[i].get(j) * (1.0f + w.get(j)) - values[i].get(j) * mean_dot);
      }
      gradients[i] = pack8(out);
    });
  } else {
    for_each_vector<kVectors>(width, [&](int i, int64_t column) { gradients[i] = load8(dsum + row * width + column); });
  }
  if (dx != nullptr) {
    for_each_vector<kVectors>(width, [&](int i, int64_t column) { store8(dx + row * width + column, gradients[i]); });
  }
  if (dh == nullptr) return;
  const float inverse = rstd_h[row];
  Vec8 values[kVectors];
  float dot = 0;
  for_each_vector<kVectors>(width, [&](int i, int64_t column) {
    values[i] = load8(h + row * width + column);
    const Vec8 w = load8_const(weight_h + column);
#pragma unroll
    for (int j = 0; j < 8; ++j) dot += gradients[i].get(j) * (1.0f + w.get(j)) * values[i].get(j);
  });
  const float mean_dot = warp_sum(dot) / float(width) * inverse * inverse;
  for_each_vector<kVectors>(width, [&](int i, int64_t column) {
    const Vec8 w = load8_const(weight_h + column);
    float out[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) out[j] = inverse * (gradients[i].get(j) * (1.0f + w.get(j)) - values[i].get(j) * mean_dot);
    store8(dh + row * width + column, pack8(out));
  });
}

// Calls f with the vectors a lane holds as a constant: registers are indexed by it.
template <class F>
void with_vectors(int64_t width, F f) {
  require(width % 8 == 0, "norm: the width is no multiple of 8");
  const int64_t vectors = ceil_div(width, 8 * kWarp);
  if (vectors <= 1) return f(std::integral_constant<int, 1>());
  if (vectors <= 3) return f(std::integral_constant<int, 3>());
  if (vectors <= 5) return f(std::integral_constant<int, 5>());
  if (vectors <= 10) return f(std::integral_constant<int, 10>());
  if (vectors <= 15) return f(std::integral_constant<int, 15>());
  if (vectors <= 21) return f(std::integral_constant<int, 21>());
  throw std::runtime_error("norm: width " + std::to_string(width) + " is above 5376");
}

unsigned blocks_for(int64_t rows) {
  return unsigned(ceil_div(rows, kWarpsABlock));
}

}  // namespace

void Kernels::layer_norm(const Bf16* x, const Bf16* weight, const Bf16* bias, Bf16* y, int64_t y_stride, float* mean, float* rstd,
                         int64_t rows, int64_t width, float eps, void* stream) const {
  with_vectors(width, [&](auto vectors) {
    layer_norm_kernel<vectors.value><<<blocks_for(rows), kWarpsABlock * kWarp, 0, as_stream(stream)>>>(
        x, weight, bias, y, y_stride, mean, rstd, rows, width, eps);
  });
  check_launch("layer_norm");
}

void Kernels::layer_norm_backward(const Bf16* dsum, const Bf16* dy, int64_t dy_stride, const Bf16* x, const Bf16* weight,
                                  const float* mean, const float* rstd, Bf16* dx, int64_t rows, int64_t width,
                                  void* stream) const {
  with_vectors(width, [&](auto vectors) {
    layer_norm_backward_kernel<vectors.value><<<blocks_for(rows), kWarpsABlock * kWarp, 0, as_stream(stream)>>>(
        dsum, dy, dy_stride, x, weight, mean, rstd, dx, rows, width);
  });
  check_launch("layer_norm_backward");
}

void Kernels::rms_joint(const Bf16* x, const Bf16* h, const Bf16* weight_h, const Bf16* weight, Bf16* sum, Bf16* y,
                        int64_t y_stride, float* rstd_h, float* rstd, int64_t rows, int64_t width, float eps,
                        void* stream) const {
  with_vectors(width, [&](auto vectors) {
    rms_joint_kernel<vectors.value><<<blocks_for(rows), kWarpsABlock * kWarp, 0, as_stream(stream)>>>(
        x, h, weight_h, weight, sum, y, y_stride, rstd_h, rstd, rows, width, eps);
  });
  check_launch("rms_joint");
}

void Kernels::rms_joint_backward(const Bf16* dsum, const Bf16* dy, int64_t dy_stride, const Bf16* sum, const Bf16* weight,
                                 const float* rstd, const Bf16* h, const Bf16* weight_h, const float* rstd_h, Bf16* dx, Bf16* dh,
                                 int64_t rows, int64_t width, void* stream) const {
  with_vectors(width, [&](auto vectors) {
    rms_joint_backward_kernel<vectors.value><<<blocks_for(rows), kWarpsABlock * kWarp, 0, as_stream(stream)>>>(
        dsum, dy, dy_stride, sum, weight, rstd, h, weight_h, rstd_h, dx, dh, rows, width);
  });
  check_launch("rms_joint_backward");
}

}  // namespace gemtune
