#include "base/error.h"
#include "base/file.h"
#include "cluster/document.h"
#include "cluster/plan.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <set>

namespace gemtune {
namespace {

std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kInput);
    return error.what();
  }
  return "no error";
}

ClusterFlags some_flags() {
  ClusterFlags flags;
  flags.project = "my-project";
  flags.region = "us-west4";
  flags.cluster = "gemma";
  flags.bucket = "gs://my-results/";
  return flags;
}

JobSpec some_job() {
  JobSpec job;
  job.run = "mugs";
  job.job = "mugs-abc123";
  job.recipe_yaml = "model:\n  path: google/gemma-3-4b-it\n";
  job.deadline_s = 7200;
  job.capacity_deadline_s = 3600;
  return job;
}

class GkeEnvironment : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"PROJECT_ID", "REGION", "CLUSTER_NAME", "GCS_BUCKET", "RESERVATION", "RAY_SA", "HF_TOKEN"}) {
      unsetenv(name);
    }
  }
};
using Settings = GkeEnvironment;
using Manifests = GkeEnvironment;

TEST(Documents, WhatIsWrittenIsReadBack) {
  Document tree;
  tree["plain"] = "gs://bucket/runs";
  tree["colon"] = "a: b";
  tree["looks like a number"] = "8";
  tree["looks like a word"] = "no";
  tree["empty"] = "";
  tree["lines"] = "one\n  two\n\nthree\n";
  tree["lines without end"] = "one\ntwo";
  tree["space at a line's end"] = "one \ntwo\n";
  tree["controls"] = "tab\t bell\a quote\" {{";
  tree["nested"] = {{"list", {1, true, nullptr, 2.5, {{"a", "x"}, {"b", Document::array()}}}}, {"none", Document::object()}};
  tree["9"] = -3;
  EXPECT_EQ(parse_yaml_document(to_yaml(tree), "test"), tree) << to_yaml(tree);
}

TEST(Documents, AValueCannotChangeTheManifestsStructure) {
  const Document form =
      parse_yaml_document("name: \"{{name}}\"\ntext: \"a {{name}} b\"\nnone: \"{{nothing}}\"\nlist: [\"{{nothing}}\", 1]\n", "t");
  const std::string evil = "x\nspec: {hostNetwork: true}\n\"'";
  const Document filled = fill_template(form, {{"name", evil}, {"nothing", nullptr}}, "t");
  EXPECT_EQ(parse_yaml_document(to_yaml(filled), "t"), (Document{{"name", evil}, {"text", "a " + evil + " b"}, {"list", {1}}}));
  EXPECT_EQ(error_of([&] {
              fill_template(form, {{"name", "x"}}, "t.yaml");
            }),
            "t.yaml: {{nothing}} has no value; the template names something unknown");
}

TEST_F(Settings, TheTutorialsVariablesServeWhereNoFlagIsGiven) {
  setenv("PROJECT_ID", "my-project", 1);
  setenv("REGION", "us-west4", 1);
  setenv("CLUSTER_NAME", "gemma", 1);
  setenv("GCS_BUCKET", "gs://my-results", 1);
  setenv("RESERVATION", "b200s", 1);
  setenv("RAY_SA", "ray", 1);
  ClusterFlags flags;
  flags.cluster = "other";
  const ClusterSettings settings = resolve_settings(flags);
  EXPECT_EQ(settings.described(), "other (us-west4, my-project)");
  EXPECT_EQ(settings.bucket, "my-results");
  EXPECT_EQ(settings.reservation.name, "b200s");
  EXPECT_EQ(settings.capacity, "reservation");
  EXPECT_EQ(settings.service_account, "ray");
  EXPECT_EQ(settings.profile.name, "a4");
  EXPECT_EQ(settings.name_space, "default");
  EXPECT_EQ(settings.num_workers(), 16);
}

