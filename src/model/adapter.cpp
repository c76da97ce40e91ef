// What is trained and how it lies on disk: PEFT adapters, and model folders.
#include "base/error.h"
#include "base/json.h"
#include "base/text.h"
#include "model/adapter_keys.h"
#include "model/model.h"
#include "model/tensor_file.h"
#include "ops/torch.h"

#include <ATen/ops/equal.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <set>

namespace gemtune {
namespace {

const std::vector<std::string> kLanguageTargets = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"};
const std::vector<std::string> kVisionTargets = {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"};

std::vector<std::string> target_modules(const LoraSpec& lora, bool has_vision) {
  std::vector<std::string> names;
  if (lora.language) names = kLanguageTargets;
  if (lora.vision && has_vision) {
    for (const std::string& name : kVisionTargets) {
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  }
  return names;
}

Json adapter_config_json(const Gemma3& model, const std::string& base) {
  const ModelSpec& spec = model.spec();
  const bool has_vision = model.dims().vision.has_value();
  Json config = {{"alpha_pattern", Json::object()},
                 {"auto_mapping", nullptr},
                 {"base_model_name_or_path", base},
                 {"bias", "none"},
                 {"corda_config", nullptr},
                 {"eva_config", nullptr},
                 {"exclude_modules", nullptr},
                 {"fan_in_fan_out", false},
                 {"inference_mode", true},
                 {"init_lora_weights", true},
                 {"layer_replication", nullptr},
                 {"layers_pattern", nullptr},
                 {"layers_to_transform", nullptr},
                 {"loftq_config", Json::object()},
                 {"lora_alpha", spec.lora.alpha},
                 {"lora_bias", false},
                 {"lora_dropout", spec.lora.dropout_p},
                 {"megatron_config", nullptr},
                 {"megatron_core", "megatron.core"},
                 {"modules_to_save", nullptr},
                 {"peft_type", "LORA"},
                 {"qalora_group_size", 16},
                 {"r", spec.lora.rank},
                 {"rank_pattern", Json::object()},
                 {"revision", nullptr},
                 {"target_modules", target_modules(spec.lora, has_vision)},
                 {"target_parameters", nullptr},
                 {"task_type", "CAUSAL_LM"},
                 {"trainable_token_indices", nullptr},
                 {"use_dora", false},
                 {"use_qalora", false},
                 {"use_rslora", spec.lora.rslora}};
  if (spec.lora.alpha == std::floor(spec.lora.alpha)) config["lora_alpha"] = int64_t(spec.lora.alpha);
  // Both towers name their projections alike: one of them is shut out by its path.
  if (has_vision && !spec.lora.vision) config["exclude_modules"] = ".*vision_tower.*";
  if (has_vision && !spec.lora.language) config["exclude_modules"] = ".*language_model.*";
  if (spec.lora.vision && spec.lora.vision_rank > 0 && spec.lora.vision_rank != spec.lora.rank) {
    config["rank_pattern"] = {{"vision_tower\\..*", spec.lora.vision_rank}};
  }
  if (spec.tables != Tables::kFrozen) config["modules_to_save"] = {"lm_head", "embed_tokens"};
  return config;
}

// modules_to_save of an adapter's config, without the paths before the names.
std::set<std::string> whole_modules(const std::string& folder) {
  const Json config = read_json_file(join_path(folder, "adapter_config.json"));
  std::set<std::string> names;
  const auto it = config.find("modules_to_save");
  if (it == config.end() || !it->is_array()) return names;
  for (const Json& name : *it) {
    if (name.is_string()) names.insert(name.get<std::string>().substr(name.get<std::string>().rfind('.') + 1));
  }
  return names;
}

std::string embed_module(const Gemma3& model) {
  return model.dims().vision ? "model.language_model.embed_tokens" : "model.embed_tokens";
}

}  // namespace

std::vector<Parameter> Gemma3::parameters() const {
  std::vector<Parameter> out;
  if (spec_.train_all) {
    for (auto& [name, tensor] : weights()) {
      const bool plain = name.ends_with(".bias") || name.find("norm") != std::string::npos;
      out.push_back({hub_name(name, dims_.vision.has_value()), tensor, TrainedKind::kWeight, !plain});
    }
    return out;
  }
  const auto add_adapters = [&](Tower tower, TrainedKind kind) {
    for (const Linears* linears : linears_of(tower)) {
      for (const Linear& linear : linears->members) {
        if (!linear.adapter) continue;
        out.push_back({kPeftPrefix + linear.name + ".lora_A.weight", linear.adapter->a_RI, kind});
        out.push_back({kPeftPrefix + linear.name + ".lora_B.weight", linear.adapter->b_OR, kind});
      }
    }
  };
  add_adapters(Tower::kVision, TrainedKind::kVisionLora);
  const bool tables = spec_.tables != Tables::kFrozen;
  if (tables) out.push_back({kPeftPrefix + embed_module(*this) + ".weight", embed_tokens_VD_, TrainedKind::kTable});
  add_adapters(Tower::kLanguage, TrainedKind::kLanguageLora);
  if (tables && !lm_head_VD_.is_same(embed_tokens_VD_)) {
    out.push_back({std::string(kPeftPrefix) + "lm_head.weight", lm_head_VD_, TrainedKind::kTable});
  }
  return out;
}

std::vector<std::pair<std::string, Tensor>> Gemma3::weights() const {
  std::map<std::string, Tensor> by_name;
  const auto add_linear = [&](const Linear& linear) {
    by_name[linear.name + ".weight"] =
        linear.weight.dense.defined() ? linear.weight.dense : nf4_dequantize(*linear.weight.nf4, spec_.compute_dtype);
    if (linear.bias_O.defined()) by_name[linear.name + ".bias"] = linear.bias_O;
  };
  for (const Linear* linear : linears()) add_linear(*linear);
  if (vision_tower_) {
    const std::string tower = "model.vision_tower.vision_model.";
    const auto add_norm = [&](const std::string& name, const LayerNorm& norm) {
      by_name[tower + name + ".weight"] = norm.weight;
      by_name[tower + name + ".bias"] = norm.bias;
    };
    by_name[tower + "embeddings.patch_embedding.weight"] = vision_tower_->patch_weight_W3pp;
    by_name[tower + "embeddings.patch_embedding.bias"] = vision_tower_->patch_bias_W;
    by_name[tower + "embeddings.position_embedding.weight"] = vision_tower_->position_PW;
    for (size_t i = 0; i < vision_tower_->layers.size(); ++i) {
      add_norm(fmt::format("encoder.layers.{}.layer_norm1", i), vision_tower_->layers[i].layer_norm1);
      add_norm(fmt::format("encoder.layers.{}.layer_norm2", i), vision_tower_->layers[i].layer_norm2);
    }
    add_norm("post_layernorm", vision_tower_->post_layernorm);
    by_name["model.multi_modal_projector.mm_input_projection_weight"] = projector_.mm_input_projection_WD;
    by_name["model.multi_modal_projector.mm_soft_emb_norm.weight"] = projector_.mm_soft_emb_norm_W;
  }
  const std::string prefix = dims_.vision ? "model.language_model." : "model.";
  by_name[prefix + "embed_tokens.weight"] = embed_tokens_VD_;
  by_name["lm_head.weight"] = lm_head_VD_;
  for (size_t i = 0; i < decoder_.layers.size(); ++i) {
    const std::string layer = fmt::format("{}layers.{}.", prefix, i);
    const Decoder::Layer& from = decoder_.layers[i];
    by_name[layer + "input_layernorm.weight"] = from.input_layernorm;
    by_name[layer + "post_attention_layernorm.weight"] = from.post_attention_layernorm;
    by_name[layer + "pre_feedforward_layernorm.weight"] = from.pre_feedforward_layernorm;
    by_name[layer + "post_feedforward_layernorm.weight"] = from.post_feedforward_layernorm;
    by_name[layer + "self_attn.q_norm.weight"] = from.q_norm;
    by_name[layer + "self_attn.k_norm.weight"] = from.k_norm;
  }
  by_name[prefix + "norm.weight"] = decoder_.norm;

  std::vector<std::pair<std::string, Tensor>> out;
  for (const WeightRow& row : weight_table(dims_)) out.emplace_back(row.name, by_name.at(row.name));
  return out;
}

void save_adapter(const Gemma3& model, const std::string& folder, const std::string& base) {
  TensorFileWriter file;
  for (const Parameter& parameter : model.parameters()) file.add(parameter.key, parameter.value);
  if (model.spec().tables == Tables::kTied) {
    // One table here; PEFT keeps two modules, which then hold the same values.
    const auto parameters = model.parameters();
    const auto table =
        std::find_if(parameters.begin(), parameters.end(), [](const Parameter& p) { return p.kind == TrainedKind::kTable; });
    file.add(std::string(kPeftPrefix) + "lm_head.weight", table->value);
  }
  file.write(join_path(folder, "adapter_model.safetensors"));
  write_file_atomically(join_path(folder, "adapter_config.json"), adapter_config_json(model, base).dump(2) + "\n");
}

AdapterConfig read_adapter_config(const std::string& folder) {
  const std::string path = join_path(folder, "adapter_config.json");
  if (!file_exists(path))
    throw input_error("{}: no such file; an adapter folder holds adapter_config.json and adapter_model.safetensors", path);
  const Json json = read_json_file(path);
  std::vector<std::string> faults;
  const auto refuse_unless = [&](const char* key, const Json& expected) {
    const auto it = json.find(key);
    if (it != json.end() && !it->is_null() && *it != expected)
      faults.push_back(fmt::format("{} is {}, gemtune supports {}", key, it->dump(), expected.dump()));
  };
  refuse_unless("peft_type", "LORA");
  refuse_unless("use_dora", false);
  refuse_unless("use_qalora", false);
  refuse_unless("bias", "none");
  refuse_unless("lora_bias", false);
  refuse_unless("fan_in_fan_out", false);
  refuse_unless("alpha_pattern", Json::object());
  refuse_unless("trainable_token_indices", nullptr);
  refuse_unless("layers_to_transform", nullptr);
  refuse_unless("layer_replication", nullptr);
  if (!json.contains("r") || !json.at("r").is_number_integer()) faults.push_back("r is missing");
  if (!faults.empty()) throw input_error("{}: {}", path, join_some(faults));

  AdapterConfig config;
  config.base =
      json.value("base_model_name_or_path", Json()).is_string() ? json.at("base_model_name_or_path").get<std::string>() : "";
  config.lora.rank = json.at("r").get<int64_t>();
  config.lora.alpha = json.value("lora_alpha", 8.0);
  config.lora.dropout_p = json.value("lora_dropout", 0.0);
  config.lora.rslora = json.value("use_rslora", false);
  config.lora.language = config.lora.vision = false;
  const SafetensorsFile file(join_path(folder, "adapter_model.safetensors"));
  Tensor tables[2];
  for (const TensorEntry& entry : file.entries()) {
    const AdapterKey key = parse_adapter_key(entry.name, /*has_vision=*/true);
    const bool vision = key.module.starts_with("model.vision_tower.");
    if (key.part == 'T') {
      tables[key.module == "lm_head"] = tensor_view(file, entry);
    } else if (key.part == 'A' && !entry.shape.empty()) {
      (vision ? config.lora.vision : config.lora.language) = true;
      if (vision && entry.shape[0] != config.lora.rank) config.lora.vision_rank = entry.shape[0];
    }
  }
  if (tables[0].defined() || tables[1].defined()) {
    const bool same = tables[0].defined() && tables[1].defined() && tables[0].sizes() == tables[1].sizes() &&
                      tables[0].scalar_type() == tables[1].scalar_type() && at::equal(tables[0], tables[1]);
    config.tables = same ? Tables::kTied : Tables::kUntied;
  }
  return config;
}

void load_adapter(Gemma3& model, const std::string& folder) {
  const bool has_vision = model.dims().vision.has_value();
  const std::string path = join_path(folder, "adapter_model.safetensors");
  if (!file_exists(path) && file_exists(join_path(folder, "adapter_model.bin"))) {
    throw input_error("{}: adapter_model.bin is a pickle, which gemtune never opens; save the adapter as safetensors", folder);
  }
  const SafetensorsFile file(path);
  std::map<std::string, Tensor> wanted;
  for (const Parameter& parameter : model.parameters()) wanted[parameter.key] = parameter.value;
  std::vector<std::string> faults;
  std::set<std::string> seen;
  const at::NoGradGuard no_grad;
  for (const TensorEntry& entry : file.entries()) {
    const AdapterKey key = parse_adapter_key(entry.name, has_vision);
    if (key.module.empty()) {
      faults.push_back(fmt::format("{}: unexpected, no such module in this model", entry.name));
      continue;
    }
    const std::string ours = kPeftPrefix + key.module + (key.part == 'T' ? ".weight" : fmt::format(".lora_{}.weight", key.part));
    const auto it = wanted.find(ours);
    if (it == wanted.end()) {
      const bool tied_copy = key.module == "lm_head" && model.spec().tables == Tables::kTied;
      if (!tied_copy)
        faults.push_back(fmt::format("{}: unexpected, the model was built without this adapter or table", entry.name));
      continue;
    }
    seen.insert(ours);
    if (it->second.sizes() != at::IntArrayRef(entry.shape)) {
      faults.push_back(fmt::format("{}: expected shape {}, got {}", entry.name, Json(it->second.sizes().vec()).dump(),
                                   Json(entry.shape).dump()));
      continue;
    }
    it->second.copy_(tensor_view(file, entry));
  }
  const std::set<std::string> whole = whole_modules(folder);
  for (const auto& [key, tensor] : wanted) {
    // A trained table that the folder never had stays the base's.
    const std::string name = key.substr(0, key.size() - std::string_view(".weight").size());
    const bool is_table = key.find(".lora_") == std::string::npos;
    if (is_table && whole.count(name.substr(name.rfind('.') + 1)) == 0) continue;
    if (seen.count(key) == 0) faults.push_back(fmt::format("{}: missing", key));
  }
  if (!faults.empty()) throw input_error("{}: {}", path, join_some(faults));
}

void save_model(const Gemma3& model, const std::string& folder, const std::string& config_json, at::ScalarType dtype) {
  TensorFileWriter file;
  for (const auto& [name, tensor] : model.weights())
    file.add(hub_name(name, model.dims().vision.has_value()), tensor.detach().to(dtype));
  file.write(join_path(folder, "model.safetensors"));
  write_file_atomically(join_path(folder, "config.json"), config_json);
}

}  // namespace gemtune
