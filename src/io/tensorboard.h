// TensorBoard event files: TFRecord frames (masked CRC-32C) of hand-encoded Event protobufs. One writer a run.
// Formats: tensorflow/core/lib/io/record_writer.h, tensorflow/core/util/event.proto, tensorflow/core/framework/summary.proto.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace gemtune {

class EventWriter {
 public:
  // Makes FOLDER, opens a new FOLDER/events.out.tfevents.SECONDS.HOST.PID.N and writes the version record. A run that
  // resumes passes the first step it will write again as `resume_step`: TensorBoard then drops what earlier files hold from
  // that step on, so that no step shows twice. Throws Error(kEnvironment) when the file cannot be written, here and below.
  explicit EventWriter(const std::string& folder, int64_t resume_step = -1);
  ~EventWriter();
  EventWriter(const EventWriter&) = delete;
  EventWriter& operator=(const EventWriter&) = delete;
  void add_scalar(const std::string& tag, int64_t step, double value);
  // Shown in the text dashboard, rendered as Markdown.
  void add_text(const std::string& tag, int64_t step, const std::string& markdown);
  void flush();
  const std::string& path() const { return path_; }

 private:
  void write_record(const std::string& event);
  std::FILE* file_ = nullptr;
  std::string path_;
};

// CRC-32C (Castagnoli) of `bytes`.
uint32_t crc32c(const void* bytes, size_t size);

}  // namespace gemtune
