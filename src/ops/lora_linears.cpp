#include "base/error.h"
#include "ops/cuda.h"
#include "ops/ops.h"
#include "ops/torch.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace gemtune {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// --- plain form -----------------------------------------------------------------------------------------------------------

// The packed weight, shared with the model and kept by the graph node.
struct HeldNf4 : torch::CustomClassHolder {
  explicit HeldNf4(const Nf4Tensor& w) : weight(w) {}
  Nf4Tensor weight;
};

// x Wᵀ for a frozen NF4 weight: expanded for the forward product and again for the backward one, never saved expanded.
struct Nf4Linear : torch::autograd::Function<Nf4Linear> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const c10::intrusive_ptr<HeldNf4>& held) {
    context->saved_data["weight"] = at::IValue::make_capsule(held);
    return at::linear(x, nf4_dequantize(held->weight, x.scalar_type()));
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto capsule = context->saved_data["weight"].toCapsule();
    const Nf4Tensor& weight = static_cast<const HeldNf4*>(capsule.get())->weight;
    return {at::matmul(gradients[0], nf4_dequantize(weight, gradients[0].scalar_type())), Tensor()};
  }
};

Tensor plain_linear(const Tensor& x, const LinearArguments& linear) {
  const auto dtype = x.scalar_type();
  const Tensor& bias = linear.bias_O;
  Tensor y;
  if (linear.weight.dense.defined()) {
    y = bias.defined() ? at::linear(x, linear.weight.dense.to(dtype), bias.to(dtype))
                       : at::linear(x, linear.weight.dense.to(dtype));
  } else {
    y = Nf4Linear::apply(x, c10::make_intrusive<HeldNf4>(*linear.weight.nf4));
    if (bias.defined()) y = y + bias.to(dtype);
  }
  if (!linear.lora) return y;
  const LoraArguments& lora = *linear.lora;
  const Tensor dropped = dropout(x, lora.dropout_p, lora.key);
  Tensor delta = at::linear(at::linear(dropped, lora.a_RI.to(dtype)), lora.b_OR.to(dtype));
  if (lora.scale != 1.0) delta = delta * lora.scale;
  return y + delta;
}

// --- GPU form: one product for base weights and adapters ------------------------------------------------------------------
//
// The input's rows are followed by u = dropout(x) Aᵀ, the weights' rows by scale · B: y = [x | u] · [W | s B]ᵀ. The same
// packed weight gives the backward pass both dx and du in one product.

int64_t padded(int64_t rank) {
  return (rank + kRankChunk - 1) / kRankChunk * kRankChunk;
}
int64_t out_of(const LinearWeight& weight) {
  return weight.dense.defined() ? weight.dense.size(0) : weight.nf4->shape[0];
}
int64_t in_of(const LinearWeight& weight) {
  return weight.dense.defined() ? weight.dense.size(1) : weight.nf4->shape[1];
}
int64_t rank_of(const LinearArguments& linear) {
  return linear.lora ? linear.lora->a_RI.size(0) : 0;
}

struct HeldSiblings : torch::CustomClassHolder {
  std::vector<LinearArguments> siblings;
  PackedLinears packed;
  int64_t in = 0, outs = 0, ranks = 0;
};

Tensor packed_weight(const HeldSiblings& held, const at::TensorOptions& options) {
  if (held.packed.weight_OX.defined()) return held.packed.weight_OX;
  const Tensor weight = at::empty({held.outs, held.in + held.ranks}, options);
  int64_t first = 0;
  for (const LinearArguments& linear : held.siblings) {
    const int64_t out = out_of(linear.weight);
    const Tensor to = weight.narrow(0, first, out).narrow(1, 0, held.in);
    if (linear.weight.dense.defined()) {
      to.copy_(linear.weight.dense);
    } else {
      nf4_dequantize_into(*linear.weight.nf4, to);
    }
    first += out;
  }
  return weight;
}

