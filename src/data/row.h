// A row as its source has it: messages and encoded images, nothing decoded or tokenized yet.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gemtune {

enum class Role { kSystem, kUser, kAssistant };

struct Part {
  enum class Kind { kText, kImage } kind = Kind::kText;
  std::string text;  // kText only
};

struct Message {
  Role role = Role::kUser;
  std::vector<Part> parts;       // in order; the k-th image part of the row stands for images[k]
  bool is_plain_string = false;  // content was a string, not a list (the template joins both alike; kept for messages)
};

// One encoded image: a local file or bytes out of a parquet cell. Opened only while it is decoded (no lazy handles).
struct ImageSource {
  std::string path;   // absolute, or "" when `bytes` holds the file
  std::string bytes;  // the encoded file, or ""
  std::string label;  // the file name that embedded bytes came with, or ""; never opened
  std::string name() const {
    if (!path.empty()) return path;
    return label.empty() ? "<embedded image>" : "<embedded image " + label + ">";
  }
};

struct Row {
  int64_t index = 0;  // from 0, over the whole (concatenated) data set
  std::string
      where;         // "train.jsonl:88213" (lines count from 1) or "part-0.parquet: row 7" (from 0): opens every message about it
  std::string file;  // the file part of `where`
  int64_t line = 0;  // 1-based line of a text source, else 0
  std::vector<Message> messages;
  std::vector<ImageSource> images;
};

}  // namespace gemtune
