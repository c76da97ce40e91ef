// `data check`: every row read, rendered and decoded before training, and its result kept for the next start.
#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "data/loader_plan.h"

#include <fmt/core.h>
#include <sys/stat.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>

namespace gemtune {
namespace {

constexpr int64_t kRowsAtOnce = 16;
constexpr auto kProgressEvery = std::chrono::seconds(10);
constexpr int kCacheVersion = 2;

// Length of a row that cannot be used.
constexpr int32_t kUnusable = -1;
constexpr int32_t kNotChecked = -2;

std::optional<FileStamp> stamp_of(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return std::nullopt;
  return FileStamp{path, static_cast<int64_t>(info.st_size), int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec};
}

// For faults of layers that name no reason.
std::string reason_of(const RowFault& fault) {
  if (!fault.reason.empty()) return fault.reason;
  if (fault.rule.find("too long") != std::string::npos) return reason::kTooLong;
  if (fault.field.ends_with(".role")) return reason::kRoles;
  return reason::kOther;
}

struct Found {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t next_row = 0;
  int64_t num_checked = 0;
  int num_running = 0;
  std::exception_ptr failed;  // no fault of a row: the check itself cannot go on
  std::vector<int32_t> lengths;
  std::vector<RowFault> faults;
  std::map<std::string, int64_t> skipped;
  int64_t num_targets = 0;
  int64_t most_targets = 0;
  int64_t most_images = 0;
  int64_t num_animated = 0;
  std::unordered_map<std::string, FileStamp> image_files;
};

class Checker {
 public:
  Checker(const Dataset& dataset, const Chat& chat, const ImageOptions& image_options, CheckDepth depth, const CheckHooks& hooks)
      : dataset_(dataset), chat_(chat), image_options_(image_options), depth_(depth), hooks_(hooks) {}

  DataReport run(int num_workers) {
    found_.lengths.assign(static_cast<size_t>(dataset_.size()), kNotChecked);
    std::vector<std::thread> threads;
    const int num_threads = threads_for(num_workers);
    for (int i = 0; i < num_threads; ++i) {
      {
        const std::lock_guard lock(found_.mutex);
        ++found_.num_running;
      }
      try {
        threads.emplace_back([this] { work(); });
      } catch (const std::system_error& error) {
        const std::lock_guard lock(found_.mutex);
        --found_.num_running;
        if (threads.empty()) throw environment_error("data check: no thread can be started: {}", error.what());
        break;
      }
    }
    wait();
    for (std::thread& thread : threads) thread.join();
    if (found_.failed != nullptr) std::rethrow_exception(found_.failed);
    return report();
  }

 private:
  bool stopped() const { return hooks_.stop != nullptr && hooks_.stop->load(std::memory_order_relaxed); }

  void work() {
    std::unique_lock lock(found_.mutex);
    while (found_.failed == nullptr && found_.next_row < dataset_.size() && !stopped()) {
      const int64_t first = found_.next_row;
      found_.next_row = std::min(dataset_.size(), first + kRowsAtOnce);
      const int64_t end = found_.next_row;
      lock.unlock();
      try {
        for (int64_t row = first; row < end && !stopped(); ++row) check_row(row);
        lock.lock();
      } catch (...) {
        lock.lock();
        if (found_.failed == nullptr) found_.failed = std::current_exception();
      }
    }
    --found_.num_running;
    found_.changed.notify_all();
  }

  void wait() {
    std::unique_lock lock(found_.mutex);
    const auto done = [&] { return found_.num_running == 0; };
    while (!found_.changed.wait_for(lock, kProgressEvery, done)) {
      const int64_t checked = found_.num_checked;
      lock.unlock();
      if (hooks_.progress) {
        hooks_.progress(checked, dataset_.size());
      } else {
        log_info("checking the data: {} of {} rows", checked, dataset_.size());
      }
      lock.lock();
    }
  }

