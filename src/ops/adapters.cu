// LoRA's skinny products on tensor cores, dropout made on the way from its counter: x is read once for all sibling adapters.
//
// A warp multiplies 16 rows at a time (mma m16n8k16). The order of columns inside a product is free, so it is chosen such that
// a thread's elements of a row are eight neighbours: one 16-byte access and one draw of eight dropout decisions.
#include "ops/device.cuh"

namespace gemtune {
namespace {

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The 8 × 8 matrix of 16-bit values that the warp holds, transposed.
__device__ __forceinline__ uint32_t transpose(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(y) : "r"(x));
  return y;
}

struct DeviceDropout {
  DropoutMask mask;
  float scale;
  uint32_t modules[kMaxChunks];
};
DeviceDropout on_device(const ChunkDropout& dropout) {
  DeviceDropout out;
  out.mask = make_mask(dropout.p, dropout.seed, dropout.micro);
  out.scale = dropout_scale(dropout.p);
  for (int i = 0; i < kMaxChunks; ++i) out.modules[i] = dropout.modules[i];
  return out;
}

// numerics: kept values stay as they are in bf16; the scale 1 ÷ (1 − p) multiplies the fp32 sum.
__device__ __forceinline__ Vec8 drop(const Vec8& x, const DropoutMask& mask, uint32_t module, uint64_t block) {
  const uint4 draws = dropout_draws(mask, module, block);
  return {{x.pairs[0] & kept_halves(draws.x, mask), x.pairs[1] & kept_halves(draws.y, mask),
           x.pairs[2] & kept_halves(draws.z, mask), x.pairs[3] & kept_halves(draws.w, mask)}};
}

// --- down: u = dropout(x) aᵀ --------------------------------------------------------------------------------------------

constexpr int kDownWarps = 4;
constexpr int kDownRows = 16;

// One warp, 16 rows, all columns in steps of 32: thread (group, quad) holds columns 8 quad … 8 quad + 7 of rows group and
// group + 8. Two products a step, each of 16 of these columns: pairs 0, 1 of the eight, then pairs 2, 3.
template <int kChunks, bool kDropout>
__global__ void __launch_bounds__(kDownWarps* kWarp)
    adapter_down_kernel(const Bf16* __restrict__ x, int64_t x_stride, const Bf16* __restrict__ a, Bf16* __restrict__ u,
                        int64_t u_stride, int64_t rows, int64_t in, DeviceDropout dropout) {
  const int lane = threadIdx.x % kWarp;
  const int group = lane / 4;
  const int quad = lane % 4;
  const int64_t row0 = (int64_t(blockIdx.x) * kDownWarps + threadIdx.x / kWarp) * kDownRows + group;
  const int64_t row1 = row0 + 8;
  if (row0 - group >= rows) return;
  float sums[kChunks][2][4] = {};
  const uint64_t vectors = uint64_t(in / 8);
#pragma unroll 2
  for (int64_t begin = 0; begin < in; begin += 32) {
    const int64_t column = begin + quad * 8;
    Vec8 x0 = {}, x1 = {};
    if (column < in) {
      if (row0 < rows) x0 = load8(x + row0 * x_stride + column);
      if (row1 < rows) x1 = load8(x + row1 * x_stride + column);
    }
    const uint64_t block = uint64_t(column / 8);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      Vec8 kept0 = x0, kept1 = x1;
      if constexpr (kDropout) {
        kept0 = drop(x0, dropout.mask, dropout.modules[chunk], uint64_t(row0) * vectors + block);
        kept1 = drop(x1, dropout.mask, dropout.modules[chunk], uint64_t(row1) * vectors + block);
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        Vec8 weight = {};
        if (column < in) weight = load8_const(a + int64_t(chunk * kRankChunk + tile * 8 + group) * in + column);
        mma(sums[chunk][tile], {kept0.pairs[0], kept1.pairs[0], kept0.pairs[1], kept1.pairs[1]}, weight.pairs[0],
            weight.pairs[1]);
        mma(sums[chunk][tile], {kept0.pairs[2], kept1.pairs[2], kept0.pairs[3], kept1.pairs[3]}, weight.pairs[2],
            weight.pairs[3]);
      }
    }
  }
  const float scale = kDropout ? dropout.scale : 1.0f;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const float(&s)[4] = sums[chunk][tile];
      const int64_t column = chunk * kRankChunk + tile * 8 + quad * 2;
      if (row0 < rows) *reinterpret_cast<uint32_t*>(u + row0 * u_stride + column) = pack_pair(s[0] * scale, s[1] * scale);
      if (row1 < rows) *reinterpret_cast<uint32_t*>(u + row1 * u_stride + column) = pack_pair(s[2] * scale, s[3] * scale);
    }
  }
}

