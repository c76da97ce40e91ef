#include "base/error.h"
#include "model/model.h"
#include "ops/torch.h"

#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros_like.h>

namespace gemtune {

double LoraSpec::scale_of(Tower tower) const {
  const double r = double(rank_of(tower));
  return rslora ? alpha / std::sqrt(r) : alpha / r;
}

std::vector<LinearArguments> Linears::arguments(const Pass& pass) const {
  std::vector<LinearArguments> all;
  for (const Linear& linear : members) {
    LinearArguments& arguments = all.emplace_back(LinearArguments{linear.weight, linear.bias_O, std::nullopt});
    if (!linear.adapter) continue;
    const Adapter& adapter = *linear.adapter;
    const double dropout_p = pass.mode == Pass::Mode::kTrain ? adapter.dropout_p : 0.0;
    arguments.lora = {adapter.a_RI, adapter.b_OR, adapter.scale, dropout_p, {pass.dropout_seed, pass.micro, adapter.module}};
  }
  return all;
}

std::vector<Tensor> Linears::operator()(const Tensor& x, const Pass& pass) const {
  return lora_linears(x, arguments(pass), packed, Tensor());
}

Tensor Linears::one(const Tensor& x, const Pass& pass, const Tensor& residual) const {
  return lora_linears(x, arguments(pass), packed, residual).at(0);
}

int64_t Linears::room() const {
  return ranks_of(arguments(Pass{}));
}

void Linears::append_trained(std::vector<Tensor>& trained) const {
  for (const Linear& linear : members) {
    if (linear.weight.dense.defined() && linear.weight.dense.requires_grad()) trained.push_back(linear.weight.dense);
    if (linear.bias_O.defined() && linear.bias_O.requires_grad()) trained.push_back(linear.bias_O);
    if (linear.adapter && linear.adapter->a_RI.requires_grad()) {
      trained.push_back(linear.adapter->a_RI);
      trained.push_back(linear.adapter->b_OR);
    }
  }
}

Targets Targets::to(at::Device device) const {
  return {position_N.to(device), token_N.to(device)};
}

Targets find_targets(const Tensor& token_ids_BT, const Tensor& target_mask_BT) {
  // Position t predicts token t + 1: the mask moved one to the left, nothing predicted at the end of a row.
  Tensor predicts_BT = at::zeros_like(target_mask_BT);
  const int64_t last = target_mask_BT.size(1) - 1;
  predicts_BT.narrow(1, 0, last).copy_(target_mask_BT.narrow(1, 1, last));
  const Tensor position_N = predicts_BT.flatten().nonzero().squeeze(1);
  return {position_N, token_ids_BT.flatten().index_select(0, position_N + 1)};
}

Tensor Gemma3::embed(const Tensor& token_ids_BT) const {
  // numerics: the pad row gets no gradient, as the reference's padding_idx has it.
  const Tensor rows_BTD = at::embedding(embed_tokens_VD_, token_ids_BT, dims_.text.pad_token);
  return rows_BTD.to(spec_.compute_dtype) * embed_scale_;
}

void require_places(int64_t num_places, int64_t num_features) {
  if (num_places != num_features) {
    throw input_error("the batch has {} image token places, its images have {} features", num_places, num_features);
  }
}

bool Gemma3::vision_is_frozen() const {
  return vision_tower_ && !spec_.train_all && !(spec_.lora.rank > 0 && spec_.lora.vision);
}

Tensor Gemma3::pooled_patches(const Tensor& pixels_NCHW, const Pass& pass) const {
  if (!vision_tower_) throw input_error("this model has no vision tower, the batch has {} images", pixels_NCHW.size(0));
  Tensor pixels = pixels_NCHW;
  // numerics: (v − 127.5) ÷ 127.5 in fp32, as the reference's fused rescale-and-normalise.
  if (pixels.scalar_type() == at::kByte) pixels = (pixels.to(at::kFloat) - 127.5) / 127.5;
  return projector_.pool(vision_tower_->forward(pixels.to(spec_.compute_dtype), pass));
}

Tensor Gemma3::forward(const ModelInput& input, const Pass& pass, KvCache* cache) const {
  const int64_t num_new = input.token_ids_BT.size(1);
  Tensor hidden_BTD = embed(input.token_ids_BT);
  Tensor pooled_NSW = input.pooled_NSW;
  if (!pooled_NSW.defined() && input.pixels_NCHW.defined()) pooled_NSW = pooled_patches(input.pixels_NCHW, pass);
  if (pooled_NSW.defined()) {
    const Tensor soft_NSD = projector_.forward(pooled_NSW, pass);
    const int64_t total = input.image_group_BT.size(1);
    const Tensor is_soft_BT1 = (input.image_group_BT.narrow(1, total - num_new, num_new) >= 0).unsqueeze(2);
    // A GPU is not waited for here: who makes batches for one counts their places.
    if (!is_soft_BT1.is_cuda()) require_places(is_soft_BT1.sum().item<int64_t>(), soft_NSD.size(0) * soft_NSD.size(1));
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

CrossEntropySum Gemma3::loss(const Tensor& hidden_BTD, const Targets& targets) const {
  const Tensor hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, targets.position_N);
  return linear_cross_entropy(hidden_ND, lm_head_VD_, targets.token_N, dims_.text.final_logit_softcap);
}

std::vector<const Linears*> Gemma3::linears_of(Tower tower) const {
  std::vector<const Linears*> all;
  if (tower == Tower::kVision && vision_tower_) {
    for (const Siglip::Layer& layer : vision_tower_->layers) {
      all.insert(all.end(), {&layer.kvq_proj, &layer.out_proj, &layer.fc1, &layer.fc2});
    }
  }
  if (tower == Tower::kLanguage) {
    for (const Decoder::Layer& layer : decoder_.layers) {
      all.insert(all.end(), {&layer.qkv_proj, &layer.o_proj, &layer.gate_up_proj, &layer.down_proj});
    }
  }
  return all;
}

std::vector<const Linear*> Gemma3::linears() const {
  std::vector<const Linear*> all;
  for (const Tower tower : {Tower::kVision, Tower::kLanguage}) {
    for (const Linears* linears : linears_of(tower)) {
      for (const Linear& linear : linears->members) all.push_back(&linear);
    }
  }
  return all;
}

}  // namespace gemtune
