#include "train/trainer.h"

#include "base/file.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/text.h"
#include "io/checkpoint.h"
#include "ops/torch.h"
#include "train/batch.h"
#include "train/checked_data.h"
#include "train/evaluate.h"
#include "train/metrics.h"
#include "train/optimizer.h"
#include "train/run_folder.h"
#include "train/specs.h"
#include "train/vision_cache.h"

#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <sys/resource.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace gemtune {
namespace {

constexpr int kMostSkippedInARow = 10;  // updates not made for a gradient that is not finite

using Clock = std::chrono::steady_clock;
double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// Of the GPU's allocations, or of the process on a CPU.
int64_t peak_bytes(at::Device device) {
  if (device.is_cuda()) {
    const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
    return stats.allocated_bytes[size_t(c10::CachingAllocator::StatType::AGGREGATE)].peak;
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t(usage.ru_maxrss) * 1024;
}

// "epoch" | "never" | N steps → is step `step` one of them?
bool falls_on(const std::string& every, int64_t step, bool epoch_ends) {
  if (every == "never") return false;
  if (every == "epoch") return epoch_ends;
  return step % std::stoll(every) == 0;
}

// What one optimizer step adds up, over micro-batches and then over ranks. A mean is taken only when it is reported.
struct StepSums {
  double loss_sum = 0;
  double num_correct = 0;
  double num_targets = 0;
  double loss_means = 0;  // of micro-batches
  double accuracy_means = 0;
  double num_micro = 0;  // micro-batches with at least one target
  double num_valid = 0;
  double num_rows = 0;
  void reduce(Group& group) {
    double values[] = {loss_sum, num_correct, num_targets, loss_means, accuracy_means, num_micro, num_valid, num_rows};
    group.all_reduce_sum(std::span<double>(values));
    loss_sum = values[0];
    num_correct = values[1];
    num_targets = values[2];
    loss_means = values[3];
    accuracy_means = values[4];
    num_micro = values[5];
    num_valid = values[6];
    num_rows = values[7];
  }
};

OptimizerSpec optimizer_spec(const Recipe& recipe, int64_t total_steps) {
  const OptimRecipe& optim = recipe.optim;
  OptimizerSpec spec;
  spec.learning_rate = optim.learning_rate;
  spec.vision_learning_rate = recipe.lora.vision_learning_rate;
  spec.schedule = optim.schedule == "linear"   ? Schedule::kLinear
                  : optim.schedule == "cosine" ? Schedule::kCosine
                                               : Schedule::kConstant;
  spec.warmup_steps = optim.warmup_steps > 0 ? optim.warmup_steps : int64_t(std::ceil(optim.warmup_ratio * double(total_steps)));
  spec.total_steps = total_steps;
  spec.max_grad_norm = optim.max_grad_norm;
  spec.weight_decay = optim.weight_decay;
  spec.beta1 = optim.beta1;
  spec.beta2 = optim.beta2;
  spec.eps = optim.eps;
  return spec;
}

// Gradients of all ranks summed: each trained tensor once a step, in fp32, in one buffer.
void reduce_gradients(const std::vector<Parameter>& parameters, Group& group) {
  if (group.world() == 1) return;
  const at::NoGradGuard no_grad;
  int64_t total = 0;
  for (const Parameter& parameter : parameters) total += parameter.value.numel();
  std::vector<float> buffer(size_t(total), 0.0f);
  float* to = buffer.data();
  for (const Parameter& parameter : parameters) {
    if (parameter.value.grad().defined()) {
      const Tensor gradient = parameter.value.grad().to(at::kCPU, at::kFloat).contiguous();
      std::memcpy(to, gradient.const_data_ptr<float>(), size_t(gradient.numel()) * sizeof(float));
    }
    to += parameter.value.numel();
  }
  group.all_reduce_sum(std::span<float>(buffer));
  const float* from = buffer.data();
  for (const Parameter& parameter : parameters) {
    Tensor& gradient = parameter.value.mutable_grad();
    if (!gradient.defined()) gradient = at::zeros_like(parameter.value.detach());
    Tensor sum = at::zeros_like(gradient, gradient.options().dtype(at::kFloat).device(at::kCPU));
    std::memcpy(sum.mutable_data_ptr<float>(), from, size_t(sum.numel()) * sizeof(float));
    gradient.copy_(sum);
    from += parameter.value.numel();
  }
}

// Rank 0 looks at the run folder; all ranks go on from the same checkpoint.
RunPlace agree_on_place(const Recipe& recipe, bool fresh, Group& group) {
  std::string message;
  if (group.is_first()) {
    const RunPlace place = find_run_place(recipe, fresh);
    for (const std::string& note : place.notes) log_warning("ignored {}", note);
    message = nlohmann::json{place.run_dir, place.checkpoint, place.has_final}.dump();
  }
  const auto agreed = nlohmann::json::parse(group.broadcast(message));
  return {agreed.at(0).get<std::string>(), agreed.at(1).get<std::string>(), agreed.at(2).get<bool>(), {}};
}

// Rows that take part and their sizes, agreed by all ranks: rank 0 looks, the others are told.
struct CheckedRows {
  std::vector<int64_t> used;
  RowSizes sizes;
};
CheckedRows check_rows(const Recipe& recipe, const Preparation& prepared, Group& group) {
  std::string message;
  if (group.is_first()) {
    const DataReport report = check_data(recipe, prepared, recipe.debug.check_data ? CheckDepth::kImages : CheckDepth::kTokens);
    for (const std::string& note : report.notes) log_warning("{}", note);
    require_usable(recipe, report);
    for (const auto& [reason, count] : report.skipped_by_reason)
      log_warning("skipped {} of {} rows: {}", count, report.num_rows, reason);
    const RowSizes sizes = row_sizes(report);
    message = nlohmann::json{report.used, sizes.longest, sizes.most_targets, sizes.most_images}.dump();
  }
  const auto agreed = nlohmann::json::parse(group.broadcast(message));
  return {agreed.at(0).get<std::vector<int64_t>>(),
          {agreed.at(1).get<int64_t>(), agreed.at(2).get<int64_t>(), agreed.at(3).get<int64_t>()}};
}

class Trainer {
 public:
  Trainer(const TrainOptions& options, Group& group)
      : options_(options), recipe_(options.resolved.recipe), group_(group), events_(options.events, group.rank()) {}

  TrainOutcome run();

 private:
  void enter_phase(const std::string& name);
  void choose_device();
  void load_model();
  void open_loader();
  void show_first_row(const Batch& batch);
  void run_step();
  void watch_loss(double loss);
  CrossEntropySum forward_backward(const Batch& batch, const Pass& pass, double share);
  StepSums forward_backward(const StepBatches& batches, const StepSums& global);
  void update(const StepBatches& batches);
  void save();
  void evaluate();
  bool stop_requested();
  TrainOutcome finish();
  TrainOutcome already_finished();

  const TrainOptions& options_;
  Recipe recipe_;
  Group& group_;
  EventStream events_;
  RunPlace place_;
  Preparation prepared_;
  std::vector<int64_t> rows_;
  PlanLoad load_;  // a micro-batch at its largest
  MemoryChoice memory_;
  std::unique_ptr<Gemma3> model_;
  std::unique_ptr<VisionCache> vision_cache_;  // when the vision tower is frozen
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Loader> loader_;
  std::unique_ptr<Metrics> metrics_;
  at::Device device_ = at::kCPU;
  TrainerState state_;
  int64_t total_steps_ = 0;
  int64_t saved_step_ = -1;
  int skipped_in_a_row_ = 0;
  std::vector<double> recent_losses_;
  Clock::time_point started_ = Clock::now();
};

void Trainer::enter_phase(const std::string& name) {
  events_.phase(name);
  log_info("[{:5.1f} s] {}", ms_since(started_) / 1000, name);
}

void Trainer::choose_device() {
  device_ = device_for(recipe_, group_.local_rank());
  log_info("on {}", device_.is_cuda() ? device_.str() : fmt::format("the CPU, {} threads", at::get_num_threads()));
}

void Trainer::load_model() {
  ModelSpec spec = model_spec(recipe_, device_);
  memory_.recompute_vision = memory_.recompute_language = recipe_.train.recompute == "true";
  if (device_.is_cuda()) {
    memory_ = memory_choice(recipe_, prepared_.dims, spec, load_);
    spec.keep_expanded = memory_.keep_expanded;
  }
  const bool whole_model_in_checkpoint = spec.train_all && !place_.checkpoint.empty();
  model_ = Gemma3::load(whole_model_in_checkpoint ? place_.checkpoint : prepared_.model_folder, spec);
  if (!spec.train_all) {
    if (!place_.checkpoint.empty()) {
      load_adapter(*model_, place_.checkpoint);
    } else if (!recipe_.lora.init.empty()) {
      load_adapter(*model_, recipe_.lora.init);
    }
  }
  if (model_->vision_is_frozen()) {
    VisionCacheOptions options;
    // Half of what is free, shared by the ranks of this machine: the rest is for decoded pictures and page cache.
    if (recipe_.train.vision_cache != "none") options.memory_limit = available_memory_bytes() / 2 / group_.world();
    if (recipe_.train.vision_cache == "disk") options.folder = vision_cache_folder(prepared_.model_folder, spec);
    vision_cache_ = std::make_unique<VisionCache>(*model_, options);
  }
  optimizer_ = std::make_unique<Optimizer>(model_->parameters(), optimizer_spec(recipe_, total_steps_));
  if (!place_.checkpoint.empty()) optimizer_->load(join_path(place_.checkpoint, "optimizer.safetensors"));
  int64_t trained = 0;
  for (const Parameter& parameter : optimizer_->parameters()) trained += parameter.value.numel();
  log_info("{} trained parameters in {} tensors", trained, optimizer_->parameters().size());
}

LoaderOptions loader_options(const Recipe& recipe, const Group& group, const Dims& dims) {
  LoaderOptions options;
  options.seed = uint64_t(recipe.train.seed);
  options.micro_batch = recipe.train.micro_batch;
  options.accumulation = accumulation_for(recipe, group.world());
  options.rank = group.rank();
  options.world = group.world();
  options.num_workers = loader_threads(recipe);
  options.image_size = image_size(dims);
  return options;
}

void Trainer::open_loader() {
  LoaderOptions options = loader_options(recipe_, group_, prepared_.dims);
  if (vision_cache_) {
    options.is_known = [cache = vision_cache_.get()](const std::string& key) { return cache->is_known(key); };
  }
  loader_ = std::make_unique<Loader>(prepared_.dataset, prepared_.chat, image_options(recipe_), rows_, options, state_.cursor);
}

// Whether pictures and targets reach the model is seen here before anything is learned.
void Trainer::show_first_row(const Batch& batch) {
  int64_t tokens = 0, image_tokens = 0, targets = 0;
  for (size_t t = 0; t < size_t(batch.num_tokens); ++t) {
    tokens += batch.valid[t];
    image_tokens += batch.image_group[t] >= 0;
    targets += batch.target_mask[t];
  }
  double pixel_sum = 0;
  for (const uint8_t value : batch.pixels_NCHW) pixel_sum += normalised(value);
  const std::string pixels = batch.pixels_NCHW.empty()
                                 ? batch.num_images > 0 ? "its pictures are known" : "no pictures in its batch"
                                 : fmt::format("mean pixel of its batch {:.3f}", pixel_sum / double(batch.pixels_NCHW.size()));
  log_info("first row {}: {} tokens, {} of pictures, {} carry loss; {}", batch.rows[0], tokens, image_tokens, targets, pixels);
}

// One micro-batch: forward → loss sum → backward of its share of the step's loss.
CrossEntropySum Trainer::forward_backward(const Batch& batch, const Pass& pass, double share) {
  try {
    DeviceBatch on_device = to_device(batch, device_);
    if (vision_cache_ && batch.num_images > 0) {
      on_device.input.pooled_NSW = vision_cache_->pooled(batch, on_device.input.pixels_NCHW);
    }
    const CrossEntropySum loss = model_->loss(model_->forward(on_device.input, pass), on_device.targets);
    (loss.loss_sum / share).backward();
    return {loss.loss_sum.detach(), loss.num_correct};
  } catch (const c10::OutOfMemoryError&) {
    const std::string newest =
        saved_step_ > 0 ? fmt::format("the checkpoint of step {} is whole", saved_step_) : "no checkpoint was due yet";
    throw job_error(
        "step {}: out of GPU memory in a micro-batch of {} rows, {} tokens each, {} images ({}); {}. What makes it need less: {}",
        state_.step + 1, batch.num_rows, batch.num_tokens, batch.num_images, memory_.describe(), newest,
        join_some(remedies(recipe_, load_)));
  }
}

StepSums Trainer::forward_backward(const StepBatches& batches, const StepSums& global) {
  StepSums sums;
  std::vector<std::pair<CrossEntropySum, double>> losses;  // with their number of targets
  Pass pass;
  pass.mode = Pass::Mode::kTrain;
  pass.recompute_vision = memory_.recompute_vision;
  pass.recompute_language = memory_.recompute_language;
  pass.dropout_seed = uint64_t(recipe_.train.seed);
  const int64_t micro_a_step = int64_t(accumulation_for(recipe_, group_.world())) * group_.world();
  for (size_t i = 0; i < batches.micro_batches.size(); ++i) {
    const Batch& batch = batches.micro_batches[i];
    sums.num_valid += double(batch.num_valid);
    sums.num_rows += double(batch.num_rows);
    if (batch.num_targets == 0) continue;
    pass.micro = uint64_t(state_.step * micro_a_step + batches.micro_index[i]);
    // numerics: tokens weigh alike over the whole step; micro_batches is the reference's mean of means.
    const bool mean_of_means = recipe_.train.loss_average == "micro_batches";
    const double count = double(batch.num_targets);
    const double share = mean_of_means ? count * global.num_micro : global.num_targets;
    losses.push_back({forward_backward(batch, pass, share), count});
  }
  // Read only now: a GPU works on while its next micro-batches are prepared.
  for (const auto& [loss, count] : losses) {
    const double loss_sum = loss.loss_sum.item<double>();
    const double num_correct = double(loss.num_correct.item<int64_t>());
    sums.loss_sum += loss_sum;
    sums.num_correct += num_correct;
    sums.num_targets += count;
    sums.loss_means += loss_sum / count;
    sums.accuracy_means += num_correct / count;
    sums.num_micro += 1;
  }
  return sums;
}

void Trainer::run_step() {
  const auto begun = Clock::now();
  const StepBatches batches = loader_->next();
  if (group_.is_first() && recent_losses_.empty()) show_first_row(batches.micro_batches[0]);
  StepSums global;  // counts of all micro-batches and ranks, before the first forward pass
  for (const Batch& batch : batches.micro_batches) {
    global.num_targets += double(batch.num_targets);
    global.num_micro += batch.num_targets > 0 ? 1 : 0;
  }
  global.reduce(group_);
  if (global.num_targets == 0) throw input_error("step {}: not one token of its rows carries loss", state_.step + 1);

  StepSums sums = forward_backward(batches, global);
  reduce_gradients(optimizer_->parameters(), group_);
  sums.reduce(group_);
  const double norm = optimizer_->gradient_norm();
  // Every rank holds the same sums and so decides alike, before weights change.
  const bool finite = std::isfinite(norm) && std::isfinite(sums.loss_sum);
  state_.step += 1;
  if (finite) {
    optimizer_->update(state_.step - state_.skipped_steps, norm);
    skipped_in_a_row_ = 0;
  } else {
    optimizer_->drop_gradients();
    state_.skipped_steps += 1;
    std::vector<std::string> rows;
    for (const Batch& batch : batches.micro_batches) {
      for (const int64_t row : batch.rows) rows.push_back(std::to_string(row));
    }
    const std::string text = fmt::format("step {}: the gradient is not finite; no update made, weights unchanged; rows {}",
                                         state_.step, join_some(rows));
    log_warning("{}", text);
    events_.warning(text);
    if (++skipped_in_a_row_ >= kMostSkippedInARow) {
      throw job_error(
          "{} steps in a row had gradients that are not finite; lower optim.learning_rate or look at the rows named above",
          skipped_in_a_row_);
    }
  }
  state_.cursor = batches.end;
  state_.num_tokens += int64_t(sums.num_valid);

  StepRecord record;
  record.step = state_.step;
  record.epoch = double(batches.begin.epoch) +
                 (batches.end.epoch > batches.begin.epoch ? 1.0 : double(batches.end.position) / double(rows_.size()));
  const bool mean_of_means = recipe_.train.loss_average == "micro_batches";
  record.loss = mean_of_means ? sums.loss_means / sums.num_micro : sums.loss_sum / sums.num_targets;
  record.mean_token_accuracy = mean_of_means ? sums.accuracy_means / sums.num_micro : sums.num_correct / sums.num_targets;
  record.learning_rate = optimizer_->learning_rate(std::max<int64_t>(1, state_.step - state_.skipped_steps));
  record.grad_norm = norm;
  record.num_tokens = state_.num_tokens;
  record.step_ms = ms_since(begun);
  record.data_ms = batches.wait_ms;
  record.samples_per_s = sums.num_rows / (record.step_ms / 1000);
  record.tokens_per_s = sums.num_valid / (record.step_ms / 1000);
  record.peak_bytes = peak_bytes(device_);
  if (metrics_) metrics_->add_step(record);
  events_.step(record);
  if (group_.is_first()) watch_loss(record.loss);

  const bool epoch_ends = batches.end.epoch > batches.begin.epoch || batches.end.position >= int64_t(rows_.size());
  if (falls_on(recipe_.eval.every, state_.step, epoch_ends)) evaluate();
  if (falls_on(recipe_.checkpoint.every, state_.step, epoch_ends)) save();
}

// A loss above that of guessing, or one that jumps, has a cause that is better named at once.
void Trainer::watch_loss(double loss) {
  constexpr size_t kWindow = 64;
  constexpr double kJump = 10;
  const double guessing = std::log(double(prepared_.dims.text.vocabulary));
  std::string text;
  if (recent_losses_.empty() && loss > guessing) {
    text = fmt::format(
        "step {}: the loss {:.2f} is above ln(vocabulary) = {:.2f}, that of guessing: are model, tokenizer and adapter of one "
        "kind?",
        state_.step, loss, guessing);
  } else if (recent_losses_.size() >= 8) {
    std::vector<double> sorted = recent_losses_;
    std::nth_element(sorted.begin(), sorted.begin() + std::ptrdiff_t(sorted.size() / 2), sorted.end());
    const double median = sorted[sorted.size() / 2];
    if (loss > kJump * median)
      text = fmt::format(
          "step {}: the loss {:.3g} is more than {} times the recent median {:.3g}: a damaged row, or a learning rate that is "
          "too high",
          state_.step, loss, kJump, median);
  }
  if (!text.empty()) {
    log_warning("{}", text);
    events_.warning(text);
  }
  recent_losses_.push_back(loss);
  if (recent_losses_.size() > kWindow) recent_losses_.erase(recent_losses_.begin());
}

void Trainer::save() {
  saved_step_ = state_.step;
  if (!group_.is_first()) return;
  const std::string folder = save_checkpoint(place_.run_dir, state_.step, [&](const std::string& to) {
    fill_checkpoint(to, *model_, *optimizer_, state_, recipe_, prepared_.model_folder);
  });
  metrics_->flush();
  events_.checkpoint(state_.step, folder);
  if (recipe_.checkpoint.keep > 0) prune_checkpoints(place_.run_dir, recipe_.checkpoint.keep);
}

void Trainer::evaluate() {
  if (!group_.is_first()) return;
  const Preparation held_out = prepare(recipe_, Source::kEval);
  HeldOut what{*held_out.dataset,      *held_out.chat, image_options(recipe_), held_out_rows(recipe_, held_out), 8,
               loader_threads(recipe_)};
  const LossScores scores = evaluate_loss(*model_, what);
  metrics_->add_eval(state_.step,
                     {{"loss", scores.loss}, {"perplexity", scores.perplexity()}, {"token_accuracy", scores.token_accuracy}});
}

// One rank's signal stops all of them at the same step.
bool Trainer::stop_requested() {
  double value = options_.stop_signal != nullptr ? double(options_.stop_signal->load()) : 0.0;
  group_.all_reduce_max(std::span<double>(&value, 1));
  return value > 0;
}

TrainOutcome Trainer::finish() {
  TrainOutcome outcome;
  outcome.run_dir = place_.run_dir;
  outcome.final_dir = join_path(place_.run_dir, "final");
  if (group_.is_first()) {
    commit_folder(outcome.final_dir, [&](const std::string& to) { fill_final(to, *model_, recipe_, prepared_.model_folder); });
    metrics_->flush();
  }
  group_.barrier();
  events_.finished(state_.step, outcome.final_dir);
  log_info("done: {} steps; {}", state_.step, outcome.final_dir);
  return outcome;
}

TrainOutcome Trainer::already_finished() {
  const std::string final_dir = join_path(place_.run_dir, "final");
  log_info("{} holds this run, finished: {}; add --fresh to train again", place_.run_dir, final_dir);
  events_.finished(state_.step, final_dir);
  return {ExitCode::kDone, place_.run_dir, final_dir};
}

TrainOutcome Trainer::run() {
  events_.hello(group_.world());
  choose_device();
  place_ = agree_on_place(recipe_, options_.fresh, group_);
  recipe_.output.dir = place_.run_dir;
  enter_phase("checking data");
  prepared_ = prepare(recipe_, Source::kTrain);
  CheckedRows checked = check_rows(recipe_, prepared_, group_);
  rows_ = std::move(checked.used);
  load_ = plan_load(recipe_, prepared_.dims, checked.sizes, group_.world());
  log_info("{}; {} rows used", prepared_.dataset->description(), rows_.size());
  const int64_t an_epoch = steps_per_epoch(int64_t(rows_.size()), loader_options(recipe_, group_, prepared_.dims));
  total_steps_ =
      recipe_.train.max_steps > 0 ? recipe_.train.max_steps : int64_t(std::ceil(recipe_.train.epochs * double(an_epoch)));
  const int64_t global_batch = int64_t(recipe_.train.micro_batch) * accumulation_for(recipe_, group_.world()) * group_.world();
  if (!place_.checkpoint.empty()) {
    state_ = read_trainer_state(place_.checkpoint);
    if (state_.global_batch != global_batch) {
      throw input_error("{}: written with {} rows a step, now {}: keep micro_batch × accumulation × ranks, or add --fresh",
                        place_.checkpoint, state_.global_batch, global_batch);
    }
  }
  state_.global_batch = global_batch;
  if (place_.has_final && (place_.checkpoint.empty() || state_.step >= total_steps_)) return already_finished();

  enter_phase("loading the model");
  load_model();
  group_.barrier();
  if (group_.is_first()) {
    make_folders(place_.run_dir);
    write_file_atomically(join_path(place_.run_dir, "recipe.yaml"), to_yaml(recipe_));
    metrics_ = std::make_unique<Metrics>(
        MetricsOptions{place_.run_dir, recipe_.logging.tensorboard, recipe_.logging.every, total_steps_, state_.step});
  }
  open_loader();
  enter_phase(state_.step > 0 ? fmt::format("training, from step {} of {}", state_.step, total_steps_)
                              : fmt::format("training, {} steps", total_steps_));
  while (state_.step < total_steps_) {
    run_step();
    if (stop_requested() && state_.step < total_steps_) {
      if (saved_step_ != state_.step) save();
      group_.barrier();
      log_info("stopped on request at step {} of {}; run the same command again to go on", state_.step, total_steps_);
      return {ExitCode::kStopped, place_.run_dir, ""};
    }
  }
  if (recipe_.checkpoint.every != "never" && saved_step_ != state_.step) save();
  return finish();
}

}  // namespace

TrainOutcome train(const TrainOptions& options, Group& group) {
  try {
    return Trainer(options, group).run();
  } catch (const Error& error) {
    throw group.fail(error.what(), error.code());
  } catch (const std::exception& error) {
    throw group.fail(error.what());
  }
}

}  // namespace gemtune
