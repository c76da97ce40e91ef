#include "dist/rendezvous.h"

#include "base/error.h"
#include "base/text.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace gemtune {
namespace {

// Rank 0 answers a Hello with a Reply and its text (empty: welcome); the rank then sends kSeated, so that a connection
// given up while it waited in the listener's queue is not counted.
struct Hello {
  char magic[8];
  uint32_t base_port;  // tells jobs on one host apart
  uint32_t world;
  uint32_t rank;
  uint32_t reserved;
};
struct Reply {
  char magic[8];
  uint32_t text_bytes;
  uint32_t reserved;
};
constexpr char kMagic[8] = {'g', 'e', 'm', 't', 'u', 'n', 'e', '1'};
constexpr char kSeated = 's';
constexpr uint32_t kMaxReplyText = 4096;
constexpr int kNumPorts = 8;
// How long a connection that says nothing is listened to: rank 0 hears the ranks one after the other.
constexpr double kHelloTimeout_s = 2;
constexpr double kReplyTimeout_s = 10;

// MASTER_PORT itself belongs to the agent's store under torchrun.
std::vector<int> candidate_ports(const RankPlace& place) {
  const char* agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  const int first = place.master_port + (agent != nullptr && std::strcmp(agent, "True") == 0 ? 1 : 0);
  std::vector<int> ports;
  for (int i = 0; i < kNumPorts && first + i <= 65535; ++i) ports.push_back(first + i);
  return ports;
}

std::string place_text(const RankPlace& place) {
  return fmt::format("{}:{}", place.master_address, place.master_port);
}

Socket open_listener(const RankPlace& place) {
  if (const char* inherited = std::getenv(kListenerVariable)) {
    const int fd = std::atoi(inherited);
    // The programs that this rank starts must neither inherit the socket nor look for it.
    ::unsetenv(kListenerVariable);
    Socket socket(fd);
    if (::fcntl(fd, F_SETFD, FD_CLOEXEC) == 0 && port_of(socket) == place.master_port) return socket;
  }
  for (const int port : candidate_ports(place)) {
    Socket socket = listen_at(place.master_address, port);
    if (socket.is_open()) return socket;
    if (errno != EADDRINUSE) break;
  }
  throw job_error("rank 0 cannot listen at {}: {}; choose another MASTER_PORT", place_text(place), std::strerror(errno));
}

bool answer(Socket* socket, const std::string& text) {
  Reply reply{};
  std::memcpy(reply.magic, kMagic, sizeof kMagic);
  reply.text_bytes = static_cast<uint32_t>(std::min<size_t>(text.size(), kMaxReplyText));
  const Deadline deadline = deadline_in(kHelloTimeout_s);
  return socket->send_all(&reply, sizeof reply, deadline) && socket->send_all(text.data(), reply.text_bytes, deadline);
}

// One attempt; not open when this port is not rank 0's. Throws what rank 0 refuses with.
Socket try_to_join(const RankPlace& place, int port, Deadline end, std::string* why) {
  Socket socket = connect_to(place.master_address, port, std::min(end, deadline_in(kReplyTimeout_s)), why);
  if (!socket.is_open()) return socket;
  Hello hello{};
  std::memcpy(hello.magic, kMagic, sizeof kMagic);
  hello.base_port = static_cast<uint32_t>(place.master_port);
  hello.world = static_cast<uint32_t>(place.world);
  hello.rank = static_cast<uint32_t>(place.rank);
  Reply reply{};
  const Deadline deadline = std::min(end, deadline_in(kReplyTimeout_s));
  if (!socket.send_all(&hello, sizeof hello, deadline) || !socket.receive_all(&reply, sizeof reply, deadline) ||
      std::memcmp(reply.magic, kMagic, sizeof kMagic) != 0 || reply.text_bytes > kMaxReplyText) {
    *why = "the program there did not answer as a rank 0";
    return Socket();
  }
  std::string refusal(reply.text_bytes, '\0');
  if (!socket.receive_all(refusal.data(), refusal.size(), deadline)) return Socket();
  if (!refusal.empty()) throw Error(ExitCode::kJobFailed, refusal);
  if (!socket.send_all(&kSeated, 1, deadline)) return Socket();
  return socket;
}

}  // namespace

void gather_ranks(const RankPlace& place, double timeout_s, const std::function<void(int, Socket)>& joined,
                  const std::function<void()>& check) {
  const Socket listener = open_listener(place);
  const Deadline end = deadline_in(timeout_s);
  std::vector<bool> present(static_cast<size_t>(place.world), false);
  present[0] = true;
  while (std::find(present.begin(), present.end(), false) != present.end()) {
    check();
    if (Clock::now() >= end) {
      std::vector<std::string> absent;
      for (size_t rank = 0; rank < present.size(); ++rank) {
        if (!present[rank]) absent.push_back(std::to_string(rank));
      }
      throw job_error(
          "start-up: rank {} of a world of {} did not connect to {} within {}; check that it runs and reaches this address",
          join_some(absent), place.world, place_text(place), human_duration(timeout_s));
    }
    Socket socket = accept_from(listener, std::min(end, deadline_in(0.2)));
    if (!socket.is_open()) continue;
    Hello hello{};
    const bool is_rank = socket.receive_all(&hello, sizeof hello, deadline_in(kHelloTimeout_s)) &&
                         std::memcmp(hello.magic, kMagic, sizeof kMagic) == 0 &&
                         hello.base_port == static_cast<uint32_t>(place.master_port);
    // A stranger, or a rank of another job that will look further.
    if (!is_rank) continue;
    std::string refusal;
    if (hello.world != static_cast<uint32_t>(place.world)) {
      refusal = fmt::format("start-up: rank {} has WORLD_SIZE {}, rank 0 has {}; start all ranks with the same WORLD_SIZE",
                            hello.rank, hello.world, place.world);
    } else if (hello.rank == 0 || hello.rank >= hello.world) {
      refusal = fmt::format("start-up: a second process has RANK {}; give each process its own RANK", hello.rank);
    } else if (present[hello.rank]) {
      refusal = fmt::format("start-up: two processes have RANK {}; give each process its own RANK", hello.rank);
    }
    char seated = 0;
    const bool answered = answer(&socket, refusal);
    if (!refusal.empty()) throw Error(ExitCode::kJobFailed, refusal);
    if (!answered || !socket.receive_all(&seated, 1, deadline_in(kHelloTimeout_s)) || seated != kSeated) continue;
    present[hello.rank] = true;
    joined(static_cast<int>(hello.rank), std::move(socket));
  }
}

Socket join_first_rank(const RankPlace& place, double timeout_s) {
  const Deadline end = deadline_in(timeout_s);
  std::string why = "nobody answered";
  do {
    for (const int port : candidate_ports(place)) {
      std::string attempt;
      Socket socket = try_to_join(place, port, end, &attempt);
      if (socket.is_open()) return socket;
      if (port == candidate_ports(place).front()) why = attempt;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  } while (Clock::now() < end);
  throw job_error(
      "start-up: rank {} did not reach rank 0 at {} within {} ({}); check that rank 0 runs and that MASTER_ADDR and MASTER_PORT "
      "are its",
      place.rank, place_text(place), human_duration(timeout_s), why);
}

}  // namespace gemtune
