#include "cluster/settings.h"

#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "recipe/gpus.h"

#include <charconv>
#include <cstdlib>
#include <regex>

#ifndef GEMTUNE_VERSION
#define GEMTUNE_VERSION "0"
#endif

namespace gemtune {
namespace {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return std::string(strip(value != nullptr ? value : ""));
}

std::string first_of(const std::string& flag, const char* variable) {
  return flag.empty() ? environment(variable) : flag;
}

class Complaints {
 public:
  template <class... Args>
  void add(fmt::format_string<Args...> text, Args&&... args) {
    text_ += (text_.empty() ? "" : "\n") + fmt::format(text, std::forward<Args>(args)...);
  }
  // `value` of `flag` must match; what it must be is said in words.
  void expect(const std::string& value, const char* flag, const char* variable, const char* pattern, const char* words) {
    static const std::regex placeholder("YOUR_.*|.*_ID|RESERVATION");
    if (value.empty()) {
      add("{} is missing; give it, or set {}", flag, variable);
    } else if (std::regex_match(value, placeholder)) {
      add("{}: {} is the tutorial's placeholder; give the real name", flag, in_quotes(value));
    } else if (!std::regex_match(value, std::regex(pattern))) {
      add("{}: expected {}, got {}", flag, words, in_quotes(value));
    }
  }
  void finish() const {
    if (!text_.empty()) throw input_error("{}", text_);
  }

 private:
  std::string text_;
};

constexpr const char* kDnsLabel = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?";
constexpr const char* kDnsWords = "lower-case letters, digits and hyphens, at most 63";

std::string without_scheme(std::string bucket) {
  if (bucket.starts_with("gs://")) bucket.erase(0, 5);
  while (bucket.ends_with('/')) bucket.pop_back();
  return bucket;
}

Reservation parse_reservation(const std::string& text, const std::string& own_project, Complaints& complaints) {
  static const std::regex shared("projects/([^/]+)/reservations/([^/]+)");
  std::smatch match;
  Reservation out;
  if (std::regex_match(text, match, shared)) {
    out = {match[1] == own_project ? "" : match[1].str(), match[2]};
  } else {
    out.name = text;
  }
  complaints.expect(out.name, "--reservation", "RESERVATION", "[a-z]([-a-z0-9]{0,61}[a-z0-9])?",
                    "NAME or projects/PROJECT/reservations/NAME");
  return out;
}

std::string default_state_dir() {
  if (const std::string home = environment("XDG_STATE_HOME"); !home.empty()) return join_path(home, "gemtune/gke");
  return join_path(environment("HOME"), ".local/state/gemtune/gke");
}

void find_price(ClusterSettings& out, const ClusterFlags& flags) {
  if (flags.usd_per_hour > 0) {
    out.usd_per_node_hour = flags.usd_per_hour;
    out.price_source = "--usd-per-hour";
  } else if (out.profile.usd_per_hour > 0) {
    out.usd_per_node_hour = out.profile.usd_per_hour;
    out.price_source = "list of " + out.profile.prices_as_of;
  } else if (!out.profile.gpu.empty()) {
    const GpuTable table = read_gpu_table(flags.gpus);
    out.usd_per_node_hour = table.find(out.profile.gpu).usd_per_hour * out.profile.gpus;
    out.price_source = "list of " + table.prices_as_of;
  }
}

}  // namespace

std::string ClusterSettings::described() const {
  return fmt::format("{} ({}, {})", cluster, region, project);
}