TEST_F(Settings, EveryFaultIsNamedAtOnce) {
  ClusterFlags flags;
  flags.project = "12345";
  flags.region = "us-west4-a";
  flags.cluster = "YOUR_CLUSTER_NAME";
  flags.bucket = "gs://a/b";
  EXPECT_EQ(error_of([&] { resolve_settings(flags); }),
            "--project: expected a project id (not its number), got \"12345\"\n"
            "--region: \"us-west4-a\" is a zone; give --region us-west4 and --zone us-west4-a\n"
            "--cluster: \"YOUR_CLUSTER_NAME\" is the tutorial's placeholder; give the real name\n"
            "--bucket: expected a bucket without a path, got \"a/b\"");
}

TEST_F(Settings, AReservationAndOtherCapacityExcludeEachOther) {
  ClusterFlags flags = some_flags();
  flags.reservation = "b200s";
  flags.capacity = "spot";
  EXPECT_EQ(error_of([&] { resolve_settings(flags); }), "--reservation and --capacity spot exclude each other");
  flags.reservation = "";
  flags.capacity = "reservation";
  EXPECT_EQ(error_of([&] { resolve_settings(flags); }), "--capacity reservation needs --reservation NAME");
}

TEST_F(Settings, DurationsAreReadWithTheirUnit) {
  EXPECT_EQ(parse_duration("90m", "--deadline"), 5400);
  EXPECT_EQ(parse_duration("2d", "--deadline"), 172800);
  EXPECT_EQ(parse_duration("30", "--deadline"), 30);
  for (const char* bad : {"", "h", "1w", "-1h", "0", "99999999999999999999", "9999999d"}) {
    EXPECT_TRUE(error_of([&] { parse_duration(bad, "--deadline"); }).starts_with("--deadline: expected a duration")) << bad;
  }
}

TEST_F(Manifests, ASharedReservationPutsNoSlashIntoALabel) {
  ClusterFlags flags = some_flags();
  flags.reservation = "projects/owner-project/reservations/b200s";
  const Document job = ray_job_manifest(resolve_settings(flags), some_job(), {});
  const Document& selector = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["nodeSelector"];
  EXPECT_EQ(selector["cloud.google.com/reservation-name"], "b200s");
  EXPECT_EQ(selector["cloud.google.com/reservation-project"], "owner-project");
  EXPECT_EQ(selector["cloud.google.com/reservation-affinity"], "specific");
}

TEST_F(Manifests, RdmaBringsItsNetworksAndLeavesWithAllowTcp) {
  ClusterFlags flags = some_flags();
  const ClusterSettings with = resolve_settings(flags);
  const std::string job = to_yaml(ray_job_manifest(with, some_job(), {}));
  EXPECT_EQ(network_manifests(with).size(), 18u);
  EXPECT_NE(job.find("rdma-7"), std::string::npos);
  EXPECT_NE(job.find("NCCL_NET"), std::string::npos);
  flags.allow_tcp = true;
  const ClusterSettings without = resolve_settings(flags);
  const std::string plain = to_yaml(ray_job_manifest(without, some_job(), {}));
  EXPECT_TRUE(network_manifests(without).empty());
  for (const char* trace : {"rdma", "NCCL", "gib", "overwrite-container-cmd"})
    EXPECT_EQ(plain.find(trace), std::string::npos) << trace;
}