// --- up: dx += mask ∘ (du a), partial sums of duᵀ dropout(x) ---------------------------------------------------------------

constexpr int kUpWarps = 4;
constexpr int kUpColumns = 32;       // a warp
constexpr int64_t kUpBlocks = 1056;  // enough to fill a large GPU: eight for each of its multiprocessors

// Rows that a block, and so a partial sum, spans.
int64_t rows_a_partial(int64_t rows, int64_t in) {
  const int64_t blocks = ceil_div(kUpBlocks, ceil_div(in, int64_t(kUpColumns) * kUpWarps));
  return ceil_div(ceil_div(rows, blocks), 16) * 16;
}

// Tile j (of four) of a warp's 32 columns: its column n stands for column 8 (n ÷ 2) + 2 j + n mod 2, so that the results a
// thread gets over the four tiles are eight neighbours.
__device__ __forceinline__ int column_of(int tile, int n) {
  return 8 * (n / 2) + 2 * tile + n % 2;
}

template <int kChunks, bool kDropout, bool kWithDx>
__global__ void __launch_bounds__(kUpWarps* kWarp)
    adapter_up_kernel(const Bf16* __restrict__ x, int64_t x_stride, const Bf16* __restrict__ du, int64_t du_stride,
                      const Bf16* __restrict__ at, int64_t at_stride, Bf16* __restrict__ dx, int64_t dx_stride,
                      float* __restrict__ partial, int64_t rows, int64_t rows_a_block, int64_t in, DeviceDropout dropout) {
  const int lane = threadIdx.x % kWarp;
  const int group = lane / 4;
  const int quad = lane % 4;
  const int64_t first = (int64_t(blockIdx.x) * kUpWarps + threadIdx.x / kWarp) * kUpColumns;
  if (first >= in) return;
  const int64_t column = first + quad * 8;
  const uint64_t vectors = uint64_t(in / 8);
  const float scale = kDropout ? dropout.scale : 1.0f;

  uint32_t weight[kWithDx ? kChunks : 1][4][2] = {};  // aᵀ: column n = group of each tile, ranks 2 quad … and 2 quad + 8 …
  if constexpr (kWithDx) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        const int64_t c = first + column_of(tile, group);
        if (c < in) {
          const Bf16* from = at + c * at_stride + chunk * kRankChunk + quad * 2;
          weight[chunk][tile][0] = *reinterpret_cast<const uint32_t*>(from);
          weight[chunk][tile][1] = *reinterpret_cast<const uint32_t*>(from + 8);
        }
      }
    }
  }

  float sums[kChunks][4][4] = {};  // duᵀ x: ranks group and group + 8, columns of each tile
  const int64_t begin = int64_t(blockIdx.y) * rows_a_block;
  const int64_t end = min(begin + rows_a_block, rows);
  for (int64_t row = begin; row < end; row += 16) {
    const int64_t row0 = row + group;
    const int64_t row1 = row0 + 8;
    const bool in0 = row0 < end && column < in;
    const bool in1 = row1 < end && column < in;
    Vec8 x0 = {}, x1 = {}, d0 = {}, d1 = {};
    if (in0) x0 = load8(x + row0 * x_stride + column);
    if (in1) x1 = load8(x + row1 * x_stride + column);
    float dx0[8], dx1[8];
    if constexpr (kWithDx) {
      if (in0) d0 = load8(dx + row0 * dx_stride + column);
      if (in1) d1 = load8(dx + row1 * dx_stride + column);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        dx0[j] = d0.get(j);
        dx1[j] = d1.get(j);
      }
    }
    const uint64_t block0 = uint64_t(row0) * vectors + uint64_t(column / 8);
    const uint64_t block1 = uint64_t(row1) * vectors + uint64_t(column / 8);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      uint32_t g[4];  // du: rows group, group + 8; ranks 2 quad …, 2 quad + 8 …
      const Bf16* from = du + chunk * kRankChunk + quad * 2;
      g[0] = row0 < end ? *reinterpret_cast<const uint32_t*>(from + row0 * du_stride) : 0;
      g[1] = row1 < end ? *reinterpret_cast<const uint32_t*>(from + row1 * du_stride) : 0;
      g[2] = row0 < end ? *reinterpret_cast<const uint32_t*>(from + row0 * du_stride + 8) : 0;
      g[3] = row1 < end ? *reinterpret_cast<const uint32_t*>(from + row1 * du_stride + 8) : 0;

      uint4 kept0 = make_uint4(~0u, ~0u, ~0u, ~0u), kept1 = kept0;
      if constexpr (kDropout) {
        const uint4 draws0 = dropout_draws(dropout.mask, dropout.modules[chunk], block0);
        const uint4 draws1 = dropout_draws(dropout.mask, dropout.modules[chunk], block1);
        const DropoutMask& m = dropout.mask;
        kept0 =
            make_uint4(kept_halves(draws0.x, m), kept_halves(draws0.y, m), kept_halves(draws0.z, m), kept_halves(draws0.w, m));
        kept1 =
            make_uint4(kept_halves(draws1.x, m), kept_halves(draws1.y, m), kept_halves(draws1.z, m), kept_halves(draws1.w, m));
      }
      const uint32_t masks0[4] = {kept0.x, kept0.y, kept0.z, kept0.w};
      const uint32_t masks1[4] = {kept1.x, kept1.y, kept1.z, kept1.w};

      if constexpr (kWithDx) {
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
          float product[4] = {};
          mma(product, g, weight[chunk][tile][0], weight[chunk][tile][1]);
          // Columns 2 quad, 2 quad + 1 of the tile are neighbours 2 tile, 2 tile + 1 of this thread's eight.
          if (masks0[tile] & 0x0000FFFFu) dx0[2 * tile] += product[0] * scale;
          if (masks0[tile] & 0xFFFF0000u) dx0[2 * tile + 1] += product[1] * scale;
          if (masks1[tile] & 0x0000FFFFu) dx1[2 * tile] += product[2] * scale;
          if (masks1[tile] & 0xFFFF0000u) dx1[2 * tile + 1] += product[3] * scale;
        }
      }
      const uint32_t turned[4] = {transpose(g[0]), transpose(g[2]), transpose(g[1]), transpose(g[3])};
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        const uint32_t b0 = transpose(x0.pairs[tile] & masks0[tile]);
        const uint32_t b1 = transpose(x1.pairs[tile] & masks1[tile]);
        mma(sums[chunk][tile], turned, b0, b1);
      }
    }
    if constexpr (kWithDx) {
      if (in0) store8(dx + row0 * dx_stride + column, pack8(dx0));
      if (in1) store8(dx + row1 * dx_stride + column, pack8(dx1));
    }
  }
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      float* to = partial + (int64_t(blockIdx.y) * kChunks + chunk) * kRankChunk * in;
      const int64_t c = column + 2 * tile;
      if (column < in) {
        to[group * in + c] = sums[chunk][tile][0] * scale;
        to[group * in + c + 1] = sums[chunk][tile][1] * scale;
        to[(group + 8) * in + c] = sums[chunk][tile][2] * scale;
        to[(group + 8) * in + c + 1] = sums[chunk][tile][3] * scale;
      }
    }
  }
}

