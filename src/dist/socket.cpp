#include "dist/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

namespace gemtune {
namespace {

// Waits for `events`; false at the deadline.
bool wait_for(int fd, short events, Deadline deadline) {
  for (;;) {
    // Short waits: the deadline may lie beyond what poll() can count.
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(std::min(deadline, Clock::now() + std::chrono::seconds(1)) - Clock::now());
    pollfd entry{fd, events, 0};
    const int ready = ::poll(&entry, 1, static_cast<int>(std::max<int64_t>(left.count(), 0)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
    if (Clock::now() >= deadline) {
      errno = ETIMEDOUT;
      return false;
    }
  }
}

struct AddressDeleter {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};
using AddressList = std::unique_ptr<addrinfo, AddressDeleter>;

AddressList resolve(const std::string& address, int port, std::string* why) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int error = ::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (error != 0) {
    *why = ::gai_strerror(error);
    return nullptr;
  }
  return AddressList(list);
}

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) return ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr) >> 24 == 127;
  return address->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

Socket listen_on(const sockaddr* address, socklen_t size) {
  Socket socket(::socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.is_open()) return Socket();
  const int on = 1;
  const int off = 0;
  ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address->sa_family == AF_INET6) ::setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  if (::bind(socket.fd(), address, size) != 0 || ::listen(socket.fd(), SOMAXCONN) != 0) return Socket();
  return socket;
}

}  // namespace

Deadline deadline_in(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

Socket::~Socket() {
  if (fd_ >= 0) {
    const int cause = errno;
    ::close(fd_);
    errno = cause;
  }
}

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

bool Socket::send_all(const void* data, size_t size, Deadline deadline) {
  const auto* at = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t sent = ::send(fd_, at, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      at += sent;
      size -= static_cast<size_t>(sent);
    } else if (sent < 0 && errno == EINTR) {
      continue;
    } else if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      if (!wait_for(fd_, POLLOUT, deadline)) return false;
    } else {
      return false;
    }
  }
  return true;
}

bool Socket::receive_all(void* data, size_t size, Deadline deadline) {
  auto* at = static_cast<char*>(data);
  while (size > 0) {
    if (!wait_for(fd_, POLLIN, deadline)) return false;
    const long got = receive_some(at, size);
    if (got <= 0) return false;
    at += got;
    size -= static_cast<size_t>(got);
  }
  return true;
}

long Socket::receive_some(void* data, size_t size) {
  for (;;) {
    const ssize_t got = ::recv(fd_, data, size, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) errno = 0;
    return got;
  }
}

bool Socket::can_send() const {
  pollfd entry{fd_, POLLOUT, 0};
  return ::poll(&entry, 1, 0) == 1 && (entry.revents & POLLOUT);
}

bool Socket::wait_readable(Deadline deadline) const {
  return wait_for(fd_, POLLIN, deadline);
}
void Socket::shut_down_sending() {
  ::shutdown(fd_, SHUT_WR);
}
void Socket::shut_down() {
  ::shutdown(fd_, SHUT_RDWR);
}

Socket listen_at(const std::string& address, int port) {
  std::string unused;
  const AddressList list = resolve(address, port, &unused);
  for (const addrinfo* item = list.get(); item != nullptr; item = item->ai_next) {
    // The clients try every address of the name, so that one loop-back address is enough.
    if (is_loopback(item->ai_addr)) return listen_on(item->ai_addr, item->ai_addrlen);
  }
  // In a cluster the name may stand for a service or a host network that no interface here carries: listen on all.
  sockaddr_in6 any6{};
  any6.sin6_family = AF_INET6;
  any6.sin6_port = htons(static_cast<uint16_t>(port));
  Socket socket = listen_on(reinterpret_cast<const sockaddr*>(&any6), sizeof any6);
  if (socket.is_open() || errno == EADDRINUSE) return socket;
  sockaddr_in any4{};
  any4.sin_family = AF_INET;
  any4.sin_port = htons(static_cast<uint16_t>(port));
  return listen_on(reinterpret_cast<const sockaddr*>(&any4), sizeof any4);
}

int port_of(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  // IPv4 and IPv6 addresses keep the port in the same place.
  return ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

Socket connect_to(const std::string& address, int port, Deadline deadline, std::string* why) {
  const AddressList list = resolve(address, port, why);
  for (const addrinfo* item = list.get(); item != nullptr; item = item->ai_next) {
    Socket socket(::socket(item->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket.is_open()) {
      *why = std::strerror(errno);
      continue;
    }
    int error = ::connect(socket.fd(), item->ai_addr, item->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      socklen_t size = sizeof error;
      if (!wait_for(socket.fd(), POLLOUT, deadline)) {
        error = errno;
      } else if (::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) {
        error = errno;
      }
    }
    if (error != 0) {
      *why = std::strerror(error);
      continue;
    }
    const int on = 1;
    ::setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    ::fcntl(socket.fd(), F_SETFL, ::fcntl(socket.fd(), F_GETFL) & ~O_NONBLOCK);
    return socket;
  }
  return Socket();
}

Socket accept_from(const Socket& listener, Deadline deadline) {
  if (!listener.wait_readable(deadline)) return Socket();
  Socket socket(::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC));
  if (socket.is_open()) {
    const int on = 1;
    ::setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  return socket;
}

}  // namespace gemtune
