#include "dist/star.h"

#include "base/error.h"
#include "base/text.h"
#include "dist/rendezvous.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cstring>

namespace gemtune {
namespace {

// How long a rank that fails or leaves waits for the others to have heard it. Only ranks that are stopped use it up.
constexpr double kFarewell_s = 5;
// How long a failure waits behind a frame that is being sent to the same rank.
constexpr auto kSendLock = std::chrono::seconds(2);

int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now().time_since_epoch()).count();
}

}  // namespace

struct Star::WireHeader {
  Kind kind;
  uint32_t op;
  uint64_t call;
  uint64_t count;
  uint64_t payload_bytes;
};

struct Star::Peer {
  Peer(int rank_, Socket socket_) : rank(rank_), socket(std::move(socket_)) {}
  const int rank;
  Socket socket;
  std::timed_mutex sending;
  std::atomic<int64_t> last_seen_ms{now_ms()};
  std::thread reader;
  // Under Star::mutex_.
  std::deque<Frame> inbox;
  bool said_goodbye = false;
  bool closed = false;
  bool knows_failure = false;
};

Star::Star(const RankPlace& place, double timeout_s, double setup_timeout_s)
    : place_(place), timeout_s_(timeout_s), peers_(static_cast<size_t>(place.world)) {
  start_thread(&heartbeats_, &Star::send_heartbeats, nullptr);
  try {
    if (place.rank == 0) {
      gather_ranks(
          place, setup_timeout_s, [this](int rank, Socket socket) { add_peer(rank, std::move(socket)); },
          [this] { throw_if_failed(); });
    } else {
      add_peer(0, join_first_rank(place, setup_timeout_s));
    }
  } catch (const Error& error) {
    settle(error);
    close();
    throw;
  } catch (...) {
    close();
    throw;
  }
}

Star::~Star() {
  close();
}

// The rank's own thread takes the process's signals.
void Star::start_thread(std::thread* thread, void (Star::*body)(Peer*), Peer* peer) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  *thread = std::thread(body, this, peer);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Star::add_peer(int rank, Socket socket) {
  std::unique_lock lock(mutex_);
  auto& place = peers_[static_cast<size_t>(rank)];
  place = std::make_unique<Peer>(rank, std::move(socket));
  Peer* peer = place.get();
  start_thread(&peer->reader, &Star::read_frames, peer);
  const std::optional<Error> failure = failure_;
  lock.unlock();
  // A failure during start-up was passed on to the ranks that were there.
  if (failure && place_.rank == 0) send_failure(peer, *failure);
}

Star::Peer* Star::peer(int rank) {
  std::lock_guard lock(mutex_);
  return peers_[static_cast<size_t>(rank)].get();
}

std::vector<Star::Peer*> Star::peers() {
  std::lock_guard lock(mutex_);
  std::vector<Peer*> result;
  for (const auto& peer : peers_) {
    if (peer) result.push_back(peer.get());
  }
  return result;
}

bool Star::send_frame(Peer* peer, Kind kind, const Frame& header, std::span<const char> payload, Deadline deadline) {
  std::unique_lock lock(peer->sending, std::defer_lock);
  if (deadline == kNoDeadline) {
    lock.lock();
  } else if (!lock.try_lock_for(kSendLock)) {
    return false;
  }
  const WireHeader wire{kind, header.op, header.call, header.count, payload.size()};
  return peer->socket.send_all(&wire, sizeof wire, deadline) && peer->socket.send_all(payload.data(), payload.size(), deadline);
}

void Star::send(int rank, const Frame& header, std::span<const char> payload) {
  throw_if_failed();
  // A connection that breaks here is the reader's to judge: it knows whether the rank failed, left or was lost.
  send_frame(peer(rank), Kind::kData, header, payload, kNoDeadline);
}

Frame Star::receive(int rank, const std::string& what) {
  Peer* from = peer(rank);
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return failure_ || !from->inbox.empty() || from->closed || from->said_goodbye; });
    // What has arrived counts, even if its sender has ended since: a call that rank 0 completed is complete everywhere.
    if (!from->inbox.empty()) {
      Frame frame = std::move(from->inbox.front());
      from->inbox.pop_front();
      return frame;
    }
  }
  throw_if_failed();
  throw fail(fmt::format("rank {} had already left when {} was due; all ranks must make the same calls", rank, what),
             ExitCode::kJobFailed);
}

void Star::throw_if_failed() {
  {
    std::lock_guard lock(mutex_);
    if (!failure_) return;
  }
  // The program may end right after this.
  wait_until_failure_is_known(deadline_in(kFarewell_s));
  std::lock_guard lock(mutex_);
  throw *failure_;
}

Error Star::fail(const std::string& text, ExitCode code) {
  const Error full(code, fmt::format("rank {}: {}", place_.rank, text));
  const Deadline deadline = deadline_in(kFarewell_s);
  if (place_.rank == 0) {
    settle(full);
  } else {
    // Rank 0 decides which of several failures all end with.
    Peer* first = peer(0);
    send_failure(first, full);
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline, [&] { return failure_ || first->closed; });
    if (!failure_) failure_ = full;
  }
  wait_until_failure_is_known(deadline);
  std::lock_guard lock(mutex_);
  return *failure_;
}

void Star::settle(const Error& failure) {
  {
    std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = failure;
    changed_.notify_all();
  }
  if (place_.rank != 0) return;
  for (Peer* peer : peers()) send_failure(peer, failure);
}