__global__ void adapter_reduce_kernel(const float* __restrict__ partial, int64_t num_partials, int64_t chunk_rows, int64_t in,
                                      int64_t first_rank, int64_t rank, float scale, bool transposed, float* __restrict__ to,
                                      int64_t to_stride) {
  const int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= rank * in) return;
  const int64_t r = index / in;
  const int64_t i = index - r * in;
  float sum = 0;
  for (int64_t p = 0; p < num_partials; ++p) sum += partial[(p * chunk_rows + first_rank + r) * in + i];
  to[transposed ? i * to_stride + r : r * to_stride + i] = sum * scale;
}

// --- packing ---------------------------------------------------------------------------------------------------------------

constexpr int kMaxPacks = 4;
struct Packs {
  AdapterPack pack[kMaxPacks];
  int count;
};

// Thread = one (rank column, position): positions < in are of A, the rest are rows of the packed weight, of B.
__global__ void pack_adapters_kernel(Packs packs, Bf16* __restrict__ packed_a, Bf16* __restrict__ packed_at,
                                     Bf16* __restrict__ weight, int64_t in, int64_t ranks, int64_t outs) {
  const int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= ranks * (in + outs)) return;
  const bool of_a = index < ranks * in;
  const int64_t local = of_a ? index : index - ranks * in;
  const int64_t column = of_a ? local / in : local % ranks;
  const int64_t at = of_a ? local % in : local / ranks;
  float value = 0;
  for (int i = 0; i < packs.count; ++i) {
    const AdapterPack& pack = packs.pack[i];
    const int64_t r = column - pack.first_rank;
    if (r < 0 || r >= pack.rank) continue;
    if (of_a) {
      value = pack.a[r * in + at];
    } else if (at >= pack.first_out && at < pack.first_out + pack.out) {
      value = pack.b[(at - pack.first_out) * pack.rank + r] * pack.scale;
    }
  }
  if (of_a) {
    packed_a[column * in + at] = to_bf16(value);
    packed_at[at * ranks + column] = to_bf16(value);
  } else {
    weight[at * (in + ranks) + in + column] = to_bf16(value);
  }
}

