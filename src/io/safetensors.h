// safetensors files: 8-byte little-endian header length, JSON header, tensor bytes. Format: github.com/huggingface/safetensors.
// Nothing here knows Torch; model/weights turns bytes into tensors.
#pragma once

#include "base/file.h"

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace gemtune {

enum class DType { kF64, kF32, kF16, kBF16, kI64, kI32, kI16, kI8, kU8, kBool };
const char* dtype_name(DType dtype);  // "F32", "BF16", … as the header spells them
int64_t dtype_size(DType dtype);

struct TensorEntry {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  int64_t begin = 0;  // byte offsets in the data part
  int64_t end = 0;
};

struct SafetensorsHeader {
  int64_t data_begin = 0;            // where the data part starts in the file
  std::vector<TensorEntry> entries;  // by offset
  std::map<std::string, std::string> metadata;
};

// Checks the whole header of a file's bytes: length bounded before anything is allocated, names unique, shapes without
// overflow, every tensor as long as its shape says, offsets tile the data part exactly. Throws Error(kInput); `where` opens
// each message.
SafetensorsHeader parse_safetensors(std::span<const std::byte> file, const std::string& where);

// An open file: header checked completely, tensors mapped lazily. Throws Error(kInput) naming file, tensor, expected and got.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  const std::string& path() const { return path_; }
  const std::vector<TensorEntry>& entries() const { return header_.entries; }  // by offset
  const TensorEntry* find(const std::string& name) const;
  // Mapped bytes. Writers need not align tensors, so the address may not suit the element type.
  std::span<const std::byte> bytes(const TensorEntry& entry) const;
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }

 private:
  std::string path_;
  std::unique_ptr<MappedFile> map_;
  SafetensorsHeader header_;
  std::map<std::string, size_t> index_;
};

// A model folder's tensors: model.safetensors, or the shards that model.safetensors.index.json names (only plain file names
// inside the folder are followed). A missing shard or a tensor in two shards is an error. No pickle is ever opened: a folder
// that holds its weights only as pickle is refused by the file's name. A folder without weights is empty().
class TensorFolder {
 public:
  explicit TensorFolder(const std::string& folder);
  struct Found {
    const SafetensorsFile* file;
    const TensorEntry* entry;
  };
  const std::map<std::string, Found>& tensors() const { return tensors_; }
  // The open files, in the order of their names.
  const std::vector<std::unique_ptr<SafetensorsFile>>& files() const { return files_; }
  bool empty() const { return tensors_.empty(); }

 private:
  void add_file(const std::string& path);
  void add_shards(const std::string& folder, const std::string& index_path);
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Found> tensors_;
};

// True for file names that are pickle by convention (*.bin of PyTorch, *.pt, *.pth, *.ckpt, *.pkl, *.pickle).
bool is_pickle_name(std::string_view name);

struct TensorToWrite {
  std::string name;
  DType dtype;
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;  // contiguous, row-major; must stay valid during the call
};

// Writes tensors in the given order, streaming, to a temporary name that is then flushed and renamed. metadata
// {"format": "pt"} is added. Throws Error(kInput) for a tensor that contradicts itself, Error(kEnvironment) with the bytes
// needed and free when the disk is full; the target is then what it was.
void write_safetensors(const std::string& path, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace gemtune