void Star::send_failure(Peer* peer, const Error& failure) {
  const std::string_view text = std::string_view(failure.what()).substr(0, kMaxPayload);
  Frame header;
  header.op = static_cast<uint32_t>(failure.code());
  send_frame(peer, Kind::kFailure, header, text, deadline_in(kFarewell_s));
}

void Star::lose(Peer* peer, const std::string& how) {
  settle(job_error("rank {} was lost: {}", peer->rank, how));
}

void Star::wait_until_failure_is_known(Deadline deadline) {
  if (place_.rank != 0) return;
  std::unique_lock lock(mutex_);
  if (!failure_) return;
  changed_.wait_until(lock, deadline, [this] {
    return std::all_of(peers_.begin(), peers_.end(),
                       [](const auto& peer) { return !peer || peer->knows_failure || peer->closed; });
  });
}

void Star::read_frames(Peer* peer) {
  while (read_frame(peer)) {
  }
  bool expected = false;
  {
    std::lock_guard lock(mutex_);
    expected = peer->said_goodbye || leaving_;
  }
  if (!expected)
    lose(peer, "its process ended without a word (killed, out of memory or crashed); see the last output of that rank");
  // Tells a rank that said goodbye that all it sent has been read.
  peer->socket.shut_down_sending();
  std::lock_guard lock(mutex_);
  peer->closed = true;
  changed_.notify_all();
}

bool Star::read_frame(Peer* peer) {
  const auto receive = [peer](void* data, size_t size) {
    for (auto* at = static_cast<char*>(data); size > 0;) {
      const long got = peer->socket.receive_some(at, size);
      if (got <= 0) return false;
      peer->last_seen_ms = now_ms();
      at += got;
      size -= static_cast<size_t>(got);
    }
    return true;
  };
  WireHeader wire{};
  if (!receive(&wire, sizeof wire) || wire.payload_bytes > kMaxPayload) return false;
  Frame frame{wire.op, wire.call, wire.count, std::string(wire.payload_bytes, '\0')};
  if (!receive(frame.payload.data(), frame.payload.size())) return false;
  switch (wire.kind) {
    case Kind::kHeartbeat:
      return true;
    case Kind::kFailure:
      settle(Error(static_cast<ExitCode>(frame.op), frame.payload));
      if (place_.rank != 0) send_frame(peer, Kind::kFailureSeen, {}, {}, deadline_in(kFarewell_s));
      return true;
    case Kind::kData:
    case Kind::kFailureSeen:
    case Kind::kGoodbye: {
      std::lock_guard lock(mutex_);
      if (wire.kind == Kind::kData) peer->inbox.push_back(std::move(frame));
      if (wire.kind == Kind::kFailureSeen) peer->knows_failure = true;
      if (wire.kind == Kind::kGoodbye) peer->said_goodbye = true;
      changed_.notify_all();
      return true;
    }
  }
  return false;
}

void Star::send_heartbeats(Peer*) {
  const auto interval = std::chrono::milliseconds(static_cast<int64_t>(1000 * std::clamp(timeout_s_ / 5, 0.02, 1.0)));
  const auto timeout_ms = static_cast<int64_t>(1000 * timeout_s_);
  int64_t last_tick_ms = now_ms();
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (changed_.wait_for(lock, interval, [this] { return leaving_; })) return;
    }
    // This process itself was stopped for a while: what the others sent meanwhile is still to be read.
    const int64_t tick_ms = now_ms();
    const bool was_stopped = tick_ms - last_tick_ms > timeout_ms / 2;
    last_tick_ms = tick_ms;
    for (Peer* peer : peers()) {
      {
        std::lock_guard lock(mutex_);
        if (peer->closed || peer->said_goodbye) continue;
      }
      if (was_stopped) peer->last_seen_ms = tick_ms;
      if (now_ms() - peer->last_seen_ms > timeout_ms) {
        lose(peer, fmt::format("no sign of life for {} (its machine or network stopped, or its process was suspended)",
                               human_duration(timeout_s_)));
        peer->socket.shut_down();
        continue;
      }
      // While another thread sends a frame to this rank, that is sign enough.
      std::unique_lock lock(peer->sending, std::try_to_lock);
      if (!lock.owns_lock() || !peer->socket.can_send()) continue;
      const WireHeader wire{Kind::kHeartbeat, 0, 0, 0, 0};
      peer->socket.send_all(&wire, sizeof wire, deadline_in(timeout_s_));
    }
  }
}

void Star::close() {
  const Deadline deadline = deadline_in(kFarewell_s);
  // A connection that closes before the failure was read would look like a loss of this rank.
  wait_until_failure_is_known(deadline);
  {
    // From here on a connection that ends is no loss: the others answer this rank's goodbye by closing.
    std::lock_guard lock(mutex_);
    leaving_ = true;
    changed_.notify_all();
  }
  const std::vector<Peer*> all = peers();
  for (Peer* peer : all) {
    send_frame(peer, Kind::kGoodbye, {}, {}, deadline);
    peer->socket.shut_down_sending();
  }
  {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline,
                        [&] { return std::all_of(all.begin(), all.end(), [](Peer* peer) { return peer->closed; }); });
  }
  if (heartbeats_.joinable()) heartbeats_.join();
  for (Peer* peer : all) {
    peer->socket.shut_down();
    if (peer->reader.joinable()) peer->reader.join();
  }
}

}  // namespace gemtune
