#include "base/error.h"
#include "base/file.h"
#include "dist/group.h"
#include "dist/socket.h"

#include <gtest/gtest.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <thread>

namespace gemtune {
namespace {

int free_port() {
  return port_of(listen_at("127.0.0.1", 0));
}

RankPlace place_of(int rank, int world, int port) {
  return {rank, world, rank, "127.0.0.1", port};
}

// Runs `body` as each rank of a world, one thread a rank; what each threw, or "".
std::vector<std::string> run_ranks(int world, const std::function<void(Group&)>& body, double timeout_s = 10) {
  const int port = free_port();
  std::vector<std::string> errors(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto group = make_socket_group(place_of(rank, world, port), timeout_s);
        body(*group);
      } catch (const Error& error) {
        errors[static_cast<size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

std::vector<std::string> all_ranks(int world, const std::string& text) {
  return std::vector<std::string>(static_cast<size_t>(world), text);
}

class Environment : public testing::Test {
 protected:
  static constexpr const char* kNames[] = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"};
  void SetUp() override { set({}); }
  void TearDown() override { set({}); }
  void set(const std::map<std::string, std::string>& values) {
    for (const char* name : kNames) ::unsetenv(name);
    for (const auto& [name, value] : values) ::setenv(name.c_str(), value.c_str(), 1);
  }
  std::string error() {
    try {
      rank_place_from_environment();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kInput);
      return error.what();
    }
    return "no error";
  }
  std::map<std::string, std::string> good_ = {
      {"RANK", "3"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "host"}, {"MASTER_PORT", "29500"}};
};

TEST_F(Environment, WithoutVariablesIsOneProcess) {
  EXPECT_EQ(rank_place_from_environment().world, 1);
  set({{"RANK", ""}});
  EXPECT_EQ(rank_place_from_environment().world, 1);
}

TEST_F(Environment, TorchrunVariablesAreRead) {
  set(good_);
  const RankPlace place = rank_place_from_environment();
  EXPECT_EQ(place.rank, 3);
  EXPECT_EQ(place.world, 8);
  EXPECT_EQ(place.local_rank, 1);
  EXPECT_EQ(place.master_address, "host");
  EXPECT_EQ(place.master_port, 29500);
}

TEST_F(Environment, HalfASetIsAnError) {
  set({{"RANK", "0"}, {"WORLD_SIZE", "2"}});
  EXPECT_EQ(error(),
            "environment: RANK, WORLD_SIZE set, LOCAL_RANK, MASTER_ADDR, MASTER_PORT not; a launcher sets all five, a single "
            "process needs none: set or unset them");
}

TEST_F(Environment, ValuesOutOfRangeAreNamed) {
  const auto error_with = [&](const std::string& name, const std::string& value) {
    auto values = good_;
    values[name] = value;
    set(values);
    return error();
  };
  EXPECT_EQ(error_with("RANK", "8"),
            "environment: RANK is \"8\", expected a whole number from 0 to 7 (WORLD_SIZE is 8); correct the launcher");
  EXPECT_EQ(error_with("RANK", "-1"),
            "environment: RANK is \"-1\", expected a whole number from 0 to 7 (WORLD_SIZE is 8); correct the launcher");
  EXPECT_EQ(error_with("LOCAL_RANK", "1x"),
            "environment: LOCAL_RANK is \"1x\", expected a whole number from 0 to 7 (WORLD_SIZE is 8); correct the launcher");
  EXPECT_EQ(error_with("WORLD_SIZE", "0"),
            "environment: WORLD_SIZE is \"0\", expected a whole number from 1; correct the launcher");
  EXPECT_EQ(error_with("MASTER_PORT", "65536"),
            "environment: MASTER_PORT is \"65536\", expected a whole number from 1 to 65535; correct the launcher");
}

TEST(SingleGroup, CollectivesAreTheIdentity) {
  const auto group = make_single_group();
  std::vector<float> values = {1, 2};
  group->all_reduce_sum(std::span(values));
  group->barrier();
  EXPECT_EQ(values, (std::vector<float>{1, 2}));
  EXPECT_EQ(group->broadcast("abc"), "abc");
  EXPECT_TRUE(group->is_first());
  EXPECT_EQ(group->world(), 1);
  const Error failure = group->fail("no rows", ExitCode::kInput);
  EXPECT_STREQ(failure.what(), "no rows");
  EXPECT_EQ(failure.code(), ExitCode::kInput);
  EXPECT_THROW(group->barrier(), Error);
}

TEST(SocketGroup, SumsAreThoseOfRankOrderOnEveryRankBitForBit) {
  for (int world = 1; world <= 4; ++world) {
    // Values whose sum depends on the order.
    const auto value = [](int rank, size_t i) {
      return 0.1f * static_cast<float>(i % 97 + 1) * std::pow(17.0f, static_cast<float>(rank));
    };
    for (const size_t size : {size_t{0}, size_t{1}, size_t{1000}, size_t{3'000'001}}) {
      std::vector<float> expected(size);
      for (size_t i = 0; i < size; ++i) {
        expected[i] = value(0, i);
        for (int rank = 1; rank < world; ++rank) expected[i] += value(rank, i);
      }
      const auto errors = run_ranks(world, [&](Group& group) {
        std::vector<float> values(size);
        for (size_t i = 0; i < size; ++i) values[i] = value(group.rank(), i);
        group.all_reduce_sum(std::span(values));
        EXPECT_TRUE(std::memcmp(values.data(), expected.data(), size * sizeof(float)) == 0)
            << "world " << world << " size " << size;
      });
      EXPECT_EQ(errors, all_ranks(world, ""));
    }
  }
}

TEST(SocketGroup, DoublesMaximaAndBroadcastsReachEveryRank) {
  const std::string large(9'000'000, 'b');
  const auto errors = run_ranks(3, [&](Group& group) {
    std::vector<double> sum = {static_cast<double>(group.rank()), 0.1};
    group.all_reduce_sum(std::span(sum));
    EXPECT_EQ(sum, (std::vector<double>{3, 0.1 + 0.1 + 0.1}));
    std::vector<double> maximum = {static_cast<double>(-group.rank()), group.rank() == 1 ? 5.0 : 0.0,
                                   group.rank() == 2 ? std::nan("") : 1.0};
    group.all_reduce_max(maximum);
    EXPECT_EQ(maximum[0], 0);
    EXPECT_EQ(maximum[1], 5);
    EXPECT_TRUE(std::isnan(maximum[2]));
    EXPECT_EQ(group.broadcast(group.is_first() ? "word" : "ignored"), "word");
    EXPECT_EQ(group.broadcast(""), "");
    EXPECT_TRUE(group.broadcast(group.is_first() ? large : "") == large);
    std::vector<double> nan_first = {group.is_first() ? std::nan("") : 1.0};
    group.all_reduce_max(nan_first);
    EXPECT_TRUE(std::isnan(nan_first[0]));
  });
  EXPECT_EQ(errors, all_ranks(3, ""));
}

TEST(SocketGroup, ABarrierHoldsUntilTheLastRank) {
  std::atomic<int> num_arrived = 0;
  const auto errors = run_ranks(4, [&](Group& group) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50 * group.rank()));
    ++num_arrived;
    group.barrier();
    EXPECT_EQ(num_arrived, 4);
  });
  EXPECT_EQ(errors, all_ranks(4, ""));
}

TEST(SocketGroup, ALargeBufferPasses) {
  const size_t size = 25'000'000;
  const auto errors = run_ranks(2, [&](Group& group) {
    std::vector<float> values(size, static_cast<float>(group.rank() + 1));
    group.all_reduce_sum(std::span(values));
    EXPECT_EQ(values.front(), 3);
    EXPECT_EQ(values.back(), 3);
  });
  EXPECT_EQ(errors, all_ranks(2, ""));
}

TEST(SocketGroup, ARankSlowerThanTheDeadlineIsNotLost) {
  for (const int slow : {0, 1}) {
    const auto errors = run_ranks(
        3,
        [&](Group& group) {
          if (group.rank() == slow) std::this_thread::sleep_for(std::chrono::milliseconds(2500));
          group.barrier();
        },
        0.8);
    EXPECT_EQ(errors, all_ranks(3, ""));
  }
}

TEST(SocketGroup, AFailureEndsAllRanksWithTheSameTextAndCode) {
  for (const int failing : {0, 2}) {
    std::atomic<int> num_input_errors = 0;
    const auto errors = run_ranks(3, [&](Group& group) {
      try {
        group.barrier();
        if (group.rank() == failing) throw group.fail("row 7: no image", ExitCode::kInput);
        group.barrier();
      } catch (const Error& error) {
        num_input_errors += error.code() == ExitCode::kInput;
        throw;
      }
    });
    EXPECT_EQ(errors, all_ranks(3, fmt::format("rank {}: row 7: no image", failing)));
    EXPECT_EQ(num_input_errors, 3);
  }
}

TEST(SocketGroup, OfSeveralFailuresAllEndWithOne) {
  for (int round = 0; round < 5; ++round) {
    const auto errors = run_ranks(4, [](Group& group) {
      group.barrier();
      throw group.fail(fmt::format("fault {}", group.rank()));
    });
    EXPECT_EQ(errors, all_ranks(4, errors[0]));
    EXPECT_TRUE(errors[0].starts_with("rank ")) << errors[0];
  }
}

TEST(SocketGroup, DifferentCallsAreNamed) {
  const auto errors = run_ranks(2, [](Group& group) {
    group.barrier();
    std::vector<float> values(group.rank() == 0 ? 4 : 5);
    group.all_reduce_sum(std::span(values));
  });
  EXPECT_EQ(errors,
            all_ranks(2,
                      "rank 0: all ranks must make the same calls: rank 1 made all_reduce_sum of floats (call 2, size 5), "
                      "rank 0 all_reduce_sum of floats (call 2, size 4)"));
}

TEST(SocketGroup, ARankThatLeavesEarlyIsNamed) {
  const auto errors = run_ranks(2, [](Group& group) {
    if (group.rank() == 0) group.barrier();
  });
  EXPECT_EQ(errors[0], "rank 0: rank 1 had already left when barrier (call 1) was due; all ranks must make the same calls");
  const auto other = run_ranks(2, [](Group& group) {
    if (group.rank() == 1) group.barrier();
  });
  EXPECT_EQ(other[1], "rank 1: rank 0 had already left when barrier (call 1) was due; all ranks must make the same calls");
}

TEST(SocketGroup, AnAbsentRankIsNamedAtStartUp) {
  const int port = free_port();
  std::string first;
  std::string second;
  std::thread thread([&] {
    try {
      make_socket_group(place_of(1, 3, port), 5, 5)->barrier();
    } catch (const Error& error) {
      second = error.what();
    }
  });
  try {
    make_socket_group(place_of(0, 3, port), 5, 1);
  } catch (const Error& error) {
    first = error.what();
  }
  thread.join();
  EXPECT_EQ(first,
            fmt::format("start-up: rank 2 of a world of 3 did not connect to 127.0.0.1:{} within 1.0 s; check that it runs and "
                        "reaches this address",
                        port));
  EXPECT_EQ(second, first);
}

TEST(SocketGroup, AnAbsentFirstRankIsNamed) {
  const int port = free_port();
  try {
    make_socket_group(place_of(1, 2, port), 5, 0.3);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(
        std::string(error.what()),
        fmt::format("start-up: rank 1 did not reach rank 0 at 127.0.0.1:{} within 0.3 s (Connection refused); check that rank 0 "
                    "runs and that MASTER_ADDR and MASTER_PORT are its",
                    port));
  }
}

TEST(SocketGroup, RankZeroMayStartLate) {
  const int port = free_port();
  std::thread thread([&] { EXPECT_NO_THROW(make_socket_group(place_of(1, 2, port), 10)->barrier()); });
  std::this_thread::sleep_for(std::chrono::seconds(1));
  EXPECT_NO_THROW(make_socket_group(place_of(0, 2, port), 10)->barrier());
  thread.join();
}

TEST(SocketGroup, AnotherWorldSizeIsRefusedOnBothSides) {
  const int port = free_port();
  std::string other;
  std::thread thread([&] {
    try {
      make_socket_group(place_of(1, 3, port), 5);
    } catch (const Error& error) {
      other = error.what();
    }
  });
  try {
    make_socket_group(place_of(0, 2, port), 5);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "start-up: rank 1 has WORLD_SIZE 3, rank 0 has 2; start all ranks with the same WORLD_SIZE");
    thread.join();
    EXPECT_EQ(other, error.what());
  }
}

