// LoRA's skinny products on tensor cores, dropout made on the way from its counter: x is read once for all sibling adapters.
//
// A warp multiplies 16 rows at a time (mma m16n8k16). The order of columns inside a product is free, so it is chosen such that
// a thread's elements of a row are eight neighbours: one 16-byte access and one draw of eight dropout decisions.
#include "ops/device.cuh"

#include <algorithm>

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

// Sixteen bytes from global to shared memory behind the thread's back; zeros when not `valid`. Each thread reads only what it
// copied itself, so waiting for its own copies is all the order there is.
__device__ __forceinline__ void copy_async(uint4* to, const Bf16* from, bool valid) {
  const uint32_t address = uint32_t(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(address), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ Vec8 copied(const uint4& raw) {
  return {{raw.x, raw.y, raw.z, raw.w}};
}

// --- down: u = dropout(x) aᵀ --------------------------------------------------------------------------------------------

constexpr int kDownWarps = 4;
constexpr int kDownRows = 16;
constexpr int kDownStages = 8;  // steps of x on their way to a thread

// A warp takes 16 rows and all columns, or with kSplit (few rows) a quarter of the columns, in steps of 32. Thread (group, quad)
// holds columns 8 quad … 8 quad + 7 of rows group and group + 8. Two products a step, each of 16 of these columns: pairs 0, 1 of
// the eight, then pairs 2, 3.
template <int kChunks, bool kDropout, bool kSplit>
__global__ void __launch_bounds__(kDownWarps* kWarp)
    adapter_down_kernel(const Bf16* __restrict__ x, int64_t x_stride, const Bf16* __restrict__ a, Bf16* u, int64_t u_stride,
                        int64_t rows, int64_t in, DeviceDropout dropout) {
  __shared__ uint4 ring[kDownStages][2][kDownWarps * kWarp];
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int group = lane / 4;
  const int quad = lane % 4;
  const int64_t row0 = (kSplit ? int64_t(blockIdx.x) : int64_t(blockIdx.x) * kDownWarps + warp) * kDownRows + group;
  const int64_t row1 = row0 + 8;
  const int last_column = int(in) - 8;
  const int steps = int(in + 31) / 32;
  const int begin = kSplit ? steps * warp / kDownWarps : 0;
  const int end = kSplit ? steps * (warp + 1) / kDownWarps : steps;
  const Bf16* x0_row = x + min(row0, rows - 1) * x_stride;
  const Bf16* x1_row = x + min(row1, rows - 1) * x_stride;

  const auto copy = [&](int step) {
    const int column = step * 32 + quad * 8;
    const bool valid = step < end && column <= last_column;
    uint4(&slot)[2][kDownWarps * kWarp] = ring[step % kDownStages];
    copy_async(&slot[0][threadIdx.x], x0_row + min(column, last_column), valid);
    copy_async(&slot[1][threadIdx.x], x1_row + min(column, last_column), valid);
    commit_copies();
  };
  for (int i = 0; i < kDownStages - 1; ++i) copy(begin + i);

  float sums[kChunks][2][4] = {};
  const uint64_t vectors = uint64_t(in / 8);
  const uint64_t block0 = uint64_t(row0) * vectors + quad;
  const uint64_t block1 = uint64_t(row1) * vectors + quad;
  for (int step = begin; step < end; ++step) {
    copy(step + kDownStages - 1);
    // Beyond the last column x is zero: any weight will do.
    const int column = min(step * 32 + quad * 8, last_column);
    Vec8 weight[kChunks][2];
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        weight[chunk][tile] = load8_const(a + int64_t(chunk * kRankChunk + tile * 8 + group) * in + column);
      }
    }
    wait_for_copies<kDownStages - 1>();
    const Vec8 x0 = copied(ring[step % kDownStages][0][threadIdx.x]);
    const Vec8 x1 = copied(ring[step % kDownStages][1][threadIdx.x]);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      Vec8 kept0 = x0, kept1 = x1;
      if constexpr (kDropout) {
        kept0 = drop(x0, dropout.mask, dropout.modules[chunk], block0 + step * 4);
        kept1 = drop(x1, dropout.mask, dropout.modules[chunk], block1 + step * 4);
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const Vec8& w = weight[chunk][tile];
        mma(sums[chunk][tile], {kept0.pairs[0], kept1.pairs[0], kept0.pairs[1], kept1.pairs[1]}, w.pairs[0], w.pairs[1]);
        mma(sums[chunk][tile], {kept0.pairs[2], kept1.pairs[2], kept0.pairs[3], kept1.pairs[3]}, w.pairs[2], w.pairs[3]);
      }
    }
  }
  if constexpr (kSplit) {
    wait_for_copies<0>();
    __syncthreads();  // the ring becomes the place where the warps' sums meet
    float* meeting = reinterpret_cast<float*>(&ring[0][0][0]);
    static_assert(sizeof(ring) >= sizeof(float) * kMaxChunks * 8 * kDownWarps * kWarp);
    float* all = &sums[0][0][0];
#pragma unroll
    for (int i = 0; i < kChunks * 8; ++i) meeting[(i * kDownWarps + warp) * kWarp + lane] = all[i];
    __syncthreads();
    if (warp != 0) return;
#pragma unroll
    for (int i = 0; i < kChunks * 8; ++i) {
#pragma unroll
      for (int other = 1; other < kDownWarps; ++other) all[i] += meeting[(i * kDownWarps + other) * kWarp + lane];
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
constexpr int kUpColumns = 32;  // a warp
constexpr int kUpStages = 4;    // sixteen rows each, on their way to a thread

// Blocks that one multiprocessor holds at a time, as registers allow.
constexpr int up_blocks_a_multiprocessor(int num_chunks) {
  return num_chunks == 1 ? 5 : num_chunks < 4 ? 3 : 2;
}

int num_multiprocessors() {
  static const int count = [] {
    int device = 0, value = 0;
    check(cudaGetDevice(&device), "adapters");
    check(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device), "adapters");
    return value;
  }();
  return count;
}

struct DeviceSegments {
  AdapterSegment segment[kMaxAdapterSegments];
};
DeviceSegments on_device(const AdapterSegment* segments, int count) {
  require(count >= 1 && count <= kMaxAdapterSegments, "adapters: more than four sibling adapters");
  DeviceSegments out = {};
  for (int i = 0; i < count; ++i) out.segment[i] = segments[i];
  return out;
}
int64_t num_tiles(const AdapterSegment* segments, int count) {
  int64_t tiles = 0;
  for (int i = 0; i < count; ++i) tiles += ceil_div(segments[i].width, kUpColumns);
  return tiles;
}

// Rows that a block, and so a partial sum, spans: the blocks fill the device once.
int64_t rows_a_partial(int64_t rows, int64_t tiles, int num_chunks) {
  const int64_t blocks = int64_t(num_multiprocessors()) * up_blocks_a_multiprocessor(num_chunks);
  const int64_t partials = std::max<int64_t>(blocks / ceil_div(tiles, kUpWarps), 1);
  return ceil_div(ceil_div(rows, partials), 16) * 16;
}

// Tile j (of four) of a warp's 32 columns: its column n stands for column 8 (n ÷ 2) + 2 j + n mod 2, so that the results a
// thread gets over the four tiles are eight neighbours.
__device__ __forceinline__ int column_of(int tile, int n) {
  return 8 * (n / 2) + 2 * tile + n % 2;
}

template <int kChunks, bool kDropout, bool kWithDx>
__global__ void __launch_bounds__(kUpWarps* kWarp, up_blocks_a_multiprocessor(kChunks))
    adapter_up_kernel(const Bf16* __restrict__ x, int64_t x_stride, int64_t width, const Bf16* __restrict__ du, int64_t du_stride,
                      DeviceSegments segments, const Bf16* __restrict__ at, int64_t at_stride, Bf16* dx, int64_t dx_stride,
                      float* __restrict__ partial, int64_t rows, int64_t rows_a_block, DeviceDropout dropout) {
  constexpr int kStreams = kWithDx ? 4 : 2;
  __shared__ uint4 ring[kUpStages][kStreams][kUpWarps * kWarp];
  const int lane = threadIdx.x % kWarp;
  const int group = lane / 4;
  const int quad = lane % 4;

  // The segment this warp's columns are of.
  int64_t tile = int64_t(blockIdx.x) * kUpWarps + threadIdx.x / kWarp;
  int64_t first = -1, end_column = 0, du_column = 0;
#pragma unroll
  for (int i = 0; i < kMaxAdapterSegments; ++i) {
    const AdapterSegment& segment = segments.segment[i];  // of width 0 beyond the last one
    const int64_t tiles = (segment.width + kUpColumns - 1) / kUpColumns;
    if (tile >= 0 && tile < tiles) {
      first = segment.first_column + tile * kUpColumns;
      end_column = segment.first_column + segment.width;
      du_column = segment.du_column;
    }
    tile -= tiles;
  }
  if (first < 0) return;
  const int64_t column = first + quad * 8;
  const bool in_width = column < end_column;
  const int64_t safe_column = in_width ? column : first;
  du += du_column + quad * 2;

  const int64_t begin = int64_t(blockIdx.y) * rows_a_block;
  const int64_t end = min(begin + rows_a_block, rows);
  const auto copy = [&](int64_t row) {
    const int64_t row0 = row + group;
    const int64_t row1 = row0 + 8;
    const bool valid0 = row0 < end && in_width;
    const bool valid1 = row1 < end && in_width;
    const int64_t safe0 = min(row0, rows - 1);
    const int64_t safe1 = min(row1, rows - 1);
    uint4(&slot)[kStreams][kUpWarps * kWarp] = ring[row / 16 % kUpStages];
    copy_async(&slot[0][threadIdx.x], x + safe0 * x_stride + safe_column, valid0);
    copy_async(&slot[1][threadIdx.x], x + safe1 * x_stride + safe_column, valid1);
    if constexpr (kWithDx) {
      copy_async(&slot[2][threadIdx.x], dx + safe0 * dx_stride + safe_column, valid0);
      copy_async(&slot[3][threadIdx.x], dx + safe1 * dx_stride + safe_column, valid1);
    }
    commit_copies();
  };
  for (int i = 0; i < kUpStages - 1; ++i) copy(begin + 16 * i);

  uint32_t weight[kWithDx ? kChunks : 1][4][2] = {};  // aᵀ: column n = group of each tile, ranks 2 quad … and 2 quad + 8 …
  if constexpr (kWithDx) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        const int64_t c = first + column_of(tile, group);
        if (c < end_column) {
          const Bf16* from = at + c * at_stride + chunk * kRankChunk + quad * 2;
          weight[chunk][tile][0] = *reinterpret_cast<const uint32_t*>(from);
          weight[chunk][tile][1] = *reinterpret_cast<const uint32_t*>(from + 8);
        }
      }
    }
  }

  float sums[kChunks][4][4] = {};  // duᵀ x: ranks group and group + 8, columns of each tile
  const uint64_t vectors = uint64_t(width / 8);
  const float scale = kDropout ? dropout.scale : 1.0f;
  for (int64_t row = begin; row < end; row += 16) {
    copy(row + 16 * (kUpStages - 1));
    const int64_t row0 = row + group;
    const int64_t row1 = row0 + 8;
    const Bf16* du0 = du + min(row0, rows - 1) * du_stride;
    const Bf16* du1 = du + min(row1, rows - 1) * du_stride;
    // du: rows group, group + 8; ranks 2 quad …, 2 quad + 8 … Beyond the last row x and dx count for nothing.
    uint32_t g[kChunks][4];
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      g[chunk][0] = *reinterpret_cast<const uint32_t*>(du0 + chunk * kRankChunk);
      g[chunk][1] = *reinterpret_cast<const uint32_t*>(du1 + chunk * kRankChunk);
      g[chunk][2] = *reinterpret_cast<const uint32_t*>(du0 + chunk * kRankChunk + 8);
      g[chunk][3] = *reinterpret_cast<const uint32_t*>(du1 + chunk * kRankChunk + 8);
    }
    wait_for_copies<kUpStages - 1>();
    const uint4(&slot)[kStreams][kUpWarps * kWarp] = ring[row / 16 % kUpStages];
    const Vec8 x0 = copied(slot[0][threadIdx.x]);
    const Vec8 x1 = copied(slot[1][threadIdx.x]);
    float dx0[8], dx1[8];
    if constexpr (kWithDx) {
      const Vec8 d0 = copied(slot[2][threadIdx.x]);
      const Vec8 d1 = copied(slot[3][threadIdx.x]);
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
          mma(product, g[chunk], weight[chunk][tile][0], weight[chunk][tile][1]);
          // Columns 2 quad, 2 quad + 1 of the tile are neighbours 2 tile, 2 tile + 1 of this thread's eight.
          if (masks0[tile] & 0x0000FFFFu) dx0[2 * tile] += product[0] * scale;
          if (masks0[tile] & 0xFFFF0000u) dx0[2 * tile + 1] += product[1] * scale;
          if (masks1[tile] & 0x0000FFFFu) dx1[2 * tile] += product[2] * scale;
          if (masks1[tile] & 0xFFFF0000u) dx1[2 * tile + 1] += product[3] * scale;
        }
      }
      const uint32_t turned[4] = {transpose(g[chunk][0]), transpose(g[chunk][2]), transpose(g[chunk][1]), transpose(g[chunk][3])};
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        const uint32_t b0 = transpose(x0.pairs[tile] & masks0[tile]);
        const uint32_t b1 = transpose(x1.pairs[tile] & masks1[tile]);
        mma(sums[chunk][tile], turned, b0, b1);
      }
    }
    if constexpr (kWithDx) {
      if (row0 < end && in_width) store8(dx + row0 * dx_stride + column, pack8(dx0));
      if (row1 < end && in_width) store8(dx + row1 * dx_stride + column, pack8(dx1));
    }
  }
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      float* to = partial + (int64_t(blockIdx.y) * kChunks + chunk) * kRankChunk * width;
      const int64_t c = column + 2 * tile;
      if (in_width) {
        const float(&s)[4] = sums[chunk][tile];
        *reinterpret_cast<float2*>(to + group * width + c) = make_float2(s[0] * scale, s[1] * scale);
        *reinterpret_cast<float2*>(to + (group + 8) * width + c) = make_float2(s[2] * scale, s[3] * scale);
      }
    }
  }
}

