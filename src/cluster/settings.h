// What the person asked for on the command line or by the tutorial's environment variables, checked before anything is called.
#pragma once

#include "cluster/profile.h"

#include <cstdint>
#include <string>

namespace gemtune {

// As typed; "" and 0 = not given.
struct ClusterFlags {
  std::string project, region, zone, cluster, bucket, name_space, service_account;
  std::string reservation, profile, capacity, image, queue, network;
  int nodes = 0;
  bool allow_tcp = false;   // go on without RDMA where the machine has it
  double usd_per_hour = 0;  // price of a node
  std::string gpus;         // table of prices in the form of recipes/gpus.yaml
  std::string state_dir;    // default: ${XDG_STATE_HOME:-~/.local/state}/gemtune/gke
};

struct Reservation {
  std::string project;  // "" = the cluster's own
  std::string name;     // "" = none
};

struct ClusterSettings {
  std::string project, region, zone, cluster, bucket, name_space, service_account;
  Reservation reservation;
  Profile profile;
  std::string capacity;  // reservation|on-demand|spot|flex-start
  std::string image;
  std::string queue;    // Kueue LocalQueue, "" = none
  std::string network;  // VPC of the cluster
  int nodes = 1;
  bool rdma = false;
  double usd_per_node_hour = 0;  // 0 = not known
  std::string price_source;      // "list of 2025-06", "--usd-per-hour"
  std::string hub_token;         // from HF_TOKEN; never printed, stored or put in an argv
  std::string state_dir;         // of this cluster

  int num_workers() const { return nodes * profile.workers; }
  double usd_per_hour() const { return usd_per_node_hour * nodes; }
  std::string workload_pool() const { return project + ".svc.id.goog"; }
  // The cluster, in messages: "gemma (us-west4, my-project)".
  std::string described() const;
};

// Flags win over PROJECT_ID, REGION, CLUSTER_NAME, GCS_BUCKET, RESERVATION, RAY_SA, HF_TOKEN. Throws Error(kInput) with every
// complaint, one a line.
ClusterSettings resolve_settings(const ClusterFlags& flags);

// "4h", "90m", "3600": seconds. Throws Error(kInput) naming `flag`.
int64_t parse_duration(const std::string& text, const std::string& flag);

}  // namespace gemtune