TEST_F(Manifests, AnAttachedJobAsksForNothingThatKubeRayRefusesThere) {
  JobSpec job = some_job();
  job.attach = "gemma3-tuning";
  const ClusterSettings settings = resolve_settings(some_flags());
  const Document spec = ray_job_manifest(settings, job, {})["spec"];
  EXPECT_EQ(spec["clusterSelector"], (Document{{"ray.io/cluster", "gemma3-tuning"}}));
  for (const char* key : {"backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "rayClusterSpec"}) {
    EXPECT_FALSE(spec.contains(key)) << key;
  }
  EXPECT_FALSE(run_config_manifest(settings, job).has_value());
  EXPECT_NE(spec["entrypoint"].get<std::string>().find(base64_of(job.recipe_yaml)), std::string::npos);
  ClusterFlags queued = some_flags();
  queued.queue = "team";
  EXPECT_EQ(error_of([&] { ray_job_manifest(resolve_settings(queued), job, {}); }),
            "--queue and --attach exclude each other: Kueue admits jobs with a cluster of their own only");
}

TEST_F(Manifests, FieldsThatAnOlderOperatorLacksAreLeftOut) {
  const Document spec = ray_job_manifest(resolve_settings(some_flags()), some_job(), {false, false, false})["spec"];
  EXPECT_FALSE(spec.contains("preRunningDeadlineSeconds"));
  EXPECT_FALSE(spec.contains("submitterConfig"));
  EXPECT_FALSE(spec["rayClusterSpec"].contains("authOptions"));
  EXPECT_EQ(spec["activeDeadlineSeconds"], 7200);
}

TEST_F(Manifests, TheHubTokenStandsInNoManifestThatIsShown) {
  setenv("HF_TOKEN", "hf_verysecret", 1);
  const ClusterSettings settings = resolve_settings(some_flags());
  const std::string shown = to_yaml_stream(all_manifests(settings, some_job(), {}));
  EXPECT_NE(shown.find("gemtune-hub"), std::string::npos);
  EXPECT_EQ(shown.find("hf_verysecret"), std::string::npos);
  EXPECT_EQ(shown.find(base64_of("hf_verysecret")), std::string::npos);
}

TEST_F(Manifests, ACostLimitBecomesADeadlineThatTheClusterItselfKeeps) {
  ClusterFlags flags = some_flags();
  flags.usd_per_hour = 50;
  RunFlags run;
  run.max_cost_usd = 250;
  PlannedRun planned = plan_run(resolve_settings(flags), run);
  EXPECT_EQ(planned.job.deadline_s, 9000);  // 2 nodes × $50: $250 buys two hours and a half
  EXPECT_EQ(planned.job.retries, 0);
  EXPECT_TRUE(planned.cost_limited);
  run.retries = 1;
  EXPECT_EQ(plan_run(resolve_settings(flags), run).job.deadline_s, 4500);
  run.max_cost_usd = 1;
  EXPECT_EQ(error_of([&] { plan_run(resolve_settings(flags), run); }),
            "--max-cost 1: buys 18.0 s of 2 × a4-highgpu-8g at $100.00 an hour; a run needs at least 5 minutes");
  flags.usd_per_hour = 0;
  EXPECT_EQ(error_of([&] { plan_run(resolve_settings(flags), run); }),
            "--max-cost 1: no price is known for a4-highgpu-8g; give the price of one node with --usd-per-hour, or a table with "
            "--gpus");
}

TEST_F(Manifests, EveryProfileOfTheFolderRenders) {
  std::set<std::string> names;
  for (const std::string& name : profile_names()) {
    ClusterFlags flags = some_flags();
    flags.profile = name;
    const ClusterSettings settings = resolve_settings(flags);
    EXPECT_EQ(ray_job_manifest(settings, some_job(), {})["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"],
              settings.profile.nodes);
    names.insert(name);
  }
  EXPECT_EQ(names, (std::set<std::string>{"a3m", "a3u", "a4", "cpu", "g2-l4"}));
}

TEST_F(Manifests, AProfileFileWithAnUnknownKeyIsRefused) {
  const std::string path = ::testing::TempDir() + "/mine.yaml";
  write_file_atomically(path, "machine_type: e2\ncpu: \"1\"\nmemory: 1Gi\nephemeral_storage: 1Gi\nworker: 2\n");
  ClusterFlags flags = some_flags();
  flags.profile = path;
  EXPECT_EQ(error_of([&] { resolve_settings(flags); }), path + ": unknown key \"worker\"; did you mean workers?");
  flags.profile = "a5";
  EXPECT_EQ(error_of([&] { resolve_settings(flags); }),
            "no profile \"a5\"; there are a3m, a3u, a4, cpu, g2-l4, or give a file NAME.yaml; did you mean a4?");
}

}  // namespace
}  // namespace gemtune
