#include "io/tensorboard.h"

#include "base/error.h"
#include "base/file.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace gemtune {
namespace {

// Protobuf wire types.
enum Wire : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

// A protobuf message under construction; field numbers are those of the .proto files named in the header.
class Message {
 public:
  Message& varint(uint32_t field, uint64_t value) {
    key(field, kVarint);
    raw_varint(value);
    return *this;
  }
  Message& fixed64(uint32_t field, double value) { return raw(field, kFixed64, &value, sizeof value); }
  Message& fixed32(uint32_t field, float value) { return raw(field, kFixed32, &value, sizeof value); }
  Message& bytes(uint32_t field, const std::string& value) {
    key(field, kBytes);
    raw_varint(value.size());
    text_ += value;
    return *this;
  }
  Message& message(uint32_t field, const Message& value) { return bytes(field, value.text_); }
  const std::string& text() const { return text_; }

 private:
  void key(uint32_t field, Wire wire) { raw_varint(field << 3 | wire); }
  void raw_varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) text_ += static_cast<char>(value | 0x80);
    text_ += static_cast<char>(value);
  }
  Message& raw(uint32_t field, Wire wire, const void* value, size_t size) {
    key(field, wire);
    text_.append(static_cast<const char*>(value), size);
    return *this;
  }
  std::string text_;
};

double now_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Event: wall_time 1, step 2, file_version 3, summary 5, session_log 7.
Message event_at(int64_t step) {
  Message event;
  event.fixed64(1, now_s());
  if (step != 0) event.varint(2, static_cast<uint64_t>(step));
  return event;
}

constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = value & 1 ? 0x82F63B78u ^ (value >> 1) : value >> 1;
    table[i] = value;
  }
  return table;
}

// TFRecord stores checksums masked, so that a checksum of data that holds checksums stays meaningful.
uint32_t masked_crc(const void* bytes, size_t size) {
  const uint32_t crc = crc32c(bytes, size);
  return (crc >> 15 | crc << 17) + 0xA282EAD8u;
}

std::string host_name() {
  char name[256] = {};
  if (::gethostname(name, sizeof name - 1) != 0 || name[0] == '\0') return "localhost";
  return name;
}

}  // namespace

uint32_t crc32c(const void* bytes, size_t size) {
  static constexpr auto kTable = crc_table();
  uint32_t crc = 0xFFFFFFFFu;
  const auto* at = static_cast<const unsigned char*>(bytes);
  for (size_t i = 0; i < size; ++i) crc = kTable[(crc ^ at[i]) & 0xFF] ^ (crc >> 8);
  return ~crc;
}

EventWriter::EventWriter(const std::string& folder, int64_t resume_step) {
  if (is_remote(folder)) throw environment_error("{}: event files are appended to and need a local folder", folder);
  make_folders(folder);
  // TensorBoard reads a folder's files in the order of their names.
  const std::string stem =
      join_path(folder, fmt::format("events.out.tfevents.{:010}.{}.{}", static_cast<int64_t>(now_s()), host_name(), ::getpid()));
  int fd = -1;
  for (int n = 0; n < 1000 && fd < 0; ++n) {
    path_ = fmt::format("{}.{}", stem, n);
    fd = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0 && errno != EEXIST) break;
  }
  if (fd < 0) throw environment_error("{}: cannot be opened: {}", path_, std::strerror(errno));
  file_ = ::fdopen(fd, "wb");
  if (file_ == nullptr) {
    ::close(fd);
    throw environment_error("{}: cannot be opened: {}", path_, std::strerror(errno));
  }
  write_record(event_at(0).bytes(3, "brain.Event:2").text());
  // SessionLog: status 1; START = 1.
  if (resume_step >= 0) write_record(event_at(resume_step).message(7, Message().varint(1, 1)).text());
  flush();
}

EventWriter::~EventWriter() {
  if (file_ != nullptr) std::fclose(file_);
}

void EventWriter::add_scalar(const std::string& tag, int64_t step, double value) {
  // Summary.value 1; Value: tag 1, simple_value 2.
  const Message item = Message().bytes(1, tag).fixed32(2, static_cast<float>(value));
  write_record(event_at(step).message(5, Message().message(1, item)).text());
}

void EventWriter::add_text(const std::string& tag, int64_t step, const std::string& markdown) {
  constexpr uint64_t kDtString = 7;
  // Value: tag 1, tensor 8, metadata 9; SummaryMetadata.plugin_data 1 {plugin_name 1}; TensorProto: dtype 1, tensor_shape 2
  // {dim 2 {size 1}}, string_val 8.
  const Message metadata = Message().message(1, Message().bytes(1, "text"));
  const Message shape = Message().message(2, Message().varint(1, 1));
  const Message tensor = Message().varint(1, kDtString).message(2, shape).bytes(8, markdown);
  const Message item = Message().bytes(1, tag).message(8, tensor).message(9, metadata);
  write_record(event_at(step).message(5, Message().message(1, item)).text());
}

void EventWriter::flush() {
  if (std::fflush(file_) != 0) throw environment_error("{}: cannot be written: {}", path_, std::strerror(errno));
}

void EventWriter::write_record(const std::string& event) {
  const uint64_t length = event.size();
  const uint32_t length_crc = masked_crc(&length, sizeof length);
  const uint32_t event_crc = masked_crc(event.data(), event.size());
  const bool written =
      std::fwrite(&length, sizeof length, 1, file_) == 1 && std::fwrite(&length_crc, sizeof length_crc, 1, file_) == 1 &&
      std::fwrite(event.data(), event.size(), 1, file_) == 1 && std::fwrite(&event_crc, sizeof event_crc, 1, file_) == 1;
  if (!written) throw environment_error("{}: cannot be written: {}", path_, std::strerror(errno));
}

}  // namespace gemtune
