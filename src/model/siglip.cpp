#include "model/model.h"
#include "ops/torch.h"

#include <ATen/ops/conv2d.h>
#include <ATen/ops/matmul.h>

namespace gemtune {
namespace {

Tensor split_heads(const Tensor& x_NPW, int64_t num_heads) {
  return x_NPW.reshape({x_NPW.size(0), x_NPW.size(1), num_heads, x_NPW.size(2) / num_heads}).transpose(1, 2);
}

Tensor forward_layer(const Siglip::Layer& layer, const VisionDims& dims, const Tensor& x_NPW, const Pass& pass) {
  const auto [x1, h1] =
      layer_norm_stream(x_NPW, layer.layer_norm1.weight, layer.layer_norm1.bias, dims.layer_norm_eps, layer.kvq_proj.room());
  const std::vector<Tensor> kvq = layer.kvq_proj(h1, pass);
  const Tensor everywhere;
  const Tensor attended = attention(split_heads(kvq[2], dims.num_heads), split_heads(kvq[0], dims.num_heads),
                                    split_heads(kvq[1], dims.num_heads), everywhere, 1.0 / std::sqrt(double(dims.head_size())));
  const Tensor x = layer.out_proj.one(attended, pass, x1);
  const auto [x2, h2] =
      layer_norm_stream(x, layer.layer_norm2.weight, layer.layer_norm2.bias, dims.layer_norm_eps, layer.fc1.room());
  return layer.fc2.one(gelu_tanh(layer.fc1.one(h2, pass), layer.fc2.room()), pass, x2);
}

std::vector<Tensor> trained_tensors(const Siglip::Layer& layer) {
  std::vector<Tensor> trained;
  for (const Linears* linears : {&layer.kvq_proj, &layer.out_proj, &layer.fc1, &layer.fc2}) linears->append_trained(trained);
  for (const LayerNorm* norm : {&layer.layer_norm1, &layer.layer_norm2}) {
    for (const Tensor& tensor : {norm->weight, norm->bias}) {
      if (tensor.requires_grad()) trained.push_back(tensor);
    }
  }
  return trained;
}

}  // namespace

Tensor Siglip::forward(const Tensor& pixels_NCHW, const Pass& pass) const {
  const Tensor grid_NWpp = at::conv2d(pixels_NCHW, patch_weight_W3pp.to(pixels_NCHW.scalar_type()),
                                      patch_bias_W.to(pixels_NCHW.scalar_type()), {dims.patch_size, dims.patch_size});
  Tensor x_NPW = grid_NWpp.flatten(2).transpose(1, 2) + position_PW.to(grid_NWpp.scalar_type());
  pass.show("vision_embeddings", -1, x_NPW);
  for (size_t i = 0; i < layers.size(); ++i) {
    const Layer& layer = layers[i];
    const auto block = [this, &layer, pass](const Tensor& x) { return forward_layer(layer, dims, x, pass); };
    x_NPW = pass.recompute_vision ? recompute(block, x_NPW, trained_tensors(layer)) : block(x_NPW);
    pass.show("vision_layer", int64_t(i), x_NPW);
  }
  x_NPW = layer_norm(x_NPW, post_layernorm.weight, post_layernorm.bias, dims.layer_norm_eps);
  pass.show("vision_post_layernorm", -1, x_NPW);
  return x_NPW;
}

Tensor Projector::pool(const Tensor& patches_NPW) const {
  const int64_t num_images = patches_NPW.size(0);
  const int64_t width = patches_NPW.size(2);
  const int64_t kernel = patches_a_side / pooled_side;
  // Rows and columns of the patch grid, each as (pooled, within); the mean over both within.
  const Tensor grid_NpkpkW = patches_NPW.reshape({num_images, pooled_side, kernel, pooled_side, kernel, width});
  return grid_NpkpkW.mean(at::IntArrayRef{2, 4}).reshape({num_images, pooled_side * pooled_side, width});
}

Tensor Projector::forward(const Tensor& pooled_NSW, const Pass& pass) const {
  const Tensor normed_NSW = rms_norm_one_plus(pooled_NSW, mm_soft_emb_norm_W, eps);
  const Tensor soft_NSD = at::matmul(normed_NSW, mm_input_projection_WD.to(normed_NSW.scalar_type()));
  pass.show("projector", -1, soft_NSD);
  return soft_NSD;
}

}  // namespace gemtune