// A block sums 32 columns of one rank: a warp every eighth partial, then the warps' sums, in a fixed order.
constexpr int kReduceWarps = 8;

struct DeviceGradients {
  AdapterGradient gradient[kMaxAdapterSegments];
  int count;
};
__global__ void __launch_bounds__(kReduceWarps* kWarp)
    adapter_reduce_kernel(const float* __restrict__ partial, int64_t num_partials, int64_t chunk_rows, int64_t width,
                          DeviceGradients gradients, float scale, bool transposed) {
  __shared__ float meeting[kReduceWarps][kWarp];
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  int64_t tile = blockIdx.x;
  int index = 0;
  for (; index < gradients.count; ++index) {
    const int64_t tiles = (gradients.gradient[index].width + kWarp - 1) / kWarp;
    if (tile < tiles) break;
    tile -= tiles;
  }
  const AdapterGradient& gradient = gradients.gradient[index];
  const int64_t r = blockIdx.y;
  if (r >= gradient.rank) return;
  const int64_t i = tile * kWarp + lane;
  float sum = 0;
  if (i < gradient.width) {
    const float* from = partial + (gradient.first_rank + r) * width + gradient.first_column + i;
#pragma unroll 4
    for (int64_t p = warp; p < num_partials; p += kReduceWarps) sum += from[p * chunk_rows * width];
  }
  meeting[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || i >= gradient.width) return;
#pragma unroll
  for (int other = 1; other < kReduceWarps; ++other) sum += meeting[other][lane];
  gradient.to[transposed ? i * gradient.to_stride + r : r * gradient.to_stride + i] = sum * scale;
}

