// Inside the data set reader: what all sources share. A source gives records (named cells); the mapper makes rows of them.
#pragma once

#include "data/dataset.h"

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace gemtune {

// One value of a record, whatever file it came from.
struct Cell {
  enum class Kind { kNull, kBool, kNumber, kText, kBytes, kList, kObject };
  Kind kind = Kind::kNull;
  std::string text;                // kBool, kNumber: as written; kText; kBytes: the bytes
  std::vector<std::string> names;  // kObject: aligned with items
  std::vector<Cell> items;         // kList, kObject

  // Member of an object, or nullptr when it is absent or null.
  const Cell* find(std::string_view name) const;
  bool is_null() const { return kind == Kind::kNull; }

  static Cell of_text(std::string text) { return {Kind::kText, std::move(text), {}, {}}; }
};

// "a string", "a list": for messages.
std::string kind_name(const Cell& cell);
// The value as a message shows it: text as it is, "[2 items]" for lists.
std::string shown(const Cell& cell);

// A source of records. Safe to read from several threads.
class RecordSource {
 public:
  virtual ~RecordSource() = default;
  virtual int64_t size() const = 0;
  // Where record `index` stands: `where`, `file` and `line`; nothing else is set.
  virtual Row place(int64_t index) const = 0;
  // The cells of the record: a kObject. `place` opens the messages of a RowError.
  virtual Cell record(int64_t index, const Row& place) const = 0;
  // Names of the columns; of a JSONL file those of its first rows.
  virtual std::vector<std::string> columns() const = 0;
  // Only these columns are asked for from now on.
  virtual void use_columns(const std::vector<std::string>& /*columns*/) {}
  virtual std::string file() const = 0;
};

std::unique_ptr<RecordSource> open_jsonl(const std::string& path);
std::unique_ptr<RecordSource> open_csv(const std::string& path);

struct ParquetLimits {
  int64_t bytes_in_memory =
      int64_t{1} << 30;  // of decoded row groups over all files of the process; the rest is mapped from disk
};
std::unique_ptr<RecordSource> open_parquet(const std::string& path, const ParquetLimits& limits = {});

// Cells of one line of JSONL. Throws RowError.
Cell parse_record(std::string_view line, const Row& place);

// Finds the files that records name, and keeps them inside the folder of the file that names them.
class ImageRoot {
 public:
  // `folder`: of the file that names images. A snapshot folder of the hub's cache may also reach its repository's blobs.
  explicit ImageRoot(const std::string& folder);

  struct Found {
    std::string path;    // absolute, or "" when the name is refused
    std::string rule;    // why it is refused
    std::string reason;  // gemtune::reason
  };
  // Symbolic links are resolved before the check; the file is not opened.
  Found find(const std::string& name) const;

 private:
  std::string folder_;
  std::vector<std::string> real_roots_;
};

// A template over columns, parsed once.
class Template {
 public:
  Template() = default;
  // `key` names the recipe key in messages. Throws Error(kInput).
  Template(const std::string& text, const std::string& key);

  bool empty() const { return pieces_.empty(); }
  std::vector<std::string> columns() const;
  // Null and absent cells are rendered as nothing. Throws RowError for a cell that is no string, number or truth value.
  std::string render(const Cell& record, const Row& place) const;
  // The first column whose cell is null, absent or blank, or "".
  std::string first_blank_column(const Cell& record) const;

 private:
  struct Piece {
    bool is_column = false;
    std::string text;
  };
  std::vector<Piece> pieces_;
};

// Records of one source → rows.
class RowMapper {
 public:
  // `named_images`: an image folder's records name their file in file_name. Throws Error(kInput) for templates that name
  // unknown columns, and for sources whose columns say too little.
  enum class SourceKind { kTable, kImageFolder };
  RowMapper(const RowMapping& mapping, const RecordSource& source, SourceKind kind);

  // Fills messages and images of `row`, which holds its place.
  void fill(const Cell& record, Row& row) const;
  std::vector<std::string> used_columns() const;
  // "columns: image, text; recognised: …"
  const std::string& description() const { return description_; }
  const std::string& image_column() const { return image_column_; }

 private:
  void choose_image_column(const RowMapping& mapping, const std::string& file, SourceKind kind);
  void choose_turns(const RowMapping& mapping, const std::string& file);
  void check_columns(const Template& text, const std::string& key, const std::string& file) const;
  bool has_column(std::string_view name) const;
  void fill_from_messages(const Cell& record, Row& row) const;
  void fill_from_templates(const Cell& record, Row& row) const;
  void add_images_of_record(const Cell& record, const Row& row, std::vector<ImageSource>& images) const;
  void add_images(const Cell& cell, const std::string& field, const Row& row, std::vector<ImageSource>& images) const;
  ImageSource image(const Cell& cell, const std::string& field, const Row& row) const;
  ImageSource image_file(const std::string& name, const std::string& field, const Row& row) const;

  std::vector<std::string> columns_;
  std::string image_column_;  // "" = none among the columns known beforehand
  bool image_column_is_certain_ = false;
  bool has_messages_ = false;
  Template system_;
  Template prompt_;
  Template answer_;
  bool image_first_ = false;
  ImageRoot root_;
  std::string recognised_;
  std::string description_;
};

// Looked for in this order where data.image_column is not set.
inline constexpr std::array<const char*, 3> kImageColumns = {"image", "images", "file_name"};

// Added to the rule of a fault that lies in the data.
inline constexpr const char* kFixRow = "; fix the row or set data.on_bad_row=skip";

}  // namespace gemtune
