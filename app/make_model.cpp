#include "app/commands.h"
#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/text.h"
#include "model/model.h"
#include "model/tensor_file.h"
#include "train/run_folder.h"

#include <ATen/Parallel.h>
#include <nlohmann/json.hpp>

namespace gemtune {
namespace {

constexpr int64_t kShardBytes = int64_t{4} << 30;

struct TextShape {
  const char* name;
  int hidden, intermediate, layers, heads, kv_heads, head_dim;
  double query_pre_attn_scalar;
  int sliding_window, max_positions, vocabulary;
  double rope_factor;
  bool has_vision;
};
// Source: the released config.json files and google-deepmind/gemma.
constexpr TextShape kShapes[] = {
    {"tiny", 128, 256, 6, 4, 2, 32, 32, 128, 2048, 262208, 8, true},
    {"270m", 640, 2048, 18, 4, 1, 256, 256, 512, 32768, 262144, 1, false},
    {"1b", 1152, 6912, 26, 4, 1, 256, 256, 512, 32768, 262144, 1, false},
    {"4b", 2560, 10240, 34, 8, 4, 256, 256, 1024, 131072, 262208, 8, true},
    {"12b", 3840, 15360, 48, 16, 8, 256, 256, 1024, 131072, 262208, 8, true},
    {"27b", 5376, 21504, 62, 32, 16, 128, 168, 1024, 131072, 262208, 8, true},
};

nlohmann::ordered_json text_config(const TextShape& shape) {
  nlohmann::ordered_json text = {{"model_type", "gemma3_text"},
                                 {"hidden_size", shape.hidden},
                                 {"intermediate_size", shape.intermediate},
                                 {"num_hidden_layers", shape.layers},
                                 {"num_attention_heads", shape.heads},
                                 {"num_key_value_heads", shape.kv_heads},
                                 {"head_dim", shape.head_dim},
                                 {"query_pre_attn_scalar", shape.query_pre_attn_scalar},
                                 {"sliding_window", shape.sliding_window},
                                 {"sliding_window_pattern", 6},
                                 {"max_position_embeddings", shape.max_positions},
                                 {"vocab_size", shape.vocabulary},
                                 {"rope_theta", 1e6},
                                 {"rope_local_base_freq", 1e4},
                                 {"rms_norm_eps", 1e-6},
                                 {"hidden_activation", "gelu_pytorch_tanh"},
                                 {"attention_bias", false},
                                 {"attention_dropout", 0.0}};
  if (shape.rope_factor != 1) text["rope_scaling"] = {{"rope_type", "linear"}, {"factor", shape.rope_factor}};
  return text;
}

std::string config_for(const TextShape& shape) {
  nlohmann::ordered_json config;
  if (!shape.has_vision) {
    config = text_config(shape);
    config["architectures"] = {"Gemma3ForCausalLM"};
  } else {
    const bool tiny = std::string_view(shape.name) == "tiny";
    config = {{"architectures", {"Gemma3ForConditionalGeneration"}},
              {"model_type", "gemma3"},
              {"mm_tokens_per_image", tiny ? 16 : 256},
              {"boi_token_index", 255999},
              {"eoi_token_index", 256000},
              {"image_token_index", 262144},
              {"text_config", text_config(shape)},
              {"vision_config",
               {{"model_type", "siglip_vision_model"},
                {"hidden_size", tiny ? 64 : 1152},
                {"intermediate_size", tiny ? 128 : 4304},
                {"num_hidden_layers", tiny ? 2 : 27},
                {"num_attention_heads", tiny ? 2 : 16},
                {"image_size", tiny ? 112 : 896},
                {"patch_size", 14},
                {"hidden_act", "gelu_pytorch_tanh"},
                {"vision_use_head", false},
                {"layer_norm_eps", 1e-6}}}};
  }
  config["bos_token_id"] = 2;
  config["eos_token_id"] = {1, 106};
  config["pad_token_id"] = 0;
  config["initializer_range"] = 0.02;
  config["tie_word_embeddings"] = true;
  config["torch_dtype"] = "bfloat16";
  return config.dump(2) + "\n";
}

std::string config_like(const std::string& like) {
  std::vector<std::string> names;
  for (const TextShape& shape : kShapes) {
    if (like == shape.name) return config_for(shape);
    names.push_back(shape.name);
  }
  if (folder_exists(like)) return read_file(join_path(like, "config.json"));
  throw input_error("--like {}: neither one of {} nor a folder with a config.json", like, join_some(names));
}

// Shards of at most kShardBytes, made one tensor at a time; the index last.
void write_weights(const std::string& folder, const Dims& dims, uint64_t seed) {
  const auto rows = weight_table(dims);
  std::vector<std::vector<const WeightRow*>> shards(1);
  int64_t shard_bytes = 0;
  int64_t total_bytes = 0;
  for (const WeightRow& row : rows) {
    const int64_t bytes = row.num_elements() * 2;
    if (shard_bytes + bytes > kShardBytes && !shards.back().empty()) {
      shards.emplace_back();
      shard_bytes = 0;
    }
    shards.back().push_back(&row);
    shard_bytes += bytes;
    total_bytes += bytes;
  }
  nlohmann::ordered_json map;
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string name =
        shards.size() == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    TensorFileWriter file;
    // Each tensor has a stream of its own, so they can be drawn side by side.
    std::vector<Tensor> drawn(shards[i].size());
    at::parallel_for(0, int64_t(drawn.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) drawn[size_t(j)] = random_weight(*shards[i][size_t(j)], seed).to(at::kBFloat16);
    });
    for (size_t j = 0; j < drawn.size(); ++j) {
      const std::string tensor = hub_name(shards[i][j]->name, dims.vision.has_value());
      file.add(tensor, drawn[j]);
      map[tensor] = name;
    }
    file.write(join_path(folder, name));
    log_info("{}", name);
  }
  if (shards.size() == 1) return;
  const nlohmann::ordered_json index = {{"metadata", {{"total_size", total_bytes}}}, {"weight_map", map}};
  write_file_atomically(join_path(folder, "model.safetensors.index.json"), index.dump(2) + "\n");
}

}  // namespace

int run_make_model(const MakeModelCommand& command) {
  const std::string config = config_like(command.like);
  make_folders(command.out);
  write_file_atomically(join_path(command.out, "config.json"), config);
  const Dims dims = read_dims(command.out);
  int64_t elements = 0;
  for (const WeightRow& row : weight_table(dims)) elements += row.num_elements();
  if (free_bytes(command.out) < 2 * elements) {
    throw environment_error("{}: {} of weights, {} free", command.out, human_bytes(2 * elements),
                            human_bytes(free_bytes(command.out)));
  }
  write_weights(command.out, dims, command.seed);
  if (!command.tokenizer.empty()) copy_side_files(command.tokenizer, "", command.out);
  log_info("{}: {} random parameters ({} in bf16)", command.out, elements, human_bytes(2 * elements));
  return 0;
}

}  // namespace gemtune
