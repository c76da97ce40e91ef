#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/text.h"
#include "model/model.h"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include <cmath>

namespace gemtune {
namespace {

// Reads keys of one config object and collects what does not fit, so that all faults are reported at once.
class ConfigReader {
 public:
  ConfigReader(const Json& object, std::string where, std::vector<std::string>& faults)
      : object_(object), where_(std::move(where)), faults_(faults) {}

  const Json* find(const char* key) const {
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  // A missing key keeps the class's default.
  void integer(const char* key, int64_t& value, int64_t least = 1) {
    const Json* found = find(key);
    if (found == nullptr) return;
    if (!found->is_number_integer() || found->get<int64_t>() < least || found->get<int64_t>() > (int64_t{1} << 31)) {
      return fault(key, fmt::format("expected an integer of at least {}, got {}", least, found->dump()));
    }
    value = found->get<int64_t>();
  }
  void integer(const char* key, int32_t& value) {
    int64_t wide = value;
    integer(key, wide, 0);
    value = int32_t(wide);
  }
  void number(const char* key, double& value) {
    const Json* found = find(key);
    if (found == nullptr) return;
    if (!found->is_number() || !(found->get<double>() > 0)) {
      return fault(key, fmt::format("expected a number above 0, got {}", found->dump()));
    }
    value = found->get<double>();
  }
  void must_be(const char* key, const Json& expected, const char* why) {
    const Json* found = find(key);
    if (found != nullptr && *found != expected) {
      fault(key, fmt::format("expected {}, got {}: {}", expected.dump(), found->dump(), why));
    }
  }
  void fault(const char* key, const std::string& text) { faults_.push_back(fmt::format("{}{}: {}", where_, key, text)); }

 private:
  const Json& object_;
  std::string where_;
  std::vector<std::string>& faults_;
};

const Json& object_or_empty(const Json& parent, const char* key) {
  static const Json empty = Json::object();
  const auto it = parent.find(key);
  return it != parent.end() && it->is_object() ? *it : empty;
}

void read_rope_scaling(ConfigReader& reader, const Json& scaling, const char* key, double& factor) {
  if (!scaling.is_object()) return;
  const auto type = scaling.value("rope_type", scaling.value("type", std::string("default")));
  if (type == "default") return;
  if (type != "linear") return reader.fault(key, fmt::format("rope_type is \"{}\"; Gemma 3 uses linear or default", type));
  factor = scaling.value("factor", 1.0);
  if (!(factor > 0)) reader.fault(key, "factor must be above 0");
}

void read_rope(ConfigReader& reader, TextDims& dims) {
  reader.number("rope_theta", dims.rope_theta);
  reader.number("rope_local_base_freq", dims.rope_local_theta);
  if (const Json* scaling = reader.find("rope_scaling")) read_rope_scaling(reader, *scaling, "rope_scaling", dims.rope_scaling);
  const Json* by_layer = reader.find("rope_parameters");  // transformers 5
  if (by_layer == nullptr) return;
  const Json& full = object_or_empty(*by_layer, "full_attention");
  const Json& sliding = object_or_empty(*by_layer, "sliding_attention");
  dims.rope_theta = full.value("rope_theta", dims.rope_theta);
  dims.rope_local_theta = sliding.value("rope_theta", dims.rope_local_theta);
  read_rope_scaling(reader, full, "rope_parameters.full_attention", dims.rope_scaling);
  double local_factor = 1;
  read_rope_scaling(reader, sliding, "rope_parameters.sliding_attention", local_factor);
  if (local_factor != 1) reader.fault("rope_parameters.sliding_attention", "sliding layers are never scaled in Gemma 3");
}

void read_layer_types(ConfigReader& reader, TextDims& dims) {
  dims.is_sliding.assign(size_t(dims.num_layers), true);
  if (const Json* types = reader.find("layer_types")) {
    if (!types->is_array() || int64_t(types->size()) != dims.num_layers) {
      return reader.fault("layer_types", fmt::format("expected a list of num_hidden_layers = {} entries", dims.num_layers));
    }
    for (size_t i = 0; i < types->size(); ++i) {
      const Json& type = (*types)[i];
      if (type != "sliding_attention" && type != "full_attention") {
        return reader.fault("layer_types",
                            fmt::format("entry {} is {}, expected \"sliding_attention\" or \"full_attention\"", i, type.dump()));
      }
      dims.is_sliding[i] = type == "sliding_attention";
    }
    return;
  }
  int64_t pattern = 6;
  reader.integer("_sliding_window_pattern", pattern);
  reader.integer("sliding_window_pattern", pattern);
  for (int64_t i = 0; i < dims.num_layers; ++i) dims.is_sliding[size_t(i)] = (i + 1) % pattern != 0;
}

TextDims read_text(const Json& config, const std::string& where, bool has_vision, std::vector<std::string>& faults) {
  ConfigReader reader(config, where, faults);
  TextDims dims;
  reader.integer("hidden_size", dims.width);
  reader.integer("intermediate_size", dims.ffn_width);
  reader.integer("num_hidden_layers", dims.num_layers);
  reader.integer("num_attention_heads", dims.num_heads);
  reader.integer("num_key_value_heads", dims.num_kv_heads);
  reader.integer("head_dim", dims.head_size);
  reader.integer("vocab_size", dims.vocabulary);
  reader.integer("sliding_window", dims.sliding_window);
  reader.integer("max_position_embeddings", dims.max_positions);
  reader.integer("pad_token_id", dims.pad_token, 0);
  reader.number("query_pre_attn_scalar", dims.query_pre_attn_scalar);
  reader.number("rms_norm_eps", dims.rms_norm_eps);
  if (!has_vision) reader.number("final_logit_softcapping", dims.final_logit_softcap);
  read_rope(reader, dims);
  read_layer_types(reader, dims);
  if (dims.num_heads % dims.num_kv_heads != 0) {
    reader.fault("num_attention_heads",
                 fmt::format("{} is no multiple of num_key_value_heads {}", dims.num_heads, dims.num_kv_heads));
  }
  if (dims.head_size % 2 != 0)
    reader.fault("head_dim", fmt::format("{} is odd; rotary positions need an even size", dims.head_size));
  reader.must_be("attention_bias", false, "Gemma 3's decoder has no biases");
  reader.must_be("use_bidirectional_attention", false, "only chat models can be fine-tuned");
  reader.must_be("hidden_activation", "gelu_pytorch_tanh", "every released Gemma 3 uses the tanh form");
  return dims;
}

VisionDims read_vision(const Json& config, std::vector<std::string>& faults) {
  ConfigReader reader(config, "vision_config.", faults);
  VisionDims dims;
  // Class defaults of SiglipVisionConfig, which released files override.
  dims.width = 768;
  dims.ffn_width = 3072;
  dims.num_layers = 12;
  dims.num_heads = 12;
  dims.image_size = 224;
  dims.patch_size = 16;
  reader.integer("hidden_size", dims.width);
  reader.integer("intermediate_size", dims.ffn_width);
  reader.integer("num_hidden_layers", dims.num_layers);
  reader.integer("num_attention_heads", dims.num_heads);
  reader.integer("image_size", dims.image_size);
  reader.integer("patch_size", dims.patch_size);
  reader.number("layer_norm_eps", dims.layer_norm_eps);
  reader.must_be("num_channels", 3, "pictures are RGB");
  reader.must_be("hidden_act", "gelu_pytorch_tanh", "SigLIP in Gemma 3 uses the tanh form");
  if (dims.width % dims.num_heads != 0) {
    reader.fault("hidden_size", fmt::format("{} is no multiple of num_attention_heads {}", dims.width, dims.num_heads));
  }
  return dims;
}

void read_stop_tokens(const Json& config, Dims& dims) {
  const auto it = config.find("eos_token_id");
  if (it == config.end()) return;
  if (it->is_number_integer()) dims.stop_tokens.push_back(it->get<int32_t>());
  if (!it->is_array()) return;
  for (const Json& id : *it) {
    if (id.is_number_integer()) dims.stop_tokens.push_back(id.get<int32_t>());
  }
}

void check_image_tokens(Dims& dims, std::vector<std::string>& faults) {
  const int64_t side = dims.pooled_side();
  const int64_t patches = dims.vision->patches_a_side();
  if (side * side != dims.tokens_per_image) {
    faults.push_back(fmt::format("mm_tokens_per_image: {} is no square number", dims.tokens_per_image));
  } else if (side == 0 || patches % side != 0) {
    faults.push_back(fmt::format("mm_tokens_per_image: {} patches a side cannot be pooled to {}", patches, side));
  }
}

}  // namespace

int64_t Dims::pooled_side() const {
  return int64_t(std::llround(std::sqrt(double(tokens_per_image))));
}

Dims read_dims(const std::string& folder) {
  const std::string path = join_path(folder, "config.json");
  if (!folder_exists(folder))
    throw input_error("model.path {}: no such folder; give a model folder as downloaded from the hub", in_quotes(folder));
  if (!file_exists(path))
    throw input_error("{}: no such file; a model folder holds config.json, tokenizer.json and .safetensors files", path);
  const Json config = read_json_file(path);
  if (!config.is_object()) throw input_error("{}: expected a JSON object", path);
  const std::string type = config.value("model_type", std::string());
  if (type != "gemma3" && type != "gemma3_text") {
    throw input_error(
        "{}: model_type is \"{}\"; gemtune trains Gemma 3 (\"gemma3\" with a vision tower, \"gemma3_text\" without)", path, type);
  }

  Dims dims;
  std::vector<std::string> faults;
  const bool has_vision = type == "gemma3";
  dims.text = read_text(has_vision ? object_or_empty(config, "text_config") : config, has_vision ? "text_config." : "",
                        has_vision, faults);
  ConfigReader top(config, "", faults);
  if (has_vision) {
    dims.vision = read_vision(object_or_empty(config, "vision_config"), faults);
    top.integer("mm_tokens_per_image", dims.tokens_per_image);
    top.integer("boi_token_index", dims.start_of_image);
    top.integer("eoi_token_index", dims.end_of_image);
    top.integer("image_token_index", dims.image_token);
    check_image_tokens(dims, faults);
    if (dims.image_token >= dims.text.vocabulary) {
      faults.push_back(
          fmt::format("image_token_index: {} is outside the vocabulary of {}", dims.image_token, dims.text.vocabulary));
    }
  } else {
    dims.tokens_per_image = 0;
  }
  if (const Json* tied = top.find("tie_word_embeddings")) dims.tied_head = tied->is_boolean() ? tied->get<bool>() : true;
  read_stop_tokens(config, dims);
  if (!faults.empty()) throw input_error("{}: {}", path, join_some(faults));
  return dims;
}

}  // namespace gemtune
