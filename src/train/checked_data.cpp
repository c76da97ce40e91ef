#include "train/checked_data.h"

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"

#include <fmt/core.h>

#include <algorithm>

namespace gemtune {
namespace {

constexpr size_t kFaultsShown = 10;

// All that a report depends on besides the data files.
std::string check_options(const Recipe& recipe, const Preparation& prepared, CheckDepth depth) {
  Recipe relevant;
  relevant.data = recipe.data;
  relevant.data.train.clear();
  relevant.data.eval.clear();
  relevant.data.num_workers = 0;
  relevant.data.on_bad_row = "error";
  relevant.image = recipe.image;
  const std::string tokenizer = recipe.model.tokenizer.empty() ? prepared.model_folder : recipe.model.tokenizer;
  return fmt::format("{}\ntokenizer {}\nconfig {}\ndepth {}", to_yaml(relevant), sha256_of(read_tokenizer_json(tokenizer)),
                     sha256_of_file(join_path(prepared.model_folder, "config.json")), int(depth));
}

}  // namespace

DataReport check_data(const Recipe& recipe, const Preparation& prepared, CheckDepth depth, const CheckHooks& hooks) {
  const std::string key = check_key(*prepared.dataset, check_options(recipe, prepared, depth));
  if (auto kept = load_report(key)) return *kept;
  DataReport report =
      check_dataset(*prepared.dataset, *prepared.chat, image_options(recipe), depth, loader_threads(recipe), hooks);
  save_report(key, report);
  return report;
}

std::vector<std::string> stopping_faults(const Recipe& recipe, const DataReport& report) {
  std::vector<std::string> texts;
  if (recipe.data.on_bad_row == "skip") return texts;
  for (const RowFault& fault : report.faults) {
    if (fault.reason == reason::kTooLong && recipe.data.on_too_long == "skip") continue;
    texts.push_back(RowError(fault).what());
  }
  return texts;
}

void require_usable(const Recipe& recipe, const DataReport& report) {
  const auto texts = stopping_faults(recipe, report);
  if (!texts.empty()) {
    std::string shown;
    for (size_t i = 0; i < std::min(kFaultsShown, texts.size()); ++i) shown += "\n  " + texts[i];
    throw input_error(
        "{} of {} rows cannot be trained on:{}\n`gemtune data check` lists all of them; fix the rows or set data.on_bad_row=skip",
        texts.size(), report.num_rows, shown);
  }
  if (report.used.empty())
    throw input_error("none of the {} rows can be trained on; `gemtune data check` says why", report.num_rows);
}

std::vector<int64_t> held_out_rows(const Recipe& recipe, const Preparation& prepared) {
  const DataReport report = check_data(recipe, prepared, CheckDepth::kImages);
  require_usable(recipe, report);
  std::vector<int64_t> rows = report.used;
  if (recipe.eval.max_rows > 0 && int64_t(rows.size()) > recipe.eval.max_rows) rows.resize(size_t(recipe.eval.max_rows));
  return rows;
}

}  // namespace gemtune