// --- dropout alone -----------------------------------------------------------------------------------------------------------

template <class T>
__global__ void dropout_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t n, DropoutMask mask, float scale,
                               uint32_t module) {
  const int64_t block = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (block * 8 >= n) return;
  const uint4 draws = dropout_draws(mask, module, uint64_t(block));
  const uint32_t words[4] = {draws.x, draws.y, draws.z, draws.w};
  for (int j = 0; j < 8 && block * 8 + j < n; ++j) {
    const bool kept = (kept_halves(words[j / 2], mask) >> (16 * (j % 2)) & 1u) != 0;
    if constexpr (sizeof(T) == 4) {
      y[block * 8 + j] = kept ? x[block * 8 + j] * scale : 0.0f;
    } else {
      y[block * 8 + j] = kept ? to_bf16(to_float(x[block * 8 + j]) * scale) : T(0);
    }
  }
}

template <class F>
void with_chunks(int num_chunks, F f) {
  switch (num_chunks) {
    case 1:
      return f(std::integral_constant<int, 1>());
    case 2:
      return f(std::integral_constant<int, 2>());
    case 3:
      return f(std::integral_constant<int, 3>());
    case 4:
      return f(std::integral_constant<int, 4>());
    default:
      throw std::runtime_error("adapters: " + std::to_string(num_chunks) + " chunks in one launch, at most 4");
  }
}

}  // namespace

void Kernels::adapter_down(const Bf16* x, int64_t x_stride, const Bf16* a, Bf16* u, int64_t u_stride, int64_t rows, int64_t in,
                           const ChunkDropout& dropout, void* stream) const {
  require(in % 8 == 0 && x_stride % 8 == 0 && is_aligned(x), "adapter_down: rows are not aligned to 16 bytes");
  const unsigned blocks = unsigned(ceil_div(rows, kDownRows * kDownWarps));
  const DeviceDropout device = on_device(dropout);
  with_chunks(dropout.num_chunks, [&](auto chunks) {
    const auto kernel = dropout.p > 0 ? adapter_down_kernel<chunks.value, true> : adapter_down_kernel<chunks.value, false>;
    kernel<<<blocks, kDownWarps * kWarp, 0, as_stream(stream)>>>(x, x_stride, a, u, u_stride, rows, in, device);
  });
  check_launch("adapter_down");
}

