#include "train/plan.h"

#include <c10/core/ScalarType.h>

#include <algorithm>

namespace gemtune {
namespace {

constexpr int64_t kNf4Block = 64;
constexpr int64_t kNestedBlock = 256;

int64_t nf4_bytes(int64_t elements, bool double_quant) {
  const int64_t blocks = (elements + kNf4Block - 1) / kNf4Block;
  return (elements + 1) / 2 + (double_quant ? blocks + (blocks + kNestedBlock - 1) / kNestedBlock * 4 : blocks * 4);
}

const char* tower_name(Tower tower) {
  return tower == Tower::kVision ? "vision" : tower == Tower::kProjector ? "projector" : "language";
}

class Parts {
 public:
  explicit Parts(std::vector<PlanPart>& parts) : parts_(parts) {}
  void add(const std::string& name, int64_t parameters, int64_t bytes, bool trained) {
    const auto it = std::find_if(parts_.begin(), parts_.end(), [&](const PlanPart& part) { return part.name == name; });
    PlanPart& part = it != parts_.end() ? *it : parts_.emplace_back(PlanPart{name, 0, 0, trained});
    part.parameters += parameters;
    part.bytes += bytes;
  }

 private:
  std::vector<PlanPart>& parts_;
};

// Bytes that one block keeps for its backward pass, a token: inputs of products, norms, activations, attention.
int64_t kept_a_token(int64_t width, int64_t attention_width, int64_t kv_width, int64_t ffn_width, int64_t ffn_copies,
                     int64_t element) {
  return element * (8 * width + 3 * attention_width + 2 * kv_width + ffn_copies * ffn_width);
}

int64_t activation_bytes(const Dims& dims, const ModelSpec& spec, const PlanLoad& load) {
  const int64_t element = int64_t(at::elementSize(spec.compute_dtype));
  const int64_t tokens = load.micro_batch * std::max<int64_t>(load.longest, 1);
  const TextDims& text = dims.text;
  const int64_t text_layer = tokens * kept_a_token(text.width, text.num_heads * text.head_size,
                                                   text.num_kv_heads * text.head_size, text.ffn_width, 4, element);
  const int64_t text_edge = tokens * text.width * element;
  int64_t total = load.recompute ? text_layer + text.num_layers * text_edge : text.num_layers * text_layer;
  if (dims.vision && load.images_a_row > 0) {
    const VisionDims& vision = *dims.vision;
    const int64_t patches = load.micro_batch * load.images_a_row * vision.patches_a_side() * vision.patches_a_side();
    const int64_t layer = patches * kept_a_token(vision.width, vision.width, vision.width, vision.ffn_width, 3, element);
    const int64_t edge = patches * vision.width * element;
    // A frozen tower keeps nothing; the layer at work is all there is.
    const bool trained = spec.train_all || spec.lora.vision;
    total += !trained || load.recompute ? layer + (trained ? vision.num_layers * edge : 0) : vision.num_layers * layer;
  }
  // The head goes through in chunks of about 64 MiB of logits, twice.
  return total + 2 * (int64_t{64} << 20);
}

}  // namespace

Plan make_plan(const Dims& dims, const ModelSpec& spec, const PlanLoad& load) {
  Plan plan;
  Parts parts(plan.parts);
  const int64_t element = int64_t(at::elementSize(spec.compute_dtype));
  const bool tables_trained = spec.tables != Tables::kFrozen && !spec.train_all;
  const int64_t table_element = int64_t(at::elementSize(spec.table_dtype));
  int64_t trained_bytes = 0;
  const auto train = [&](const std::string& name, int64_t parameters, int64_t bytes_each) {
    parts.add(name, parameters, parameters * bytes_each, true);
    plan.trainable_parameters += parameters;
    trained_bytes += parameters * bytes_each;
  };
  for (const WeightRow& row : weight_table(dims)) {
    const int64_t n = row.num_elements();
    const std::string tower = tower_name(row.tower);
    if (spec.train_all) {
      train(tower + " weights (fp32)", n, 4);
      continue;
    }
    if (row.kind == WeightKind::kTable) {
      const bool untied_here = tables_trained && spec.tables == Tables::kUntied && dims.tied_head;
      if (tables_trained) {
        train("tables", untied_here ? 2 * n : n, table_element);
      } else {
        parts.add("tables (frozen)", n, n * element, false);
      }
      continue;
    }
    const bool quantised =
        spec.quant.nf4 && row.kind == WeightKind::kLinear && (row.tower == Tower::kLanguage || spec.quant.vision);
    if (quantised) {
      parts.add(tower + " linears (NF4)", n, nf4_bytes(n, spec.quant.double_quant), false);
    } else {
      parts.add(tower + (row.kind == WeightKind::kLinear ? " linears" : " norms, biases, embeddings"), n, n * element, false);
    }
    const bool adapted = row.kind == WeightKind::kLinear && spec.lora.rank > 0 &&
                         (row.tower == Tower::kVision ? spec.lora.vision : spec.lora.language);
    if (adapted) {
      plan.lora_modules += 1;
      train(tower + " adapters (fp32)", spec.lora.rank_of(row.tower) * (row.shape[0] + row.shape[1]), 4);
    }
  }
  plan.adapter_bytes = trained_bytes;
  plan.checkpoint_bytes = 3 * trained_bytes;
  parts.add("gradients", 0, trained_bytes, false);
  parts.add("AdamW moments", 0, 2 * trained_bytes, false);
  for (const PlanPart& part : plan.parts) plan.weight_bytes += part.bytes;
  plan.peak_bytes = plan.weight_bytes + activation_bytes(dims, spec, load);
  return plan;
}

}  // namespace gemtune