// bf16 copies of the adapters' A ([ranks, in]) and Aᵀ; scale · B goes behind the packed weight's rows.
struct PackedAdapters {
  Tensor a, at;
};
PackedAdapters pack_adapters(const HeldSiblings& held, const Tensor& weight) {
  std::vector<AdapterPack> packs;
  int64_t first_out = 0, first_rank = 0;
  for (const LinearArguments& linear : held.siblings) {
    const int64_t rank = rank_of(linear);
    if (rank > 0) {
      packs.push_back({linear.lora->a_RI.const_data_ptr<float>(), linear.lora->b_OR.const_data_ptr<float>(),
                       float(linear.lora->scale), rank, out_of(linear.weight), first_out, first_rank});
    }
    first_out += out_of(linear.weight);
    first_rank += padded(rank);
  }
  PackedAdapters out = {at::empty({held.ranks, held.in}, weight.options()), at::empty({held.in, held.ranks}, weight.options())};
  kernels().pack_adapters(packs.data(), int(packs.size()), mutable_bf16(out.a), mutable_bf16(out.at), mutable_bf16(weight),
                          held.in, held.ranks, held.outs, stream_of(weight));
  return out;
}

// A run of rank chunks that one launch takes: of adapters beside each other.
struct ChunkRun {
  ChunkDropout dropout;
  int64_t first_column = 0;
};
std::vector<ChunkRun> chunk_runs(const HeldSiblings& held) {
  std::vector<ChunkRun> runs;
  int64_t column = 0;
  for (const LinearArguments& linear : held.siblings) {
    for (int64_t i = 0; i < padded(rank_of(linear)); i += kRankChunk, column += kRankChunk) {
      if (runs.empty() || runs.back().dropout.num_chunks == kMaxChunks) {
        const LoraArguments& lora = *linear.lora;
        runs.push_back({{float(lora.dropout_p), lora.key.seed, lora.key.micro, {}, 0}, column});
      }
      ChunkDropout& dropout = runs.back().dropout;
      dropout.modules[dropout.num_chunks++] = linear.lora->key.module;
    }
  }
  return runs;
}

// Gradients side by side as one matrix: as they lie when they do, copied together otherwise.
RowMatrix side_by_side(const variable_list& gradients, const HeldSiblings& held, const Tensor& like) {
  variable_list parts = gradients;
  std::vector<int64_t> rows = like.sizes().vec();
  for (size_t i = 0; i < parts.size(); ++i) {
    rows.back() = out_of(held.siblings[i].weight);
    if (!parts[i].defined()) parts[i] = at::zeros(rows, like.options());
  }
  if (parts.size() == 1) return rows_of(parts[0]);
  const auto* next = static_cast<const char*>(parts[0].const_data_ptr());
  bool beside = true;
  for (const Tensor& part : parts) {
    const RowMatrix matrix = rows_of(part);
    beside = beside && matrix.tensor.is_same(part) && matrix.stride == held.outs && part.const_data_ptr() == next;
    next += part.size(-1) * int64_t(part.element_size());
  }
  if (!beside) return rows_of(at::cat(parts, -1));
  RowMatrix matrix = rows_of(parts[0]);
  matrix.width = held.outs;
  return matrix;
}

