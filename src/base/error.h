// The one exception type of the engine. The engine throws; programs (app/) decide what a failure means.
#pragma once

#include <fmt/core.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace gemtune {

// Exit codes are part of the product's contract: other tools are written against them.
enum class ExitCode : int {
  kDone = 0,
  kInput = 2,        // usage, recipe or data error
  kEnvironment = 3,  // missing GPU, token, permission, disk
  kCapacity = 4,     // capacity or deadline
  kJobFailed = 5,    // the job failed
  kCancelled = 6,
  kCostStop = 7,
  kContactLost = 8,  // the job may run on
  kLeftovers = 9,    // leftovers after `gke down`
  kStopped = 75,     // stopped on request with a complete checkpoint: run the same command again to go on
};

// A failure with a one-line message: where, what, expected and got, what to do.
class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& text) : std::runtime_error(text), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

// throw input_error("train.jsonl:7: field image: {} is missing", path);
template <class... Args>
Error input_error(fmt::format_string<Args...> text, Args&&... args) {
  return Error(ExitCode::kInput, fmt::format(text, std::forward<Args>(args)...));
}
template <class... Args>
Error environment_error(fmt::format_string<Args...> text, Args&&... args) {
  return Error(ExitCode::kEnvironment, fmt::format(text, std::forward<Args>(args)...));
}
template <class... Args>
Error job_error(fmt::format_string<Args...> text, Args&&... args) {
  return Error(ExitCode::kJobFailed, fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace gemtune