int64_t Kernels::adapter_partial_elements(int64_t rows, int64_t in, int num_chunks) const {
  return ceil_div(rows, rows_a_partial(rows, in)) * num_chunks * kRankChunk * in;
}

void Kernels::adapter_up(const Bf16* x, int64_t x_stride, const Bf16* du, int64_t du_stride, const Bf16* at, int64_t at_stride,
                         Bf16* dx, int64_t dx_stride, float* partial, int64_t rows, int64_t in, const ChunkDropout& dropout,
                         void* stream) const {
  require(in % 8 == 0 && x_stride % 8 == 0 && is_aligned(x), "adapter_up: rows are not aligned to 16 bytes");
  require(dx == nullptr || (dx_stride % 8 == 0 && is_aligned(dx)), "adapter_up: gradient rows are not aligned to 16 bytes");
  const int64_t rows_a_block = rows_a_partial(rows, in);
  const dim3 blocks(unsigned(ceil_div(in, kUpColumns * kUpWarps)), unsigned(ceil_div(rows, rows_a_block)));
  const DeviceDropout device = on_device(dropout);
  with_chunks(dropout.num_chunks, [&](auto chunks) {
    constexpr int n = chunks.value;
    const auto kernel = dropout.p > 0 ? (dx != nullptr ? adapter_up_kernel<n, true, true> : adapter_up_kernel<n, true, false>)
                                      : (dx != nullptr ? adapter_up_kernel<n, false, true> : adapter_up_kernel<n, false, false>);
    kernel<<<blocks, kUpWarps * kWarp, 0, as_stream(stream)>>>(x, x_stride, du, du_stride, at, at_stride, dx, dx_stride, partial,
                                                               rows, rows_a_block, in, device);
  });
  check_launch("adapter_up");
}

void Kernels::adapter_reduce(const float* partial, int64_t rows, int64_t in, int num_chunks, int64_t first_rank, int64_t rank,
                             float scale, bool transposed, float* to, int64_t to_stride, void* stream) const {
  constexpr int kThreads = 256;
  adapter_reduce_kernel<<<unsigned(ceil_div(rank * in, kThreads)), kThreads, 0, as_stream(stream)>>>(
      partial, ceil_div(rows, rows_a_partial(rows, in)), int64_t(num_chunks) * kRankChunk, in, first_rank, rank, scale,
      transposed, to, to_stride);
  check_launch("adapter_reduce");
}

void Kernels::pack_adapters(const AdapterPack* packs, int num_packs, Bf16* packed_a, Bf16* packed_at, Bf16* weight, int64_t in,
                            int64_t ranks, int64_t outs, void* stream) const {
  require(num_packs <= kMaxPacks, "pack_adapters: more than four sibling adapters");
  Packs all = {};
  all.count = num_packs;
  for (int i = 0; i < num_packs; ++i) all.pack[i] = packs[i];
  constexpr int kThreads = 256;
  pack_adapters_kernel<<<unsigned(ceil_div(ranks * (in + outs), kThreads)), kThreads, 0, as_stream(stream)>>>(
      all, packed_a, packed_at, weight, in, ranks, outs);
  check_launch("pack_adapters");
}

void Kernels::dropout(const void* x, void* y, bool fp32, int64_t n, float p, uint64_t seed, uint64_t micro, uint32_t module,
                      void* stream) const {
  constexpr int kThreads = 256;
  const unsigned blocks = unsigned(ceil_div(ceil_div(n, 8), kThreads));
  const DropoutMask mask = make_mask(p, seed, micro);
  if (fp32) {
    dropout_kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const float*>(x), static_cast<float*>(y), n, mask,
                                                               dropout_scale(p), module);
  } else {
    dropout_kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const Bf16*>(x), static_cast<Bf16*>(y), n, mask,
                                                               dropout_scale(p), module);
  }
  check_launch("dropout");
}

}  // namespace gemtune
