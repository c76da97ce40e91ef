// THE map of the model: one tower a file, names as in transformers' Gemma 3, sizes from config.json alone.
//
// Shape letters, used as suffixes of tensor names here and in ops/:
//   B batch (rows)      T tokens           S source tokens (keys) or soft tokens an image
//   D text width        H query heads      K key-value heads    E head size     F feed-forward width
//   V vocabulary        N images           P patches an image   W vision width  R adapter rank    L layers
//   I, O: a linear layer's inputs and outputs
//
// The way of the data: pixels_NCHW → Siglip → patches_NPW → pooled_NSW → projector → soft_NSD; token ids → embedding · √D (text
// rows only) → soft rows spliced in → Decoder → hidden_BTD → head. No ranks, no recipe, no data set in this layer.
#pragma once

#include "io/safetensors.h"
#include "ops/ops.h"

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gemtune {

// --- sizes (dims.cpp) ---------------------------------------------------------------------------------------------------

struct VisionDims {
  int64_t width = 1152;
  int64_t ffn_width = 4304;
  int64_t num_layers = 27;
  int64_t num_heads = 16;
  int64_t image_size = 896;
  int64_t patch_size = 14;
  double layer_norm_eps = 1e-6;
  int64_t head_size() const { return width / num_heads; }
  int64_t patches_a_side() const { return image_size / patch_size; }
};

struct TextDims {
  int64_t width = 2304;
  int64_t ffn_width = 9216;
  int64_t num_layers = 26;
  int64_t num_heads = 8;
  int64_t num_kv_heads = 4;
  int64_t head_size = 256;
  int64_t vocabulary = 262208;
  int64_t sliding_window = 4096;
  int64_t max_positions = 131072;
  double query_pre_attn_scalar = 256;
  double rms_norm_eps = 1e-6;
  double rope_theta = 1e6;         // global layers
  double rope_local_theta = 1e4;   // sliding layers
  double rope_scaling = 1;         // global layers: frequencies are divided by it
  double final_logit_softcap = 0;  // 0 = none; the vision-language class ignores it, as the reference does
  int64_t pad_token = 0;
  std::vector<bool> is_sliding;  // one a layer
};

struct Dims {
  std::optional<VisionDims> vision;  // absent: a text-only model (270M, 1B)
  TextDims text;
  int64_t tokens_per_image = 256;
  int32_t start_of_image = 255999;
  int32_t end_of_image = 256000;
  int32_t image_token = 262144;
  bool tied_head = true;
  std::vector<int32_t> stop_tokens;  // eos_token_id: what generation stops at
  int64_t pooled_side() const;       // √tokens_per_image
};

// Reads FOLDER/config.json of Gemma3ForConditionalGeneration or Gemma3ForCausalLM, in the key spellings of transformers
// 4.50 to 5.x; a missing key has the class's default. Throws Error(kInput) listing everything that does not fit at once.
Dims read_dims(const std::string& folder);

// --- weights (weights.cpp) ------------------------------------------------------------------------------------------------

enum class Tower { kVision, kProjector, kLanguage };
enum class WeightKind { kLinear, kBias, kNorm, kTable, kConv, kPosition, kProjection };

// One row a tensor: the canonical name is the module path of transformers 4.52–5.5.
struct WeightRow {
  std::string name;
  std::vector<int64_t> shape;
  WeightKind kind;
  Tower tower;
  int64_t num_elements() const;
};
// Every tensor a model of these sizes has, in the reference's named_parameters order (vision, projector, language).
std::vector<WeightRow> weight_table(const Dims& dims);

// Any prefix that transformers ever wrote → the canonical name ("" = not a weight of this model).
std::string canonical_name(const std::string& name, bool has_vision);
// The spelling of the released model folders ("language_model.model.…"), for folders we write.
std::string hub_name(const std::string& canonical, bool has_vision);

// What a folder's safetensors headers hold against the table; nothing is read but headers.
struct FolderCheck {
  bool weights_found = false;
  std::vector<std::string> faults;  // missing, unexpected, wrong shape: each "FILE: TENSOR: expected …, got …"
};
FolderCheck check_weights(const std::string& folder, const Dims& dims);
// SHA-256 of names and bytes of the vision tower's tensors, as the folder has them.
std::string vision_digest(const std::string& folder);

// --- adapters and what is trained --------------------------------------------------------------------------------------------

struct LoraSpec {
  int64_t rank = 16;        // 0 = no adapters
  int64_t vision_rank = 0;  // 0 = rank
  double alpha = 16;
  double dropout_p = 0.05;
  bool rslora = false;
  bool language = true;
  bool vision = false;
  int64_t rank_of(Tower tower) const { return tower == Tower::kVision && vision_rank > 0 ? vision_rank : rank; }
  double scale_of(Tower tower) const;
};

struct QuantSpec {
  bool nf4 = true;
  bool double_quant = true;
  bool vision = false;  // the vision tower's linears too
};

enum class Tables { kFrozen, kTied, kUntied };

struct ModelSpec {
  LoraSpec lora;
  QuantSpec quant;
  Tables tables = Tables::kFrozen;
  bool train_all = false;                      // full fine-tuning: every weight, fp32 masters
  at::ScalarType table_dtype = at::kBFloat16;  // trained tables
  at::ScalarType compute_dtype = at::kFloat;
  at::Device device = at::kCPU;
  std::optional<bool> keep_expanded;  // NF4 weights also in the compute dtype; unset: when that takes ≤ ¼ of the free memory
  uint64_t seed = 42;                 // adapter initialisation
};

enum class TrainedKind { kLanguageLora, kVisionLora, kTable, kWeight };

// A trained tensor. `key` is its name in PEFT's adapter file (adapters, tables) or in the model folder (full fine-tuning).
struct Parameter {
  std::string key;
  Tensor value;
  TrainedKind kind;
  bool decays = true;  // norms and biases do not
};

// --- the parts ---------------------------------------------------------------------------------------------------------------

// Called with every intermediate of interest when set: "vision_layer", "decoder_layer", … with the layer's number, or −1.
using Tap = std::function<void(std::string_view name, int64_t layer, const Tensor& value)>;

// What a forward pass is for.
struct Pass {
  enum class Mode { kTrain, kInfer } mode = Mode::kInfer;  // kTrain: adapters' dropout acts
  // Run the tower's blocks again in the backward pass instead of keeping their activations.
  bool recompute_vision = false;
  bool recompute_language = false;
  uint64_t dropout_seed = 0;
  uint64_t micro = 0;  // global number of the micro-batch
  const Tap* tap = nullptr;
  void show(std::string_view name, int64_t layer, const Tensor& value) const {
    if (tap != nullptr) (*tap)(name, layer, value);
  }
};

struct Adapter {
  Tensor a_RI;
  Tensor b_OR;
  double scale = 1;
  double dropout_p = 0;
  uint32_t module = 0;
};

// A linear layer of either tower: frozen (dense or NF4) or trained weight, optional bias, optional adapter.
struct Linear {
  std::string name;  // module path, e.g. "model.language_model.layers.0.self_attn.q_proj"
  LinearWeight weight;
  Tensor bias_O;
  std::optional<Adapter> adapter;
};

// Linear layers that read one input, so that it is read once: q, k, v; gate, up; or one alone.
struct Linears {
  std::vector<Linear> members;
  PackedLinears packed;  // on a GPU
  // x […, I] → one […, O] a member.
  std::vector<Tensor> operator()(const Tensor& x, const Pass& pass) const;
  // Of a single member; `residual` (or undefined) is added.
  Tensor one(const Tensor& x, const Pass& pass, const Tensor& residual = Tensor()) const;
  // Free space that an input made for this layer should have behind its rows (ops.h).
  int64_t room() const;
  // Adds the tensors that need gradients.
  void append_trained(std::vector<Tensor>& trained) const;

 private:
  std::vector<LinearArguments> arguments(const Pass& pass) const;
};

struct LayerNorm {
  Tensor weight;
  Tensor bias;
};

// SigLIP vision tower. Source: transformers SiglipVisionTransformer (without its pooling head).
class Siglip {
 public:
  struct Layer {
    LayerNorm layer_norm1, layer_norm2;
    Linears kvq_proj, out_proj, fc1, fc2;  // k, v, q: the reference's order
  };
  // pixels float [N, 3, image, image] in [−1, 1] → [N, P, W], after post_layernorm.
  Tensor forward(const Tensor& pixels_NCHW, const Pass& pass) const;

  VisionDims dims;
  Tensor patch_weight_W3pp, patch_bias_W, position_PW;
  std::vector<Layer> layers;
  LayerNorm post_layernorm;
};

// 4 × 4 average pooling, norm, projection into the language model's width. Source: transformers Gemma3MultiModalProjector.
struct Projector {
  Tensor pool(const Tensor& patches_NPW) const;                      // → [N, S, W]
  Tensor forward(const Tensor& pooled_NSW, const Pass& pass) const;  // → [N, S, D]
  int64_t patches_a_side = 64;
  int64_t pooled_side = 16;
  double eps = 1e-6;
  Tensor mm_soft_emb_norm_W;
  Tensor mm_input_projection_WD;
};

// Keys and values of earlier tokens, one pair a layer: [B, K, S, E].
struct KvCache {
  std::vector<Tensor> keys, values;
  int64_t length() const { return keys.empty() || !keys[0].defined() ? 0 : keys[0].size(2); }
};

// Where each query may look. bool [B, 1, T, S], or attention_mask()'s form of it.
struct Masks {
  Tensor full;
  Tensor sliding;
};
// From validity (bool [B, S]) and image numbers (int32 [B, S], −1 outside images): causal, two-way inside each image,
// sliding layers see `window` tokens back including themselves; a query always sees itself. The queries are the last
// `num_queries` positions. Source: semantics of transformers ≥ 4.55 (group ids, not distances).
Masks make_masks(const Tensor& valid_BS, const Tensor& image_group_BS, int64_t num_queries, int64_t window);

// Gemma 3 decoder. Source: transformers Gemma3TextModel.
class Decoder {
 public:
  struct Layer {
    Tensor input_layernorm, post_attention_layernorm, pre_feedforward_layernorm, post_feedforward_layernorm;
    Tensor q_norm, k_norm;
    Linears qkv_proj, o_proj, gate_up_proj, down_proj;
    bool is_sliding = true;
  };
  // hidden [B, T, D] (embedded, spliced) → [B, T, D] after the final norm. `cache` may be null; it is extended otherwise.
  Tensor forward(const Tensor& hidden_BTD, const Masks& masks, int64_t first_position, KvCache* cache, const Pass& pass) const;

  TextDims dims;
  std::vector<Layer> layers;
  Tensor norm;
};

struct ModelInput {
  Tensor token_ids_BT;    // int64
  Tensor valid_BT;        // bool
  Tensor image_group_BT;  // int32, −1 outside images
  Tensor pixels_NCHW;     // uint8 or float in [−1, 1]; undefined without images
  Tensor pooled_NSW;      // instead of pixels: what pooled_patches() made of them
};

// Where loss is: position t of a row predicts token t + 1.
struct Targets {
  Tensor position_N;  // int64, into rows of B · T
  Tensor token_N;     // int64
  Targets to(at::Device device) const;
};
// Throws Error(kInput) unless the images' features fit the batch's places for them.
void require_places(int64_t num_places, int64_t num_features);
// target_mask bool [B, T], unshifted. On CPU tensors it costs a GPU nothing.
Targets find_targets(const Tensor& token_ids_BT, const Tensor& target_mask_BT);

class Gemma3 {
 public:
  // Reads the folder's weights, quantises, attaches fresh adapters (A uniform in ±1 ÷ √in, B zero, from the seed).
  // Throws Error(kInput) listing every missing, unexpected or mismatching tensor.
  static std::unique_ptr<Gemma3> load(const std::string& folder, const ModelSpec& spec);

  // → hidden [B, T, D] after the final norm. With a cache: token_ids are the new tokens, valid and image_group cover all
  // tokens so far, images belong to the new ones.
  Tensor forward(const ModelInput& input, const Pass& pass, KvCache* cache = nullptr) const;
  // What the vision tower makes of images, pooled to their soft tokens: [N, S, W].
  Tensor pooled_patches(const Tensor& pixels_NCHW, const Pass& pass) const;
  // Whether pooled_patches() is a function of the pixels alone: there is a vision tower and nothing in it is trained.
  bool vision_is_frozen() const;
  // hidden […, D] → fp32 logits […, V] (soft cap applied).
  Tensor logits(const Tensor& hidden) const;
  // Next-token loss over the targets.
  CrossEntropySum loss(const Tensor& hidden_BTD, const Targets& targets) const;

  // Trained tensors in the reference's named_parameters order.
  std::vector<Parameter> parameters() const;
  // All weights under canonical names as they stand (dense; NF4 expanded), for saving and merging.
  std::vector<std::pair<std::string, Tensor>> weights() const;
  // All linear layers in the reference's order.
  std::vector<const Linear*> linears() const;

  const Dims& dims() const { return dims_; }
  const ModelSpec& spec() const { return spec_; }

 private:
  friend class ModelBuilder;
  Tensor embed(const Tensor& token_ids_BT) const;
  // Layers in the reference's order, first to last.
  std::vector<const Linears*> linears_of(Tower tower) const;

  Dims dims_;
  ModelSpec spec_;
  std::optional<Siglip> vision_tower_;
  Projector projector_;
  Decoder decoder_;
  Tensor embed_tokens_VD_;  // frozen, trained (tied or its own copy)
  Tensor lm_head_VD_;       // same tensor as embed_tokens_VD_ unless untied
  double embed_scale_ = 1;
};

// Runs `block` without keeping its intermediates and again in the backward pass. `trained`: the tensors inside that need
// gradients. Gradients equal those without recompute bit for bit.
Tensor recompute(const std::function<Tensor(const Tensor&)>& block, const Tensor& x, const std::vector<Tensor>& trained);

// --- adapters on disk (adapter.cpp) -----------------------------------------------------------------------------------------

// adapter_model.safetensors and adapter_config.json in PEFT 0.17's form. `base` is written as base_model_name_or_path.
void save_adapter(const Gemma3& model, const std::string& folder, const std::string& base);
// Loads an adapter folder of any prefix spelling into the model's adapters and tables. Throws Error(kInput) listing what is
// missing, unexpected or of another shape.
void load_adapter(Gemma3& model, const std::string& folder);
// What an adapter folder's config asks for, so that a model can be built to take it. Unsupported settings are refused by name.
struct AdapterConfig {
  LoraSpec lora;
  Tables tables = Tables::kFrozen;
  std::string base;
};
AdapterConfig read_adapter_config(const std::string& folder);

// fp32 numbers to begin a weight with: normal with standard deviation 0.02 from (seed, name), norms at rest, biases zero.
Tensor random_weight(const WeightRow& row, uint64_t seed);

// model.safetensors in the released spelling and config.json's text, in `dtype`.
void save_model(const Gemma3& model, const std::string& folder, const std::string& config_json, at::ScalarType dtype);

}  // namespace gemtune
