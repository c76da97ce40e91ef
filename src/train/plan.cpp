#include "train/plan.h"

#include <c10/core/ScalarType.h>
#include <fmt/core.h>

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

// --- activations ------------------------------------------------------------------------------------------------------------
//
// Counted from what the operations keep (src/ops), in elements a token or patch; D is the stream's width, `ranks` the free space
// that adapters' inputs take behind rows. On a CPU, where the plain forms run, about the same is kept in fp32.

struct BlockBytes {
  int64_t rows = 0;  // tokens or patches of a micro-batch
  int64_t layers = 0;
  int64_t kept = 0;     // a row and layer: everything the backward pass reads
  int64_t edge = 0;     // a row and layer: the block's input alone
  int64_t at_work = 0;  // a row: what the layer at work holds besides in the backward pass
  int64_t passing = 0;  // a row: most that a forward pass without a backward one holds
};

BlockBytes vision_block(const VisionDims& dims, const ModelSpec& spec, const PlanLoad& load) {
  const int64_t element = int64_t(at::elementSize(spec.compute_dtype));
  const int64_t w = dims.width, f = dims.ffn_width;
  const int64_t r = spec.lora.rank_of(Tower::kVision);
  BlockBytes out;
  out.rows = load.micro_batch * load.images_a_row * dims.patches_a_side() * dims.patches_a_side();
  out.layers = dims.num_layers;
  // Norm inputs and outputs 4 w, k v q 3 w, attention's output as it comes and as the product reads it 2 w, fc1 f, gelu f.
  out.kept = element * (9 * w + 2 * f + 6 * r) + 4 * (4 + dims.num_heads);
  out.edge = element * w;
  out.at_work = element * (2 * f + 3 * w);
  out.passing = element * std::max(3 * w + 2 * f, 7 * w);
  return out;
}

BlockBytes language_block(const TextDims& dims, const ModelSpec& spec, const PlanLoad& load) {
  const int64_t element = int64_t(at::elementSize(spec.compute_dtype));
  const int64_t d = dims.width, f = dims.ffn_width;
  const int64_t q = dims.num_heads * dims.head_size, k = dims.num_kv_heads * dims.head_size;
  const int64_t r = spec.lora.rank_of(Tower::kLanguage);
  BlockBytes out;
  out.rows = load.micro_batch * load.longest;
  out.layers = dims.num_layers;
  // Streams 2 d, norms' outputs 2 d, inner norms' inputs 2 d; q k v, rotated q, k and v a query head each, attention's output as
  // it comes and as the product reads it; gate, up and their product.
  out.kept = element * (6 * d + 6 * q + 2 * k + 3 * f + 7 * r) + 4 * (6 + dims.num_heads);
  out.edge = element * d;
  out.at_work = element * (4 * f + 3 * d);
  out.passing = element * (3 * d + 3 * f);
  return out;
}

int64_t kept_bytes(const BlockBytes& block, bool recompute) {
  return block.rows * (recompute ? block.layers * block.edge + block.kept : block.layers * block.kept);
}

constexpr int64_t kHeadChunk = int64_t{2} << 30;  // bf16 logits at once (linear_cross_entropy.cpp)
constexpr int64_t kHeadChunkCpu = int64_t{64} << 20;

bool vision_is_trained(const ModelSpec& spec) {
  return spec.train_all || (spec.lora.rank > 0 && spec.lora.vision);
}

struct Activations {
  int64_t kept = 0;      // of both towers, when the backward pass begins
  int64_t backward = 0;  // the most that the layer at work adds
  int64_t head = 0;      // logits of a chunk, gradient of the hidden rows
  int64_t vision = 0;    // a frozen tower's forward pass, before anything is kept
};

Activations activations(const Dims& dims, const ModelSpec& spec, const PlanLoad& load, const MemoryChoice& choice) {
  Activations out;
  const BlockBytes language = language_block(dims.text, spec, load);
  out.kept = kept_bytes(language, choice.recompute_language);
  out.backward = language.rows * language.at_work;
  if (dims.vision && load.images_a_row > 0 && !load.cached) {
    const BlockBytes vision = vision_block(*dims.vision, spec, load);
    if (vision_is_trained(spec)) {
      out.kept += kept_bytes(vision, choice.recompute_vision);
      out.backward = std::max(out.backward, vision.rows * vision.at_work);
    } else {
      out.vision = vision.rows * vision.passing;
    }
  }
  const int64_t targets = load.micro_batch * (load.targets > 0 ? load.targets : load.longest);
  const bool on_cpu = spec.device.is_cpu();
  out.head = std::min<int64_t>(on_cpu ? 3 * kHeadChunkCpu : kHeadChunk,
                               targets * dims.text.vocabulary * int64_t(at::elementSize(spec.compute_dtype))) +
             2 * targets * dims.text.width * int64_t(at::elementSize(spec.compute_dtype));
  return out;
}

