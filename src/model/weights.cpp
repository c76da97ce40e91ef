// The table of a model's tensors, and the names they have had.
#include "base/error.h"
#include "base/text.h"
#include "model/model.h"

#include <fmt/core.h>

#include <algorithm>

namespace gemtune {
namespace {

bool take_prefix(std::string_view& text, std::string_view prefix) {
  if (text.substr(0, prefix.size()) != prefix) return false;
  text.remove_prefix(prefix.size());
  return true;
}

class TableBuilder {
 public:
  explicit TableBuilder(std::vector<WeightRow>& rows) : rows_(rows) {}
  void add(const std::string& name, std::vector<int64_t> shape, WeightKind kind, Tower tower) {
    rows_.push_back({name, std::move(shape), kind, tower});
  }
  void linear(const std::string& name, int64_t out, int64_t in, Tower tower) {
    add(name + ".weight", {out, in}, WeightKind::kLinear, tower);
    if (tower == Tower::kVision) add(name + ".bias", {out}, WeightKind::kBias, tower);
  }
  void layer_norm(const std::string& name, int64_t width) {
    add(name + ".weight", {width}, WeightKind::kNorm, Tower::kVision);
    add(name + ".bias", {width}, WeightKind::kNorm, Tower::kVision);
  }

 private:
  std::vector<WeightRow>& rows_;
};

void add_vision(TableBuilder& table, const VisionDims& dims, int64_t text_width) {
  const std::string tower = "model.vision_tower.vision_model.";
  const int64_t side = dims.patches_a_side();
  table.add(tower + "embeddings.patch_embedding.weight", {dims.width, 3, dims.patch_size, dims.patch_size}, WeightKind::kConv,
            Tower::kVision);
  table.add(tower + "embeddings.patch_embedding.bias", {dims.width}, WeightKind::kBias, Tower::kVision);
  table.add(tower + "embeddings.position_embedding.weight", {side * side, dims.width}, WeightKind::kPosition, Tower::kVision);
  for (int64_t i = 0; i < dims.num_layers; ++i) {
    const std::string layer = fmt::format("{}encoder.layers.{}.", tower, i);
    table.layer_norm(layer + "layer_norm1", dims.width);
    for (const char* name : {"k_proj", "v_proj", "q_proj", "out_proj"}) {
      table.linear(layer + "self_attn." + name, dims.width, dims.width, Tower::kVision);
    }
    table.layer_norm(layer + "layer_norm2", dims.width);
    table.linear(layer + "mlp.fc1", dims.ffn_width, dims.width, Tower::kVision);
    table.linear(layer + "mlp.fc2", dims.width, dims.ffn_width, Tower::kVision);
  }
  table.layer_norm(tower + "post_layernorm", dims.width);
  const std::string projector = "model.multi_modal_projector.";
  table.add(projector + "mm_input_projection_weight", {dims.width, text_width}, WeightKind::kProjection, Tower::kProjector);
  table.add(projector + "mm_soft_emb_norm.weight", {dims.width}, WeightKind::kNorm, Tower::kProjector);
}

void add_text(TableBuilder& table, const TextDims& dims, const std::string& prefix) {
  const auto norm = [&](const std::string& name, int64_t width) {
    table.add(name + ".weight", {width}, WeightKind::kNorm, Tower::kLanguage);
  };
  table.add(prefix + "embed_tokens.weight", {dims.vocabulary, dims.width}, WeightKind::kTable, Tower::kLanguage);
  for (int64_t i = 0; i < dims.num_layers; ++i) {
    const std::string layer = fmt::format("{}layers.{}.", prefix, i);
    table.linear(layer + "self_attn.q_proj", dims.num_heads * dims.head_size, dims.width, Tower::kLanguage);
    table.linear(layer + "self_attn.k_proj", dims.num_kv_heads * dims.head_size, dims.width, Tower::kLanguage);
    table.linear(layer + "self_attn.v_proj", dims.num_kv_heads * dims.head_size, dims.width, Tower::kLanguage);
    table.linear(layer + "self_attn.o_proj", dims.width, dims.num_heads * dims.head_size, Tower::kLanguage);
    norm(layer + "self_attn.q_norm", dims.head_size);
    norm(layer + "self_attn.k_norm", dims.head_size);
    table.linear(layer + "mlp.gate_proj", dims.ffn_width, dims.width, Tower::kLanguage);
    table.linear(layer + "mlp.up_proj", dims.ffn_width, dims.width, Tower::kLanguage);
    table.linear(layer + "mlp.down_proj", dims.width, dims.ffn_width, Tower::kLanguage);
    for (const char* name :
         {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"}) {
      norm(layer + name, dims.width);
    }
  }
  norm(prefix + "norm", dims.width);
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += fmt::format("{}{}", i == 0 ? "" : ", ", shape[i]);
  return text + "]";
}

}  // namespace

int64_t WeightRow::num_elements() const {
  int64_t n = 1;
  for (const int64_t size : shape) n *= size;
  return n;
}

std::vector<WeightRow> weight_table(const Dims& dims) {
  std::vector<WeightRow> rows;
  TableBuilder table(rows);
  if (dims.vision) add_vision(table, *dims.vision, dims.text.width);
  add_text(table, dims.text, dims.vision ? "model.language_model." : "model.");
  if (!dims.tied_head) table.add("lm_head.weight", {dims.text.vocabulary, dims.text.width}, WeightKind::kTable, Tower::kLanguage);
  return rows;
}

std::string canonical_name(const std::string& name, bool has_vision) {
  std::string_view rest = name;
  if (take_prefix(rest, "language_model.lm_head.") || take_prefix(rest, "lm_head.")) return "lm_head." + std::string(rest);
  const std::string language = has_vision ? "model.language_model." : "model.";
  if (take_prefix(rest, "language_model.model.") || take_prefix(rest, "model.language_model."))
    return language + std::string(rest);
  if (!has_vision) return take_prefix(rest, "model.") ? "model." + std::string(rest) : "";
  if (take_prefix(rest, "model.vision_tower.") || take_prefix(rest, "vision_tower.")) {
    take_prefix(rest, "vision_model.");  // absent from transformers 5.6 on
    return "model.vision_tower.vision_model." + std::string(rest);
  }
  if (take_prefix(rest, "model.multi_modal_projector.") || take_prefix(rest, "multi_modal_projector.")) {
    return "model.multi_modal_projector." + std::string(rest);
  }
  return "";
}

std::string hub_name(const std::string& canonical, bool has_vision) {
  if (!has_vision) return canonical;
  std::string_view rest = canonical;
  if (take_prefix(rest, "model.language_model.")) return "language_model.model." + std::string(rest);
  if (take_prefix(rest, "lm_head.")) return "language_model.lm_head." + std::string(rest);
  take_prefix(rest, "model.");
  return std::string(rest);
}

// Suffixes of a pre-quantised linear's tensors (bitsandbytes 4-bit), each beside NAME.weight.
static const std::vector<std::string> kQuantSuffixes = {".absmax",
                                                        ".quant_map",
                                                        ".nested_absmax",
                                                        ".nested_quant_map",
                                                        ".quant_state.bitsandbytes__nf4",
                                                        ".quant_state.bitsandbytes__fp4"};

FolderCheck check_weights(const std::string& folder, const Dims& dims) {
  FolderCheck check;
  const TensorFolder tensors(folder);
  if (tensors.empty()) return check;
  check.weights_found = true;
  std::map<std::string, TensorFolder::Found> by_name;
  for (const auto& [name, found] : tensors.tensors()) by_name[canonical_name(name, dims.vision.has_value())] = found;

  std::map<std::string, const WeightRow*> expected;
  const auto rows = weight_table(dims);
  for (const WeightRow& row : rows) {
    expected[row.name] = &row;
    const auto it = by_name.find(row.name);
    if (it == by_name.end()) {
      check.faults.push_back(fmt::format("{}: {}: missing, expected {}", folder, row.name, shape_text(row.shape)));
    } else if (by_name.count(row.name + ".quant_map") == 0 && it->second.entry->shape != row.shape) {
      check.faults.push_back(fmt::format("{}: {}: expected {} from config.json, got {}", it->second.file->path(),
                                         it->second.entry->name, shape_text(row.shape), shape_text(it->second.entry->shape)));
    }
  }
  for (const auto& [name, found] : tensors.tensors()) {
    std::string canonical = canonical_name(name, dims.vision.has_value());
    for (const std::string& suffix : kQuantSuffixes) {
      if (canonical.size() > suffix.size() && canonical.ends_with(suffix)) canonical.resize(canonical.size() - suffix.size());
    }
    const bool tied_copy = canonical == "lm_head.weight" && dims.tied_head;
    if (expected.count(canonical) == 0 && !tied_copy) {
      check.faults.push_back(
          fmt::format("{}: {}: unexpected, no such tensor in a model of config.json's sizes", found.file->path(), name));
    }
  }
  return check;
}

std::string vision_digest(const std::string& folder) {
  const TensorFolder tensors(folder);
  std::string digests;
  for (const auto& [name, found] : tensors.tensors()) {
    const std::string canonical = canonical_name(name, true);
    if (!canonical.starts_with("model.vision_tower.")) continue;
    const auto bytes = found.file->bytes(*found.entry);
    digests += canonical + " " + sha256_of({reinterpret_cast<const char*>(bytes.data()), bytes.size()}) + "\n";
  }
  return sha256_of(digests);
}

}  // namespace gemtune