ClusterSettings resolve_settings(const ClusterFlags& flags) {
  Complaints complaints;
  ClusterSettings out;
  out.project = first_of(flags.project, "PROJECT_ID");
  out.region = first_of(flags.region, "REGION");
  out.cluster = first_of(flags.cluster, "CLUSTER_NAME");
  out.bucket = without_scheme(first_of(flags.bucket, "GCS_BUCKET"));
  out.name_space = flags.name_space.empty() ? "default" : flags.name_space;
  out.service_account = first_of(flags.service_account, "RAY_SA");
  if (out.service_account.empty()) out.service_account = "gemtune-ray";
  out.zone = flags.zone;
  out.queue = flags.queue;
  out.network = flags.network.empty() ? "default" : flags.network;
  out.hub_token = environment("HF_TOKEN");

  complaints.expect(out.project, "--project", "PROJECT_ID", "([a-z0-9.-]+:)?[a-z][-a-z0-9]{4,28}[a-z0-9]",
                    "a project id (not its number)");
  if (std::regex_match(out.region, std::regex("[a-z]+-[a-z]+[0-9]+-[a-z]"))) {
    complaints.add("--region: {} is a zone; give --region {} and --zone {}", in_quotes(out.region),
                   out.region.substr(0, out.region.size() - 2), out.region);
  } else {
    complaints.expect(out.region, "--region", "REGION", "[a-z]+-[a-z]+[0-9]+", "a region such as us-west4");
  }
  if (!out.zone.empty() && !out.zone.starts_with(out.region + "-")) {
    complaints.add("--zone: {} is not in the region {}", in_quotes(out.zone), out.region);
  }
  complaints.expect(out.cluster, "--cluster", "CLUSTER_NAME", "[a-z]([-a-z0-9]{0,38}[a-z0-9])?",
                    "lower-case letters, digits and hyphens, at most 40");
  if (out.bucket.find('/') != std::string::npos) {
    complaints.add("--bucket: expected a bucket without a path, got {}", in_quotes(out.bucket));
  } else {
    complaints.expect(out.bucket, "--bucket", "GCS_BUCKET", "[a-z0-9][-a-z0-9_.]{1,220}[a-z0-9]", "a bucket's name");
  }
  complaints.expect(out.name_space, "--namespace", "--namespace", kDnsLabel, kDnsWords);
  complaints.expect(out.service_account, "--service-account", "RAY_SA", kDnsLabel, kDnsWords);
  if (!out.queue.empty()) complaints.expect(out.queue, "--queue", "--queue", kDnsLabel, kDnsWords);

  out.capacity = flags.capacity;
  const std::string reservation = first_of(flags.reservation, "RESERVATION");
  if (!reservation.empty() && (out.capacity.empty() || out.capacity == "reservation")) {
    out.reservation = parse_reservation(reservation, out.project, complaints);
    out.capacity = "reservation";
  } else if (!flags.reservation.empty()) {
    complaints.add("--reservation and --capacity {} exclude each other", out.capacity);
  } else if (out.capacity == "reservation") {
    complaints.add("--capacity reservation needs --reservation NAME");
  }
  if (out.capacity.empty()) out.capacity = "on-demand";
  complaints.finish();

  out.profile = read_profile(flags.profile.empty() ? "a4" : flags.profile);
  out.nodes = flags.nodes > 0 ? flags.nodes : out.profile.nodes;
  out.rdma = out.profile.rdma_networks > 0 && !flags.allow_tcp;
  if (out.capacity == "reservation" && out.profile.accelerator.empty()) {
    complaints.add("profile {}: reservations are for GPU machines; leave --reservation out", out.profile.name);
  }
  complaints.finish();
  out.image = flags.image.empty()
                  ? fmt::format("{}-docker.pkg.dev/{}/gemtune/gemtune-ray:{}", out.region, out.project, GEMTUNE_VERSION)
                  : flags.image;
  if (out.image.find_first_of(" \t\"'$`\\") != std::string::npos || out.image.find(':') == std::string::npos) {
    complaints.add("--image: expected HOST/NAME:TAG or HOST/NAME@sha256:…, got {}", in_quotes(out.image));
  }
  complaints.finish();
  find_price(out, flags);
  out.state_dir = join_path(flags.state_dir.empty() ? default_state_dir() : flags.state_dir,
                            fmt::format("{}.{}.{}", out.project, out.region, out.cluster));
  return out;
}

int64_t parse_duration(const std::string& text, const std::string& flag) {
  int64_t number = 0;
  const char* end = text.data() + text.size();
  const auto read = std::from_chars(text.data(), end, number);
  const std::string unit(read.ptr, end);
  const int64_t factor = unit.empty() || unit == "s" ? 1 : unit == "m" ? 60 : unit == "h" ? 3600 : unit == "d" ? 86400 : 0;
  if (read.ec != std::errc() || factor == 0 || number < 1 || number > 31536000 / factor) {
    throw input_error("{}: expected a duration such as 4h, 90m or 3600s, got {}", flag, in_quotes(text));
  }
  return number * factor;
}

}  // namespace gemtune