// --- weights ----------------------------------------------------------------------------------------------------------------

// What the plan adds up while it goes through the weight table.
struct Sums {
  int64_t trained_bytes = 0;
  int64_t table_bytes = 0;       // one trained table
  int64_t num_tables = 0;        // trained ones
  int64_t expanded_bytes = 0;    // NF4 weights in the compute dtype
  int64_t largest_expanded = 0;  // of the weights that one product multiplies with
};

}  // namespace

std::string MemoryChoice::describe() const {
  const std::string again = recompute_vision && recompute_language ? "blocks of both towers"
                            : recompute_vision                     ? "vision blocks"
                            : recompute_language                   ? "language blocks"
                                                                   : "nothing";
  return fmt::format("4-bit weights {}; {} recomputed", keep_expanded ? "kept expanded" : "expanded for each product", again);
}

Plan make_plan(const Dims& dims, const ModelSpec& spec, const PlanLoad& load, const MemoryChoice& choice) {
  Plan plan;
  Parts parts(plan.parts);
  Sums sums;
  const int64_t element = int64_t(at::elementSize(spec.compute_dtype));
  const bool tables_trained = spec.tables != Tables::kFrozen && !spec.train_all;
  const int64_t table_element = int64_t(at::elementSize(spec.table_dtype));
  const auto train = [&](const std::string& name, int64_t parameters, int64_t bytes_each) {
    parts.add(name, parameters, parameters * bytes_each, true);
    plan.trainable_parameters += parameters;
    sums.trained_bytes += parameters * bytes_each;
  };
  for (const WeightRow& row : weight_table(dims)) {
    const int64_t n = row.num_elements();
    const std::string tower = tower_name(row.tower);
    if (spec.train_all) {
      train(tower + " weights (fp32)", n, 4);
      if (row.kind == WeightKind::kTable) sums.table_bytes = 4 * n, sums.num_tables += 1;
      continue;
    }
    if (row.kind == WeightKind::kTable) {
      const bool untied_here = tables_trained && spec.tables == Tables::kUntied && dims.tied_head;
      if (tables_trained) {
        train("tables", untied_here ? 2 * n : n, table_element);
        sums.table_bytes = n * table_element;
        sums.num_tables += untied_here ? 2 : 1;
      } else {
        parts.add("tables (frozen)", n, n * element, false);
      }
      continue;
    }
    const bool quantised =
        spec.quant.nf4 && row.kind == WeightKind::kLinear && (row.tower == Tower::kLanguage || spec.quant.vision);
    const bool adapted = row.kind == WeightKind::kLinear && spec.lora.rank > 0 &&
                         (row.tower == Tower::kVision ? spec.lora.vision : spec.lora.language);
    const int64_t rank = adapted ? spec.lora.rank_of(row.tower) : 0;
    if (quantised) {
      parts.add(tower + " linears (NF4)", n, nf4_bytes(n, spec.quant.double_quant), false);
      sums.expanded_bytes += n * element;
      // gate and up lie below each other, and their adapters' B beside them.
      sums.largest_expanded = std::max(sums.largest_expanded, 2 * row.shape[0] * (row.shape[1] + 2 * rank) * element);
      if (choice.keep_expanded) parts.add(tower + " linears (expanded)", 0, n * element, false);
    } else {
      parts.add(tower + (row.kind == WeightKind::kLinear ? " linears" : " norms, biases, embeddings"), n, n * element, false);
    }
    if (adapted) {
      plan.lora_modules += 1;
      train(tower + " adapters (fp32)", rank * (row.shape[0] + row.shape[1]), 4);
    }
  }
  plan.adapter_bytes = sums.trained_bytes;
  plan.checkpoint_bytes = 3 * sums.trained_bytes;
  parts.add("gradients", 0, sums.trained_bytes, false);
  parts.add("AdamW moments", 0, 2 * sums.trained_bytes, false);
  for (const PlanPart& part : plan.parts) plan.weight_bytes += part.bytes;

  // A micro-batch's table gradients are added to those already there, so one more is held for a moment; in a step's first
  // micro-batch there are none yet: the head's appears with it, the embedding's when all activations are gone.
  const Activations work = activations(dims, spec, load, choice);
  plan.activation_bytes = work.kept;
  const int64_t tables = sums.num_tables * sums.table_bytes;
  const int64_t expansion = choice.keep_expanded ? 0 : sums.largest_expanded;
  const bool later_micro_batches = load.accumulation > 1;
  const int64_t gradients_at_head = (later_micro_batches ? tables : 0) + std::min(tables, sums.table_bytes);
  const int64_t gradients_at_end = tables + (later_micro_batches ? std::min(tables, sums.table_bytes) : 0);
  const int64_t without_table_gradients = plan.weight_bytes - tables;
  plan.peak_bytes =
      without_table_gradients +
      std::max({work.kept + work.head + gradients_at_head, work.kept + work.backward + expansion + gradients_at_head,
                work.vision + expansion + (later_micro_batches ? tables : 0), gradients_at_end});
  return plan;
}

