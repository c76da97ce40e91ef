// The connections of a socket group: rank 0 to each other rank. Threads of their own read every connection and send
// heartbeats, so that frames, failures and losses arrive whatever the rank itself is doing.
#pragma once

#include "base/error.h"
#include "dist/group.h"
#include "dist/socket.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace gemtune {

// A message between rank 0 and another rank; `op`, `call` and `count` describe the collective it belongs to.
struct Frame {
  uint32_t op = 0;
  uint64_t call = 0;
  uint64_t count = 0;
  std::string payload;
};

class Star {
 public:
  // Returns when all ranks are connected. Throws Error(kJobFailed), the same text on all that were.
  Star(const RankPlace& place, double timeout_s, double setup_timeout_s);
  ~Star();
  Star(const Star&) = delete;
  Star& operator=(const Star&) = delete;

  static constexpr size_t kMaxPayload = size_t{4} << 20;

  // Both throw what all ranks end with when a rank has failed, was lost or has left.
  void send(int rank, const Frame& header, std::span<const char> payload);
  Frame receive(int rank, const std::string& what);

  // See Group::fail.
  Error fail(const std::string& text, ExitCode code);
  void throw_if_failed();

 private:
  enum class Kind : uint32_t { kData, kHeartbeat, kFailure, kFailureSeen, kGoodbye };
  struct WireHeader;
  struct Peer;

  void add_peer(int rank, Socket socket);
  void start_thread(std::thread* thread, void (Star::*body)(Peer*), Peer* peer);
  void read_frames(Peer* peer);
  bool read_frame(Peer* peer);
  void send_heartbeats(Peer* unused);
  bool send_frame(Peer* peer, Kind kind, const Frame& header, std::span<const char> payload, Deadline deadline);
  // Records the first failure; rank 0 passes it on to all.
  void settle(const Error& failure);
  void send_failure(Peer* peer, const Error& failure);
  void lose(Peer* peer, const std::string& how);
  void wait_until_failure_is_known(Deadline deadline);
  void close();
  Peer* peer(int rank);
  std::vector<Peer*> peers();

  RankPlace place_;
  double timeout_s_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank; null where this rank has no connection
  std::optional<Error> failure_;
  bool leaving_ = false;
  std::thread heartbeats_;
};

}  // namespace gemtune
