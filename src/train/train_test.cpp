#include "base/error.h"
#include "base/file.h"
#include "train/evaluate.h"
#include "train/metrics.h"
#include "train/optimizer.h"
#include "train/plan.h"
#include "train/specs.h"

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

namespace gemtune {
namespace {

class Folder {
 public:
  Folder()
      : path_(fmt::format("{}/gemtune-train-test-{}-{}", std::filesystem::temp_directory_path().string(), getpid(), counter_++)) {
    make_folders(path_);
  }
  ~Folder() { remove_recursively(path_); }
  const std::string& path() const { return path_; }

 private:
  static inline int counter_ = 0;
  std::string path_;
};

Dims dims_4b() {
  Folder folder;
  write_file_atomically(join_path(folder.path(), "config.json"), R"({"model_type": "gemma3", "text_config": {"hidden_size": 2560,
    "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14}})");
  return read_dims(folder.path());
}

TEST(Schedule, ConstantWithWarmupRisesOverItsStepsToTheFullRate) {
  const OptimizerSpec spec{.warmup_steps = 10, .total_steps = 100};
  EXPECT_DOUBLE_EQ(schedule_factor(spec, 1), 0.1);
  EXPECT_DOUBLE_EQ(schedule_factor(spec, 10), 1.0);
  EXPECT_DOUBLE_EQ(schedule_factor(spec, 100), 1.0);
}

TEST(Schedule, LinearFallsFromTheFullRateTowardsZero) {
  const OptimizerSpec spec{.schedule = Schedule::kLinear, .total_steps = 10};
  EXPECT_DOUBLE_EQ(schedule_factor(spec, 1), 1.0);
  EXPECT_DOUBLE_EQ(schedule_factor(spec, 6), 0.5);
  EXPECT_NEAR(schedule_factor(spec, 10), 0.1, 1e-12);
}

TEST(Schedule, CosineIsHalfWayDownInTheMiddle) {
  const OptimizerSpec spec{.schedule = Schedule::kCosine, .warmup_steps = 2, .total_steps = 12};
  EXPECT_DOUBLE_EQ(schedule_factor(spec, 2), 1.0);
  EXPECT_DOUBLE_EQ(schedule_factor(spec, 3), 1.0);
  EXPECT_NEAR(schedule_factor(spec, 8), 0.5, 1e-12);
}

TEST(Plan, TheDefaultAdaptsTheLanguageTowerAlone) {
  const Plan plan = make_plan(dims_4b(), model_spec(Recipe{}, at::kCPU), {}, {});
  EXPECT_EQ(plan.lora_modules, 238);
  EXPECT_EQ(plan.trainable_parameters, 29802496);
  EXPECT_EQ(plan.adapter_bytes, 29802496 * 4);
}

TEST(Plan, TheTutorialTrainsBothTowersAndTwoTables) {
  Recipe recipe;
  recipe.lora.targets = "all-linear";
  recipe.lora.train_tables = "untied";
  recipe.quant.vision = true;
  const Plan plan = make_plan(dims_4b(), model_spec(recipe, at::kCPU), {}, {});
  EXPECT_EQ(plan.lora_modules, 400);
  EXPECT_EQ(plan.trainable_parameters, 1381002752);
}

TEST(Plan, QuantisedBytesAreThoseOfCodesAndScales) {
  Recipe recipe;
  recipe.quant.vision = true;
  const Plan plan = make_plan(dims_4b(), model_spec(recipe, at::kCPU), {}, {});
  int64_t elements = 0;
  int64_t bytes = 0;
  for (const PlanPart& part : plan.parts) {
    if (part.name.find("NF4") == std::string::npos) continue;
    elements += part.parameters;
    bytes += part.bytes;
  }
  EXPECT_EQ(elements, 3619713024);
  // 1726.0 MiB of codes, 53.9 MiB of scales, 0.84 MiB of nested scales.
  EXPECT_NEAR(double(bytes) / (1 << 20), 1726.0 + 53.9 + 0.84, 0.2);
}

// Peaks measured on one H200 with bench/gpu_step (docs/performance.md, 2026-12-05), GiB.
struct MeasuredPeak {
  const char* name;
  bool tutorial;  // both towers adapted, two trained tables; else language only
  PlanLoad load;
  MemoryChoice choice;
  double gib;
};
class MeasuredPeaks : public testing::TestWithParam<MeasuredPeak> {};
TEST_P(MeasuredPeaks, ArePredictedWithinATenth) {
  const MeasuredPeak& measured = GetParam();
  Recipe recipe;
  if (measured.tutorial) {
    recipe.lora.targets = "all-linear";
    recipe.lora.train_tables = "untied";
    recipe.quant.vision = true;
  }
  const Plan plan = make_plan(dims_4b(), model_spec(recipe, at::kCUDA), measured.load, measured.choice);
  EXPECT_NEAR(double(plan.peak_bytes) / double(1 << 30) / measured.gib, 1.0, 0.1);
}
constexpr PlanLoad tutorial_load(int64_t batch, int64_t accumulation = 1) {
  return {.micro_batch = batch, .accumulation = accumulation, .longest = 412, .targets = 155, .images_a_row = 1};
}
INSTANTIATE_TEST_SUITE_P(OnAnH200, MeasuredPeaks,
                         testing::Values(MeasuredPeak{"batch1", true, tutorial_load(1), {}, 24.8},
                                         MeasuredPeak{"batch8", true, tutorial_load(8), {}, 63.6},
                                         MeasuredPeak{"batch16", true, tutorial_load(16), {}, 107.8}),
                         [](const auto& info) { return info.param.name; });

TEST(MemoryChoice, IsTheFastestThatFits) {
  Recipe recipe;
  recipe.lora.targets = "all-linear";
  recipe.lora.train_tables = "untied";
  recipe.quant.vision = true;
  const ModelSpec spec = model_spec(recipe, at::kCUDA);
  const Dims dims = dims_4b();
  const PlanLoad load = tutorial_load(1, 4);
  const auto choose = [&](double gib, RecomputePolicy policy = RecomputePolicy::kAuto) {
    return choose_memory(dims, spec, load, policy, int64_t(gib * double(1 << 30))).describe();
  };
  EXPECT_EQ(choose(139), "4-bit weights kept expanded; nothing recomputed");
  EXPECT_EQ(choose(20), "4-bit weights expanded for each product; nothing recomputed");
  EXPECT_EQ(choose(15), "4-bit weights expanded for each product; blocks of both towers recomputed");
  EXPECT_EQ(choose(1), choose(15)) << "the leanest when nothing fits";
  EXPECT_EQ(choose(139, RecomputePolicy::kAlways), "4-bit weights kept expanded; blocks of both towers recomputed");
  EXPECT_EQ(choose(15, RecomputePolicy::kNever), "4-bit weights expanded for each product; nothing recomputed");
}

TEST(MemoryChoice, NeverCostsTimeThatMoreMemoryWouldNotSave) {
  const ModelSpec spec = model_spec(Recipe{}, at::kCUDA);
  const Dims dims = dims_4b();
  double before = 1e9;
  for (int64_t gib = 4; gib < 64; gib += 2) {
    const MemoryChoice choice = choose_memory(dims, spec, tutorial_load(8), RecomputePolicy::kAuto, gib << 30);
    const double seconds = step_seconds(dims, spec, tutorial_load(8), choice, {});
    EXPECT_LE(seconds, before) << gib;
    before = seconds;
  }
}

TEST(Accumulation, KeepsTheRowsOfAStepOnFewerRanks) {
  Recipe recipe;
  recipe.train.accumulation = 4;
  recipe.dist.workers = 16;
  EXPECT_EQ(accumulation_for(recipe, 1), 64);
  EXPECT_EQ(accumulation_for(recipe, 16), 4);
  recipe.dist.workers = 0;
  EXPECT_EQ(accumulation_for(recipe, 2), 4);
}

TEST(Accumulation, RefusesRanksThatCannotShareAStepEvenly) {
  Recipe recipe;
  recipe.train.accumulation = 1;
  recipe.dist.workers = 4;
  try {
    accumulation_for(recipe, 3);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "a step has train.accumulation 1 × dist.workers 4 = 4 micro-batches, which 3 ranks cannot share evenly; use a "
                 "number of ranks that divides it");
  }
}

TEST(Scores, RougeLCountsTheLongestCommonSubsequenceOfWords) {
  EXPECT_DOUBLE_EQ(rouge_l("the cat sat", "the cat sat"), 1.0);
  EXPECT_DOUBLE_EQ(rouge_l("The cat, sat!", "the CAT sat"), 1.0);
  EXPECT_NEAR(rouge_l("police kill the gunman", "police killed the gunman"), 0.75, 1e-12);
  EXPECT_DOUBLE_EQ(rouge_l("", "a"), 0.0);
}

TEST(Scores, ChrfIsAHundredForEqualTextsAndZeroForDisjointOnes) {
  EXPECT_DOUBLE_EQ(chrf("A leather boot.", "A leather boot."), 100.0);
  EXPECT_DOUBLE_EQ(chrf("abc", "xyz"), 0.0);
  EXPECT_GT(chrf("A leather boot", "A leather bag"), 50.0);
}

TEST(Metrics, RecordsAfterTheResumedStepAreDropped) {
  Folder folder;
  const std::string path = join_path(folder.path(), "metrics.jsonl");
  write_file_atomically(path, "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"step\":");
  { Metrics metrics({.run_dir = folder.path(), .tensorboard = false, .total_steps = 5, .first_step = 2}); }
  EXPECT_EQ(read_file(path), "{\"step\":1}\n{\"step\":2}\n");
}

TEST(Metrics, ARecordHasTheContractsFieldsInOrder) {
  Folder folder;
  StepRecord record;
  record.step = 1;
  record.loss = std::nan("");
  {
    Metrics metrics({.run_dir = folder.path(), .tensorboard = false, .every = 1000, .total_steps = 5});
    metrics.add_step(record);
  }
  EXPECT_EQ(read_file(join_path(folder.path(), "metrics.jsonl")),
            "{\"step\":1,\"epoch\":0.0,\"loss\":null,\"learning_rate\":0.0,\"grad_norm\":0.0,\"num_tokens\":0,\"mean_token_"
            "accuracy\":0.0,"
            "\"tokens_per_s\":0.0,\"samples_per_s\":0.0,\"step_ms\":0.0,\"data_ms\":0.0,\"peak_bytes\":0}\n");
}

}  // namespace
}  // namespace gemtune
