#include "data/loader.h"

#include "base/error.h"
#include "data/loader_plan.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

namespace gemtune {

Batch collate(const std::vector<Sample>& samples, const std::vector<std::vector<std::vector<uint8_t>>>& images_CHW,
              int32_t pad_id, int image_size) {
  if (samples.size() != images_CHW.size()) {
    throw job_error("collate: {} samples but images of {} rows", samples.size(), images_CHW.size());
  }
  Batch batch;
  batch.num_rows = static_cast<int64_t>(samples.size());
  batch.image_size = image_size;
  size_t longest = 0;
  for (const Sample& sample : samples) longest = std::max(longest, sample.token_ids.size());
  batch.num_tokens = static_cast<int64_t>(longest);
  const size_t cells = samples.size() * longest;
  batch.token_ids.assign(cells, pad_id);
  batch.valid.assign(cells, 0);
  batch.target_mask.assign(cells, 0);
  batch.image_group.assign(cells, -1);

  const size_t image_bytes = 3 * static_cast<size_t>(image_size) * static_cast<size_t>(image_size);
  size_t num_decoded = 0;
  for (const auto& images : images_CHW) {
    for (const auto& image : images) num_decoded += image.empty() ? 0 : 1;
  }
  batch.pixels_NCHW.reserve(num_decoded * image_bytes);
  for (size_t b = 0; b < samples.size(); ++b) {
    const Sample& sample = samples[b];
    const size_t length = sample.token_ids.size();
    const auto at = static_cast<std::ptrdiff_t>(b * longest);
    if (sample.target_mask.size() != length || sample.image_first_token.size() != images_CHW[b].size()) {
      throw job_error("collate: row {} has {} tokens, {} target marks, {} image places and {} images", sample.row, length,
                      sample.target_mask.size(), sample.image_first_token.size(), images_CHW[b].size());
    }
    batch.rows.push_back(sample.row);
    std::copy(sample.token_ids.begin(), sample.token_ids.end(), batch.token_ids.begin() + at);
    std::fill_n(batch.valid.begin() + at, length, uint8_t{1});
    std::copy(sample.target_mask.begin(), sample.target_mask.end(), batch.target_mask.begin() + at);
    for (size_t t = 1; t < length; ++t) batch.num_targets += sample.target_mask[t] != 0 ? 1 : 0;
    batch.num_valid += static_cast<int64_t>(length);
    // An image's soft tokens are one run of one id; an end-of-image token always follows it.
    for (size_t k = 0; k < sample.image_first_token.size(); ++k) {
      const auto first = static_cast<size_t>(sample.image_first_token[k]);
      for (size_t t = first; t < length && sample.token_ids[t] == sample.token_ids[first]; ++t) {
        batch.image_group[b * longest + t] = static_cast<int32_t>(k);
      }
    }
    for (const auto& image : images_CHW[b]) {
      const int64_t number = batch.num_images++;
      if (image.empty()) continue;
      if (image.size() != image_bytes) {
        throw job_error("collate: row {} has an image of {} bytes, expected {}", sample.row, image.size(), image_bytes);
      }
      batch.decoded.push_back(number);
      batch.pixels_NCHW.insert(batch.pixels_NCHW.end(), image.begin(), image.end());
    }
  }
  return batch;
}

// Steps are planned in order and held in a window; workers take the oldest row not yet taken. So the content depends on
// the order alone, and no more than `steps_ahead` steps are ever in memory.
struct Loader::Impl {
  struct Step {
    StepPlan plan;
    std::vector<int64_t> rows;        // data set rows, micro-batch after micro-batch
    std::vector<DecodedRow> decoded;  // aligned with rows
    std::vector<std::exception_ptr> failed;
    size_t num_taken = 0;
    size_t num_done = 0;
    std::vector<Batch> batches;
    std::exception_ptr error;
    bool ready = false;
  };

  std::shared_ptr<const Dataset> dataset;
  std::shared_ptr<const Chat> chat;
  ImageOptions image_options;
  std::vector<int64_t> rows;
  LoaderOptions options;

  std::mutex mutex;
  std::condition_variable work_waits;
  std::condition_variable step_is_ready;
  std::deque<std::shared_ptr<Step>> window;
  bool stop = false;
  Cursor planned_to;
  std::map<int64_t, std::vector<int64_t>> orders;  // of the epochs in the window
  std::vector<std::thread> workers;

  const std::vector<int64_t>& order_of(int64_t epoch) {
    auto found = orders.find(epoch);
    if (found == orders.end()) {
      std::vector<int64_t> order;
      if (options.shuffle) {
        order = random_permutation(static_cast<int64_t>(rows.size()), options.seed + static_cast<uint64_t>(epoch));
        for (int64_t& at : order) at = rows[static_cast<size_t>(at)];
      } else {
        order = rows;
      }
      orders.clear();  // steps already planned hold their rows
      found = orders.emplace(epoch, std::move(order)).first;
    }
    return found->second;
  }

