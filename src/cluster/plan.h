// `gemtune gke plan`: what a run would be, without a call that changes anything.
#pragma once

#include "cluster/manifests.h"
#include "recipe/recipe.h"

namespace gemtune {

// What the person asks of a run.
struct RunFlags {
  RecipeArguments recipe;
  std::string name;  // "" = the base name of output.dir
  std::string deadline = "24h";
  std::string capacity_deadline = "1h";
  int retries = -1;  // -1: 2, or 0 under a cost limit
  double max_cost_usd = 0;
  std::string attach;
};

// A run as it would be submitted. Under a cost limit the server-side deadline is what the money buys.
struct PlannedRun {
  JobSpec job;
  Recipe recipe;              // as rendered for the cluster
  bool cost_limited = false;  // the deadline is --max-cost's
};
// Throws Error(kInput): recipe faults, a bad name, a cost limit without a price.
PlannedRun plan_run(const ClusterSettings& settings, const RunFlags& flags);

// One paragraph for people: machines, ranks, price by the hour and at the deadline.
std::string describe_cost(const ClusterSettings& settings, const PlannedRun& run);

}  // namespace gemtune
