// Machine profiles: what a worker node is and what its pods need. Data files (deploy/gke/profiles), no code.
#pragma once

#include "cluster/document.h"

#include <string>
#include <vector>

namespace gemtune {

struct QuotaNeed {
  std::string metric;  // Compute Engine's name, "NVIDIA_L4_GPUS"
  double per_node = 0;
};

struct Profile {
  std::string name;
  std::string machine_type;
  std::string accelerator;  // value of cloud.google.com/gke-accelerator; "" = no GPU
  std::string gpu;          // name in recipes/gpus.yaml; "" = no GPU
  int gpus = 0;             // a node
  int nodes = 1;            // default
  int workers = 1;          // training ranks a node
  std::string cpu;          // a worker's requests, as Kubernetes writes them
  std::string memory;
  std::string ephemeral_storage;
  std::string shm;          // size of /dev/shm; "" = KubeRay's default
  std::string staging;      // folder of the node's local disk for caches and staging; "" = none
  int rdma_networks = 0;    // RoCE interfaces a node; 0 = plain TCP
  double usd_per_hour = 0;  // a node; 0 = the GPU table's price, if it has one
  std::string prices_as_of;
  std::vector<QuotaNeed> quotas;
  // Added to every worker pod.
  Document node_selector = Document::object();
  Document annotations = Document::object();
  Document env = Document::array();
  Document init_containers = Document::array();
  Document volume_mounts = Document::array();
  Document volumes = Document::array();
  std::string start_script;  // shell text before `ray start`; "" = KubeRay's own start line
};

std::vector<std::string> profile_names();
// A profile the program carries, or a file (its name ends in .yaml). Throws Error(kInput).
Profile read_profile(const std::string& name_or_file);

}  // namespace gemtune