struct PackedLora : torch::autograd::Function<PackedLora> {
  static variable_list forward(AutogradContext* context, const Tensor& x, const std::optional<Tensor>& maybe_residual,
                               const c10::intrusive_ptr<HeldSiblings>& held, at::TensorList adapters) {
    const Tensor residual = maybe_residual.value_or(Tensor());
    // The adapters are inputs so that their gradients are returned; their values are read through `held`.
    context->saved_data["num_adapter_tensors"] = int64_t(adapters.size());
    const Kernels& k = kernels();
    void* stream = stream_of(x);
    const Tensor weight = packed_weight(*held, x.options());
    Tensor source = x;
    if (held->ranks > 0 && !has_room(x, held->ranks)) {
      source = empty_with_room(x.sizes(), held->ranks, x.options());
      source.copy_(x);
    }
    const RowMatrix in = rows_of(source);
    if (held->ranks > 0) {
      const PackedAdapters packed = pack_adapters(*held, weight);
      for (const ChunkRun& run : chunk_runs(*held)) {
        k.adapter_down(bf16(in.tensor), in.stride, bf16(packed.a) + run.first_column * held->in,
                       mutable_bf16(in.tensor) + held->in + run.first_column, in.stride, in.rows, held->in, run.dropout, stream);
      }
      context->saved_data["at"] = packed.at;
    }
    std::vector<int64_t> shape = x.sizes().vec();
    shape.back() = held->outs;
    const Tensor y = at::empty(shape, x.options());
    const RowMatrix added = residual.defined() ? rows_of(residual) : RowMatrix();
    MatrixProduct product;
    product.a = bf16(in.tensor);
    product.a_stride = in.stride;
    product.b = bf16(weight);
    product.b_stride = held->in + held->ranks;
    product.b_transposed = true;
    product.c = bf16(added.tensor);
    product.c_stride = added.stride;
    product.bias = bf16(held->packed.bias_O);
    product.d = mutable_bf16(y);
    product.d_stride = held->outs;
    product.m = in.rows;
    product.n = held->outs;
    product.k = held->in + held->ranks;
    k.matrix_product(product, stream);
    // Without adapters the input is not needed again.
    if (held->ranks > 0) context->save_for_backward({in.tensor});
    context->saved_data["siblings"] = at::IValue::make_capsule(held);
    context->saved_data["x_needs_gradient"] = x.requires_grad();
    context->saved_data["residual_needs_gradient"] = residual.defined() && residual.requires_grad();
    context->set_materialize_grads(false);
    variable_list outputs;
    int64_t first = 0;
    for (const LinearArguments& linear : held->siblings) {
      const int64_t out = out_of(linear.weight);
      outputs.push_back(held->siblings.size() == 1 ? y : y.narrow(-1, first, out));
      first += out;
    }
    return outputs;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto capsule = context->saved_data["siblings"].toCapsule();
    const HeldSiblings& held = *static_cast<const HeldSiblings*>(capsule.get());
    const bool wants_x = context->saved_data["x_needs_gradient"].toBool();
    variable_list out(size_t(3 + context->saved_data["num_adapter_tensors"].toInt()));
    const auto defined = std::find_if(gradients.begin(), gradients.end(), [](const Tensor& g) { return g.defined(); });
    if (defined == gradients.end()) return out;
    if (context->saved_data["residual_needs_gradient"].toBool()) out[1] = gradients[0];
    const RowMatrix dy = side_by_side(gradients, held, *defined);
    if (!wants_x && held.ranks == 0) return out;

    // dx and du in one product; du alone where nobody wants dx.
    const Kernels& k = kernels();
    void* stream = stream_of(dy.tensor);
    const auto options = dy.tensor.options();
    const Tensor weight = packed_weight(held, options);
    PackedAdapters packed;
    if (held.ranks > 0) {
      packed.at = context->saved_data["at"].toTensor();
      if (!held.packed.weight_OX.defined()) packed = pack_adapters(held, weight);
    }
    const int64_t in = wants_x ? held.in : 0;
    std::vector<int64_t> shape = defined->sizes().vec();
    shape.back() = in + held.ranks;
    const Tensor dx_and_du = at::empty(shape, options);
    MatrixProduct product;
    product.a = bf16(dy.tensor);
    product.a_stride = dy.stride;
    product.b = bf16(weight) + (held.in - in);
    product.b_stride = held.in + held.ranks;
    product.d = mutable_bf16(dx_and_du);
    product.d_stride = in + held.ranks;
    product.m = dy.rows;
    product.n = in + held.ranks;
    product.k = held.outs;
    k.matrix_product(product, stream);
    if (held.ranks > 0) adapter_gradients(context->get_saved_variables()[0], held, dy, dx_and_du, in, packed.at, out);
    if (wants_x) out[0] = dx_and_du.narrow(-1, 0, in);
    return out;
  }

