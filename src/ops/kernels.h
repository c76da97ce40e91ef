// The CUDA kernels as the operations see them: raw pointers, sizes, a stream. They live in a shared library of their own,
// opened when a run asks for a GPU, so that the program starts fast and runs on machines without one. Its functions are
// virtual only so that the program needs no symbol of the library.
//
// Matrices are row-major, activations bfloat16 (`Bf16*` is a raw uint16 view), statistics and adapter gradients fp32. A
// "stride" is the distance between rows in elements; widths are multiples of 8 and rows begin at multiples of 16 bytes.
#pragma once

#include <cstdint>

namespace gemtune {

using Bf16 = uint16_t;

// The adapter kernels work on ranks in chunks of sixteen (fewer are padded with zeros), at most four chunks a launch.
constexpr int kRankChunk = 16;
constexpr int kMaxChunks = 4;

// Each chunk drops inputs by the mask of its own layer.
struct ChunkDropout {
  float p = 0;  // 0 = none
  uint64_t seed = 0;
  uint64_t micro = 0;
  uint32_t modules[kMaxChunks] = {};
  int num_chunks = 1;
};

// One adapter's fp32 matrices and where they go in the packed operands.
struct AdapterPack {
  const float* a = nullptr;  // [rank, in]
  const float* b = nullptr;  // [out, rank]
  float scale = 1;
  int64_t rank = 0;
  int64_t out = 0;
  int64_t first_out = 0;   // first row in the packed weight
  int64_t first_rank = 0;  // first column behind `in`
};

// Neighbouring columns of one adapter, and the column of `du` where its ranks begin.
constexpr int kMaxAdapterSegments = 4;
struct AdapterSegment {
  int64_t first_column = 0;
  int64_t width = 0;
  int64_t du_column = 0;
};

// Where an adapter's gradient goes, and of which columns and ranks of the partial sums.
struct AdapterGradient {
  int64_t first_column = 0;
  int64_t width = 0;
  int64_t first_rank = 0;
  int64_t rank = 0;
  float* to = nullptr;
  int64_t to_stride = 0;
};

// d = alpha · op(a) op(b) + beta · c + bias (a row). a [m, k], b [k, n] as operands; `transposed` = stored the other way round.
struct MatrixProduct {
  const void* a = nullptr;
  const void* b = nullptr;
  const void* c = nullptr;     // bf16 or fp32 like d; null = none (beta 0), may be d
  const void* bias = nullptr;  // bf16 [n] or null
  void* d = nullptr;
  int64_t m = 0, n = 0, k = 0;
  int64_t a_stride = 0, b_stride = 0, c_stride = 0, d_stride = 0;
  bool a_transposed = false, b_transposed = false;
  bool fp32_out = false;
  float alpha = 1;
  const float* device_alpha = nullptr;  // alpha in device memory instead
};

struct AdamwEntry {
  void* weight = nullptr;
  const void* gradient = nullptr;
  void* moment1 = nullptr;
  void* moment2 = nullptr;
  int64_t n = 0;
};
struct AdamwScalars {
  float beta1 = 0, beta2 = 0, keep = 1, step_size = 0, root_correction = 1, eps = 0, gradient_scale = 1;
};

class Kernels {
 public:
  virtual ~Kernels() = default;

  // Compute capability of a device, 90 for 9.0, and its memory.
  virtual int capability(int device) const;
  virtual void memory(int device, int64_t* free_bytes, int64_t* total_bytes) const;

  // --- norms; every pointer marked "or null" may be absent -----------------------------------------------------------------
  // y = layer_norm(x); mean, rstd [rows] are kept for the backward pass.
  virtual void layer_norm(const Bf16* x, const Bf16* weight, const Bf16* bias, Bf16* y, int64_t y_stride, float* mean,
                          float* rstd, int64_t rows, int64_t width, float eps, void* stream) const;
  // dx = dsum (or null) + the norm's gradient of dy.
  virtual void layer_norm_backward(const Bf16* dsum, const Bf16* dy, int64_t dy_stride, const Bf16* x, const Bf16* weight,
                                   const float* mean, const float* rstd, Bf16* dx, int64_t rows, int64_t width,
                                   void* stream) const;
  // sum = x + rms(h, weight_h) (h or null: sum is not written, x stands for it); y (or null) = rms(sum, weight).
  virtual void rms_joint(const Bf16* x, const Bf16* h, const Bf16* weight_h, const Bf16* weight, Bf16* sum, Bf16* y,
                         int64_t y_stride, float* rstd_h, float* rstd, int64_t rows, int64_t width, float eps,
                         void* stream) const;
  // dx = dsum (or null) + gradient of dy (or null); dh (or null) = its gradient through the inner norm.
  virtual void rms_joint_backward(const Bf16* dsum, const Bf16* dy, int64_t dy_stride, const Bf16* sum, const Bf16* weight,
                                  const float* rstd, const Bf16* h, const Bf16* weight_h, const float* rstd_h, Bf16* dx, Bf16* dh,
                                  int64_t rows, int64_t width, void* stream) const;

  // --- attention's inputs --------------------------------------------------------------------------------------------------
  // Per-head RMSNorm and rotation of [tokens, heads, E]; token t has position t mod positions. cos, sin [positions, E].
  virtual void qk_norm_rope(const Bf16* x, int64_t x_stride, const Bf16* weight, const Bf16* cos, const Bf16* sin, Bf16* y,
                            int64_t tokens, int64_t positions, int64_t heads, int64_t head_size, float eps, void* stream) const;
  virtual void qk_norm_rope_backward(const Bf16* dy, const Bf16* x, int64_t x_stride, const Bf16* weight, const Bf16* cos,
                                     const Bf16* sin, Bf16* dx, int64_t dx_stride, int64_t tokens, int64_t positions,
                                     int64_t heads, int64_t head_size, float eps, void* stream) const;

