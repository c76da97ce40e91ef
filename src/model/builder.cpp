// Builds a Gemma3 from a folder's tensors: quantises, attaches adapters, decides what is trained.
#include "base/error.h"
#include "base/json.h"
#include "base/text.h"
#include "model/model.h"
#include "model/tensor_file.h"
#include "ops/cuda.h"
#include "ops/torch.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>

namespace gemtune {
namespace {

Tensor view(const TensorFolder::Found& found) {
  return tensor_view(*found.file, *found.entry);
}

// A folder's tensors under canonical names.
class WeightSource {
 public:
  WeightSource(const std::string& folder, bool has_vision) : tensors_(folder), folder_(folder) {
    for (const auto& [name, found] : tensors_.tensors()) by_name_[canonical_name(name, has_vision)] = found;
  }

  // In the source's dtype.
  Tensor dense(const WeightRow& row) {
    if (auto nf4 = quantised(row)) return nf4_dequantize(*nf4, nf4->dtype);
    return view(by_name_.at(row.name));
  }

  // A linear of a pre-quantised bitsandbytes folder: NAME.weight with its quant state beside it.
  std::optional<Nf4Tensor> quantised(const WeightRow& row) {
    const auto state = by_name_.find(row.name + ".quant_state.bitsandbytes__nf4");
    if (state == by_name_.end()) {
      if (by_name_.count(row.name + ".quant_map") != 0) {
        throw input_error("{}: {}: quantised as fp4; gemtune reads nf4 folders or the original model", folder_, row.name);
      }
      return std::nullopt;
    }
    const auto bytes = state->second.file->bytes(*state->second.entry);
    const std::string where = state->second.file->path() + ": " + state->second.entry->name;
    const Json json = parse_json({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, where);
    Nf4Tensor out;
    out.shape = json.at("shape").get<std::vector<int64_t>>();
    if (json.value("blocksize", int64_t{64}) != 64 || out.shape != row.shape) {
      throw input_error("{}: expected blocksize 64 and shape {}, got {}", where, Json(row.shape).dump(), json.dump());
    }
    const std::string dtype = json.value("dtype", std::string("bfloat16"));
    out.dtype = dtype == "float32" ? at::kFloat : dtype == "float16" ? at::kHalf : at::kBFloat16;
    out.codes = bytes_of(row.name);
    if (out.codes.numel() != (row.num_elements() + 1) / 2) {
      throw input_error("{}: {}: expected {} bytes of codes, got {}", folder_, row.name, (row.num_elements() + 1) / 2,
                        out.codes.numel());
    }
    const auto absmax = by_name_.at(row.name + ".absmax");
    if (absmax.entry->dtype == DType::kU8) {
      out.absmax_codes = view(absmax).flatten().clone();
      out.absmax2 = view(by_name_.at(row.name + ".nested_absmax")).flatten().clone();
      out.code8 = view(by_name_.at(row.name + ".nested_quant_map")).flatten().clone();
      out.offset = json.value("nested_offset", 0.0f);
    } else {
      out.absmax = view(absmax).flatten().to(at::kFloat).clone();
    }
    return out;
  }

 private:
  Tensor bytes_of(const std::string& name) {
    const auto found = by_name_.at(name);  // the storage dtype is only a view of the packed bytes
    const auto bytes = found.file->bytes(*found.entry);
    return at::from_blob(const_cast<std::byte*>(bytes.data()), {int64_t(bytes.size())}, at::kByte).clone();
  }

  TensorFolder tensors_;
  std::string folder_;
  std::map<std::string, TensorFolder::Found> by_name_;
};

// Free on a GPU, physical on a CPU.
int64_t memory_bytes(at::Device device) {
  if (!device.is_cuda()) return int64_t(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
  int64_t free = 0, total = 0;
  kernels().memory(device.index(), &free, &total);
  return free;
}

}  // namespace

class ModelBuilder {
 public:
  ModelBuilder(const Dims& dims, const ModelSpec& spec, WeightSource& source) : source_(source), model_(new Gemma3) {
    model_->dims_ = dims;
    model_->spec_ = spec;
    for (WeightRow& row : weight_table(dims)) rows_.emplace(row.name, row);
  }

  std::unique_ptr<Gemma3> build() {
    const Dims& dims = model_->dims_;
    keep_expanded_ = spec().keep_expanded.value_or(expansion_bytes() <= memory_bytes(spec().device) / 4);
    if (dims.vision) build_vision(*dims.vision);
    build_text();
    attach_adapters();
    if (spec().device.is_cuda() && spec().compute_dtype == at::kBFloat16 && !spec().train_all) pack();
    return std::move(model_);
  }

 private:
  const ModelSpec& spec() const { return model_->spec_; }
  const WeightRow& row(const std::string& name) const { return rows_.at(name); }

  bool is_quantised(const WeightRow& row) const {
    if (!spec().quant.nf4 || row.kind != WeightKind::kLinear) return false;
    return row.tower == Tower::kLanguage || spec().quant.vision;
  }