TEST(SocketGroup, TakenPortsAndStrangersAreSteppedOver) {
  // Another program listens on the port and answers nothing; a stranger talks to the listener of rank 0.
  const Socket taken = listen_at("127.0.0.1", 0);
  const int port = port_of(taken);
  std::thread closer([&] {
    for (int i = 0; i < 2; ++i) accept_from(taken, deadline_in(1));
  });
  std::thread stranger([&] {
    std::string why;
    for (int i = 0; i < 20; ++i) {
      Socket socket = connect_to("127.0.0.1", port + 1, deadline_in(1), &why);
      if (socket.is_open()) {
        socket.send_all("GET / HTTP/1.1\r\nHost: somebody else\r\n\r\n", 40);
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  });
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    EXPECT_NO_THROW(make_socket_group(place_of(1, 2, port), 15)->barrier());
  });
  EXPECT_NO_THROW(make_socket_group(place_of(0, 2, port), 15)->barrier());
  closer.join();
  stranger.join();
  other.join();
}

// Ranks as processes, so that they can be killed or stopped. The child's error goes to its exit: 0 when it is `expected`.
pid_t start_process(const std::function<void()>& body) {
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  try {
    body();
  } catch (...) {
    ::_exit(9);
  }
  ::_exit(0);
}

std::string error_of_lost_rank(int lost, int signal, double timeout_s, double* seconds) {
  const int port = free_port();
  const int other = lost == 0 ? 1 : 0;
  const pid_t child = start_process([&] {
    const auto group = make_socket_group(place_of(lost, 2, port), timeout_s, 10);
    group->barrier();
    ::pause();
  });
  std::string text;
  const auto group = make_socket_group(place_of(other, 2, port), timeout_s, 10);
  group->barrier();
  ::kill(child, signal);
  const auto start = Clock::now();
  try {
    group->barrier();
  } catch (const Error& error) {
    text = error.what();
  }
  *seconds = std::chrono::duration<double>(Clock::now() - start).count();
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  return text;
}

