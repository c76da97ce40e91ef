#include "io/safetensors.h"

#include "base/error.h"
#include "base/json.h"
#include "base/text.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

namespace gemtune {
namespace {

static_assert(std::endian::native == std::endian::little, "tensor bytes are little-endian in the file and in memory");

// The reference implementation's bound; a 27B model's header is under 1 MB.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;

struct DTypeRow {
  DType dtype;
  const char* name;
  int64_t size;
};
constexpr std::array<DTypeRow, 10> kDTypes = {{{DType::kF64, "F64", 8},
                                               {DType::kF32, "F32", 4},
                                               {DType::kF16, "F16", 2},
                                               {DType::kBF16, "BF16", 2},
                                               {DType::kI64, "I64", 8},
                                               {DType::kI32, "I32", 4},
                                               {DType::kI16, "I16", 2},
                                               {DType::kI8, "I8", 1},
                                               {DType::kU8, "U8", 1},
                                               {DType::kBool, "BOOL", 1}}};

std::optional<DType> dtype_of(const std::string& name) {
  for (const DTypeRow& row : kDTypes) {
    if (name == row.name) return row.dtype;
  }
  return std::nullopt;
}

std::string known_dtypes() {
  std::vector<std::string> names;
  for (const DTypeRow& row : kDTypes) names.emplace_back(row.name);
  return join_some(names, names.size());
}

// A whole number from 0 to INT64_MAX, or nothing.
std::optional<int64_t> whole_number(const Json& value) {
  if (!value.is_number_integer()) return std::nullopt;
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  const auto number = value.get<int64_t>();
  if (number < 0) return std::nullopt;
  return number;
}

// Bytes of a contiguous tensor, or nothing when the product does not fit.
std::optional<int64_t> num_bytes_of(DType dtype, const std::vector<int64_t>& shape) {
  int64_t product = dtype_size(dtype);
  for (const int64_t size : shape) {
    if (__builtin_mul_overflow(product, size, &product)) return std::nullopt;
  }
  return product;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

TensorEntry parse_entry(const std::string& name, const Json& value, int64_t data_bytes, const std::string& where) {
  const std::string tensor = fmt::format("{}: tensor {}", where, in_quotes(name));
  if (!value.is_object())
    throw input_error("{}: expected an object with dtype, shape and data_offsets; the file is damaged", tensor);
  for (const auto& [key, unused] : value.items()) {
    if (key != "dtype" && key != "shape" && key != "data_offsets")
      throw input_error("{}: unknown field {}; expected dtype, shape and data_offsets", tensor, in_quotes(key));
  }
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!value.contains(key)) throw input_error("{}: field {} is missing; the file is damaged", tensor, key);
  }

  TensorEntry entry;
  entry.name = name;
  const Json& dtype = value["dtype"];
  if (!dtype.is_string()) throw input_error("{}: dtype is not a string; the file is damaged", tensor);
  const auto known = dtype_of(dtype.get<std::string>());
  if (!known)
    throw input_error("{}: dtype {} is not supported; expected one of {}", tensor, in_quotes(dtype.get<std::string>()),
                      known_dtypes());
  entry.dtype = *known;

  if (!value["shape"].is_array()) throw input_error("{}: shape is not a list; the file is damaged", tensor);
  for (const Json& item : value["shape"]) {
    const auto size = whole_number(item);
    if (!size) throw input_error("{}: shape holds {}, expected whole numbers from 0; the file is damaged", tensor, item.dump());
    entry.shape.push_back(*size);
  }
  const auto expected = num_bytes_of(entry.dtype, entry.shape);
  if (!expected)
    throw input_error("{}: shape {} does not fit into 64 bits; the file is damaged", tensor, shape_text(entry.shape));

