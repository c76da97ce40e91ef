#include "base/error.h"
#include "model/model.h"
#include "ops/torch.h"

#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>

namespace gemtune {

double LoraSpec::scale_of(Tower tower) const {
  const double r = double(rank_of(tower));
  return rslora ? alpha / std::sqrt(r) : alpha / r;
}

Tensor Linear::operator()(const Tensor& x, const Pass& pass) const {
  if (!adapter) return lora_linear(x, weight, bias_O, nullptr);
  LoraArguments lora{adapter->a_RI, adapter->b_OR, adapter->scale, 0, {pass.dropout_seed, pass.micro, adapter->module}};
  if (pass.mode == Pass::Mode::kTrain) lora.dropout_p = adapter->dropout_p;
  return lora_linear(x, weight, bias_O, &lora);
}

void append_trained(const Linear& linear, std::vector<Tensor>& trained) {
  if (linear.weight.dense.defined() && linear.weight.dense.requires_grad()) trained.push_back(linear.weight.dense);
  if (linear.bias_O.defined() && linear.bias_O.requires_grad()) trained.push_back(linear.bias_O);
  if (linear.adapter && linear.adapter->a_RI.requires_grad()) {
    trained.push_back(linear.adapter->a_RI);
    trained.push_back(linear.adapter->b_OR);
  }
}

Tensor Gemma3::embed(const Tensor& token_ids_BT) const {
  // numerics: the pad row gets no gradient, as the reference's padding_idx has it.
  const Tensor rows_BTD = at::embedding(embed_tokens_VD_, token_ids_BT, dims_.text.pad_token);
  return rows_BTD.to(spec_.compute_dtype) * embed_scale_;
}

Tensor Gemma3::image_features(const Tensor& pixels_NCHW, const Pass& pass) const {
  Tensor pixels = pixels_NCHW;
  // numerics: (v − 127.5) ÷ 127.5 in fp32, as the reference's fused rescale-and-normalise.
  if (pixels.scalar_type() == at::kByte) pixels = (pixels.to(at::kFloat) - 127.5) / 127.5;
  return projector_.forward(vision_tower_->forward(pixels.to(spec_.compute_dtype), pass), pass);
}

Tensor Gemma3::forward(const ModelInput& input, const Pass& pass, KvCache* cache) const {
  const int64_t num_new = input.token_ids_BT.size(1);
  Tensor hidden_BTD = embed(input.token_ids_BT);
  if (input.pixels_NCHW.defined() && input.pixels_NCHW.size(0) > 0) {
    if (!vision_tower_) throw input_error("this model has no vision tower, the batch has {} images", input.pixels_NCHW.size(0));
    const Tensor soft_NSD = image_features(input.pixels_NCHW, pass);
    const int64_t total = input.image_group_BT.size(1);
    const Tensor is_soft_BT1 = (input.image_group_BT.narrow(1, total - num_new, num_new) >= 0).unsqueeze(2);
    const int64_t places = is_soft_BT1.sum().item<int64_t>();
    if (places != soft_NSD.size(0) * soft_NSD.size(1)) {
      throw input_error("the batch has {} image token places, its images have {} features", places,
                        soft_NSD.size(0) * soft_NSD.size(1));
    }
    hidden_BTD = hidden_BTD.masked_scatter(is_soft_BT1, soft_NSD.to(hidden_BTD.scalar_type()));
  }
  pass.show("embeddings", -1, hidden_BTD);
  const Masks masks = make_masks(input.valid_BT, input.image_group_BT, num_new, dims_.text.sliding_window);
  return decoder_.forward(hidden_BTD, masks, input.valid_BT.size(1) - num_new, cache, pass);
}

Tensor Gemma3::logits(const Tensor& hidden) const {
  Tensor out = at::linear(hidden, lm_head_VD_.to(hidden.scalar_type())).to(at::kFloat);
  const double cap = dims_.text.final_logit_softcap;
  if (cap > 0) out = (out / cap).tanh() * cap;
  return out;
}

CrossEntropySum Gemma3::loss(const Tensor& hidden_BTD, const Tensor& token_ids_BT, const Tensor& target_mask_BT) const {
  const int64_t last = token_ids_BT.size(1) - 1;
  // Position t predicts token t + 1.
  const Tensor predicts_BT = target_mask_BT.narrow(1, 1, last);
  const Tensor hidden_ND =
      hidden_BTD.narrow(1, 0, last).flatten(0, 1).index_select(0, predicts_BT.flatten().nonzero().squeeze(1));
  const Tensor targets_N = token_ids_BT.narrow(1, 1, last).masked_select(predicts_BT);
  return linear_cross_entropy(hidden_ND, lm_head_VD_, targets_N, dims_.text.final_logit_softcap);
}

std::vector<Linear*> Gemma3::linears() {
  std::vector<Linear*> all;
  if (vision_tower_) {
    for (auto& layer : vision_tower_->layers) {
      for (Linear* linear : {&layer.k_proj, &layer.v_proj, &layer.q_proj, &layer.out_proj, &layer.fc1, &layer.fc2})
        all.push_back(linear);
    }
  }
  for (auto& layer : decoder_.layers) {
    for (Linear* linear :
         {&layer.q_proj, &layer.k_proj, &layer.v_proj, &layer.o_proj, &layer.gate_proj, &layer.up_proj, &layer.down_proj}) {
      all.push_back(linear);
    }
  }
  return all;
}

}  // namespace gemtune
