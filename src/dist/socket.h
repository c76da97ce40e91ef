// TCP sockets with deadlines; the star of ranks (star.h) is built on them.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

namespace gemtune {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;
inline constexpr Deadline kNoDeadline = Deadline::max();
Deadline deadline_in(double seconds);

// Owns a file descriptor; closed on exec.
class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  ~Socket();
  Socket(Socket&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Socket& operator=(Socket&& other) noexcept;
  int fd() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }

  // False when the deadline passed, the peer closed or the connection broke; errno tells (0 for a closed peer).
  bool send_all(const void* data, size_t size, Deadline deadline = kNoDeadline);
  bool receive_all(void* data, size_t size, Deadline deadline = kNoDeadline);
  // Bytes received, 0 when the peer closed, -1 when the connection broke. Waits as long as it takes.
  long receive_some(void* data, size_t size);
  // True when a small message can be sent now without waiting.
  bool can_send() const;
  bool wait_readable(Deadline deadline) const;
  void shut_down_sending();
  void shut_down();

 private:
  int fd_;
};

// Listens on `port`: on the loop-back interface when `address` names it, else on all. Not open (errno set) when the port is
// taken.
Socket listen_at(const std::string& address, int port);
int port_of(const Socket& socket);

// A connection with Nagle's delay off; not open when nobody answered, `why` then says why.
Socket connect_to(const std::string& address, int port, Deadline deadline, std::string* why);
// The next connection, or one that is not open when none came before the deadline.
Socket accept_from(const Socket& listener, Deadline deadline);

}  // namespace gemtune