  // With the mutex held, or before the workers start.
  void plan_next() {
    auto step = std::make_shared<Step>();
    step->plan = plan_step(planned_to, static_cast<int64_t>(rows.size()), options);
    planned_to = step->plan.end;
    const std::vector<int64_t>& order = order_of(step->plan.begin.epoch);
    for (const auto& micro : step->plan.micro_rows) {
      for (const int64_t at : micro) step->rows.push_back(order[static_cast<size_t>(at)]);
    }
    step->decoded.resize(step->rows.size());
    step->failed.resize(step->rows.size());
    step->ready = step->rows.empty();
    window.push_back(std::move(step));
  }

  // The step's micro-batches, or the error of its first bad row.
  void finish(Step& step) const {
    for (const std::exception_ptr& failed : step.failed) {
      if (failed == nullptr) continue;
      step.error = failed;
      return;
    }
    try {
      size_t at = 0;
      for (const auto& micro : step.plan.micro_rows) {
        std::vector<Sample> samples;
        std::vector<std::vector<std::vector<uint8_t>>> images;
        std::vector<std::string> keys;
        std::set<std::string> seen;
        for (size_t i = 0; i < micro.size(); ++i, ++at) {
          DecodedRow& row = step.decoded[at];
          for (size_t k = 0; k < row.picture_keys.size(); ++k) {
            const bool again = !seen.insert(row.picture_keys[k]).second;
            if (again && options.is_known) row.images_CHW[k].clear();
            keys.push_back(std::move(row.picture_keys[k]));
          }
          samples.push_back(std::move(row.sample));
          images.push_back(std::move(row.images_CHW));
        }
        step.batches.push_back(collate(samples, images, chat->tokens().pad, options.image_size));
        step.batches.back().picture_keys = std::move(keys);
      }
    } catch (...) {
      step.error = std::current_exception();
    }
    step.decoded.clear();
  }

  void work() {
    std::unique_lock lock(mutex);
    for (;;) {
      std::shared_ptr<Step> step;
      work_waits.wait(lock, [&] {
        if (stop) return true;
        for (const auto& candidate : window) {
          if (candidate->num_taken == candidate->rows.size()) continue;
          step = candidate;
          return true;
        }
        return false;
      });
      if (stop) return;
      const size_t slot = step->num_taken++;
      lock.unlock();
      try {
        step->decoded[slot] = decode_row(*dataset, *chat, image_options, step->rows[slot], options);
      } catch (...) {
        step->failed[slot] = std::current_exception();
      }
      lock.lock();
      if (++step->num_done < step->rows.size()) continue;
      lock.unlock();
      finish(*step);
      lock.lock();
      step->ready = true;
      step_is_ready.notify_all();
    }
  }
};

Loader::Loader(std::shared_ptr<const Dataset> dataset, std::shared_ptr<const Chat> chat, ImageOptions image_options,
               std::vector<int64_t> rows, LoaderOptions options, Cursor start)
    : impl_(std::make_unique<Impl>()) {
  if (rows.empty()) throw input_error("the data set has no rows to train on");
  if (options.micro_batch < 1 || options.accumulation < 1 || options.world < 1 || options.rank < 0 ||
      options.rank >= options.world) {
    throw input_error(
        "loader: micro_batch {}, accumulation {}, rank {} of {}: counts must be positive and the rank below the world",
        options.micro_batch, options.accumulation, options.rank, options.world);
  }
  impl_->dataset = std::move(dataset);
  impl_->chat = std::move(chat);
  impl_->image_options = image_options;
  impl_->rows = std::move(rows);
  impl_->options = options;
  impl_->planned_to = start;
  for (int i = 0; i < std::max(1, options.steps_ahead); ++i) impl_->plan_next();
  const int num_threads = threads_for(options.num_workers);
  try {
    for (int i = 0; i < num_threads; ++i) impl_->workers.emplace_back([impl = impl_.get()] { impl->work(); });
  } catch (const std::system_error& error) {
    if (impl_->workers.empty()) throw environment_error("loader: no thread can be started: {}", error.what());
  }
}

Loader::~Loader() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
  }
  impl_->work_waits.notify_all();
  for (std::thread& worker : impl_->workers) worker.join();
}

StepBatches Loader::next() {
  const auto asked = std::chrono::steady_clock::now();
  std::unique_lock lock(impl_->mutex);
  const std::shared_ptr<Impl::Step> step = impl_->window.front();
  impl_->step_is_ready.wait(lock, [&] { return step->ready; });
  if (step->error != nullptr) std::rethrow_exception(step->error);
  impl_->window.pop_front();
  impl_->plan_next();
  lock.unlock();
  impl_->work_waits.notify_all();

  StepBatches batches;
  batches.begin = step->plan.begin;
  batches.end = step->plan.end;
  batches.epoch_steps = steps_per_epoch();
  batches.num_micro_batches = step->plan.num_micro_batches;
  batches.micro_index = step->plan.micro_index;
  batches.micro_batches = std::move(step->batches);
  batches.wait_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - asked).count();
  return batches;
}

int64_t Loader::steps_per_epoch() const {
  return gemtune::steps_per_epoch(static_cast<int64_t>(impl_->rows.size()), impl_->options);
}

}  // namespace gemtune