// --- packing ---------------------------------------------------------------------------------------------------------------

struct Packs {
  AdapterPack pack[kMaxAdapterSegments];
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
  const int64_t tiles = ceil_div(rows, kDownRows);
  // One warp a tile leaves a device idle when rows are few: then four share it.
  const bool split = tiles < int64_t(num_multiprocessors()) * kDownWarps * 2;
  const unsigned blocks = unsigned(split ? tiles : ceil_div(tiles, kDownWarps));
  const DeviceDropout device = on_device(dropout);
  with_chunks(dropout.num_chunks, [&](auto chunks) {
    constexpr int n = chunks.value;
    const auto kernel = dropout.p > 0 ? (split ? adapter_down_kernel<n, true, true> : adapter_down_kernel<n, true, false>)
                                      : (split ? adapter_down_kernel<n, false, true> : adapter_down_kernel<n, false, false>);
    kernel<<<blocks, kDownWarps * kWarp, 0, as_stream(stream)>>>(x, x_stride, a, u, u_stride, rows, in, device);
  });
  check_launch("adapter_down");
}

int64_t Kernels::adapter_partial_elements(int64_t rows, const AdapterSegment* segments, int num_segments, int64_t width,
                                          int num_chunks) const {
  return ceil_div(rows, rows_a_partial(rows, num_tiles(segments, num_segments), num_chunks)) * num_chunks * kRankChunk * width;
}