  void check_row(int64_t index) {
    bool any_animated = false;
    std::vector<FileStamp> stamps;
    try {
      const Row row = dataset_.row(index);
      for (const ImageSource& image : row.images) {
        if (image.path.empty()) continue;
        if (std::optional<FileStamp> stamp = stamp_of(image.path)) stamps.push_back(std::move(*stamp));
      }
      const Sample sample = chat_.sample(row);
      for (size_t k = 0; depth_ == CheckDepth::kImages && k < row.images.size(); ++k) {
        bool animated = false;
        decode_image_of(row, k, image_options_, &animated);
        any_animated = any_animated || animated;
      }
      const std::lock_guard lock(found_.mutex);
      add(stamps);
      found_.num_animated += any_animated ? 1 : 0;
      // Position 0 is never predicted.
      const auto first = sample.target_mask.begin() + (sample.target_mask.empty() ? 0 : 1);
      const int64_t num_targets =
          std::count_if(first, sample.target_mask.end(), [](uint8_t is_target) { return is_target != 0; });
      if (num_targets == 0) {
        ++found_.skipped[reason::kNoTargets];
        found_.lengths[static_cast<size_t>(index)] = kUnusable;
      } else {
        found_.num_targets += num_targets;
        found_.most_targets = std::max(found_.most_targets, num_targets);
        found_.most_images = std::max(found_.most_images, static_cast<int64_t>(sample.image_first_token.size()));
        found_.lengths[static_cast<size_t>(index)] = static_cast<int32_t>(sample.token_ids.size());
      }
      ++found_.num_checked;
    } catch (const RowError& error) {
      const std::lock_guard lock(found_.mutex);
      add(stamps);
      RowFault fault = error.fault();
      fault.row = index;
      fault.reason = reason_of(fault);
      ++found_.skipped[fault.reason];
      found_.faults.push_back(std::move(fault));
      found_.lengths[static_cast<size_t>(index)] = kUnusable;
      ++found_.num_checked;
    }
  }

  void add(std::vector<FileStamp>& stamps) {
    for (FileStamp& stamp : stamps) {
      const std::string path = stamp.path;
      found_.image_files.emplace(path, std::move(stamp));
    }
  }

  DataReport report() {
    DataReport report;
    report.num_rows = dataset_.size();
    report.num_checked = found_.num_checked;
    report.num_targets = found_.num_targets;
    report.most_targets = found_.most_targets;
    report.most_images = found_.most_images;
    for (size_t row = 0; row < found_.lengths.size(); ++row) {
      if (found_.lengths[row] < 0) continue;
      report.used.push_back(static_cast<int64_t>(row));
      report.lengths.push_back(found_.lengths[row]);
    }
    report.faults = std::move(found_.faults);
    std::sort(report.faults.begin(), report.faults.end(), [](const RowFault& a, const RowFault& b) { return a.row < b.row; });
    report.skipped_by_reason.assign(found_.skipped.begin(), found_.skipped.end());
    std::stable_sort(report.skipped_by_reason.begin(), report.skipped_by_reason.end(),
                     [](const auto& a, const auto& b) { return a.second > b.second; });
    const auto rows_that = [](int64_t count, const char* one, const char* many) {
      return count == 1 ? fmt::format("1 row {}", one) : fmt::format("{} rows {}", count, many);
    };
    if (found_.num_animated > 0) {
      report.notes.push_back(rows_that(found_.num_animated, "holds an animated image: its first frame is used",
                                       "hold animated images: the first frame is used"));
    }
    if (found_.skipped.contains(reason::kNoTargets)) {
      report.notes.push_back(rows_that(found_.skipped.at(reason::kNoTargets), "has no token that carries loss and is left out",
                                       "have no token that carries loss and are left out"));
    }
    for (auto& [path, stamp] : found_.image_files) report.image_files.push_back(std::move(stamp));
    std::sort(report.image_files.begin(), report.image_files.end(),
              [](const FileStamp& a, const FileStamp& b) { return a.path < b.path; });
    return report;
  }

