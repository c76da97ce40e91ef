#include "app/commands.h"
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/text.h"
#include "train/checked_data.h"
#include "train/evaluate.h"
#include "train/specs.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>

namespace gemtune {
namespace {

struct Scores {
  LossScores loss;
  TextScores text;
};

Scores score(const Gemma3& model, const HeldOut& held_out, const Recipe& recipe, const std::string& what) {
  log_info("scoring {} on {} held-out rows", what, held_out.rows.size());
  Scores scores;
  scores.loss = evaluate_loss(model, held_out);
  scores.text = evaluate_text(model, held_out, recipe.eval.max_new_tokens);
  return scores;
}

nlohmann::ordered_json to_json(const Scores& s) {
  return {{"loss", s.loss.loss},
          {"perplexity", s.loss.perplexity()},
          {"token_accuracy", s.loss.token_accuracy},
          {"exact_match", s.text.exact_match},
          {"rouge_l", s.text.rouge_l},
          {"chrf", s.text.chrf},
          {"num_eval_rows", s.text.num_eval_rows}};
}

// RUN_DIR/samples: the first held-out rows with their pictures and answers, for the report.
nlohmann::ordered_json write_samples(const std::string& run_dir, const HeldOut& held_out, const Scores* before,
                                     const Scores& after, int count) {
  nlohmann::ordered_json samples = nlohmann::ordered_json::array();
  const std::string folder = join_path(run_dir, "samples");
  make_folders(folder);
  for (size_t i = 0; i < std::min(size_t(count), after.text.answers.size()); ++i) {
    const Answer& answer = after.text.answers[i];
    nlohmann::ordered_json sample = {{"row", answer.row}, {"prompt", answer.prompt}, {"expected", answer.expected}};
    if (before != nullptr) sample["before"] = before->text.answers[i].generated;
    sample["after"] = answer.generated;
    sample["pictures"] = nlohmann::ordered_json::array();
    const Row row = held_out.dataset.row(answer.row);
    for (size_t k = 0; k < row.images.size(); ++k) {
      const std::string name = fmt::format("row-{}-image-{}.png", answer.row, k);
      write_file_atomically(join_path(folder, name),
                            encode_png(decode_image(read_image_bytes(row.images[k]), held_out.image_options, row.where)));
      sample["pictures"].push_back(name);
    }
    samples.push_back(sample);
  }
  write_file_atomically(join_path(folder, "samples.json"), samples.dump(2) + "\n");
  return samples;
}

void print_for_people(const nlohmann::ordered_json& scores, const nlohmann::ordered_json& samples) {
  for (const auto& sample : samples) {
    fmt::print("\nrow {}\n", sample.at("row").get<int64_t>());
    fmt::print("  expected  {}\n", sample.at("expected").get<std::string>());
    if (sample.contains("before")) fmt::print("  before    {}\n", sample.at("before").get<std::string>());
    fmt::print("  {}  {}\n", sample.contains("before") ? "after   " : "answer  ", sample.at("after").get<std::string>());
  }
  fmt::print("\n");
  for (const auto& [name, value] : scores.items()) fmt::print("{:<22} {}\n", name, value.dump());
}

}  // namespace

int run_eval(const EvalCommand& command) {
  const ResolvedRecipe resolved = command.recipe.load();
  const Recipe& recipe = resolved.recipe;
  const Preparation prepared = prepare(recipe, Source::kEval);
  const HeldOut held_out{*prepared.dataset,     *prepared.chat, image_options(recipe), held_out_rows(recipe, prepared), 32,
                         loader_threads(recipe)};

  const bool adapter = !command.checkpoint.empty() && file_exists(join_path(command.checkpoint, "adapter_config.json"));
  if (!command.checkpoint.empty() && !folder_exists(command.checkpoint)) {
    throw input_error("--checkpoint {}: no such folder; give an adapter or model folder, e.g. {}", command.checkpoint,
                      join_path(recipe.output.dir, "final"));
  }
  const ModelSpec spec = model_spec_for(recipe, device_for(recipe, 0), adapter ? command.checkpoint : "");
  std::unique_ptr<Gemma3> model = Gemma3::load(prepared.model_folder, spec);
  std::optional<Scores> before;
  // Fresh adapters add nothing and fresh tables are copies: until the checkpoint is loaded this is the base.
  if (command.compare_base && !command.checkpoint.empty()) before = score(*model, held_out, recipe, "the base model");
  if (adapter) {
    load_adapter(*model, command.checkpoint);
  } else if (!command.checkpoint.empty()) {
    model = Gemma3::load(command.checkpoint, spec);
  }
  const Scores after = score(*model, held_out, recipe, command.checkpoint.empty() ? prepared.model_folder : command.checkpoint);

  nlohmann::ordered_json json = to_json(after);
  if (before) {
    json["exact_match_before"] = before->text.exact_match;
    json["exact_match_after"] = after.text.exact_match;
    json["loss_before"] = before->loss.loss;
  }
  make_folders(recipe.output.dir);
  write_file_atomically(join_path(recipe.output.dir, "eval.json"), json.dump(2) + "\n");
  const auto samples = write_samples(recipe.output.dir, held_out, before ? &*before : nullptr, after, recipe.eval.num_samples);
  if (command.json) {
    fmt::print("{}\n", json.dump(2));
  } else {
    print_for_people(json, samples);
  }
  return 0;
}

}  // namespace gemtune