void Kernels::adapter_up(const Bf16* x, int64_t x_stride, int64_t width, const Bf16* du, int64_t du_stride,
                         const AdapterSegment* segments, int num_segments, const Bf16* at, int64_t at_stride, Bf16* dx,
                         int64_t dx_stride, float* partial, int64_t rows, const ChunkDropout& dropout, void* stream) const {
  require(width % 8 == 0 && x_stride % 8 == 0 && is_aligned(x), "adapter_up: rows are not aligned to 16 bytes");
  require(dx == nullptr || (dx_stride % 8 == 0 && is_aligned(dx)), "adapter_up: gradient rows are not aligned to 16 bytes");
  for (int i = 0; i < num_segments; ++i) {
    require(segments[i].width % 8 == 0 && segments[i].first_column % 8 == 0, "adapter_up: a segment is not aligned to 16 bytes");
  }
  const int64_t tiles = num_tiles(segments, num_segments);
  const int64_t rows_a_block = rows_a_partial(rows, tiles, dropout.num_chunks);
  const dim3 blocks(unsigned(ceil_div(tiles, kUpWarps)), unsigned(ceil_div(rows, rows_a_block)));
  const DeviceDropout device_dropout = on_device(dropout);
  const DeviceSegments device_segments = on_device(segments, num_segments);
  with_chunks(dropout.num_chunks, [&](auto chunks) {
    constexpr int n = chunks.value;
    const auto kernel = dropout.p > 0 ? (dx != nullptr ? adapter_up_kernel<n, true, true> : adapter_up_kernel<n, true, false>)
                                      : (dx != nullptr ? adapter_up_kernel<n, false, true> : adapter_up_kernel<n, false, false>);
    kernel<<<blocks, kUpWarps * kWarp, 0, as_stream(stream)>>>(x, x_stride, width, du, du_stride, device_segments, at, at_stride,
                                                               dx, dx_stride, partial, rows, rows_a_block, device_dropout);
  });
  check_launch("adapter_up");
}