 private:
  static void adapter_gradients(const Tensor& input, const HeldSiblings& held, const RowMatrix& dy, const Tensor& dx_and_du,
                                int64_t in, const Tensor& at, variable_list& out) {
    const Kernels& k = kernels();
    void* stream = stream_of(input);
    const RowMatrix x = rows_of(input);
    const auto fp32 = input.options().dtype(at::kFloat);
    struct Adapter {
      Tensor da, db;
      int64_t rank = 0, outs = 0, first_rank = 0, first_out = 0;
      float scale = 1;
    };
    std::vector<Adapter> adapters;
    int64_t column = 0, row = 0;
    for (const LinearArguments& linear : held.siblings) {
      if (linear.lora) {
        adapters.push_back({at::empty(linear.lora->a_RI.sizes(), fp32), at::empty(linear.lora->b_OR.sizes(), fp32),
                            rank_of(linear), out_of(linear.weight), column, row, float(linear.lora->scale)});
      }
      column += padded(rank_of(linear));
      row += out_of(linear.weight);
    }
    const auto scratch = [&](const std::vector<AdapterSegment>& segments, int64_t width, int num_chunks) {
      return at::empty({k.adapter_partial_elements(x.rows, segments.data(), int(segments.size()), width, num_chunks)}, fp32);
    };

    const int64_t d_stride = in + held.ranks;
    for (const ChunkRun& run : chunk_runs(held)) {
      const int64_t first = run.first_column;
      const int64_t last = first + run.dropout.num_chunks * kRankChunk;
      const std::vector<AdapterSegment> whole = {{0, held.in, 0}};
      const Tensor partial = scratch(whole, held.in, run.dropout.num_chunks);
      k.adapter_up(bf16(x.tensor), x.stride, held.in, bf16(dx_and_du) + in + first, d_stride, whole.data(), 1, bf16(at) + first,
                   held.ranks, in > 0 ? mutable_bf16(dx_and_du) : nullptr, d_stride, partial.mutable_data_ptr<float>(), x.rows,
                   run.dropout, stream);
      std::vector<AdapterGradient> gradients;
      for (const Adapter& adapter : adapters) {
        const int64_t begin = std::max(first, adapter.first_rank);
        const int64_t end = std::min(last, adapter.first_rank + adapter.rank);
        if (begin >= end) continue;
        float* to = adapter.da.mutable_data_ptr<float>() + (begin - adapter.first_rank) * held.in;
        gradients.push_back({0, held.in, begin - first, end - begin, to, held.in});
      }
      k.adapter_reduce(partial.const_data_ptr<float>(), x.rows, whole.data(), 1, held.in, run.dropout.num_chunks,
                       gradients.data(), int(gradients.size()), 1.0f, false, stream);
    }

    // dB = scale · dyᵀ u: the same sums, of the outputs' gradients with what lies behind the input's rows. Siblings of one rank
    // and scale, as they are as a rule, go together.
    for (size_t begin = 0, end = 0; begin < adapters.size(); begin = end) {
      const int64_t rank = adapters[begin].rank;
      const float scale = adapters[begin].scale;
      while (end < adapters.size() && adapters[end].rank == rank && adapters[end].scale == scale &&
             end - begin < kMaxAdapterSegments) {
        ++end;
      }
      for (int64_t first = 0; first < padded(rank); first += kMaxChunks * kRankChunk) {
        ChunkDropout none;
        none.num_chunks = int(std::min<int64_t>(kMaxChunks, (padded(rank) - first) / kRankChunk));
        std::vector<AdapterSegment> segments;
        std::vector<AdapterGradient> gradients;
        for (size_t i = begin; i < end; ++i) {
          const Adapter& adapter = adapters[i];
          segments.push_back({adapter.first_out, adapter.outs, held.in + adapter.first_rank + first});
          gradients.push_back({adapter.first_out, adapter.outs, 0, std::min<int64_t>(rank - first, none.num_chunks * kRankChunk),
                               adapter.db.mutable_data_ptr<float>() + first, rank});
        }
        const Tensor partial = scratch(segments, held.outs, none.num_chunks);
        k.adapter_up(bf16(dy.tensor), dy.stride, held.outs, bf16(x.tensor), x.stride, segments.data(), int(segments.size()),
                     nullptr, 0, nullptr, 0, partial.mutable_data_ptr<float>(), x.rows, none, stream);
        k.adapter_reduce(partial.const_data_ptr<float>(), x.rows, segments.data(), int(segments.size()), held.outs,
                         none.num_chunks, gradients.data(), int(gradients.size()), scale, true, stream);
      }
    }
    size_t slot = 3;
    for (const Adapter& adapter : adapters) {
      out[slot++] = adapter.da;
      out[slot++] = adapter.db;
    }
  }
};

