#include "cluster/manifests.h"

#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "cluster/files.h"

#include <openssl/evp.h>

#include <regex>

namespace gemtune {
namespace {

using Values = std::map<std::string, Document>;

Document render(const std::string& name, const Values& values) {
  const std::string path = "templates/" + name + ".yaml";
  return fill_template(parse_yaml_document(deployed_files().at(path), path), values, path);
}

// The label that `down` and a second person's `up` recognise.
Document labels() {
  return {{"app.kubernetes.io/managed-by", kManagedBy}};
}

Document list_or_none(const Document& list) {
  return list.empty() ? Document(nullptr) : list;
}

void add_all(Document& list, const Document& more) {
  for (const Document& item : more) list.push_back(item);
}

std::string config_map_name(const JobSpec& job) {
  return fmt::format("{}-{}", job.run, sha256_of(job.recipe_yaml).substr(0, 10));
}

Document node_selector(const ClusterSettings& settings) {
  Document out = Document::object();
  const Profile& profile = settings.profile;
  if (!profile.accelerator.empty()) {
    out["cloud.google.com/gke-accelerator"] = profile.accelerator;
    out["cloud.google.com/gke-accelerator-count"] = std::to_string(profile.gpus);
  }
  for (const auto& [key, value] : profile.node_selector.items()) out[key] = value;
  if (settings.capacity == "reservation") {
    // A shared reservation's project has a label of its own: a label value holds no slash.
    out["cloud.google.com/reservation-name"] = settings.reservation.name;
    if (!settings.reservation.project.empty()) out["cloud.google.com/reservation-project"] = settings.reservation.project;
    out["cloud.google.com/reservation-affinity"] = "specific";
  } else if (settings.capacity == "spot") {
    out["cloud.google.com/gke-spot"] = "true";
  } else if (settings.capacity == "flex-start") {
    out["cloud.google.com/gke-flex-start"] = "true";
  }
  if (!settings.zone.empty()) out["topology.kubernetes.io/zone"] = settings.zone;
  return out;
}

// Of head and workers: what Ray and the engine read.
Document shared_env() {
  return Document::array({
      {{"name", "HF_TOKEN"},
       {"valueFrom", {{"secretKeyRef", {{"name", kHubSecret}, {"key", "hf_api_token"}, {"optional", true}}}}}},
      {{"name", "RAY_TRAIN_V2_ENABLED"}, {"value", "1"}},
      {{"name", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"}, {"value", "1800"}},
      {{"name", "RAY_process_group_cleanup_enabled"}, {"value", "1"}},
      {{"name", "RAY_DEDUP_LOGS"}, {"value", "0"}},
  });
}

Document worker_annotations(const ClusterSettings& settings) {
  Document out = {{"cluster-autoscaler.kubernetes.io/safe-to-evict", "false"}};
  for (const auto& [key, value] : settings.profile.annotations.items()) out[key] = value;
  if (settings.rdma) {
    Document interfaces = Document::array({{{"interfaceName", "eth0"}, {"network", "default"}}});
    for (const RdmaNetwork& network : rdma_networks(settings)) {
      interfaces.push_back({{"interfaceName", fmt::format("eth{}", interfaces.size())}, {"network", network.network}});
    }
    out["networking.gke.io/default-interface"] = "eth0";
    out["networking.gke.io/interfaces"] = interfaces.dump();
  }
  // Our command goes before KubeRay's own start line.
  if (settings.rdma && !settings.profile.start_script.empty()) out["ray.io/overwrite-container-cmd"] = "true";
  return out;
}

Document worker_resources(const Profile& profile) {
  Document out = {{"cpu", profile.cpu}, {"memory", profile.memory}, {"ephemeral-storage", profile.ephemeral_storage}};
  if (profile.gpus > 0) out["nvidia.com/gpu"] = std::to_string(profile.gpus);
  return out;
}

Document ray_cluster_spec(const ClusterSettings& settings, const JobSpec& job, const OperatorFeatures& features) {
  const Profile& profile = settings.profile;
  Document env = shared_env();
  if (settings.rdma) add_all(env, profile.env);
  Document mounts = Document::array({{{"name", "run"}, {"mountPath", kRecipeFolder}, {"readOnly", true}}});
  Document volumes = Document::array({{{"name", "run"}, {"configMap", {{"name", config_map_name(job)}}}}});
  if (!profile.shm.empty()) {
    mounts.push_back({{"name", "shm"}, {"mountPath", "/dev/shm"}});
    volumes.push_back({{"name", "shm"}, {"emptyDir", {{"medium", "Memory"}, {"sizeLimit", profile.shm}}}});
  }
  if (!profile.staging.empty()) {
    mounts.push_back({{"name", "staging"}, {"mountPath", profile.staging}});
    volumes.push_back({{"name", "staging"}, {"emptyDir", Document::object()}});
    for (const auto& [name, folder] :
         {std::pair("HF_HOME", "/hub"), std::pair("XDG_CACHE_HOME", "/cache"), std::pair("TMPDIR", "")}) {
      env.push_back({{"name", name}, {"value", profile.staging + folder}});
    }
  }
  if (settings.rdma) {
    add_all(mounts, profile.volume_mounts);
    add_all(volumes, profile.volumes);
  }
  Document tolerations = Document::array();
  if (profile.gpus > 0) {
    tolerations.push_back({{"key", "nvidia.com/gpu"}, {"operator", "Exists"}, {"effect", "NoSchedule"}});
  }
  if (settings.capacity == "spot" || settings.capacity == "flex-start") {
    // Lets a pod stay on its node for the notice's seconds, in which the checkpoint is written.
    tolerations.push_back(
        {{"key", "cloud.google.com/impending-node-termination"}, {"operator", "Exists"}, {"effect", "NoExecute"}});
  }
  Document worker_start = Document::object();
  if (profile.gpus > 0) worker_start["num-gpus"] = std::to_string(profile.gpus);
  const bool own_command = settings.rdma && !profile.start_script.empty();
  return render(
      "ray_cluster_spec",
      {{"ray_version", kRayVersion},
       {"auth", features.auth ? Document{{"mode", "token"}} : Document(nullptr)},
       {"labels", labels()},
       {"service_account", settings.service_account},
       {"image", settings.image},
       {"env", shared_env()},
       {"config_map", config_map_name(job)},
       {"nodes", settings.nodes},
       {"worker_start", worker_start},
       {"worker_annotations", worker_annotations(settings)},
       {"node_selector", list_or_none(node_selector(settings))},
       {"tolerations", list_or_none(tolerations)},
       {"init_containers", settings.rdma ? list_or_none(profile.init_containers) : Document(nullptr)},
       {"command", own_command ? Document::array({"/bin/bash", "-c", "--"}) : Document(nullptr)},
       {"args", own_command ? Document::array({profile.start_script + "ulimit -n 65536\nexec $KUBERAY_GEN_RAY_START_CMD\n"})
                            : Document(nullptr)},
       {"resources", worker_resources(profile)},
       {"worker_env", env},
       {"volume_mounts", mounts},
       {"volumes", volumes}});
}

// KubeRay puts the entrypoint unquoted into a shell line: only words that need no quotes may stand in it.
std::string entrypoint_of(const ClusterSettings& settings, const JobSpec& job) {
  const auto command = [&](const std::string& folder) {
    return fmt::format("python -m gemtune.ray {}/{}.yaml --num-workers {} --storage-path gs://{}/runs", folder, job.run,
                       settings.num_workers(), settings.bucket);
  };
  if (job.attach.empty()) return command(kRecipeFolder);
  // An existing cluster mounts nothing of ours: the recipe travels in the command.
  return fmt::format("bash -c \"mkdir -p /tmp/gemtune && echo {} | base64 -d > /tmp/gemtune/{}.yaml && exec {}\"",
                     base64_of(job.recipe_yaml), job.run, command("/tmp/gemtune"));
}

}  // namespace

std::string base64_of(std::string_view bytes) {
  std::string out(4 * ((bytes.size() + 2) / 3) + 1, '\0');
  const int size = EVP_EncodeBlock(reinterpret_cast<unsigned char*>(out.data()),
                                   reinterpret_cast<const unsigned char*>(bytes.data()), int(bytes.size()));
  out.resize(size_t(size));
  return out;
}

std::string complaint_about_run_name(const std::string& name) {
  if (std::regex_match(name, std::regex("[a-z]([-a-z0-9]{0,38}[a-z0-9])?"))) return "";
  return fmt::format("a run's name has lower-case letters, digits and hyphens, begins with a letter and has at most 40, got {}",
                     in_quotes(name));
}

std::vector<RdmaNetwork> rdma_networks(const ClusterSettings& settings) {
  std::vector<RdmaNetwork> out;
  if (!settings.rdma) return out;
  const std::string& name = settings.cluster;
  out.push_back({"gvnic-1", name + "-gvnic", name + "-gvnic-sub", "192.168.0.0/24", "NetDevice"});
  for (int i = 0; i < settings.profile.rdma_networks; ++i) {
    out.push_back({fmt::format("rdma-{}", i), name + "-rdma", fmt::format("{}-rdma-sub-{}", name, i),
                   fmt::format("192.168.{}.0/24", i + 1), "RDMA"});
  }
  return out;
}

Document namespace_manifest(const ClusterSettings& settings) {
  return render("namespace", {{"namespace", settings.name_space}, {"labels", labels()}});
}

Document service_account_manifest(const ClusterSettings& settings) {
  return render("service_account",
                {{"service_account", settings.service_account}, {"namespace", settings.name_space}, {"labels", labels()}});
}

Document hub_secret_manifest(const ClusterSettings& settings, const std::string& token_base64) {
  return render(
      "hub_secret",
      {{"hub_secret", kHubSecret}, {"namespace", settings.name_space}, {"labels", labels()}, {"hub_token_base64", token_base64}});
}

std::vector<Document> network_manifests(const ClusterSettings& settings) {
  std::vector<Document> out;
  for (const RdmaNetwork& network : rdma_networks(settings)) {
    const Values values = {{"network", network.network},
                           {"vpc", network.vpc},
                           {"subnet", network.subnet},
                           {"device_mode", network.device_mode},
                           {"labels", labels()}};
    out.push_back(render("network_parameters", values));
    out.push_back(render("network", values));
  }
  return out;
}

std::optional<Document> run_config_manifest(const ClusterSettings& settings, const JobSpec& job) {
  if (!job.attach.empty()) return std::nullopt;
  return render("run_config", {{"config_map", config_map_name(job)},
                               {"namespace", settings.name_space},
                               {"labels", labels()},
                               {"files", {{job.run + ".yaml", job.recipe_yaml}}}});
}

Document ray_job_manifest(const ClusterSettings& settings, const JobSpec& job, const OperatorFeatures& features) {
  if (const std::string fault = complaint_about_run_name(job.run); !fault.empty()) throw input_error("{}", fault);
  const bool own = job.attach.empty();
  Document job_labels = labels();
  job_labels["gemtune.dev/run"] = job.run;
  if (!settings.queue.empty()) {
    if (!own) throw input_error("--queue and --attach exclude each other: Kueue admits jobs with a cluster of their own only");
    job_labels["kueue.x-k8s.io/queue-name"] = settings.queue;
  }
  const Document none = nullptr;
  return render("ray_job", {{"job", job.job},
                            {"run", job.run},
                            {"namespace", settings.name_space},
                            {"job_labels", job_labels},
                            {"annotations", {{"gemtune.dev/usd-per-hour", fmt::format("{:.2f}", settings.usd_per_hour())}}},
                            {"entrypoint", entrypoint_of(settings, job)},
                            {"runtime_env", "env_vars:\n  RAY_TRAIN_V2_ENABLED: \"1\"\n"},
                            {"submitter", features.submitter_config ? Document{{"backoffLimit", 5}} : none},
                            // KubeRay refuses retries and clean-up of a cluster that is not the job's own.
                            {"retries", own ? Document(job.retries) : none},
                            {"deadline_s", job.deadline_s},
                            {"capacity_deadline_s", features.pre_running_deadline ? Document(job.capacity_deadline_s) : none},
                            {"shutdown", own ? Document(true) : none},
                            {"ttl_s", own ? Document(60) : none},
                            {"cluster_selector", own ? none : Document{{"ray.io/cluster", job.attach}}},
                            {"ray_cluster", own ? ray_cluster_spec(settings, job, features) : none}});
}

std::vector<Document> all_manifests(const ClusterSettings& settings, const JobSpec& job, const OperatorFeatures& features) {
  std::vector<Document> out;
  if (settings.name_space != "default") out.push_back(namespace_manifest(settings));
  out.push_back(service_account_manifest(settings));
  if (!settings.hub_token.empty()) out.push_back(hub_secret_manifest(settings, base64_of("sent on standard input")));
  for (Document& network : network_manifests(settings)) out.push_back(std::move(network));
  if (auto config = run_config_manifest(settings, job)) out.push_back(std::move(*config));
  out.push_back(ray_job_manifest(settings, job, features));
  return out;
}

}  // namespace gemtune
