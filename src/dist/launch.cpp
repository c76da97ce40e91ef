#include "base/error.h"
#include "base/log.h"
#include "dist/group.h"
#include "dist/rendezvous.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <thread>

extern "C" char** environ;

namespace gemtune {
namespace {

// The ranks end by themselves once a collective tells them of the failure; one that is in none is asked, then made to.
constexpr double kGrace_s = 10;
constexpr double kGraceAfterTerm_s = 20;

struct Rank {
  pid_t pid = -1;
  bool running = false;
};

std::vector<std::string> without_nproc(const std::vector<std::string>& argv) {
  std::vector<std::string> result;
  for (size_t i = 0; i < argv.size(); ++i) {
    if (argv[i] == "--nproc") {
      ++i;
    } else if (!argv[i].starts_with("--nproc=")) {
      result.push_back(argv[i]);
    }
  }
  return result;
}

std::vector<char*> pointers(std::vector<std::string>* strings) {
  std::vector<char*> result;
  for (std::string& text : *strings) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

// This process's variables without those that are set for each rank.
std::vector<std::string> environment_of(int rank, int nproc, int port, int listener) {
  static constexpr const char* kOwn[] = {"RANK",
                                         "WORLD_SIZE",
                                         "LOCAL_RANK",
                                         "LOCAL_WORLD_SIZE",
                                         "MASTER_ADDR",
                                         "MASTER_PORT",
                                         "TORCHELASTIC_USE_AGENT_STORE",
                                         kListenerVariable};
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::string_view name = text.substr(0, text.find('='));
    if (std::find(std::begin(kOwn), std::end(kOwn), name) == std::end(kOwn)) result.emplace_back(text);
  }
  result.push_back(fmt::format("RANK={}", rank));
  result.push_back(fmt::format("WORLD_SIZE={}", nproc));
  result.push_back(fmt::format("LOCAL_RANK={}", rank));
  result.push_back(fmt::format("LOCAL_WORLD_SIZE={}", nproc));
  result.push_back("MASTER_ADDR=127.0.0.1");
  result.push_back(fmt::format("MASTER_PORT={}", port));
  if (rank == 0) result.push_back(fmt::format("{}={}", kListenerVariable, listener));
  if (std::getenv("OMP_NUM_THREADS") == nullptr)
    result.push_back(
        fmt::format("OMP_NUM_THREADS={}", std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / nproc)));
  return result;
}

pid_t start_rank(std::vector<std::string> argv, std::vector<std::string> environment, int inherited_fd, const sigset_t& mask) {
  // Nothing is allocated between fork and exec.
  const std::vector<char*> arguments = pointers(&argv);
  const std::vector<char*> variables = pointers(&environment);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  // A process group of its own: Ctrl-C reaches a rank once, forwarded, not twice.
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(static_cast<int>(ExitCode::kJobFailed));
  if (inherited_fd >= 0) ::fcntl(inherited_fd, F_SETFD, 0);
  ::sigprocmask(SIG_SETMASK, &mask, nullptr);
  ::execve("/proc/self/exe", arguments.data(), variables.data());
  ::_exit(static_cast<int>(ExitCode::kEnvironment));
}

void signal_all(const std::vector<Rank>& ranks, int signal) {
  for (const Rank& rank : ranks) {
    if (rank.running) ::kill(rank.pid, signal);
  }
}

int exit_code_of(int rank, int status) {
  if (WIFEXITED(status)) return WEXITSTATUS(status);
  const int signal = WTERMSIG(status);
  log_line(LogLevel::kError, fmt::format("rank {} was ended by signal {} ({})", rank, signal, ::strsignal(signal)));
  return static_cast<int>(ExitCode::kJobFailed);
}

// Signals that this process waits for instead of being interrupted by them; restored at the end.
class BlockedSignals {
 public:
  BlockedSignals() {
    ::sigemptyset(&waited_);
    for (const int signal : {SIGTERM, SIGINT, SIGCHLD}) ::sigaddset(&waited_, signal);
    ::sigprocmask(SIG_BLOCK, &waited_, &before_);
    // Where the starter ignored SIGCHLD, exit codes would be lost.
    struct sigaction standard {};
    standard.sa_handler = SIG_DFL;
    ::sigaction(SIGCHLD, &standard, &child_before_);
  }
  ~BlockedSignals() {
    ::sigaction(SIGCHLD, &child_before_, nullptr);
    ::sigprocmask(SIG_SETMASK, &before_, nullptr);
  }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;
  const sigset_t& before() const { return before_; }
  // The next signal, or 0 after a while.
  int wait() const {
    const timespec span{0, 100'000'000};
    const int signal = ::sigtimedwait(&waited_, nullptr, &span);
    return signal > 0 ? signal : 0;
  }