double step_seconds(const Dims& dims, const ModelSpec& spec, const PlanLoad& load, const MemoryChoice& choice,
                    const GpuRates& rates) {
  // Shares of the rate of large products that a step reaches on an H200, and its time for element-wise work and adapters by the
  // bytes that blocks keep (docs/performance.md).
  constexpr double kProducts = 0.88, kVisionAttention = 0.44, kSecondsAByteKept = 2.7e-12 * 4.27, kLaunches = 0.012;
  const bool vision_trained = vision_is_trained(spec);
  const auto again = [](bool trained, bool recompute) { return !trained ? 1.0 : recompute ? 3.0 : 2.0; };
  double products = 0, attention = 0, bytes = 0;

  const BlockBytes language = language_block(dims.text, spec, load);
  double language_weights = 0, vision_weights = 0, expanded = 0;
  for (const WeightRow& row : weight_table(dims)) {
    if (row.kind != WeightKind::kLinear) continue;
    (row.tower == Tower::kVision ? vision_weights : language_weights) += double(row.num_elements());
    if (spec.quant.nf4 && (row.tower == Tower::kLanguage || spec.quant.vision)) expanded += double(row.num_elements());
  }
  const double language_passes = again(true, choice.recompute_language);
  products += 2 * language_weights * double(language.rows) * (language_passes + (spec.train_all ? 1 : 0));
  bytes += double(language.rows * language.layers * language.kept) * (language_passes / 2);
  if (dims.vision && load.images_a_row > 0 && !load.cached) {
    const BlockBytes vision = vision_block(*dims.vision, spec, load);
    const double passes = again(vision_trained, choice.recompute_vision);
    const double patches = double(dims.vision->patches_a_side() * dims.vision->patches_a_side());
    products += 2 * vision_weights * double(vision.rows) * (passes + (spec.train_all ? 1 : 0));
    // The backward pass of attention is two and a half forward ones.
    attention += 4 * patches * double(vision.rows) * double(dims.vision->width * vision.layers) *
                 (!vision_trained           ? 1
                  : choice.recompute_vision ? 4.5
                                            : 3.5);
    bytes += double(vision.rows * vision.layers * vision.kept) * (passes / 2);
  }
  const double targets = double(load.micro_batch * (load.targets > 0 ? load.targets : load.longest));
  const bool head_trained = spec.train_all || spec.tables != Tables::kFrozen;
  products += 2 * double(dims.text.vocabulary * dims.text.width) * targets * (head_trained ? 3 : 2);
  // Expanding writes bf16 and reads half a byte; every pass over the weights needs it.
  const double expansions = choice.keep_expanded ? 0 : expanded * 2.5 * language_passes;

  const double rate = rates.bf16_tflops * 1e12, memory = rates.memory_tbps * 1e12;
  const double micro = products / (kProducts * rate) + attention / (kVisionAttention * rate) +
                       bytes * kSecondsAByteKept / rates.memory_tbps + expansions / memory + kLaunches;
  // AdamW reads weight, gradient and moments and writes three of them; the norm reads the gradient once more.
  const double update = 8.0 * double(make_plan(dims, spec, load, choice).adapter_bytes) / memory;
  return double(load.accumulation) * micro + update;
}

MemoryChoice choose_memory(const Dims& dims, const ModelSpec& spec, const PlanLoad& load, RecomputePolicy policy,
                           int64_t budget_bytes) {
  MemoryChoice best, leanest;
  double best_seconds = 0;
  int64_t least_bytes = 0;
  for (const bool keep_expanded : {true, false}) {
    for (const bool recompute_vision : {false, true}) {
      for (const bool recompute_language : {false, true}) {
        if (policy == RecomputePolicy::kAlways && !(recompute_vision && recompute_language)) continue;
        if (policy == RecomputePolicy::kNever && (recompute_vision || recompute_language)) continue;
        const MemoryChoice choice = {keep_expanded, recompute_vision, recompute_language};
        const int64_t bytes = make_plan(dims, spec, load, choice).peak_bytes;
        const double seconds = step_seconds(dims, spec, load, choice, {});
        if (least_bytes == 0 || bytes < least_bytes) {
          least_bytes = bytes;
          leanest = choice;
        }
        if (bytes <= budget_bytes && (best_seconds == 0 || seconds < best_seconds)) {
          best_seconds = seconds;
          best = choice;
        }
      }
    }
  }
  return best_seconds > 0 ? best : leanest;
}

}  // namespace gemtune