  int64_t expansion_bytes() const {
    int64_t total = 0;
    for (const auto& [name, row] : rows_) {
      if (is_quantised(row)) total += row.num_elements() * int64_t(at::elementSize(spec().compute_dtype));
    }
    return total;
  }

  // A tensor that is frozen in the compute dtype, or trained in fp32.
  Tensor take(const std::string& name) {
    const Tensor source = source_.dense(row(name));
    if (spec().train_all) return source.to(spec().device, at::kFloat, false, /*copy=*/true).contiguous().set_requires_grad(true);
    return source.to(spec().device, spec().compute_dtype, false, /*copy=*/true).contiguous();
  }

  Linear linear(const std::string& name) {
    Linear out;
    out.name = name;
    const WeightRow& weight = row(name + ".weight");
    if (weight.tower == Tower::kVision) out.bias_O = take(name + ".bias");
    auto nf4 = source_.quantised(weight);
    if (nf4) {
      nf4 = to_device(*nf4, spec().device);
    } else if (is_quantised(weight)) {
      nf4 = nf4_quantize(source_.dense(weight).to(spec().device), spec().quant.double_quant);
    }
    if (!nf4) {
      out.weight.dense = take(name + ".weight");
      return out;
    }
    if (spec().train_all)
      throw input_error("{}: a quantised weight cannot be trained; give the original model or train adapters", name);
    if (keep_expanded_ && !spec().device.is_cuda()) out.weight.dense = nf4_dequantize(*nf4, spec().compute_dtype);
    out.weight.nf4 = std::move(nf4);
    return out;
  }

  Linears linears(const std::string& prefix, const std::vector<std::string>& names) {
    Linears out;
    for (const std::string& name : names) out.members.push_back(linear(prefix + name));
    return out;
  }

  LayerNorm vision_norm(const std::string& name) { return {take(name + ".weight"), take(name + ".bias")}; }

  void build_vision(const VisionDims& dims) {
    Siglip& tower = model_->vision_tower_.emplace();
    tower.dims = dims;
    const std::string prefix = "model.vision_tower.vision_model.";
    tower.patch_weight_W3pp = take(prefix + "embeddings.patch_embedding.weight");
    tower.patch_bias_W = take(prefix + "embeddings.patch_embedding.bias");
    tower.position_PW = take(prefix + "embeddings.position_embedding.weight");
    for (int64_t i = 0; i < dims.num_layers; ++i) {
      const std::string layer = fmt::format("{}encoder.layers.{}.", prefix, i);
      Siglip::Layer& to = tower.layers.emplace_back();
      to.layer_norm1 = vision_norm(layer + "layer_norm1");
      to.layer_norm2 = vision_norm(layer + "layer_norm2");
      to.kvq_proj = linears(layer + "self_attn.", {"k_proj", "v_proj", "q_proj"});
      to.out_proj = linears(layer + "self_attn.", {"out_proj"});
      to.fc1 = linears(layer + "mlp.", {"fc1"});
      to.fc2 = linears(layer + "mlp.", {"fc2"});
    }
    tower.post_layernorm = vision_norm(prefix + "post_layernorm");
    Projector& projector = model_->projector_;
    projector.patches_a_side = dims.patches_a_side();
    projector.pooled_side = model_->dims_.pooled_side();
    projector.eps = dims.layer_norm_eps;
    projector.mm_soft_emb_norm_W = take("model.multi_modal_projector.mm_soft_emb_norm.weight");
    projector.mm_input_projection_WD = take("model.multi_modal_projector.mm_input_projection_weight");
  }

  void build_text() {
    const TextDims& dims = model_->dims_.text;
    const std::string prefix = model_->dims_.vision ? "model.language_model." : "model.";
    Decoder& decoder = model_->decoder_;
    decoder.dims = dims;
    build_tables(prefix);
    for (int64_t i = 0; i < dims.num_layers; ++i) {
      const std::string layer = fmt::format("{}layers.{}.", prefix, i);
      Decoder::Layer& to = decoder.layers.emplace_back();
      to.is_sliding = dims.is_sliding[size_t(i)];
      to.input_layernorm = take(layer + "input_layernorm.weight");
      to.post_attention_layernorm = take(layer + "post_attention_layernorm.weight");
      to.pre_feedforward_layernorm = take(layer + "pre_feedforward_layernorm.weight");
      to.post_feedforward_layernorm = take(layer + "post_feedforward_layernorm.weight");
      to.q_norm = take(layer + "self_attn.q_norm.weight");
      to.k_norm = take(layer + "self_attn.k_norm.weight");
      to.qkv_proj = linears(layer + "self_attn.", {"q_proj", "k_proj", "v_proj"});
      to.o_proj = linears(layer + "self_attn.", {"o_proj"});
      to.gate_up_proj = linears(layer + "mlp.", {"gate_proj", "up_proj"});
      to.down_proj = linears(layer + "mlp.", {"down_proj"});
    }
    decoder.norm = take(prefix + "norm.weight");
    // numerics: the factor is rounded to the activations' dtype, as the reference's buffer is.
    model_->embed_scale_ =
        at::empty({}, at::kDouble).fill_(std::sqrt(double(dims.width))).to(spec().compute_dtype).item<double>();
  }