 private:
  sigset_t waited_{};
  sigset_t before_{};
  struct sigaction child_before_ {};
};

class Job {
 public:
  Job(int nproc, const std::vector<std::string>& argv) : ranks_(static_cast<size_t>(nproc)) {
    const Socket listener = listen_at("127.0.0.1", 0);
    if (!listener.is_open()) throw environment_error("cannot listen on 127.0.0.1: {}", std::strerror(errno));
    for (int rank = 0; rank < nproc; ++rank) {
      Rank& entry = ranks_[static_cast<size_t>(rank)];
      entry.pid = start_rank(without_nproc(argv), environment_of(rank, nproc, port_of(listener), listener.fd()),
                             rank == 0 ? listener.fd() : -1, signals_.before());
      if (entry.pid < 0) {
        const int cause = errno;
        signal_all(ranks_, SIGKILL);
        throw environment_error("rank {} cannot be started: {}", rank, std::strerror(cause));
      }
      entry.running = true;
      ++num_running_;
    }
  }

  int run() {
    while (num_running_ > 0) {
      const int signal = signals_.wait();
      if (signal == SIGTERM || signal == SIGINT) signal_all(ranks_, signal);
      collect();
      if (first_failure_ == 0) continue;
      if (last_step_ == 0 && Clock::now() >= term_at_) {
        signal_all(ranks_, SIGTERM);
        last_step_ = SIGTERM;
      } else if (last_step_ == SIGTERM && Clock::now() >= kill_at_) {
        signal_all(ranks_, SIGKILL);
        last_step_ = SIGKILL;
      }
    }
    if (first_failure_ != 0) return first_failure_;
    return any_stopped_ ? static_cast<int>(ExitCode::kStopped) : 0;
  }

 private:
  void collect() {
    for (size_t i = 0; i < ranks_.size(); ++i) {
      int status = 0;
      if (!ranks_[i].running || ::waitpid(ranks_[i].pid, &status, WNOHANG) != ranks_[i].pid) continue;
      ranks_[i].running = false;
      --num_running_;
      const int code = exit_code_of(static_cast<int>(i), status);
      if (code == static_cast<int>(ExitCode::kStopped)) {
        // The others are still saving or on their way there.
        any_stopped_ = true;
      } else if (code != 0 && first_failure_ == 0) {
        first_failure_ = code;
        term_at_ = deadline_in(kGrace_s);
        kill_at_ = deadline_in(kGrace_s + kGraceAfterTerm_s);
      }
    }
  }

  BlockedSignals signals_;
  std::vector<Rank> ranks_;
  int num_running_ = 0;
  int first_failure_ = 0;
  bool any_stopped_ = false;
  int last_step_ = 0;  // the last signal sent because of the failure
  Deadline term_at_;
  Deadline kill_at_;
};

}  // namespace

int run_local_ranks(int nproc, const std::vector<std::string>& argv) {
  if (nproc < 1) throw input_error("--nproc is {}, expected a number from 1", nproc);
  return Job(nproc, argv).run();
}

}  // namespace gemtune