TEST(SocketGroup, AKilledRankIsNamedAtOnce) {
  for (const int lost : {0, 1}) {
    double seconds = 0;
    EXPECT_EQ(error_of_lost_rank(lost, SIGKILL, 60, &seconds),
              fmt::format(
                  "rank {} was lost: its process ended without a word (killed, out of memory or crashed); see the last output of "
                  "that rank",
                  lost));
    EXPECT_LT(seconds, 10);
  }
}

TEST(SocketGroup, ASilentRankIsNamedAtTheDeadline) {
  for (const int lost : {0, 1}) {
    double seconds = 0;
    EXPECT_EQ(
        error_of_lost_rank(lost, SIGSTOP, 1.5, &seconds),
        fmt::format("rank {} was lost: no sign of life for 1.5 s (its machine or network stopped, or its process was suspended)",
                    lost));
    EXPECT_GT(seconds, 1);
    EXPECT_LT(seconds, 15);
  }
}

TEST(SocketGroup, AllOtherRanksNameTheLostOne) {
  const int port = free_port();
  const pid_t child = start_process([&] {
    const auto group = make_socket_group(place_of(1, 3, port), 20);
    group->barrier();
    ::raise(SIGKILL);
  });
  std::string errors[2];
  std::thread threads[2];
  for (const int i : {0, 1}) {
    threads[i] = std::thread([&, i] {
      try {
        const auto group = make_socket_group(place_of(2 * i, 3, port), 20);
        group->barrier();
        group->barrier();
      } catch (const Error& error) {
        errors[i] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(errors[0].starts_with("rank 1 was lost: ")) << errors[0];
  EXPECT_EQ(errors[1], errors[0]);
}

}  // namespace
}  // namespace gemtune
