#include "base/error.h"
#include "dist/group.h"
#include "dist/star.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace gemtune {
namespace {

enum class Op : uint32_t { kSumFloat, kSumDouble, kMaxDouble, kBarrier, kBroadcast };

const char* op_name(uint32_t op) {
  switch (static_cast<Op>(op)) {
    case Op::kSumFloat:
      return "all_reduce_sum of floats";
    case Op::kSumDouble:
      return "all_reduce_sum of doubles";
    case Op::kMaxDouble:
      return "all_reduce_max of doubles";
    case Op::kBarrier:
      return "barrier";
    case Op::kBroadcast:
      return "broadcast";
  }
  return "an unknown call";
}

std::string call_text(const Frame& frame) {
  std::string text = fmt::format("{} (call {}", op_name(frame.op), frame.call);
  if (frame.count > 0) text += fmt::format(", size {}", frame.count);
  return text + ")";
}

// Pieces that are under way at once, so that sending, summing and receiving overlap in bounded memory.
constexpr size_t kWindow = 4;

constexpr auto kAdd = [](auto* into, auto value) { *into += value; };

class SocketGroup : public Group {
 public:
  SocketGroup(const RankPlace& place, double timeout_s, double setup_timeout_s)
      : Group(place), star_(place, timeout_s, setup_timeout_s) {}

  void all_reduce_sum(std::span<float> values) override { reduce(Op::kSumFloat, values, kAdd); }
  void all_reduce_sum(std::span<double> values) override { reduce(Op::kSumDouble, values, kAdd); }
  void all_reduce_max(std::span<double> values) override {
    reduce(Op::kMaxDouble, values, [](double* into, double value) {
      if (std::isnan(value) || value > *into) *into = value;
    });
  }
  void barrier() override { reduce(Op::kBarrier, std::span<double>(), kAdd); }
  std::string broadcast(const std::string& bytes) override;
  Error fail(const std::string& text, ExitCode code) override { return star_.fail(text, code); }

 private:
  template <class T, class Combine>
  void reduce(Op op, std::span<T> values, Combine combine);
  // The next frame from `rank`, which must belong to the same call as `mine`.
  Frame receive(int rank, const Frame& mine, size_t payload_bytes);
  Error different_calls(int rank, const Frame& theirs, const Frame& mine);
  Frame header(Op op, size_t count) { return {static_cast<uint32_t>(op), ++num_calls_, count, {}}; }

  Star star_;
  uint64_t num_calls_ = 0;
};

Frame SocketGroup::receive(int rank, const Frame& mine, size_t payload_bytes) {
  Frame frame = star_.receive(rank, call_text(mine));
  if (frame.op == mine.op && frame.call == mine.call && frame.count == mine.count && frame.payload.size() == payload_bytes)
    return frame;
  throw different_calls(rank, frame, mine);
}

Error SocketGroup::different_calls(int rank, const Frame& theirs, const Frame& mine) {
  return fail(fmt::format("all ranks must make the same calls: rank {} made {}, rank {} {}", rank, call_text(theirs), place_.rank,
                          call_text(mine)),
              ExitCode::kJobFailed);
}

template <class T, class Combine>
void SocketGroup::reduce(Op op, std::span<T> values, Combine combine) {
  constexpr size_t kPiece = Star::kMaxPayload / sizeof(T);
  const Frame mine = header(op, values.size());
  const size_t num_pieces = std::max<size_t>(1, (values.size() + kPiece - 1) / kPiece);
  const auto piece = [&](size_t i) { return values.subspan(i * kPiece, std::min(kPiece, values.size() - i * kPiece)); };
  const auto chars = [](std::span<T> part) {
    return std::span<const char>(reinterpret_cast<const char*>(part.data()), part.size_bytes());
  };

  if (place_.rank != 0) {
    for (size_t i = 0; i < num_pieces + kWindow; ++i) {
      if (i < num_pieces) star_.send(0, mine, chars(piece(i)));
      if (i < kWindow) continue;
      const std::span<T> part = piece(i - kWindow);
      const Frame result = receive(0, mine, part.size_bytes());
      if (!part.empty()) std::memcpy(part.data(), result.payload.data(), part.size_bytes());
    }
    return;
  }
  for (size_t i = 0; i < num_pieces; ++i) {
    const std::span<T> part = piece(i);
    for (int rank = 1; rank < place_.world; ++rank) {
      const Frame frame = receive(rank, mine, part.size_bytes());
      for (size_t k = 0; k < part.size(); ++k) {
        T value;
        std::memcpy(&value, frame.payload.data() + k * sizeof(T), sizeof(T));
        combine(&part[k], value);
      }
    }
    for (int rank = 1; rank < place_.world; ++rank) star_.send(rank, mine, chars(part));
  }
}

std::string SocketGroup::broadcast(const std::string& bytes) {
  Frame mine = header(Op::kBroadcast, place_.rank == 0 ? bytes.size() : 0);
  const auto piece_bytes = [](size_t at, size_t total) { return std::min(Star::kMaxPayload, total - at); };
  if (place_.rank == 0) {
    size_t at = 0;
    do {
      const std::span<const char> part(bytes.data() + at, piece_bytes(at, bytes.size()));
      for (int rank = 1; rank < place_.world; ++rank) star_.send(rank, mine, part);
      at += part.size();
    } while (at < bytes.size());
    return bytes;
  }
  std::string result;
  do {
    Frame frame = star_.receive(0, call_text(mine));
    // Only rank 0 knows the size.
    if (frame.op == mine.op && frame.call == mine.call && result.empty()) mine.count = frame.count;
    if (frame.op != mine.op || frame.call != mine.call || frame.count != mine.count) throw different_calls(0, frame, mine);
    result += frame.payload;
  } while (result.size() < mine.count);
  return result;
}

}  // namespace

std::unique_ptr<Group> make_socket_group(const RankPlace& place, double timeout_s, double setup_timeout_s) {
  if (place.world == 1) return make_single_group();
  return std::make_unique<SocketGroup>(place, timeout_s, setup_timeout_s > 0 ? setup_timeout_s : timeout_s);
}

}  // namespace gemtune
