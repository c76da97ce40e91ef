#include "train/run_folder.h"

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/text.h"
#include "io/checkpoint.h"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

namespace gemtune {
namespace {

// What a stock processor and generate() look for beside weights.
const std::vector<std::string> kSideFiles = {
    "tokenizer.json",      "tokenizer.model",    "tokenizer_config.json", "special_tokens_map.json",  "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "processor_config.json", "preprocessor_config.json", "generation_config.json"};

std::string sibling(const std::string& run_dir) {
  for (int number = 2;; ++number) {
    const std::string candidate = fmt::format("{}-{}", run_dir, number);
    if (!folder_exists(candidate)) return candidate;
  }
}

void save_trainer_state(const std::string& path, const TrainerState& state) {
  const nlohmann::ordered_json json = {{"format", 1},
                                       {"step", state.step},
                                       {"epoch", state.cursor.epoch},
                                       {"position", state.cursor.position},
                                       {"num_tokens", state.num_tokens},
                                       {"skipped_steps", state.skipped_steps},
                                       {"global_batch", state.global_batch}};
  write_file_atomically(path, json.dump(2) + "\n");
}

}  // namespace

RunPlace find_run_place(const Recipe& recipe, bool fresh) {
  RunPlace place;
  place.run_dir = recipe.output.dir;
  const std::string stored_path = join_path(place.run_dir, "recipe.yaml");
  if (fresh && folder_exists(place.run_dir)) {
    place.run_dir = sibling(place.run_dir);
    return place;
  }
  if (!file_exists(stored_path)) return place;

  RecipeArguments arguments;
  arguments.file = stored_path;
  const Recipe stored = load_recipe(arguments).recipe;
  const auto differences = differences_that_forbid_resume(stored, recipe);
  if (!differences.empty()) {
    throw input_error(
        "{} holds a run with another recipe: {}; go on with the old values, choose another output.dir or add --fresh",
        place.run_dir, join_some(differences));
  }
  CheckpointInfo newest;
  if (find_newest_checkpoint(place.run_dir, &newest, &place.notes)) place.checkpoint = newest.folder;
  const std::string final_dir = join_path(place.run_dir, "final");
  place.has_final = folder_exists(final_dir) && verify_manifest(final_dir).empty();
  return place;
}

void copy_side_files(const std::string& model_folder, const std::string& tokenizer, const std::string& to) {
  for (const std::string& name : kSideFiles) {
    const std::string from = join_path(model_folder, name);
    if (file_exists(from)) write_file_atomically(join_path(to, name), read_file(from));
  }
  if (tokenizer.empty()) return;
  const std::string own = folder_exists(tokenizer) ? join_path(tokenizer, "tokenizer.json") : tokenizer;
  write_file_atomically(join_path(to, "tokenizer.json"), read_file(own));
}

void fill_checkpoint(const std::string& folder, const Gemma3& model, const Optimizer& optimizer, const TrainerState& state,
                     const Recipe& recipe, const std::string& model_folder) {
  if (model.spec().train_all) {
    // fp32 masters, so that a resumed run goes on with the same bits.
    save_model(model, folder, read_file(join_path(model_folder, "config.json")), at::kFloat);
  } else {
    save_adapter(model, folder, recipe.model.path);
  }
  optimizer.save(join_path(folder, "optimizer.safetensors"));
  copy_side_files(model_folder, recipe.model.tokenizer, folder);
  write_file_atomically(join_path(folder, "recipe.yaml"), to_yaml(recipe));
  save_trainer_state(join_path(folder, "trainer_state.json"), state);
}

TrainerState read_trainer_state(const std::string& folder) {
  const std::string path = join_path(folder, "trainer_state.json");
  const Json json = read_json_file(path);
  TrainerState state;
  const auto read = [&](const char* key, int64_t& value) {
    const auto it = json.find(key);
    if (it == json.end() || !it->is_number_integer() || it->get<int64_t>() < 0)
      throw input_error("{}: {} is missing or no count", path, key);
    value = it->get<int64_t>();
  };
  read("step", state.step);
  read("epoch", state.cursor.epoch);
  read("position", state.cursor.position);
  read("num_tokens", state.num_tokens);
  read("skipped_steps", state.skipped_steps);
  read("global_batch", state.global_batch);
  return state;
}

void fill_final(const std::string& folder, const Gemma3& model, const Recipe& recipe, const std::string& model_folder) {
  if (model.spec().train_all) {
    save_model(model, folder, read_file(join_path(model_folder, "config.json")), at::kBFloat16);
  } else {
    save_adapter(model, folder, recipe.model.path);
  }
  copy_side_files(model_folder, recipe.model.tokenizer, folder);
}

}  // namespace gemtune