  const Dataset& dataset_;
  const Chat& chat_;
  const ImageOptions& image_options_;
  const CheckDepth depth_;
  const CheckHooks& hooks_;
  Found found_;
};

std::string report_path(const std::string& key) {
  return join_path(join_path(cache_folder(), "checks"), key + ".json");
}

Json to_json(const DataReport& report) {
  Json faults = Json::array();
  for (const RowFault& fault : report.faults) {
    faults.push_back({fault.row, fault.file, fault.line, fault.where, fault.field, fault.value, fault.rule, fault.reason});
  }
  Json images = Json::array();
  for (const FileStamp& stamp : report.image_files) images.push_back({stamp.path, stamp.size, stamp.mtime_ns});
  Json skipped = Json::array();
  for (const auto& [why, count] : report.skipped_by_reason) skipped.push_back({why, count});
  return {{"version", kCacheVersion},
          {"num_rows", report.num_rows},
          {"used", report.used},
          {"faults", faults},
          {"skipped_by_reason", skipped},
          {"lengths", report.lengths},
          {"num_targets", report.num_targets},
          {"most_targets", report.most_targets},
          {"most_images", report.most_images},
          {"notes", report.notes},
          {"image_files", images}};
}

DataReport report_from_json(const Json& json) {
  DataReport report;
  report.num_rows = json.at("num_rows").get<int64_t>();
  report.num_checked = report.num_rows;
  report.used = json.at("used").get<std::vector<int64_t>>();
  for (const Json& fault : json.at("faults")) {
    report.faults.push_back({fault.at(0).get<int64_t>(), fault.at(1).get<std::string>(), fault.at(2).get<int64_t>(),
                             fault.at(3).get<std::string>(), fault.at(4).get<std::string>(), fault.at(5).get<std::string>(),
                             fault.at(6).get<std::string>(), fault.at(7).get<std::string>()});
  }
  for (const Json& one : json.at("skipped_by_reason")) {
    report.skipped_by_reason.emplace_back(one.at(0).get<std::string>(), one.at(1).get<int64_t>());
  }
  report.lengths = json.at("lengths").get<std::vector<int32_t>>();
  report.num_targets = json.at("num_targets").get<int64_t>();
  report.most_targets = json.at("most_targets").get<int64_t>();
  report.most_images = json.at("most_images").get<int64_t>();
  report.notes = json.at("notes").get<std::vector<std::string>>();
  for (const Json& one : json.at("image_files")) {
    report.image_files.push_back({one.at(0).get<std::string>(), one.at(1).get<int64_t>(), one.at(2).get<int64_t>()});
  }
  if (report.used.size() != report.lengths.size()) throw input_error("used and lengths differ in size");
  return report;
}

}  // namespace

DataReport check_dataset(const Dataset& dataset, const Chat& chat, const ImageOptions& image_options, CheckDepth depth,
                         int num_workers, const CheckHooks& hooks) {
  return Checker(dataset, chat, image_options, depth, hooks).run(num_workers);
}

std::string check_key(const Dataset& dataset, const std::string& options) {
  std::string text = fmt::format("{}\n{}\n{}\n", kCacheVersion, dataset.size(), options);
  for (const std::string& file : dataset.files()) {
    const std::optional<FileStamp> stamp = stamp_of(file);
    if (!stamp.has_value()) throw input_error("{}: was there a moment ago and is gone", file);
    text += fmt::format("{}\n{}\n{}\n", stamp->path, stamp->size, stamp->mtime_ns);
  }
  return sha256_of(text);
}

std::optional<DataReport> load_report(const std::string& key) {
  const std::string path = report_path(key);
  if (!file_exists(path)) return std::nullopt;
  try {
    const Json json = read_json_file(path);
    if (json.value("version", 0) != kCacheVersion) return std::nullopt;
    DataReport report = report_from_json(json);
    for (const FileStamp& old : report.image_files) {
      const std::optional<FileStamp> now = stamp_of(old.path);
      if (!now.has_value() || now->size != old.size || now->mtime_ns != old.mtime_ns) return std::nullopt;
    }
    return report;
  } catch (const std::exception&) {
    return std::nullopt;  // a damaged cache file is as good as none
  }
}

void save_report(const std::string& key, const DataReport& report) {
  if (report.num_checked < report.num_rows) return;
  for (const RowFault& fault : report.faults) {
    // Such a file may appear without any file of the data set changing.
    if (fault.reason == reason::kMissingFile || fault.reason == reason::kImagePath) return;
  }
  try {
    make_folders(parent_folder(report_path(key)));
    write_file_atomically(report_path(key), to_json(report).dump(-1, ' ', false, Json::error_handler_t::replace));
  } catch (const std::exception& error) {
    log_warning("the result of the data check is not kept for the next start: {}", error.what());
  }
}

}  // namespace gemtune
