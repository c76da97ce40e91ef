#include "cluster/plan.h"

#include "base/error.h"
#include "base/file.h"
#include "base/text.h"

#include <algorithm>
#include <cmath>

namespace gemtune {
namespace {

// "runs/Gemma 3 SEO" → "gemma-3-seo".
std::string name_from(const std::string& folder) {
  std::string out;
  for (const char c : base_name(folder)) {
    const char lower = c >= 'A' && c <= 'Z' ? char(c - 'A' + 'a') : c;
    const bool keep = (lower >= 'a' && lower <= 'z') || (lower >= '0' && lower <= '9');
    if (keep) out += lower;
    if (!keep && !out.empty() && out.back() != '-') out += '-';
  }
  out = out.substr(0, 40);
  while (out.ends_with('-')) out.pop_back();
  if (out.empty() || (out[0] >= '0' && out[0] <= '9')) out = ("run-" + out).substr(0, 40);
  return out;
}

}  // namespace

PlannedRun plan_run(const ClusterSettings& settings, const RunFlags& flags) {
  PlannedRun out;
  RecipeArguments arguments = flags.recipe;
  // Without a file it is the tutorial's job, as in `gemtune train --gcs_bucket B`.
  if (arguments.file.empty()) arguments.tutorial_flags.emplace_back("--gcs_bucket", settings.bucket);
  out.recipe = load_recipe(arguments).recipe;
  JobSpec& job = out.job;
  job.run = flags.name.empty() ? name_from(out.recipe.output.dir) : flags.name;
  if (const std::string fault = complaint_about_run_name(job.run); !fault.empty()) throw input_error("--name: {}", fault);
  out.recipe.output.dir = fmt::format("gs://{}/runs/{}", settings.bucket, job.run);
  out.recipe.dist.nproc = 1;  // Ray starts the ranks
  job.recipe_yaml = to_yaml(out.recipe);
  job.attach = flags.attach;
  job.deadline_s = parse_duration(flags.deadline, "--deadline");
  job.capacity_deadline_s = std::min(parse_duration(flags.capacity_deadline, "--capacity-deadline"), job.deadline_s);
  job.retries = flags.retries >= 0 ? flags.retries : flags.max_cost_usd > 0 ? 0 : 2;
  if (flags.max_cost_usd > 0) {
    if (settings.usd_per_hour() <= 0) {
      throw input_error(
          "--max-cost {}: no price is known for {}; give the price of one node with --usd-per-hour, or a table with --gpus",
          flags.max_cost_usd, settings.profile.machine_type);
    }
    // Each retry is a cluster of its own with the same deadline: all of them together may cost the limit.
    const double hours = flags.max_cost_usd / settings.usd_per_hour() / (job.retries + 1);
    const auto bought_s = int64_t(std::floor(hours * 3600));
    if (bought_s < 300) {
      throw input_error("--max-cost {}: buys {} of {} × {} at ${:.2f} an hour; a run needs at least 5 minutes",
                        flags.max_cost_usd, human_duration(double(bought_s)), settings.nodes, settings.profile.machine_type,
                        settings.usd_per_hour());
    }
    out.cost_limited = bought_s < job.deadline_s;
    job.deadline_s = std::min(job.deadline_s, bought_s);
    job.capacity_deadline_s = std::min(job.capacity_deadline_s, job.deadline_s);
  }
  // The attempt's name follows from what is asked, so that a repeated command finds it.
  job.job = fmt::format("{}-{}", job.run, sha256_of(job.recipe_yaml + settings.image + job.attach).substr(0, 6));
  return out;
}

std::string describe_cost(const ClusterSettings& settings, const PlannedRun& run) {
  std::string out = fmt::format("{} × {} ({}), {} ranks", settings.nodes, settings.profile.machine_type, settings.capacity,
                                settings.num_workers());
  const std::string deadline = human_duration(double(run.job.deadline_s));
  if (settings.usd_per_hour() <= 0) {
    return out + fmt::format("; price not known (--usd-per-hour N says it), ends after {} at the latest", deadline);
  }
  const double most = settings.usd_per_hour() * double(run.job.deadline_s) / 3600 * (run.job.retries + 1);
  return out + fmt::format(
                   ": ${:.2f} an hour ({}), each minute of waiting ${:.2f}; ends after {} at the latest, ${:.0f} with {} "
                   "retries",
                   settings.usd_per_hour(), settings.price_source, settings.usd_per_hour() / 60, deadline, most, run.job.retries);
}

}  // namespace gemtune