void Kernels::adapter_reduce(const float* partial, int64_t rows, const AdapterSegment* segments, int num_segments, int64_t width,
                             int num_chunks, const AdapterGradient* gradients, int num_gradients, float scale, bool transposed,
                             void* stream) const {
  require(num_gradients >= 1 && num_gradients <= kMaxAdapterSegments, "adapter_reduce: more than four sibling adapters");
  DeviceGradients device = {};
  device.count = num_gradients;
  int64_t tiles = 0, ranks = 0;
  for (int i = 0; i < num_gradients; ++i) {
    device.gradient[i] = gradients[i];
    tiles += ceil_div(gradients[i].width, kWarp);
    ranks = std::max(ranks, gradients[i].rank);
  }
  const int64_t num_partials = ceil_div(rows, rows_a_partial(rows, num_tiles(segments, num_segments), num_chunks));
  adapter_reduce_kernel<<<dim3(unsigned(tiles), unsigned(ranks)), kReduceWarps * kWarp, 0, as_stream(stream)>>>(
      partial, num_partials, int64_t(num_chunks) * kRankChunk, width, device, scale, transposed);
  check_launch("adapter_reduce");
}

void Kernels::pack_adapters(const AdapterPack* packs, int num_packs, Bf16* packed_a, Bf16* packed_at, Bf16* weight, int64_t in,
                            int64_t ranks, int64_t outs, void* stream) const {
  require(num_packs <= kMaxAdapterSegments, "pack_adapters: more than four sibling adapters");
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
