#include "train/plan.h"

#include "app/commands.h"
#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "recipe/gpus.h"
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
  RowSizes sizes;
  int64_t steps_per_epoch = 0;
  int64_t total_steps = 0;
};

DataPlan plan_data(const Recipe& recipe, const Preparation& prepared) {
  DataPlan out;
  const DataReport report = check_data(recipe, prepared, CheckDepth::kTokens);
  out.known = !report.used.empty();
  out.num_rows = int64_t(report.used.size());
  out.sizes = row_sizes(report);
  LoaderOptions options;
  options.micro_batch = recipe.train.micro_batch;
  options.world = recipe.dist.nproc;
  options.accumulation = accumulation_for(recipe, options.world);
  out.steps_per_epoch = steps_per_epoch(out.num_rows, options);
  out.total_steps =
      recipe.train.max_steps > 0 ? recipe.train.max_steps : int64_t(std::ceil(recipe.train.epochs * double(out.steps_per_epoch)));
  return out;
}

// Steps over which a run's time is spread: those that make pictures' features, and those that find them kept.
double run_seconds(const Recipe& recipe, const Dims& dims, const ModelSpec& spec, PlanLoad load, const MemoryChoice& choice,
                   const GpuRates& rates, const DataPlan& data) {
  const double first = step_seconds(dims, spec, load, choice, rates);
  const bool keeps = dims.vision && !spec.train_all && !spec.lora.vision && recipe.train.vision_cache != "none";
  const double uncached_steps =
      keeps ? std::min<double>(double(data.steps_per_epoch), double(data.total_steps)) : double(data.total_steps);
  load.cached = true;
  return uncached_steps * first + (double(data.total_steps) - uncached_steps) * step_seconds(dims, spec, load, choice, rates);
}

// Checkpoints that lie beside each other while a new one is written, and the final adapter.
int64_t disk_bytes(const Recipe& recipe, const Plan& plan, const DataPlan& data) {
  int64_t checkpoints = 0;
  if (recipe.checkpoint.every != "never") {
    const int64_t every = recipe.checkpoint.every == "epoch" ? data.steps_per_epoch : std::stoll(recipe.checkpoint.every);
    const int64_t made = std::max<int64_t>(1, data.total_steps / std::max<int64_t>(1, every));
    checkpoints = recipe.checkpoint.keep > 0 ? std::min<int64_t>(made, recipe.checkpoint.keep + 1) : made;
  }
  return checkpoints * plan.checkpoint_bytes + plan.adapter_bytes;
}

}  // namespace

int run_plan(const PlanCommand& command) {
  const ResolvedRecipe resolved = command.recipe.load();
  const Recipe& recipe = resolved.recipe;
  const GpuTable table = read_gpu_table(command.gpus);
  const GpuOffer& gpu = table.find(command.gpu);
  const std::string folder = model_folder(recipe);
  const Dims dims = read_dims(folder);
  const FolderCheck weights = check_weights(folder, dims);
  if (!weights.faults.empty()) throw input_error("{}", join_some(weights.faults));

  DataPlan data;
  try {
    data = plan_data(recipe, prepare(recipe, Source::kTrain));
  } catch (const Error& error) {
    data.why_not = error.what();
    data.sizes = {dims.tokens_per_image + 156, 0, 1};  // a picture and a short text
  }
  // Planned for a GPU unless the recipe says cpu: a plan is made before the machine is there.
  const bool on_gpu = recipe.train.device != "cpu";
  const ModelSpec spec = model_spec(recipe, on_gpu ? at::kCUDA : at::kCPU);
  const PlanLoad load = plan_load(recipe, dims, data.sizes, recipe.dist.nproc);
  const double usable_gib = recipe.train.memory_gib > 0 ? recipe.train.memory_gib : 0.95 * (gpu.memory_gib - 1);
  const int64_t budget = int64_t(usable_gib * double(1 << 30));
  const MemoryChoice choice = choose_memory(dims, spec, load, recompute_policy(recipe), budget);
  const Plan plan = make_plan(dims, spec, load, choice);
  const bool fits = !on_gpu || plan.peak_bytes <= budget;
  const GpuRates rates = {gpu.bf16_tflops, gpu.memory_tbps};
  const double seconds = on_gpu && data.known ? run_seconds(recipe, dims, spec, load, choice, rates, data) : 0;
  const double usd = seconds / 3600 * gpu.usd_per_hour * recipe.dist.nproc;
  const int64_t disk = disk_bytes(recipe, plan, data);

  if (command.json) {
    nlohmann::ordered_json json = {{"trainable_parameters", plan.trainable_parameters}, {"lora_modules", plan.lora_modules}};
    for (const PlanPart& part : plan.parts) {
      if (part.parameters > 0) json["parameters_by_part"][part.name] = part.parameters;
      json["bytes_by_part"][part.name] = part.bytes;
    }
    const auto known = [](bool is_known, const nlohmann::ordered_json& value) {
      return is_known ? value : nlohmann::ordered_json(nullptr);
    };
    json["activation_bytes"] = plan.activation_bytes;
    json["peak_bytes"] = plan.peak_bytes;
    json["gpu"] = known(on_gpu, gpu.name);
    json["fits"] = fits;
    json["memory"] = known(on_gpu, choice.describe());
    json["steps_per_epoch"] = known(data.known, data.steps_per_epoch);
    json["total_steps"] = known(data.known, data.total_steps);
    json["seconds"] = known(seconds > 0, seconds);
    json["usd"] = known(usd > 0, usd);
    json["disk_bytes"] = disk;
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
  fmt::print("{:<44} {:>16} {:>12}\n",
             fmt::format("activations ({} × {} tokens, {} pictures)", load.micro_batch, load.longest,
                         load.micro_batch * load.images_a_row),
             "", human_bytes(plan.activation_bytes));
  fmt::print("{:<44} {:>16} {:>12}\n", "peak", "", human_bytes(plan.peak_bytes));
  if (on_gpu) {
    fmt::print("\n{}: {}; {} of {} usable\n", gpu.name, choice.describe(), fits ? "fits" : "DOES NOT FIT", human_bytes(budget));
    if (!fits) fmt::print("what makes it need less: {}\n", join_some(remedies(recipe, load)));
  }
  fmt::print("{} trainable parameters, {} adapted modules; an adapter is {}, a checkpoint {}\n", plan.trainable_parameters,
             plan.lora_modules, human_bytes(plan.adapter_bytes), human_bytes(plan.checkpoint_bytes));
  if (!data.known) {
    fmt::print("steps unknown: {}\n", data.why_not);
    return 0;
  }
  fmt::print("{} rows: {} steps an epoch, {} in all\n", data.num_rows, data.steps_per_epoch, data.total_steps);
  if (seconds > 0) {
    fmt::print("about {} on {} × {}{}\n", human_duration(seconds), recipe.dist.nproc, gpu.name,
               usd > 0 ? fmt::format(", ${:.2f} at ${:.2f} a GPU and hour (list of {}; --gpus FILE for yours)", usd,
                                     gpu.usd_per_hour, table.prices_as_of)
                       : "");
  }
  fmt::print("disk: {} in {}\n", human_bytes(disk), recipe.output.dir);
  return 0;
}

}  // namespace gemtune
