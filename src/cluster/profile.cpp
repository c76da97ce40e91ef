#include "cluster/profile.h"

#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "cluster/files.h"

namespace gemtune {
namespace {

constexpr std::string_view kFolder = "profiles/";

// Takes keys out of a map; what is left at the end is unknown.
class Reader {
 public:
  Reader(Document map, std::string where) : map_(std::move(map)), where_(std::move(where)) {
    if (!map_.is_object()) throw input_error("{}: expected a map of keys", where_);
  }

  template <class T>
  void read(const std::string& key, T& member) {
    known_.push_back(key);
    if (!map_.contains(key)) return;
    try {
      member = map_[key].get<T>();
    } catch (const nlohmann::json::exception&) {
      throw input_error("{}: {}: expected {}, got {}", where_, key, expected(member), in_quotes(map_[key].dump()));
    }
    map_.erase(key);
  }
  void read(const std::string& key, Document& member) {
    known_.push_back(key);
    if (!map_.contains(key)) return;
    if (map_[key].type() != member.type()) {
      throw input_error("{}: {}: expected a {}, got {}", where_, key, member.is_array() ? "list" : "map",
                        in_quotes(map_[key].dump()));
    }
    member = map_[key];
    map_.erase(key);
  }
  void finish() const {
    if (map_.empty()) return;
    const std::string key = map_.begin().key();
    const std::string near = did_you_mean(key, known_);
    throw input_error("{}: unknown key {}{}", where_, in_quotes(key), near.empty() ? "" : "; did you mean " + near + "?");
  }

 private:
  static const char* expected(const std::string&) { return "a text"; }
  static const char* expected(double) { return "a number"; }
  static const char* expected(int) { return "a whole number"; }

  Document map_;
  std::string where_;
  std::vector<std::string> known_;
};

}  // namespace

std::vector<std::string> profile_names() {
  std::vector<std::string> names;
  for (const auto& [path, text] : deployed_files()) {
    if (path.starts_with(kFolder)) names.push_back(path.substr(kFolder.size(), path.size() - kFolder.size() - 5));
  }
  return names;
}

Profile read_profile(const std::string& name_or_file) {
  std::string text, where = name_or_file;
  if (name_or_file.ends_with(".yaml")) {
    text = read_file(name_or_file);
  } else {
    where = std::string(kFolder) + name_or_file + ".yaml";
    const auto found = deployed_files().find(where);
    if (found == deployed_files().end()) {
      const std::string near = did_you_mean(name_or_file, profile_names());
      throw input_error("no profile {}; there are {}, or give a file NAME.yaml{}", in_quotes(name_or_file),
                        join_some(profile_names()), near.empty() ? "" : "; did you mean " + near + "?");
    }
    text = found->second;
  }
  Profile out;
  out.name = base_name(where).substr(0, base_name(where).size() - 5);
  Reader reader(parse_yaml_document(text, where), where);
  reader.read("machine_type", out.machine_type);
  reader.read("accelerator", out.accelerator);
  reader.read("gpu", out.gpu);
  reader.read("gpus", out.gpus);
  reader.read("nodes", out.nodes);
  reader.read("workers", out.workers);
  reader.read("cpu", out.cpu);
  reader.read("memory", out.memory);
  reader.read("ephemeral_storage", out.ephemeral_storage);
  reader.read("shm", out.shm);
  reader.read("staging", out.staging);
  reader.read("rdma_networks", out.rdma_networks);
  reader.read("usd_per_hour", out.usd_per_hour);
  reader.read("prices_as_of", out.prices_as_of);
  Document quotas = Document::array();
  reader.read("quotas", quotas);
  for (const Document& quota : quotas) {
    QuotaNeed need;
    Reader entry(quota, where + ": quotas");
    entry.read("metric", need.metric);
    entry.read("per_node", need.per_node);
    entry.finish();
    out.quotas.push_back(need);
  }
  reader.read("node_selector", out.node_selector);
  reader.read("annotations", out.annotations);
  reader.read("env", out.env);
  reader.read("init_containers", out.init_containers);
  reader.read("volume_mounts", out.volume_mounts);
  reader.read("volumes", out.volumes);
  reader.read("start_script", out.start_script);
  reader.finish();
  for (const auto& [key, value] : {std::pair("machine_type", out.machine_type), std::pair("cpu", out.cpu),
                                   std::pair("memory", out.memory), std::pair("ephemeral_storage", out.ephemeral_storage)}) {
    if (value.empty()) throw input_error("{}: {} is missing; every profile needs it", where, key);
  }
  if (out.nodes < 1 || out.workers < 1 || out.gpus < 0) throw input_error("{}: nodes and workers must be at least 1", where);
  if ((out.gpus > 0) == out.accelerator.empty()) throw input_error("{}: accelerator and gpus belong together", where);
  return out;
}

}  // namespace gemtune