  const Json& offsets = value["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2)
    throw input_error("{}: data_offsets is not a pair; the file is damaged", tensor);
  const auto begin = whole_number(offsets[0]);
  const auto end = whole_number(offsets[1]);
  if (!begin || !end || *begin > *end)
    throw input_error("{}: data_offsets {} are not an ascending pair of whole numbers; the file is damaged", tensor,
                      offsets.dump());
  if (*end > data_bytes)
    throw input_error("{}: ends at byte {} of the data, the file has {}; the file is truncated or damaged", tensor, *end,
                      data_bytes);
  if (*end - *begin != *expected)
    throw input_error("{}: {} {} needs {} bytes, data_offsets give {}; the file is damaged", tensor, dtype_name(entry.dtype),
                      shape_text(entry.shape), *expected, *end - *begin);
  entry.begin = *begin;
  entry.end = *end;
  return entry;
}

void check_tiling(const std::vector<TensorEntry>& entries, int64_t data_bytes, const std::string& where) {
  int64_t covered = 0;
  for (const TensorEntry& entry : entries) {
    if (entry.begin != covered)
      throw input_error("{}: tensor {} begins at byte {} of the data, the tensors before it end at {}; the file is damaged",
                        where, in_quotes(entry.name), entry.begin, covered);
    covered = entry.end;
  }
  if (covered != data_bytes)
    throw input_error("{}: the tensors fill {} bytes, the file has {} bytes of data; the file is damaged", where, covered,
                      data_bytes);
}

// Shards come from a downloaded index: only a plain name may lead to a file.
bool is_plain_shard_name(const std::string& name) {
  return name.ends_with(".safetensors") && name.find_first_of("/\\:") == std::string::npos &&
         name.find('\0') == std::string::npos && !name.starts_with(".");
}

}  // namespace

const char* dtype_name(DType dtype) {
  return kDTypes[static_cast<size_t>(dtype)].name;
}
int64_t dtype_size(DType dtype) {
  return kDTypes[static_cast<size_t>(dtype)].size;
}

SafetensorsHeader parse_safetensors(std::span<const std::byte> file, const std::string& where) {
  if (file.size() < 8)
    throw input_error("{}: {} bytes are too few for a safetensors file; fetch or write it again", where, file.size());
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), 8);
  if (header_bytes > kMaxHeaderBytes)
    throw input_error("{}: the header claims {} bytes, at most {} are read; not a safetensors file, or damaged", where,
                      header_bytes, kMaxHeaderBytes);
  if (header_bytes > file.size() - 8)
    throw input_error("{}: the header claims {} bytes, the file has {} after its length; the file is truncated", where,
                      header_bytes, file.size() - 8);
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + 8, header_bytes);
  if (text.empty() || text.front() != '{')
    throw input_error("{}: the header does not start with an open brace; not a safetensors file, or damaged", where);

  SafetensorsHeader header;
  header.data_begin = static_cast<int64_t>(8 + header_bytes);
  const auto data_bytes = static_cast<int64_t>(file.size()) - header.data_begin;
  const Json json = parse_json(text, where);
  for (const auto& [name, value] : json.items()) {
    if (name != "__metadata__") {
      header.entries.push_back(parse_entry(name, value, data_bytes, where));
      continue;
    }
    if (!value.is_object()) throw input_error("{}: __metadata__ is not an object of strings; the file is damaged", where);
    for (const auto& [key, item] : value.items()) {
      if (!item.is_string()) throw input_error("{}: __metadata__ {} is not a string; the file is damaged", where, in_quotes(key));
      header.metadata[key] = item.get<std::string>();
    }
  }
  std::sort(header.entries.begin(), header.entries.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  check_tiling(header.entries, data_bytes, where);
  return header;
}

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path), map_(std::make_unique<MappedFile>(path)) {
  header_ = parse_safetensors(map_->bytes(), path);
  for (size_t i = 0; i < header_.entries.size(); ++i) index_[header_.entries[i].name] = i;
}

const TensorEntry* SafetensorsFile::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &header_.entries[found->second];
}

std::span<const std::byte> SafetensorsFile::bytes(const TensorEntry& entry) const {
  return map_->bytes().subspan(static_cast<size_t>(header_.data_begin + entry.begin),
                               static_cast<size_t>(entry.end - entry.begin));
}

bool is_pickle_name(std::string_view name) {
  for (const char* ending : {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}) {
    if (name.ends_with(ending)) return true;
  }
  return name.ends_with(".bin.index.json");
}

TensorFolder::TensorFolder(const std::string& folder) {
  const std::string single = join_path(folder, "model.safetensors");
  const std::string index = join_path(folder, "model.safetensors.index.json");
  if (file_exists(single)) {
    add_file(single);
  } else if (file_exists(index)) {
    add_shards(folder, index);
  } else if (folder_exists(folder)) {
    for (const std::string& name : list_folder(folder)) {
      // Left by the reference trainer beside weights of every format.
      if (name == "training_args.bin") continue;
      if (is_pickle_name(name))
        throw input_error(
            "{}: pickle files can run code and are never opened, and the folder has no model.safetensors; save the model again "
            "with "
            "safe_serialization=True",
            join_path(folder, name));
    }
  }
}

void TensorFolder::add_file(const std::string& path) {
  const auto& file = files_.emplace_back(std::make_unique<SafetensorsFile>(path));
  for (const TensorEntry& entry : file->entries()) {
    const auto [place, added] = tensors_.emplace(entry.name, Found{file.get(), &entry});
    if (!added)
      throw input_error("{}: tensor {} is also in {}; keep one of the two", path, in_quotes(entry.name),
                        base_name(place->second.file->path()));
  }
}

void TensorFolder::add_shards(const std::string& folder, const std::string& index_path) {
  const Json index = read_json_file(index_path);
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
    throw input_error("{}: weight_map is missing or not an object; fetch the file again", index_path);
  std::map<std::string, std::vector<std::string>> tensors_of_shard;
  for (const auto& [tensor, shard] : index["weight_map"].items()) {
    if (!shard.is_string() || !is_plain_shard_name(shard.get<std::string>()))
      throw input_error("{}: tensor {} is in {}, expected a plain *.safetensors file name in the same folder; refused",
                        index_path, in_quotes(tensor),
                        shard.is_string() ? in_quotes(shard.get<std::string>()) : shard.type_name());
    tensors_of_shard[shard.get<std::string>()].push_back(tensor);
  }
  std::vector<std::string> missing;
  for (const auto& [shard, unused] : tensors_of_shard) {
    if (!file_exists(join_path(folder, shard))) missing.push_back(shard);
  }
  if (!missing.empty())
    throw input_error("{}: {} of {} shards are missing: {}; fetch the model again", index_path, missing.size(),
                      tensors_of_shard.size(), join_some(missing));
  for (const auto& [shard, tensors] : tensors_of_shard) {
    add_file(join_path(folder, shard));
    for (const std::string& tensor : tensors) {
      if (!files_.back()->find(tensor))
        throw input_error("{}: tensor {} should be in {} and is not; fetch the model again", index_path, in_quotes(tensor),
                          shard);
    }
  }
}

}  // namespace gemtune
