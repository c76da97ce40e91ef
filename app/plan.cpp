#include "train/plan.h"

#include "app/commands.h"
#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "train/checked_data.h"
#include "train/specs.h"

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdio>

namespace gemtune {
namespace {

// Steps and lengths, known only when the data can be read here.
struct DataPlan {
  bool known = false;
  std::string why_not;
  int64_t num_rows = 0;
  int64_t longest = 0;
  int64_t steps_per_epoch = 0;
  int64_t total_steps = 0;
};

DataPlan plan_data(const Recipe& recipe, const Preparation& prepared) {
  DataPlan out;
  const DataReport report = check_data(recipe, prepared, CheckDepth::kTokens);
  out.known = !report.used.empty();
  out.num_rows = int64_t(report.used.size());
  for (const int32_t length : report.lengths) out.longest = std::max<int64_t>(out.longest, length);
  LoaderOptions options;
  options.micro_batch = recipe.train.micro_batch;
  options.world = recipe.dist.nproc;
  options.accumulation = accumulation_for(recipe, options.world);
  out.steps_per_epoch = steps_per_epoch(out.num_rows, options);
  out.total_steps =
      recipe.train.max_steps > 0 ? recipe.train.max_steps : int64_t(std::ceil(recipe.train.epochs * double(out.steps_per_epoch)));
  return out;
}

}  // namespace

int run_plan(const PlanCommand& command) {
  const ResolvedRecipe resolved = command.recipe.load();
  const Recipe& recipe = resolved.recipe;
  const std::string folder = model_folder(recipe);
  const Dims dims = read_dims(folder);
  const FolderCheck weights = check_weights(folder, dims);
  if (!weights.faults.empty()) throw input_error("{}", join_some(weights.faults));

  DataPlan data;
  try {
    data = plan_data(recipe, prepare(recipe, Source::kTrain));
  } catch (const Error& error) {
    data.why_not = error.what();
  }
  // Planned for a GPU unless the recipe says cpu: a plan is made before the machine is there.
  const ModelSpec spec = model_spec(recipe, recipe.train.device == "cpu" ? at::kCPU : at::kCUDA);
  PlanLoad load;
  load.micro_batch = recipe.train.micro_batch;
  load.longest = data.known ? data.longest : dims.tokens_per_image + 156;
  load.images_a_row = dims.vision ? 1 : 0;
  load.recompute = recipe.train.recompute;
  const Plan plan = make_plan(dims, spec, load);

  if (command.json) {
    nlohmann::ordered_json json = {{"trainable_parameters", plan.trainable_parameters}, {"lora_modules", plan.lora_modules}};
    for (const PlanPart& part : plan.parts) {
      if (part.parameters > 0) json["parameters_by_part"][part.name] = part.parameters;
      json["bytes_by_part"][part.name] = part.bytes;
    }
    json["peak_bytes"] = plan.peak_bytes;
    json["steps_per_epoch"] = data.known ? nlohmann::ordered_json(data.steps_per_epoch) : nlohmann::ordered_json(nullptr);
    json["total_steps"] = data.known ? nlohmann::ordered_json(data.total_steps) : nlohmann::ordered_json(nullptr);
    json["weights_found"] = weights.weights_found;
    fmt::print("{}\n", json.dump(2));
    return 0;
  }
  fmt::print("{}\n", folder);
  if (!weights.weights_found) fmt::print("note: the folder holds no weights yet; sizes are config.json's\n");
  fmt::print("\n{:<44} {:>16} {:>12}\n", "part", "parameters", "memory");
  for (const PlanPart& part : plan.parts) {
    fmt::print("{:<44} {:>16} {:>12}\n", part.name + (part.trained ? ", trained" : ""),
               part.parameters > 0 ? std::to_string(part.parameters) : "", human_bytes(part.bytes));
  }
  fmt::print("{:<44} {:>16} {:>12}\n", fmt::format("with activations ({} × {} tokens)", load.micro_batch, load.longest), "",
             human_bytes(plan.peak_bytes));
  fmt::print("\n{} trainable parameters, {} adapted modules; an adapter is {}, a checkpoint {}\n", plan.trainable_parameters,
             plan.lora_modules, human_bytes(plan.adapter_bytes), human_bytes(plan.checkpoint_bytes));
  if (data.known) {
    fmt::print("{} rows: {} steps an epoch, {} in all\n", data.num_rows, data.steps_per_epoch, data.total_steps);
  } else {
    fmt::print("steps unknown: {}\n", data.why_not);
  }
  return 0;
}

}  // namespace gemtune
