#include "model/model.h"

#include "base/error.h"
#include "base/file.h"
#include "model/tensor_file.h"
#include "ops/torch.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <set>

namespace gemtune {
namespace {

class Folder {
 public:
  Folder()
      : path_(fmt::format("{}/gemtune-model-test-{}-{}", std::filesystem::temp_directory_path().string(), getpid(), counter_++)) {
    make_folders(path_);
  }
  ~Folder() { remove_recursively(path_); }
  const std::string& path() const { return path_; }
  void write(const std::string& name, const std::string& content) const {
    write_file_atomically(join_path(path_, name), content);
  }

 private:
  static inline int counter_ = 0;
  std::string path_;
};

const char* kConfig4b =
    R"({"model_type": "gemma3", "mm_tokens_per_image": 256, "text_config": {"hidden_size": 2560, "intermediate_size": 10240,
  "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
  "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14},
  "eos_token_id": [1, 106]})";

const char* kTinyConfig =
    R"({"model_type": "gemma3", "mm_tokens_per_image": 4, "boi_token_index": 5, "eoi_token_index": 6, "image_token_index": 7,
  "text_config": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
  "vocab_size": 96, "sliding_window": 8, "sliding_window_pattern": 3, "query_pre_attn_scalar": 16, "max_position_embeddings": 256},
  "vision_config": {"hidden_size": 64, "image_size": 28, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2, "patch_size": 7}})";

void write_random_weights(const Folder& folder) {
  TensorFileWriter file;
  for (const WeightRow& row : weight_table(read_dims(folder.path()))) file.add(hub_name(row.name, true), random_weight(row, 1));
  file.write(join_path(folder.path(), "model.safetensors"));
}

std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Dims, MissingKeysHaveTheClassDefaults) {
  Folder folder;
  folder.write("config.json", kConfig4b);
  const Dims dims = read_dims(folder.path());
  EXPECT_EQ(dims.text.num_heads, 8);
  EXPECT_EQ(dims.text.num_kv_heads, 4);
  EXPECT_EQ(dims.text.head_size, 256);
  EXPECT_EQ(dims.text.vocabulary, 262208);
  EXPECT_EQ(dims.text.rope_scaling, 8);
  EXPECT_EQ(dims.stop_tokens, (std::vector<int32_t>{1, 106}));
  std::vector<int> global;
  for (size_t i = 0; i < dims.text.is_sliding.size(); ++i) {
    if (!dims.text.is_sliding[i]) global.push_back(int(i));
  }
  EXPECT_EQ(global, (std::vector<int>{5, 11, 17, 23, 29}));
}

TEST(Dims, Transformers5SpellingsAreRead) {
  Folder folder;
  folder.write("config.json",
               R"({"model_type": "gemma3_text", "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"],
    "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}, "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}})");
  const Dims dims = read_dims(folder.path());
  EXPECT_FALSE(dims.vision.has_value());
  EXPECT_EQ(dims.text.rope_scaling, 4);
  EXPECT_EQ(dims.text.rope_theta, 5e5);
  EXPECT_EQ(dims.text.rope_local_theta, 2e4);
  EXPECT_EQ(dims.text.is_sliding, (std::vector<bool>{false, true}));
}

TEST(Dims, AllFaultsAreReportedAtOnce) {
  Folder folder;
  folder.write(
      "config.json",
      R"({"model_type": "gemma3", "mm_tokens_per_image": 200, "text_config": {"num_attention_heads": 3, "num_key_value_heads": 2, "attention_bias": true}})");
  EXPECT_EQ(error_of([&] { read_dims(folder.path()); }),
            folder.path() +
                "/config.json: text_config.num_attention_heads: 3 is no multiple of num_key_value_heads 2, "
                "text_config.attention_bias: expected false, got true: Gemma 3's decoder has no biases, mm_tokens_per_image: 200 "
                "is no square number");
}

TEST(Dims, AnotherModelFamilyIsRefusedByName) {
  Folder folder;
  folder.write("config.json", R"({"model_type": "llama"})");
  EXPECT_EQ(error_of([&] { read_dims(folder.path()); }), folder.path() +
                                                             "/config.json: model_type is \"llama\"; gemtune trains Gemma 3 "
                                                             "(\"gemma3\" with a vision tower, \"gemma3_text\" without)");
}

TEST(Weights, A4bModelHasItsPublishedNumberOfParameters) {
  Folder folder;
  folder.write("config.json", kConfig4b);
  std::map<Tower, int64_t> elements;
  for (const WeightRow& row : weight_table(read_dims(folder.path()))) elements[row.tower] += row.num_elements();
  EXPECT_EQ(elements[Tower::kLanguage], 3880263168);
  EXPECT_EQ(elements[Tower::kVision], 416866032);
  EXPECT_EQ(elements[Tower::kProjector], 2950272);
}

