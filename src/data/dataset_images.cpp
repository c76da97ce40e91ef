// Image cells of every shape → encoded images.
#include "data/dataset_record.h"

#include <fmt/core.h>

#include <optional>
#include <utility>

namespace gemtune {
namespace {

// Bytes of "data:image/png;base64,…"; nothing when it is damaged.
std::optional<std::string> decode_data_uri(std::string_view uri) {
  const size_t comma = uri.find(',');
  if (comma == std::string_view::npos || !uri.substr(0, comma).ends_with(";base64")) return std::nullopt;
  std::string out;
  uint32_t bits = 0;
  int num_bits = 0;
  std::string_view body = uri.substr(comma + 1);
  while (body.ends_with('=')) body.remove_suffix(1);
  for (const char c : body) {
    uint32_t value = 0;
    if (c >= 'A' && c <= 'Z') {
      value = static_cast<uint32_t>(c - 'A');
    } else if (c >= 'a' && c <= 'z') {
      value = static_cast<uint32_t>(c - 'a' + 26);
    } else if (c >= '0' && c <= '9') {
      value = static_cast<uint32_t>(c - '0' + 52);
    } else if (c == '+' || c == '/') {
      value = c == '+' ? 62 : 63;
    } else {
      return std::nullopt;
    }
    bits = (bits << 6) | value;
    num_bits += 6;
    if (num_bits >= 8) {
      num_bits -= 8;
      out += static_cast<char>((bits >> num_bits) & 0xff);
    }
  }
  return out;
}

}  // namespace

void RowMapper::add_images_of_record(const Cell& record, const Row& row, std::vector<ImageSource>& images) const {
  if (const Cell* cell = image_column_.empty() ? nullptr : record.find(image_column_)) {
    add_images(*cell, image_column_, row, images);
    return;
  }
  if (image_column_is_certain_) return;
  // Lines of JSONL may differ: text rows first, rows with pictures later.
  for (const char* name : kImageColumns) {
    if (const Cell* cell = record.find(name)) {
      add_images(*cell, name, row, images);
      return;
    }
  }
}

void RowMapper::add_images(const Cell& cell, const std::string& field, const Row& row, std::vector<ImageSource>& images) const {
  if (cell.kind != Cell::Kind::kList) {
    images.push_back(image(cell, field, row));
    return;
  }
  for (size_t i = 0; i < cell.items.size(); ++i) images.push_back(image(cell.items[i], fmt::format("{}[{}]", field, i), row));
}

ImageSource RowMapper::image(const Cell& cell, const std::string& field, const Row& row) const {
  const auto bad_cell = [&](const std::string& rule) {
    return row_error(row, field, cell.kind == Cell::Kind::kBytes || cell.kind == Cell::Kind::kObject ? "" : shown(cell),
                     rule + kFixRow, reason::kImageCell);
  };
  switch (cell.kind) {
    case Cell::Kind::kText:
      return image_file(cell.text, field, row);
    case Cell::Kind::kBytes:
      if (cell.text.empty()) throw bad_cell("holds 0 bytes");
      return {"", cell.text, ""};
    case Cell::Kind::kObject: {
      const Cell* bytes = cell.find("bytes");
      const Cell* path = cell.find("path");
      if (path != nullptr && path->kind != Cell::Kind::kText) throw bad_cell("path is " + kind_name(*path) + ", not a string");
      if (bytes != nullptr) {
        if (bytes->kind != Cell::Kind::kBytes) {
          throw bad_cell("bytes is " + kind_name(*bytes) + ", not binary; name a file or write a data: URI");
        }
        if (bytes->text.empty()) throw bad_cell("holds 0 bytes");
        return {"", bytes->text, path == nullptr ? "" : path->text};
      }
      if (path != nullptr) return image_file(path->text, field, row);
      throw bad_cell("holds neither bytes nor a path");
    }
    default:
      throw bad_cell("is " + kind_name(cell) + ", not an image");
  }
}

ImageSource RowMapper::image_file(const std::string& name, const std::string& field, const Row& row) const {
  if (name.starts_with("data:")) {
    std::optional<std::string> bytes = decode_data_uri(name);
    if (!bytes.has_value() || bytes->empty()) {
      throw row_error(row, field, name, std::string("is not of the form data:image/…;base64,…") + kFixRow, reason::kImageCell);
    }
    return {"", std::move(*bytes), "data:"};
  }
  ImageRoot::Found found = root_.find(name);
  if (found.path.empty()) throw row_error(row, field, name, found.rule, found.reason);
  return {std::move(found.path), "", ""};
}

}  // namespace gemtune
