#include "model/model.h"
#include "ops/torch.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>

namespace gemtune {
namespace {

struct LayerContext {
  const TextDims& dims;
  const Tensor& mask_B1TS;
  const RopeTable& rope;
  KvCache* cache;
  size_t index;
};

Tensor split_heads(const Tensor& x_BTI, int64_t num_heads, int64_t head_size) {
  return x_BTI.reshape({x_BTI.size(0), x_BTI.size(1), num_heads, head_size}).transpose(1, 2);
}

Tensor extend(Tensor& cached_BKSE, const Tensor& fresh_BKTE) {
  cached_BKSE = cached_BKSE.defined() ? at::cat({cached_BKSE, fresh_BKTE}, 2) : fresh_BKTE;
  return cached_BKSE;
}

Tensor attend(const Decoder::Layer& layer, const LayerContext& at, const Tensor& h_BTD, const Pass& pass) {
  const TextDims& dims = at.dims;
  const std::vector<Tensor> qkv = layer.qkv_proj(h_BTD, pass);
  const Tensor q_BHTE =
      qk_norm_rope(split_heads(qkv[0], dims.num_heads, dims.head_size), layer.q_norm, dims.rms_norm_eps, at.rope);
  Tensor k_BKSE = qk_norm_rope(split_heads(qkv[1], dims.num_kv_heads, dims.head_size), layer.k_norm, dims.rms_norm_eps, at.rope);
  Tensor v_BKSE = split_heads(qkv[2], dims.num_kv_heads, dims.head_size);
  if (at.cache != nullptr) {
    k_BKSE = extend(at.cache->keys[at.index], k_BKSE);
    v_BKSE = extend(at.cache->values[at.index], v_BKSE);
  }
  const double scale = 1.0 / std::sqrt(dims.query_pre_attn_scalar);
  return layer.o_proj.one(attention(q_BHTE, k_BKSE, v_BKSE, at.mask_B1TS, scale), pass);
}

Tensor forward_layer(const Decoder::Layer& layer, const LayerContext& at, const Tensor& x_BTD, const Pass& pass) {
  const double eps = at.dims.rms_norm_eps;
  const Tensor none;
  const auto [x1, h1] = rms_norm_stream(x_BTD, none, none, layer.input_layernorm, eps, layer.qkv_proj.room());
  const auto [x2, h2] = rms_norm_stream(x1, attend(layer, at, h1, pass), layer.post_attention_layernorm,
                                        layer.pre_feedforward_layernorm, eps, layer.gate_up_proj.room());
  const std::vector<Tensor> gate_up = layer.gate_up_proj(h2, pass);
  const Tensor h3 = layer.down_proj.one(geglu(gate_up[0], gate_up[1], layer.down_proj.room()), pass);
  return rms_norm_stream(x2, h3, layer.post_feedforward_layernorm, none, eps, 0).stream;
}

std::vector<Tensor> trained_tensors(const Decoder::Layer& layer) {
  std::vector<Tensor> trained;
  for (const Linears* linears : {&layer.qkv_proj, &layer.o_proj, &layer.gate_up_proj, &layer.down_proj}) {
    linears->append_trained(trained);
  }
  for (const Tensor* norm : {&layer.input_layernorm, &layer.post_attention_layernorm, &layer.pre_feedforward_layernorm,
                             &layer.post_feedforward_layernorm, &layer.q_norm, &layer.k_norm}) {
    if (norm->requires_grad()) trained.push_back(*norm);
  }
  return trained;
}

}  // namespace

Masks make_masks(const Tensor& valid_BS, const Tensor& image_group_BS, int64_t num_queries, int64_t window) {
  const int64_t num_keys = valid_BS.size(1);
  const int64_t first_query = num_keys - num_queries;
  const auto indices = at::TensorOptions().dtype(at::kLong).device(valid_BS.device());
  const Tensor query_T1 = at::arange(first_query, num_keys, indices).unsqueeze(1);
  const Tensor key_1S = at::arange(num_keys, indices).unsqueeze(0);
  const Tensor causal_TS = key_1S <= query_T1;
  const Tensor near_TS = causal_TS & (key_1S > query_T1 - window);
  const Tensor itself_TS = key_1S == query_T1;
  const Tensor group_q_BT1 = image_group_BS.narrow(1, first_query, num_queries).unsqueeze(2);
  const Tensor group_k_B1S = image_group_BS.unsqueeze(1);
  const Tensor same_image_BTS = (group_q_BT1 == group_k_B1S) & (group_k_B1S >= 0);
  const Tensor valid_B1S = valid_BS.unsqueeze(1);
  // numerics: a query at padding sees itself, so that no softmax row is empty; such rows carry no loss.
  return {((valid_B1S & (causal_TS | same_image_BTS)) | itself_TS).unsqueeze(1),
          ((valid_B1S & (near_TS | same_image_BTS)) | itself_TS).unsqueeze(1)};
}

Tensor Decoder::forward(const Tensor& hidden_BTD, const Masks& masks, int64_t first_position, KvCache* cache,
                        const Pass& pass) const {
  const int64_t num_tokens = hidden_BTD.size(1);
  const auto dtype = hidden_BTD.scalar_type();
  const RopeTable global =
      make_rope_table(first_position, num_tokens, dims.head_size, dims.rope_theta, dims.rope_scaling, dtype, hidden_BTD.device());
  const RopeTable local =
      make_rope_table(first_position, num_tokens, dims.head_size, dims.rope_local_theta, 1.0, dtype, hidden_BTD.device());
  if (cache != nullptr && cache->keys.empty()) {
    cache->keys.resize(layers.size());
    cache->values.resize(layers.size());
  }
  const Tensor full = attention_mask(masks.full, hidden_BTD);
  const Tensor sliding = attention_mask(masks.sliding, hidden_BTD);
  Tensor x_BTD = hidden_BTD;
  for (size_t i = 0; i < layers.size(); ++i) {
    const Layer& layer = layers[i];
    const Tensor mask = layer.is_sliding ? sliding : full;
    const RopeTable rope = layer.is_sliding ? local : global;
    const auto block = [this, &layer, mask, rope, cache, i, pass](const Tensor& x) {
      return forward_layer(layer, {dims, mask, rope, cache, i}, x, pass);
    };
    x_BTD = pass.recompute_language ? recompute(block, x_BTD, trained_tensors(layer)) : block(x_BTD);
    pass.show("decoder_layer", int64_t(i), x_BTD);
  }
  x_BTD = rms_norm_one_plus(x_BTD, norm, dims.rms_norm_eps);
  pass.show("final_norm", -1, x_BTD);
  return x_BTD;
}

}  // namespace gemtune