TEST(Weights, EveryPrefixOfTheFieldHasOneCanonicalName) {
  const std::string layer = "layers.3.mlp.up_proj.weight";
  EXPECT_EQ(canonical_name("language_model.model." + layer, true), "model.language_model." + layer);
  EXPECT_EQ(canonical_name("model.language_model." + layer, true), "model.language_model." + layer);
  EXPECT_EQ(canonical_name("model." + layer, false), "model." + layer);
  const std::string vision = "encoder.layers.1.mlp.fc1.bias";
  for (const char* prefix :
       {"vision_tower.vision_model.", "model.vision_tower.vision_model.", "model.vision_tower.", "vision_tower."}) {
    EXPECT_EQ(canonical_name(prefix + vision, true), "model.vision_tower.vision_model." + vision) << prefix;
  }
  EXPECT_EQ(canonical_name("language_model.lm_head.weight", true), "lm_head.weight");
  EXPECT_EQ(canonical_name("transformer.h.0.weight", true), "");
}

TEST(Weights, MissingUnexpectedAndMismatchingTensorsAreListedTogether) {
  Folder folder;
  folder.write("config.json", kTinyConfig);
  TensorFileWriter file;
  for (const WeightRow& row : weight_table(read_dims(folder.path()))) {
    if (row.name == "model.language_model.norm.weight") continue;
    const bool wrong = row.name == "model.language_model.embed_tokens.weight";
    file.add(hub_name(row.name, true), wrong ? at::ones({3, 4}) : random_weight(row, 1));
  }
  file.add("language_model.model.extra.weight", at::ones({1}));
  file.write(join_path(folder.path(), "model.safetensors"));
  const std::string path = folder.path() + "/model.safetensors: ";
  EXPECT_EQ(check_weights(folder.path(), read_dims(folder.path())).faults,
            (std::vector<std::string>{
                path + "language_model.model.embed_tokens.weight: expected [96, 64] from config.json, got [3, 4]",
                folder.path() + ": model.language_model.norm.weight: missing, expected [64]",
                path + "language_model.model.extra.weight: unexpected, no such tensor in a model of config.json's sizes"}));
}