  // --- feed-forward --------------------------------------------------------------------------------------------------------
  virtual void geglu(const Bf16* gate, const Bf16* up, int64_t stride, Bf16* y, int64_t y_stride, int64_t rows, int64_t width,
                     void* stream) const;
  virtual void geglu_backward(const Bf16* dy, int64_t dy_stride, const Bf16* gate, const Bf16* up, int64_t stride, Bf16* dgate,
                              Bf16* dup, int64_t d_stride, int64_t rows, int64_t width, void* stream) const;
  virtual void gelu(const Bf16* x, int64_t x_stride, Bf16* y, int64_t y_stride, int64_t rows, int64_t width, void* stream) const;
  virtual void gelu_backward(const Bf16* dy, int64_t dy_stride, const Bf16* x, int64_t x_stride, Bf16* dx, int64_t rows,
                             int64_t width, void* stream) const;

  // --- products ------------------------------------------------------------------------------------------------------------
  virtual void matrix_product(const MatrixProduct& product, void* stream) const;

  // --- adapters ------------------------------------------------------------------------------------------------------------
  // packed_a bf16 [ranks, in], packed_at bf16 [in, ranks] and the columns [in, in + ranks) of weight [outs, in + ranks].
  virtual void pack_adapters(const AdapterPack* packs, int num_packs, Bf16* packed_a, Bf16* packed_at, Bf16* weight, int64_t in,
                             int64_t ranks, int64_t outs, void* stream) const;
  // u[row, 16 j + r] = Σ_i dropout_j(x)[row, i] · a[16 j + r, i] for chunks j.
  virtual void adapter_down(const Bf16* x, int64_t x_stride, const Bf16* a, Bf16* u, int64_t u_stride, int64_t rows, int64_t in,
                            const ChunkDropout& dropout, void* stream) const;
  // Partial sums over blocks of rows, for adapter_reduce, of Σ_row du[row, c + 16 j + r] · dropout_j(x)[row, i] for the columns i
  // of each segment, c = its du_column; and, when dx is given, dx[row, i] += Σ_j mask_j · Σ_r du[row, c + 16 j + r] · a[16 j + r,
  // i], with at = aᵀ [width, at_stride]. `partial`: fp32 scratch of adapter_partial_elements().
  virtual void adapter_up(const Bf16* x, int64_t x_stride, int64_t width, const Bf16* du, int64_t du_stride,
                          const AdapterSegment* segments, int num_segments, const Bf16* at, int64_t at_stride, Bf16* dx,
                          int64_t dx_stride, float* partial, int64_t rows, const ChunkDropout& dropout, void* stream) const;
  virtual int64_t adapter_partial_elements(int64_t rows, const AdapterSegment* segments, int num_segments, int64_t width,
                                           int num_chunks) const;
  // Sums the partials of adapter_up with the same rows, segments, width and chunks: to[r, i], or to[i, r] when `transposed`.
  virtual void adapter_reduce(const float* partial, int64_t rows, const AdapterSegment* segments, int num_segments, int64_t width,
                              int num_chunks, const AdapterGradient* gradients, int num_gradients, float scale, bool transposed,
                              void* stream) const;
  virtual void dropout(const void* x, void* y, bool fp32, int64_t n, float p, uint64_t seed, uint64_t micro, uint32_t module,
                       void* stream) const;

  // --- head ----------------------------------------------------------------------------------------------------------------
  // Per row: loss and whether the arg-max is the target; logits become (softmax − one-hot) when `gradient`.
  virtual void cross_entropy(Bf16* logits, const int64_t* targets, float* loss, int32_t* correct, int64_t rows,
                             int64_t vocabulary, float softcap, bool gradient, void* stream) const;

  // --- optimizer -----------------------------------------------------------------------------------------------------------
  // All tensors of one dtype in as few launches as their number allows.
  virtual void adamw(const AdamwEntry* entries, int count, bool fp32, const AdamwScalars& scalars, void* stream) const;

  // --- NF4 -----------------------------------------------------------------------------------------------------------------
  // codes of n elements in blocks of 64; absmax [blocks]. `weight` fp32 or bf16.
  virtual void nf4_quantize(const void* weight, bool fp32, int64_t n, uint8_t* codes, float* absmax, void* stream) const;
  // Nested: codes8 [blocks], absmax2 [blocks ÷ 256]; centred = absmax − offset.
  virtual void nf4_quantize_absmax(const float* absmax, float offset, const float* map, int64_t blocks, uint8_t* codes8,
                                   float* absmax2, void* stream) const;
  // Rows of `width` elements at `stride`. absmax, or the nested parts (absmax null). numerics: rounded to bf16 when round_bf16.
  virtual void nf4_dequantize(const uint8_t* codes, const float* absmax, const uint8_t* codes8, const float* absmax2,
                              const float* map, float offset, void* to, bool fp32_out, bool round_bf16, int64_t rows,
                              int64_t width, int64_t stride, void* stream) const;
};

// What the library exports.
using KernelsFunction = const Kernels* (*)();
constexpr const char* kKernelsSymbol = "gemtune_kernels";

}  // namespace gemtune
