#include "model/merge.h"

#include "app/commands.h"
#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "io/checkpoint.h"
#include "train/logit_gap.h"
#include "train/run_folder.h"
#include "train/specs.h"

#include <cstdio>

namespace gemtune {
namespace {

// The quantisation that the adapter's run recorded; none where there is no recipe.
QuantRecipe quant_of_run(const std::string& adapter) {
  for (const std::string& folder : {adapter, parent_folder(adapter)}) {
    RecipeArguments arguments;
    arguments.file = join_path(folder, "recipe.yaml");
    if (file_exists(arguments.file)) return load_recipe(arguments).recipe.quant;
  }
  QuantRecipe none;
  none.base = "none";
  return none;
}

struct LiveLogits {
  std::vector<Tensor> base, adapted;
};
LiveLogits live_logits(const Recipe& recipe, const MergeCommand& command, const SampleRows& rows, at::Device device) {
  const auto model = Gemma3::load(model_folder(recipe), model_spec_for(recipe, device, command.adapter));
  LiveLogits live;
  live.base = logits_on(*model, rows);  // fresh adapters add nothing, fresh tables are copies
  load_adapter(*model, command.adapter);
  live.adapted = logits_on(*model, rows);
  return live;
}

// Live (base + adapter) against merged; the base alone shows how much there is to lose.
void compare(const MergeCommand& command, Recipe recipe, const QuantRecipe& trained, const std::string& merged_folder) {
  const at::Device device = device_for(recipe, 0);
  const SampleRows rows = sample_rows(prepare(recipe, Source::kNone), command.adapter, command.num_rows, device);
  const LiveLogits live = live_logits(recipe, command, rows, device);
  recipe.quant.base = "none";
  const auto merged = logits_on(*Gemma3::load(merged_folder, model_spec_for(recipe, device, "")), rows);
  const LogitGap gap = logit_gap(merged, live.adapted);
  const std::string text = fmt::format(
      "logits of live and merged model on {} {}: largest gap {:.2g}, mean {:.2g} of the largest logit; same first choice at {} "
      "of "
      "{} places; the adapter itself moves them by {:.2g}",
      rows.inputs.size(), rows.from, gap.max, gap.mean, gap.num_same_choice, gap.num_places,
      logit_gap(live.base, live.adapted).max);
  if (!(gap.max <= command.max_gap)) {
    throw job_error("{}: {}; --max-gap allows {}, so nothing was written", command.out, text, command.max_gap);
  }
  fmt::print("{}\n", text);
  if (command.onto == "nf4" || trained.base != "nf4") return;
  recipe.quant = trained;
  const LogitGap seen = logit_gap(merged, live_logits(recipe, command, rows, device).adapted);
  fmt::print(
      "the run trained on NF4 weights; from the model as it was then: largest gap {:.2g}, mean {:.2g}; --onto nf4 keeps "
      "what the adapter saw\n",
      seen.max, seen.mean);
}

}  // namespace

int run_merge(const MergeCommand& command) {
  if (folder_exists(command.out) && !list_folder(command.out).empty())
    throw input_error("--out {}: the folder is not empty; choose another", command.out);
  const QuantRecipe trained = quant_of_run(command.adapter);
  Recipe recipe;
  recipe.model.path = command.model;
  recipe.quant.base = "none";
  std::optional<QuantSpec> onto;
  if (command.onto == "nf4") {
    if (trained.base == "nf4") recipe.quant = trained;
    recipe.quant.base = "nf4";
    onto = model_spec(recipe, at::kCPU).quant;
  }
  const std::string base = model_folder(recipe);
  MergeReport report;
  commit_folder(command.out, [&](const std::string& to) {
    report = merge_adapter(base, command.adapter, to, onto);
    copy_side_files(command.adapter, "", to);  // for what a base without them lacks
    copy_side_files(base, "", to);
    if (command.num_rows > 0) compare(command, recipe, trained, to);
  });
  fmt::print("{}: {} tensors ({}), {} linear layers merged{}\n", command.out, report.num_tensors, human_bytes(report.num_bytes),
             report.num_merged,
             report.num_tables == 0 ? ""
             : report.untied        ? ", embed_tokens and lm_head as two tables (tie_word_embeddings false)"
                                    : ", trained tables in place");
  return 0;
}

}  // namespace gemtune
