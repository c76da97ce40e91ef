#include "app/gke.h"

#include "base/error.h"
#include "base/text.h"
#include "cluster/plan.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <functional>

namespace gemtune {
namespace {

struct GkeFlags {
  ClusterFlags cluster;
  RunFlags run;
  std::vector<std::string> words;  // RECIPE.yaml and key=value
  bool json = false;
};

void add_cluster(CLI::App* command, ClusterFlags& flags) {
  const auto add = [&](const char* name, auto& member, const char* help) {
    command->add_option(name, member, help)->group("Cluster");
  };
  add("--project", flags.project, "Google Cloud project id ($PROJECT_ID)");
  add("--region", flags.region, "region of cluster and bucket ($REGION)");
  add("--zone", flags.zone, "zone of the machines; default: the reservation's");
  add("--cluster", flags.cluster, "GKE cluster ($CLUSTER_NAME)");
  add("--bucket", flags.bucket, "bucket of inputs and results ($GCS_BUCKET)");
  add("--namespace", flags.name_space, "Kubernetes namespace; default: default");
  add("--service-account", flags.service_account, "Kubernetes service account of the pods ($RAY_SA); default: gemtune-ray");
  add("--reservation", flags.reservation, "NAME or projects/PROJECT/reservations/NAME ($RESERVATION)");
  add("--profile", flags.profile, "machines: a4, a3u, a3m, g2-l4, cpu, or a file NAME.yaml; default: a4");
  command->add_option("--capacity", flags.capacity, "reservation, on-demand, spot or flex-start; default: on-demand")
      ->check(CLI::IsMember({"reservation", "on-demand", "spot", "flex-start"}))
      ->group("Cluster");
  command->add_option("--nodes", flags.nodes, "worker nodes; default: the profile's")
      ->check(CLI::Range(1, 1000))
      ->group("Cluster");
  add("--image", flags.image, "worker image; default: REGION-docker.pkg.dev/PROJECT/gemtune/gemtune-ray:VERSION");
  add("--queue", flags.queue, "Kueue local queue that admits the job");
  add("--network", flags.network, "VPC network of the cluster; default: default");
  command->add_flag("--allow-tcp", flags.allow_tcp, "go on without RDMA where the machine has it")->group("Cluster");
  add("--usd-per-hour", flags.usd_per_hour, "price of one node");
  add("--gpus", flags.gpus, "table of GPU prices in the form of recipes/gpus.yaml");
}

void add_run(CLI::App* command, GkeFlags& flags) {
  command->add_option("RECIPE", flags.words, "recipe.yaml and key=value settings, in any order; default: the tutorial's job")
      ->option_text("[RECIPE.yaml] [key=value …]");
  command->add_option("--name", flags.run.name, "name of the run: its results lie in gs://BUCKET/runs/NAME");
  command->add_option("--deadline", flags.run.deadline, "whole job, waiting included")->capture_default_str();
  command->add_option("--capacity-deadline", flags.run.capacity_deadline, "the job must have its machines by then")
      ->capture_default_str();
  command->add_option("--retries", flags.run.retries, "new attempts after a failure; default: 2, under --max-cost 0")
      ->check(CLI::Range(0, 100));
  command->add_option("--max-cost", flags.run.max_cost_usd, "US dollars; the cluster itself ends the job")
      ->check(CLI::PositiveNumber);
  command->add_option("--attach", flags.run.attach, "submit to this existing RayCluster instead of one of the job's own");
}

void sort_words(GkeFlags& flags) {
  for (const std::string& word : flags.words) {
    if (word.find('=') != std::string::npos) {
      flags.run.recipe.overrides.push_back(word);
    } else if (flags.run.recipe.file.empty()) {
      flags.run.recipe.file = word;
    } else {
      throw input_error("{}: a recipe was already given ({}); settings are written key=value", word, flags.run.recipe.file);
    }
  }
}

int run_plan_verb(GkeFlags& flags) {
  sort_words(flags);
  const ClusterSettings settings = resolve_settings(flags.cluster);
  const PlannedRun run = plan_run(settings, flags.run);
  fmt::print("# {}\n# results: gs://{}/runs/{}\n{}", describe_cost(settings, run), settings.bucket, run.job.run,
             to_yaml_stream(all_manifests(settings, run.job, {})));
  return 0;
}

}  // namespace

int run_gke(int argc, char** argv) {
  CLI::App app{"Brings a GKE cluster up, trains on it, and leaves nothing behind.", "gemtune gke"};
  app.require_subcommand(1);
  std::function<int()> action;
  GkeFlags flags;

  CLI::App* command = app.add_subcommand("plan", "every manifest as it would be applied, and the price; changes nothing");
  add_run(command, flags);
  add_cluster(command, flags.cluster);
  command->callback([&] { action = [&] { return run_plan_verb(flags); }; });

  std::vector<std::string> words(argv + std::min(argc, 2), argv + argc);
  std::reverse(words.begin(), words.end());  // CLI11 takes them from the back
  try {
    app.parse(words);
  } catch (const CLI::Success& asked) {
    return app.exit(asked);
  } catch (const CLI::ParseError& error) {
    throw input_error("{}; `gemtune gke --help` lists verbs and flags", error.what());
  }
  return action();
}

}  // namespace gemtune
