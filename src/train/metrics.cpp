#include "train/metrics.h"

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/text.h"

#include <fmt/core.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <cmath>

namespace gemtune {
namespace {

using OrderedJson = nlohmann::ordered_json;

OrderedJson number_or_null(double value) {
  return std::isfinite(value) ? OrderedJson(value) : OrderedJson(nullptr);
}

OrderedJson to_json(const StepRecord& r) {
  return {{"step", r.step},
          {"epoch", r.epoch},
          {"loss", number_or_null(r.loss)},
          {"learning_rate", r.learning_rate},
          {"grad_norm", number_or_null(r.grad_norm)},
          {"num_tokens", r.num_tokens},
          {"mean_token_accuracy", number_or_null(r.mean_token_accuracy)},
          {"tokens_per_s", r.tokens_per_s},
          {"samples_per_s", r.samples_per_s},
          {"step_ms", r.step_ms},
          {"data_ms", r.data_ms},
          {"peak_bytes", r.peak_bytes}};
}

// The records of steps up to `last`, so that a resumed run goes on after them without doubles.
std::string records_up_to(const std::string& path, int64_t last) {
  if (!file_exists(path)) return "";
  std::string kept;
  const std::string content = read_file(path);
  for (size_t begin = 0; begin < content.size();) {
    const size_t end = content.find('\n', begin);
    if (end == std::string::npos) break;  // a line cut by a crash
    const std::string line = content.substr(begin, end - begin);
    begin = end + 1;
    const auto record = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (record.is_object() && record.value("step", last + 1) <= last) kept += line + "\n";
  }
  return kept;
}

}  // namespace

std::string short_number(double value) {
  return fmt::format("{:.6g}", value);
}

EventStream::EventStream(const std::string& target, int rank) : rank_(rank) {
  if (target.empty()) return;
  const bool is_descriptor = target.find_first_not_of("0123456789") == std::string::npos;
  file_ = is_descriptor ? fdopen(dup(std::stoi(target)), "w") : std::fopen(target.c_str(), "a");
  if (file_ == nullptr)
    throw input_error("--events {}: cannot be opened for writing; give a file descriptor number or a path", target);
}

EventStream::~EventStream() {
  if (file_ != nullptr) std::fclose(file_);
}

void EventStream::write(const std::string& line) {
  if (file_ == nullptr) return;
  std::fwrite(line.data(), 1, line.size(), file_);
  std::fputc('\n', file_);
  std::fflush(file_);
}

void EventStream::hello(int world) {
  write(OrderedJson{{"event", "hello"}, {"rank", rank_}, {"world", world}, {"pid", getpid()}}.dump());
}
void EventStream::phase(const std::string& name) {
  write(OrderedJson{{"event", "phase"}, {"rank", rank_}, {"name", name}}.dump());
}
void EventStream::step(const StepRecord& record) {
  OrderedJson json = {{"event", "step"}, {"rank", rank_}};
  json.update(to_json(record));
  write(json.dump());
}
void EventStream::checkpoint(int64_t step, const std::string& dir) {
  write(OrderedJson{{"event", "checkpoint"}, {"rank", rank_}, {"step", step}, {"dir", dir}}.dump());
}
void EventStream::warning(const std::string& text) {
  write(OrderedJson{{"event", "warning"}, {"rank", rank_}, {"text", text}}.dump());
}
void EventStream::error(const std::string& kind, const std::string& text, bool retryable) {
  write(OrderedJson{{"event", "error"}, {"rank", rank_}, {"kind", kind}, {"text", text}, {"retryable", retryable}}.dump());
}
void EventStream::finished(int64_t step, const std::string& final_dir) {
  write(OrderedJson{{"event", "finished"}, {"rank", rank_}, {"step", step}, {"final_dir", final_dir}}.dump());
}

Metrics::Metrics(const MetricsOptions& options)
    : options_(options), started_(std::chrono::steady_clock::now()), live_(isatty(2) == 1) {
  const std::string path = join_path(options.run_dir, "metrics.jsonl");
  write_file_atomically(path, records_up_to(path, options.first_step));
  file_ = std::fopen(path.c_str(), "a");
  if (file_ == nullptr) throw environment_error("{}: cannot be opened for writing", path);
  if (options.tensorboard)
    events_ = std::make_unique<EventWriter>(join_path(options.run_dir, "tensorboard"),
                                            options.first_step > 0 ? options.first_step + 1 : -1);
}

Metrics::~Metrics() {
  if (line_open_) std::fputc('\n', stderr);
  if (file_ != nullptr) std::fclose(file_);
}

void Metrics::add_step(const StepRecord& record) {
  const std::string line = to_json(record).dump() + "\n";
  std::fwrite(line.data(), 1, line.size(), file_);
  std::fflush(file_);
  if (events_) {
    events_->add_scalar("train/loss", record.step, record.loss);
    events_->add_scalar("train/learning_rate", record.step, record.learning_rate);
    events_->add_scalar("train/grad_norm", record.step, record.grad_norm);
    events_->add_scalar("train/mean_token_accuracy", record.step, record.mean_token_accuracy);
    events_->add_scalar("train/epoch", record.step, record.epoch);
    events_->add_scalar("speed/samples_per_s", record.step, record.samples_per_s);
    events_->add_scalar("speed/tokens_per_s", record.step, record.tokens_per_s);
    events_->add_scalar("speed/data_ms", record.step, record.data_ms);
  }
  show_progress(record);
}

void Metrics::add_eval(int64_t step, const std::vector<std::pair<std::string, double>>& values) {
  OrderedJson json = {{"step", step}};
  std::string text;
  for (const auto& [name, value] : values) {
    json["eval_" + name] = number_or_null(value);
    if (events_) events_->add_scalar("eval/" + name, step, value);
    text += fmt::format("  {} {}", name, short_number(value));
  }
  const std::string line = json.dump() + "\n";
  std::fwrite(line.data(), 1, line.size(), file_);
  std::fflush(file_);
  if (line_open_) std::fputc('\n', stderr);
  line_open_ = false;
  log_info("step {}: held-out{}", step, text);
}

void Metrics::flush() {
  if (events_) events_->flush();
}

void Metrics::show_progress(const StepRecord& record) {
  const bool last = record.step == options_.total_steps;
  if (!live_ && !last && record.step % options_.every != 0) return;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
  const int64_t done = record.step - options_.first_step;
  const double left = done > 0 ? seconds / double(done) * double(options_.total_steps - record.step) : 0;
  const std::string line = fmt::format(
      "step {}/{}  epoch {:.2f}  loss {:.4f}  acc {:.3f}  lr {}  norm {}  {} samples/s  {} tokens/s  ETA {}  {}", record.step,
      options_.total_steps, record.epoch, record.loss, record.mean_token_accuracy, short_number(record.learning_rate),
      fmt::format("{:.3g}", record.grad_norm), fmt::format("{:.4g}", record.samples_per_s),
      fmt::format("{:.0f}", record.tokens_per_s), human_duration(left), human_bytes(record.peak_bytes));
  if (!live_) return log_info("{}", line);
  std::fprintf(stderr, "\r\033[K%s", line.c_str());
  line_open_ = !last;
  if (last) std::fputc('\n', stderr);
  std::fflush(stderr);
}

}  // namespace gemtune