  void build_tables(const std::string& prefix) {
    const bool tied = model_->dims_.tied_head;
    const Tables tables = spec().train_all ? Tables::kFrozen : spec().tables;
    if (tables == Tables::kTied && !tied) {
      throw input_error("lora.train_tables=tied: this model's embed_tokens and lm_head are two tables; use untied");
    }
    const auto table = [&](const std::string& name) {
      if (tables == Tables::kFrozen) return take(name);
      return source_.dense(row(name))
          .to(spec().device, spec().table_dtype, false, /*copy=*/true)
          .contiguous()
          .set_requires_grad(true);
    };
    model_->embed_tokens_VD_ = table(prefix + "embed_tokens.weight");
    if (!tied) {
      model_->lm_head_VD_ = table("lm_head.weight");
    } else if (tables == Tables::kUntied) {
      model_->lm_head_VD_ = table(prefix + "embed_tokens.weight");
    } else {
      model_->lm_head_VD_ = model_->embed_tokens_VD_;
    }
  }

  std::vector<Linears*> all_groups() {
    std::vector<Linears*> all;
    for (const Tower tower : {Tower::kVision, Tower::kLanguage}) {
      for (const Linears* group : model_->linears_of(tower)) all.push_back(const_cast<Linears*>(group));
    }
    return all;
  }
  std::vector<Linear*> all_linears() {
    std::vector<Linear*> all;
    for (Linears* group : all_groups()) {
      for (Linear& linear : group->members) all.push_back(&linear);
    }
    return all;
  }

  // Dense weights move into the GPU's packed form, and NF4 ones are kept expanded there when they fit.
  void pack() {
    const at::NoGradGuard no_grad;
    for (Linears* group : all_groups()) {
      std::vector<LinearWeight*> weights;
      std::vector<Tensor> biases;
      bool resident = true;
      for (Linear& linear : group->members) {
        weights.push_back(&linear.weight);
        biases.push_back(linear.bias_O);
        resident = resident && (linear.weight.dense.defined() || keep_expanded_);
      }
      if (resident) {
        group->packed = pack_linears(weights, biases, group->room());
      } else if (biases[0].defined()) {
        group->packed.bias_O = at::cat(biases);
      }
    }
  }

  // A uniform in ±1 ÷ √in (Kaiming with a = √5), B zero, each from (seed, number of the layer) alone.
  void attach_adapters() {
    const LoraSpec& lora = spec().lora;
    if (lora.rank == 0 || spec().train_all) return;
    uint32_t module = 0;
    for (Linear* linear : all_linears()) {
      ++module;
      const WeightRow& weight = row(linear->name + ".weight");
      if (weight.tower == Tower::kVision ? !lora.vision : !lora.language) continue;
      const int64_t rank = lora.rank_of(weight.tower);
      const double bound = 1.0 / std::sqrt(double(weight.shape[1]));
      auto generator = at::detail::createCPUGenerator(spec().seed * 1000003 + module);
      Adapter adapter;
      adapter.a_RI = at::empty({rank, weight.shape[1]}, at::kFloat)
                         .uniform_(-bound, bound, generator)
                         .to(spec().device)
                         .set_requires_grad(true);
      adapter.b_OR =
          at::zeros({weight.shape[0], rank}, at::TensorOptions().dtype(at::kFloat).device(spec().device)).set_requires_grad(true);
      adapter.scale = lora.scale_of(weight.tower);
      adapter.dropout_p = lora.dropout_p;
      adapter.module = module;
      linear->adapter = std::move(adapter);
    }
  }

  WeightSource& source_;
  std::unique_ptr<Gemma3> model_;
  std::map<std::string, WeightRow> rows_;
  bool keep_expanded_ = false;
};

std::unique_ptr<Gemma3> Gemma3::load(const std::string& folder, const ModelSpec& spec) {
  const Dims dims = read_dims(folder);
  const FolderCheck check = check_weights(folder, dims);
  if (!check.weights_found) {
    throw input_error("{}: no model.safetensors or model.safetensors.index.json; the folder holds no weights to load", folder);
  }
  if (!check.faults.empty()) throw input_error("{}", join_some(check.faults));
  WeightSource source(folder, dims.vision.has_value());
  return ModelBuilder(dims, spec, source).build();
}

Tensor random_weight(const WeightRow& row, uint64_t seed) {
  const bool layer_norm_weight = row.kind == WeightKind::kNorm && row.tower == Tower::kVision && row.name.ends_with(".weight");
  if (layer_norm_weight) return at::ones(row.shape, at::kFloat);
  if (row.kind == WeightKind::kNorm || row.kind == WeightKind::kBias) return at::zeros(row.shape, at::kFloat);
  // FNV-1a of the name: each tensor has its own stream, whatever the order they are made in.
  uint64_t hash = 14695981039346656037u ^ seed;
  for (const char c : row.name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  auto generator = at::detail::createCPUGenerator(hash);
  return at::empty(row.shape, at::kFloat).normal_(0.0, 0.02, generator);
}

}  // namespace gemtune
