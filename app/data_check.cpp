#include "app/commands.h"
#include "base/error.h"
#include "base/text.h"
#include "train/checked_data.h"
#include "train/specs.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <thread>

namespace gemtune {
namespace {

int32_t percentile(std::vector<int32_t> values, double share) {
  if (values.empty()) return 0;
  const size_t at = std::min(values.size() - 1, size_t(share * double(values.size())));
  std::nth_element(values.begin(), values.begin() + std::ptrdiff_t(at), values.end());
  return values[at];
}

int64_t total_steps(const Recipe& recipe, const DataReport& report) {
  if (recipe.train.max_steps > 0) return recipe.train.max_steps;
  LoaderOptions options;
  options.micro_batch = recipe.train.micro_batch;
  options.world = recipe.dist.nproc;
  options.accumulation = accumulation_for(recipe, options.world);
  return int64_t(std::ceil(recipe.train.epochs * double(steps_per_epoch(int64_t(report.used.size()), options))));
}

void print_json(const Recipe& recipe, const DataReport& report) {
  nlohmann::ordered_json json = {
      {"rows", report.num_rows}, {"used", report.used.size()}, {"skipped", nlohmann::ordered_json::object()}};
  for (const auto& [reason, count] : report.skipped_by_reason) json["skipped"][reason] = count;
  json["errors"] = nlohmann::ordered_json::array();
  for (const RowFault& fault : report.faults) {
    json["errors"].push_back({{"row", fault.row},
                              {"file", fault.file},
                              {"line", fault.line > 0 ? nlohmann::ordered_json(fault.line) : nlohmann::ordered_json(nullptr)},
                              {"field", fault.field},
                              {"value", fault.value},
                              {"rule", fault.rule}});
  }
  json["lengths"] = {{"p50", percentile(report.lengths, 0.5)},
                     {"p95", percentile(report.lengths, 0.95)},
                     {"max", percentile(report.lengths, 1)}};
  json["target_tokens"] = report.num_targets;
  json["total_steps"] = total_steps(recipe, report);
  fmt::print("{}\n", json.dump(2));
}

void print_histogram(const std::vector<int32_t>& lengths) {
  if (lengths.empty()) return;
  constexpr int kBins = 10;
  constexpr int kWidth = 40;
  const auto [least, most] = std::minmax_element(lengths.begin(), lengths.end());
  const int32_t width = std::max(1, (*most - *least + kBins) / kBins);
  std::vector<int64_t> counts(kBins, 0);
  for (const int32_t length : lengths) ++counts[size_t(std::min(kBins - 1, (length - *least) / width))];
  const int64_t largest = *std::max_element(counts.begin(), counts.end());
  fmt::print("\ntokens a row\n");
  for (int bin = 0; bin < kBins; ++bin) {
    if (*least + bin * width > *most) break;
    const int64_t bar = (counts[size_t(bin)] * kWidth + largest - 1) / largest;
    fmt::print("{:>7}–{:<7} {:>8} {}\n", *least + bin * width, *least + (bin + 1) * width - 1, counts[size_t(bin)],
               std::string(size_t(bar), '#'));
  }
}

void print_for_people(const Recipe& recipe, const DataReport& report, const std::string& description) {
  fmt::print("{}\n", description);
  for (const RowFault& fault : report.faults) fmt::print("{}\n", RowError(fault).what());
  fmt::print("\n{} rows, {} used", report.num_rows, report.used.size());
  for (const auto& [reason, count] : report.skipped_by_reason) fmt::print(", {} {}", count, reason);
  fmt::print("\n{} tokens carry loss; {} steps\n", report.num_targets, total_steps(recipe, report));
  if (report.num_checked < report.num_rows)
    fmt::print("stopped early: {} of {} rows were looked at\n", report.num_checked, report.num_rows);
  for (const std::string& note : report.notes) fmt::print("note: {}\n", note);
  print_histogram(report.lengths);
}

}  // namespace

int run_data_check(const DataCommand& command) {
  const ResolvedRecipe resolved = command.recipe.load();
  const Recipe& recipe = resolved.recipe;
  const Preparation prepared = prepare(recipe, Source::kTrain);
  // Ctrl-C gives the report of the rows looked at so far.
  std::atomic<bool> stop{false};
  std::jthread watch([&](const std::stop_token& token) {
    while (!token.stop_requested()) {
      if (g_stop_signal.load() != 0) stop = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  });
  CheckHooks hooks;
  hooks.stop = &stop;
  const DataReport report = check_data(recipe, prepared, CheckDepth::kImages, hooks);
  if (command.json) {
    print_json(recipe, report);
  } else {
    print_for_people(recipe, report, prepared.dataset->description());
  }
  return stopping_faults(recipe, report).empty() ? 0 : int(ExitCode::kInput);
}

}  // namespace gemtune