TEST(Masks, FollowTheToyOfTheReference) {
  // Types 0 0 1 1 1 0 0 0, window 4 on sliding layers.
  const Tensor valid = at::ones({1, 8}, at::kBool);
  Tensor group = at::full({1, 8}, -1, at::kInt);
  group.narrow(1, 2, 3).fill_(0);
  const Masks masks = make_masks(valid, group, 8, 4);
  const auto keys = [](const Tensor& mask, int64_t query) {
    std::vector<int64_t> out;
    for (int64_t k = 0; k < mask.size(3); ++k) {
      if (mask[0][0][query][k].item<bool>()) out.push_back(k);
    }
    return out;
  };
  using Keys = std::vector<int64_t>;
  EXPECT_EQ(keys(masks.full, 1), (Keys{0, 1}));
  EXPECT_EQ(keys(masks.full, 2), (Keys{0, 1, 2, 3, 4}));
  EXPECT_EQ(keys(masks.full, 5), (Keys{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(keys(masks.sliding, 3), (Keys{0, 1, 2, 3, 4}));
  EXPECT_EQ(keys(masks.sliding, 4), (Keys{1, 2, 3, 4}));
  EXPECT_EQ(keys(masks.sliding, 5), (Keys{2, 3, 4, 5}));
  EXPECT_EQ(keys(masks.sliding, 7), (Keys{4, 5, 6, 7}));
}

ModelInput tiny_input() {
  ModelInput input;
  input.token_ids_BT = at::randint(10, 90, {2, 12}, at::kLong);
  input.valid_BT = at::ones({2, 12}, at::kBool);
  input.image_group_BT = at::full({2, 12}, -1, at::kInt);
  input.image_group_BT.narrow(1, 3, 4).fill_(0);
  input.token_ids_BT.narrow(1, 3, 4).fill_(7);
  input.pixels_NCHW = at::randn({2, 3, 28, 28});
  return input;
}

ModelSpec tiny_spec() {
  ModelSpec spec;
  spec.lora = {.rank = 4, .dropout_p = 0.25, .language = true, .vision = true};
  spec.quant.vision = true;
  return spec;
}

std::vector<Tensor> gradients_of(const Gemma3& model, const ModelInput& input, bool recompute) {
  for (const Parameter& parameter : model.parameters()) parameter.value.mutable_grad() = Tensor();
  Pass pass;
  pass.mode = Pass::Mode::kTrain;
  pass.recompute_vision = pass.recompute_language = recompute;
  pass.micro = 5;
  const Tensor targets = at::ones({2, 12}, at::kBool);
  model.loss(model.forward(input, pass), find_targets(input.token_ids_BT, targets)).loss_sum.backward();
  std::vector<Tensor> out;
  for (const Parameter& parameter : model.parameters()) out.push_back(parameter.value.grad());
  return out;
}

TEST(Model, RecomputeChangesNoGradientBit) {
  Folder folder;
  folder.write("config.json", kTinyConfig);
  write_random_weights(folder);
  const auto model = Gemma3::load(folder.path(), tiny_spec());
  {
    const at::NoGradGuard no_grad;
    for (const Parameter& parameter : model->parameters()) parameter.value.normal_(0, 0.1);
  }
  const ModelInput input = tiny_input();
  const auto kept = gradients_of(*model, input, false);
  const auto recomputed = gradients_of(*model, input, true);
  ASSERT_EQ(kept.size(), size_t(2 * (2 * 6 + 3 * 7)));
  for (size_t i = 0; i < kept.size(); ++i) {
    EXPECT_GT(kept[i].abs().max().item<double>(), 0) << model->parameters()[i].key;
    EXPECT_TRUE(at::equal(kept[i], recomputed[i])) << model->parameters()[i].key;
  }
}

TEST(Model, CachedDecodingEqualsTheWholeForwardPass) {
  Folder folder;
  folder.write("config.json", kTinyConfig);
  write_random_weights(folder);
  const auto model = Gemma3::load(folder.path(), tiny_spec());
  const ModelInput whole = tiny_input();
  const at::NoGradGuard no_grad;
  const Pass pass;
  const Tensor expected = model->forward(whole, pass);
  KvCache cache;
  ModelInput part = whole;
  part.token_ids_BT = whole.token_ids_BT.narrow(1, 0, 9);
  part.valid_BT = whole.valid_BT.narrow(1, 0, 9);
  part.image_group_BT = whole.image_group_BT.narrow(1, 0, 9);
  model->forward(part, pass, &cache);
  for (int64_t t = 9; t < 12; ++t) {
    part.token_ids_BT = whole.token_ids_BT.narrow(1, t, 1);
    part.valid_BT = whole.valid_BT.narrow(1, 0, t + 1);
    part.image_group_BT = whole.image_group_BT.narrow(1, 0, t + 1);
    part.pixels_NCHW = Tensor();
    const Tensor step = model->forward(part, pass, &cache);
    EXPECT_LT((step.select(1, 0) - expected.select(1, t)).abs().max().item<double>(), 1e-4) << t;
  }
}

TEST(Model, FreshAdaptersAddNothing) {
  Folder folder;
  folder.write("config.json", kTinyConfig);
  write_random_weights(folder);
  ModelSpec bare = tiny_spec();
  bare.lora.language = bare.lora.vision = false;
  const ModelInput input = tiny_input();
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(Gemma3::load(folder.path(), tiny_spec())->forward(input, {}),
                        Gemma3::load(folder.path(), bare)->forward(input, {})));
}

TEST(Adapter, ComesBackFromDiskBitForBit) {
  Folder folder;
  Folder saved;
  folder.write("config.json", kTinyConfig);
  write_random_weights(folder);
  ModelSpec spec = tiny_spec();
  spec.tables = Tables::kUntied;
  const auto model = Gemma3::load(folder.path(), spec);
  {
    const at::NoGradGuard no_grad;
    for (const Parameter& parameter : model->parameters()) parameter.value.normal_(0, 0.1);
  }
  save_adapter(*model, saved.path(), folder.path());
  const AdapterConfig config = read_adapter_config(saved.path());
  EXPECT_EQ(config.lora.rank, 4);
  EXPECT_TRUE(config.lora.language && config.lora.vision);
  EXPECT_EQ(config.tables, Tables::kUntied);
  const auto again = Gemma3::load(folder.path(), spec);
  load_adapter(*again, saved.path());
  const auto before = model->parameters();
  const auto after = again->parameters();
  ASSERT_EQ(before.size(), after.size());
  for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(before[i].value, after[i].value)) << before[i].key;
}

TEST(Adapter, OfAnotherShapeIsRefusedWithBothShapes) {
  Folder folder;
  Folder saved;
  folder.write("config.json", kTinyConfig);
  write_random_weights(folder);
  ModelSpec spec = tiny_spec();
  spec.lora.vision = false;
  save_adapter(*Gemma3::load(folder.path(), spec), saved.path(), folder.path());
  spec.lora.rank = 8;
  const auto other = Gemma3::load(folder.path(), spec);
  const std::string error = error_of([&] { load_adapter(*other, saved.path()); });
  EXPECT_NE(
      error.find(
          "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight: expected shape [8,64], got [4,64]"),
      std::string::npos)
      << error;
}

}  // namespace
}  // namespace gemtune
