// Kubernetes manifests from settings: pure functions, no calls.
#pragma once

#include "cluster/settings.h"

#include <optional>
#include <string>
#include <vector>

namespace gemtune {

inline constexpr const char* kManagedBy = "gemtune";
inline constexpr const char* kHubSecret = "gemtune-hub";
inline constexpr const char* kRayVersion = "2.60.0";
inline constexpr const char* kRecipeFolder = "/etc/gemtune";

// One run of a recipe as a RayJob.
struct JobSpec {
  std::string run;                  // run name: folder under gs://BUCKET/runs
  std::string job;                  // RayJob's name, one an attempt: "RUN-3fa9c1"
  std::string recipe_yaml;          // rendered
  int64_t deadline_s = 0;           // whole job, waiting included
  int64_t capacity_deadline_s = 0;  // must run by then
  int retries = 2;
  std::string attach;  // RayCluster to submit to; "" = its own cluster
};

// Which optional fields the cluster's own RayJob definition has; an older operator's lack some.
struct OperatorFeatures {
  bool pre_running_deadline = true;
  bool auth = true;
  bool submitter_config = true;
};

// "" when fine, else what is wrong with a run's name.
std::string complaint_about_run_name(const std::string& name);

Document namespace_manifest(const ClusterSettings& settings);
Document service_account_manifest(const ClusterSettings& settings);
// `token_base64` may be a stand-in where the manifest is shown.
Document hub_secret_manifest(const ClusterSettings& settings, const std::string& token_base64);
// GKENetworkParamSet and Network of each RDMA interface's network, in pairs; empty without RDMA.
std::vector<Document> network_manifests(const ClusterSettings& settings);
// ConfigMap with the recipe; its name carries the content's hash. None when the job is attached to a cluster.
std::optional<Document> run_config_manifest(const ClusterSettings& settings, const JobSpec& job);
Document ray_job_manifest(const ClusterSettings& settings, const JobSpec& job, const OperatorFeatures& features);

// Everything `up` puts into the cluster and `run` adds, the Secret's content left out.
std::vector<Document> all_manifests(const ClusterSettings& settings, const JobSpec& job, const OperatorFeatures& features);

// VPC networks that RDMA needs, as `up` makes them.
struct RdmaNetwork {
  std::string network;  // in the cluster: "gvnic-1", "rdma-0"
  std::string vpc, subnet, range, device_mode;
};
std::vector<RdmaNetwork> rdma_networks(const ClusterSettings& settings);

std::string base64_of(std::string_view bytes);

}  // namespace gemtune