bool can_be_packed(const Tensor& x, const std::vector<LinearArguments>& siblings) {
  if (!has_kernels(x) || x.size(-1) % 8 != 0) return false;
  return std::all_of(siblings.begin(), siblings.end(), [](const LinearArguments& linear) {
    const bool trained = (linear.weight.dense.defined() && linear.weight.dense.requires_grad()) ||
                         (linear.bias_O.defined() && linear.bias_O.requires_grad());
    return !trained && out_of(linear.weight) % 8 == 0;
  });
}

}  // namespace

int64_t ranks_of(const std::vector<LinearArguments>& siblings) {
  int64_t ranks = 0;
  for (const LinearArguments& linear : siblings) ranks += padded(rank_of(linear));
  return ranks;
}

PackedLinears pack_linears(std::vector<LinearWeight*> weights, const std::vector<Tensor>& biases, int64_t ranks) {
  const int64_t in = in_of(*weights[0]);
  int64_t outs = 0;
  for (const LinearWeight* weight : weights) outs += out_of(*weight);
  const LinearWeight& first = *weights[0];
  const auto options = (first.dense.defined() ? first.dense : first.nf4->codes).options().dtype(at::kBFloat16);
  PackedLinears packed;
  packed.weight_OX = at::zeros({outs, in + ranks}, options);
  int64_t row = 0;
  for (LinearWeight* weight : weights) {
    const int64_t out = out_of(*weight);
    const Tensor to = packed.weight_OX.narrow(0, row, out).narrow(1, 0, in);
    if (weight->nf4) {
      nf4_dequantize_into(*weight->nf4, to);
    } else {
      to.copy_(weight->dense);
    }
    weight->dense = to;
    row += out;
  }
  if (biases[0].defined()) packed.bias_O = at::cat(biases);
  return packed;
}

std::vector<Tensor> lora_linears(const Tensor& x, const std::vector<LinearArguments>& siblings, const PackedLinears& packed,
                                 const Tensor& residual) {
  if (can_be_packed(x, siblings)) {
    auto held = c10::make_intrusive<HeldSiblings>();
    held->siblings = siblings;
    held->packed = packed;
    held->in = x.size(-1);
    held->ranks = ranks_of(siblings);
    std::vector<Tensor> adapters;
    for (const LinearArguments& linear : siblings) {
      held->outs += out_of(linear.weight);
      if (linear.lora) adapters.insert(adapters.end(), {linear.lora->a_RI, linear.lora->b_OR});
    }
    return PackedLora::apply(x, residual.defined() ? std::optional<Tensor>(residual) : std::nullopt, held,
                             at::TensorList(adapters));
  }
  std::vector<Tensor> outputs;
  for (const LinearArguments& linear : siblings) outputs.push_back(plain_linear(x, linear));
  if (residual.defined()) outputs[0] = residual + outputs[0];
  return outputs;
}

}  // namespace gemtune
