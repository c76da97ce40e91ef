#include "base/error.h"
#include "base/file.h"
#include "dist/group.h"
#include "dist/socket.h"

#include <gtest/gtest.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

namespace gemtune {
namespace {

volatile sig_atomic_t g_signal = 0;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

void note(const std::string& name, const std::string& text) {
  std::ofstream(join_path(variable("GEMTUNE_TEST_DIR"), name)) << text;
}

// What a rank of the tests below does; run_local_ranks starts this program again with a filter that leaves only this test.
TEST(RankProgram, ActsAsTold) {
  const std::string act = variable("GEMTUNE_TEST_ACT");
  if (act.empty()) GTEST_SKIP() << "a part of the Launch tests";
  const RankPlace place = rank_place_from_environment();
  const std::string rank = std::to_string(place.rank);
  note("pid." + rank, std::to_string(::getpid()));
  if (act == "sum") {
    std::vector<double> values = {1.0 + place.rank};
    make_socket_group(place, 20)->all_reduce_sum(std::span(values));
    note("sum." + rank, fmt::format("{} {} {}", values[0], place.local_rank, variable("OMP_NUM_THREADS")));
    ::exit(0);
  }
  if (act == "stop") {
    // Ranks stop one after the other, as they do when one of them writes the checkpoint.
    const auto handle = [](int signal) { g_signal = signal; };
    ::signal(SIGTERM, handle);
    ::signal(SIGINT, handle);
    note("ready." + rank, "");
    while (g_signal == 0) ::usleep(10'000);
    ::usleep(static_cast<useconds_t>(200'000 * place.rank));
    note("signal." + rank, std::to_string(g_signal));
    ::exit(75);
  }
  if (act == "wait") {
    note("ready." + rank, "");
    for (;;) ::pause();
  }
  const auto group = make_socket_group(place, 20);
  try {
    group->barrier();
    if (place.rank == 1 && act == "fail") throw group->fail("row 7: no image", ExitCode::kInput);
    if (place.rank == 1 && act == "crash") ::raise(SIGKILL);
    group->barrier();
  } catch (const Error& error) {
    note("error." + rank, error.what());
    ::exit(static_cast<int>(error.code()));
  }
  ::exit(0);
}

class Launch : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "gemtune-launch-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
    ::setenv("GEMTUNE_TEST_DIR", folder_.c_str(), 1);
  }
  void TearDown() override {
    ::unsetenv("GEMTUNE_TEST_ACT");
    ::unsetenv("GEMTUNE_TEST_DIR");
    std::filesystem::remove_all(folder_);
  }
  int run(const std::string& act, int nproc) {
    ::setenv("GEMTUNE_TEST_ACT", act.c_str(), 1);
    return run_local_ranks(nproc,
                           {"dist_test", "--nproc", std::to_string(nproc), "--gtest_filter=RankProgram.ActsAsTold", "--nproc=9"});
  }
  // The launcher as a process of its own, so that it can be signalled.
  pid_t start(const std::string& act, int nproc) {
    const pid_t pid = ::fork();
    if (pid == 0) ::_exit(run(act, nproc));
    return pid;
  }
  std::string read(const std::string& name) {
    return file_exists(join_path(folder_, name)) ? read_file(join_path(folder_, name)) : "";
  }
  bool wait_for(const std::string& name) {
    for (int i = 0; i < 1000 && !file_exists(join_path(folder_, name)); ++i) ::usleep(10'000);
    return file_exists(join_path(folder_, name));
  }
  std::string folder_;
};

TEST_F(Launch, RanksFindEachOtherAndShareTheCores) {
  ASSERT_EQ(variable("OMP_NUM_THREADS"), "");
  EXPECT_EQ(run("sum", 3), 0);
  const int threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / 3);
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(read(fmt::format("sum.{}", rank)), fmt::format("6 {} {}", rank, threads));
}

TEST_F(Launch, AGivenThreadCountIsKept) {
  ::setenv("OMP_NUM_THREADS", "7", 1);
  EXPECT_EQ(run("sum", 1), 0);
  ::unsetenv("OMP_NUM_THREADS");
  EXPECT_EQ(read("sum.0"), "1 0 7");
}

TEST_F(Launch, TheFailingRanksCodeIsTheJobs) {
  EXPECT_EQ(run("fail", 3), 2);
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(read(fmt::format("error.{}", rank)), "rank 1: row 7: no image");
}

TEST_F(Launch, ACrashedRankFailsTheJob) {
  testing::internal::CaptureStderr();
  const int code = run("crash", 3);
  const std::string output = testing::internal::GetCapturedStderr();
  EXPECT_EQ(code, 5);
  EXPECT_NE(output.find("error: rank 1 was ended by signal 9 (Killed)\n"), std::string::npos) << output;
  EXPECT_TRUE(read("error.0").starts_with("rank 1 was lost: ")) << read("error.0");
  EXPECT_EQ(read("error.2"), read("error.0"));
}

TEST_F(Launch, AStopReachesEveryRankAndIsTheJobsCode) {
  for (const int signal : {SIGTERM, SIGINT}) {
    const pid_t launcher = start("stop", 2);
    ASSERT_TRUE(wait_for("ready.0") && wait_for("ready.1"));
    ::kill(launcher, signal);
    int status = 0;
    ASSERT_EQ(::waitpid(launcher, &status, 0), launcher);
    ASSERT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 75);
    for (const char* rank : {"0", "1"}) {
      EXPECT_EQ(read(std::string("signal.") + rank), std::to_string(signal));
      std::filesystem::remove(join_path(folder_, std::string("ready.") + rank));
    }
  }
}

TEST_F(Launch, NoRankOutlivesAKilledLauncher) {
  const pid_t launcher = start("wait", 2);
  ASSERT_TRUE(wait_for("ready.0") && wait_for("ready.1"));
  ::kill(launcher, SIGKILL);
  ::waitpid(launcher, nullptr, 0);
  for (const char* name : {"pid.0", "pid.1"}) {
    const pid_t pid = std::stoi(read(name));
    // A zombie that init has not collected yet counts as ended.
    const auto is_running = [&] {
      std::ifstream stat(fmt::format("/proc/{}/stat", pid));
      std::string number;
      std::string command;
      char state = 'X';
      stat >> number >> command >> state;
      return state != 'X' && state != 'Z';
    };
    for (int i = 0; i < 500 && is_running(); ++i) ::usleep(10'000);
    EXPECT_FALSE(is_running()) << name;
  }
}

TEST_F(Launch, ANumberOfRanksBelowOneIsRefused) {
  try {
    run("sum", 0);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "--nproc is 0, expected a number from 1");
    EXPECT_EQ(error.code(), ExitCode::kInput);
  }
}

}  // namespace
}  // namespace gemtune
