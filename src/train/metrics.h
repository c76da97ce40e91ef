// What a run says while it runs: metrics.jsonl, TensorBoard, the event stream, the progress line.
#pragma once

#include "io/tensorboard.h"

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace gemtune {

// One optimizer step; units in the names. Field names are those of metrics.jsonl and of the step event.
struct StepRecord {
  int64_t step = 0;
  double epoch = 0;  // passes over the data so far
  double loss = 0;   // nats a target token, over all target tokens of the step on all ranks
  double learning_rate = 0;
  double grad_norm = 0;    // before clipping
  int64_t num_tokens = 0;  // valid tokens since the start of training, over all ranks, resumes included
  double mean_token_accuracy = 0;
  double tokens_per_s = 0;
  double samples_per_s = 0;
  double step_ms = 0;
  double data_ms = 0;  // of step_ms: waiting for the loader
  int64_t peak_bytes = 0;
};

// JSON lines for a supervising process: hello, phase, step, checkpoint, warning, error, finished. Every frame has the rank.
class EventStream {
 public:
  // `target`: a file descriptor number, a path, or "" = no stream.
  EventStream(const std::string& target, int rank);
  ~EventStream();
  EventStream(const EventStream&) = delete;
  EventStream& operator=(const EventStream&) = delete;
  void hello(int world);
  void phase(const std::string& name);
  void step(const StepRecord& record);
  void checkpoint(int64_t step, const std::string& dir);
  void warning(const std::string& text);
  void error(const std::string& kind, const std::string& text, bool retryable);
  void finished(int64_t step, const std::string& final_dir);

 private:
  void write(const std::string& line);
  std::FILE* file_ = nullptr;
  int rank_ = 0;
};

struct MetricsOptions {
  std::string run_dir;
  bool tensorboard = true;
  int every = 1;  // steps between progress lines
  int64_t total_steps = 0;
  int64_t first_step = 0;  // where this process begins; records after it from an earlier life are dropped
};

// One writer a run (rank 0).
class Metrics {
 public:
  explicit Metrics(const MetricsOptions& options);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;
  void add_step(const StepRecord& record);
  void add_eval(int64_t step, const std::vector<std::pair<std::string, double>>& values);
  void flush();

 private:
  void show_progress(const StepRecord& record);
  MetricsOptions options_;
  std::FILE* file_ = nullptr;
  std::unique_ptr<EventWriter> events_;
  std::chrono::steady_clock::time_point started_;
  bool live_ = false;  // stderr is a terminal
  bool line_open_ = false;
};

// "0.000123", "1.2e-05": six significant digits, never longer than needed.
std::string short_number(double value);

}  // namespace gemtune
