#include "data/dataset.h"

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/text.h"
#include "data/dataset_record.h"

#include <fmt/core.h>
#include <glob.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>
#include <set>
#include <system_error>
#include <unordered_set>
#include <utility>

namespace gemtune {
namespace {

namespace fs = std::filesystem;

constexpr size_t kLongestValue = 200;

std::string what_of(const RowFault& fault) {
  std::string text = fault.where;
  const bool is_number = !fault.value.empty() && fault.value.find_first_not_of("0123456789") == std::string::npos;
  if (!fault.field.empty() || !fault.value.empty()) text += ": ";
  text += fault.field;
  if (!fault.value.empty()) text += (fault.field.empty() ? "" : " ") + (is_number ? fault.value : in_quotes(fault.value));
  return text + ": " + fault.rule;
}

std::string extension_of(const std::string& path) {
  std::string extension = fs::path(path).extension().string();
  for (char& c : extension) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return extension;
}

bool is_image_name(const std::string& path) {
  static const std::set<std::string> kExtensions = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"};
  return kExtensions.contains(extension_of(path));
}

// "1,500"
std::string grouped(int64_t number) {
  const std::string digits = std::to_string(number);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

std::string rows_text(int64_t number) {
  return grouped(number) + (number == 1 ? " row" : " rows");
}

// One file that holds rows, and how its folder counts.
struct SourceFile {
  std::string path;
  RowMapper::SourceKind kind = RowMapper::SourceKind::kTable;
};

std::vector<std::string> image_files_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::recursive_directory_iterator it(folder, fs::directory_options::skip_permission_denied, error), end;
       it != end && !error; it.increment(error)) {
    if (it->is_regular_file(error) && is_image_name(it->path().string())) {
      names.push_back(it->path().lexically_relative(folder).generic_string());
    }
  }
  return names;
}

// Split that a parquet file's name opens with, as the hub's files do: "train-00000-of-00002.parquet" → "train".
std::string split_of(const std::string& name) {
  for (const char* split : {"train", "test", "validation", "valid", "val", "dev"}) {
    const std::string_view prefix = split;
    if (!name.starts_with(prefix) || name.size() == prefix.size()) continue;
    const char next = name[prefix.size()];
    if (next == '-' || next == '_' || next == '.') return split;
  }
  return "";
}

std::vector<SourceFile> parquet_files(const std::string& folder, const std::vector<std::string>& names) {
  std::map<std::string, int64_t> splits;
  std::vector<SourceFile> files;
  for (const std::string& name : names) {
    ++splits[split_of(name)];
    files.push_back({join_path(folder, name), RowMapper::SourceKind::kTable});
  }
  if (splits.size() > 1) {
    std::vector<std::string> counts;
    std::string example;
    for (const auto& [split, count] : splits) {
      counts.push_back(fmt::format("{}: {}", split.empty() ? "no split in the name" : split, count));
      if (example.empty() || split == "train") example = split.empty() ? example : split;
    }
    throw input_error("{}: holds parquet files of several splits ({}); name one, such as {}-*.parquet", folder, join_some(counts),
                      join_path(folder, example));
  }
  return files;
}

std::vector<SourceFile> files_of_folder(const std::string& folder) {
  const std::vector<std::string> names = list_folder(folder);
  std::vector<std::string> metadata;
  std::vector<std::string> parquet;
  for (const std::string& name : names) {
    if (name == "metadata.jsonl" || name == "metadata.csv") metadata.push_back(name);
    if (extension_of(name) == ".parquet") parquet.push_back(name);
  }
  if (metadata.size() > 1) throw input_error("{}: holds both metadata.csv and metadata.jsonl; keep one", folder);
  if (!metadata.empty()) return {{join_path(folder, metadata[0]), RowMapper::SourceKind::kImageFolder}};
  if (!parquet.empty()) return parquet_files(folder, parquet);
  // The hub's layout keeps the files in data/.
  const std::string inner = join_path(folder, "data");
  if (folder_exists(inner)) {
    for (const std::string& name : list_folder(inner)) {
      if (extension_of(name) == ".parquet") parquet.push_back(name);
    }
    if (!parquet.empty()) return parquet_files(inner, parquet);
  }
  const size_t num_images = image_files_in(folder).size();
  if (num_images > 0) {
    throw input_error("{}: holds {} images but no metadata.jsonl or metadata.csv; write one that names them in column file_name",
                      folder, num_images);
  }
  throw input_error("{}: holds no metadata.jsonl, metadata.csv or .parquet file; expected an image folder or parquet files",
                    folder);
}

std::vector<SourceFile> files_of_glob(const std::string& pattern) {
  glob_t found{};
  const int status = ::glob(pattern.c_str(), 0, nullptr, &found);
  std::vector<SourceFile> files;
  for (size_t i = 0; status == 0 && i < found.gl_pathc; ++i) files.push_back({found.gl_pathv[i], RowMapper::SourceKind::kTable});
  ::globfree(&found);
  if (files.empty()) throw input_error("{}: no file matches the pattern", pattern);
  std::sort(files.begin(), files.end(), [](const SourceFile& a, const SourceFile& b) { return a.path < b.path; });
  return files;
}

std::vector<SourceFile> files_of_source(const std::string& source) {
  if (source.empty()) throw input_error("data.train: a source is empty; name a file or folder");
  if (is_remote(source)) {
    throw input_error("{}: rows are read from local files; copy the data beside the job first (gcloud storage cp -r, aws s3 cp)",
                      source);
  }
  if (folder_exists(source)) return files_of_folder(source);
  if (file_exists(source)) {
    const std::string name = base_name(source);
    const bool is_metadata = name == "metadata.jsonl" || name == "metadata.csv";
    return {{source, is_metadata ? RowMapper::SourceKind::kImageFolder : RowMapper::SourceKind::kTable}};
  }
  if (source.find_first_of("*?[") != std::string::npos) return files_of_glob(source);
  throw input_error(
      "{}: no such file or folder; a data set of the hub is downloaded first by: hf download --repo-type dataset ID", source);
}

std::unique_ptr<RecordSource> open_file(const std::string& path) {
  const std::string extension = extension_of(path);
  if (extension == ".jsonl" || extension == ".ndjson") return open_jsonl(path);
  if (extension == ".csv") return open_csv(path);
  if (extension == ".parquet") return open_parquet(path);
  throw input_error("{}: is no source of rows; expected .jsonl, .csv, .parquet or a folder", path);
}

// Images of the folder that no row names: their captions may have been lost on the way.
void warn_of_unnamed_images(const RecordSource& source, const std::string& column) {
  std::unordered_set<std::string> named;
  for (int64_t i = 0; i < source.size(); ++i) {
    try {
      const Cell record = source.record(i, source.place(i));
      const Cell* cell = record.find(column);
      if (cell == nullptr) continue;
      const auto add = [&](const Cell& name) {
        if (name.kind == Cell::Kind::kText) named.insert(fs::path(name.text).lexically_normal().generic_string());
      };
      add(*cell);
      for (const Cell& item : cell->items) add(item);
    } catch (const RowError&) {
      continue;  // reported when the row is read
    }
  }
  const std::string folder = parent_folder(source.file());
  std::vector<std::string> unnamed;
  for (const std::string& name : image_files_in(folder.empty() ? "." : folder)) {
    if (!named.contains(name)) unnamed.push_back(name);
  }
  if (unnamed.empty()) return;
  std::sort(unnamed.begin(), unnamed.end());
  log_warning("{}: {} image{} in the folder {} named by no row and not used: {}", source.file(), unnamed.size(),
              unnamed.size() == 1 ? "" : "s", unnamed.size() == 1 ? "is" : "are", join_some(unnamed, 3));
}

class FileDataset : public Dataset {
 public:
  FileDataset(const std::vector<std::string>& sources, const RowMapping& mapping) {
    if (sources.empty()) throw input_error("data.train: names no source; expected a .jsonl, .csv or .parquet file or a folder");
    for (const std::string& source : sources) {
      const int64_t rows_before = size_;
      const size_t first = files_.size();
      for (const SourceFile& file : files_of_source(source)) open(file, mapping);
      const size_t num_files = files_.size() - first;
      if (num_files == 0) throw input_error("{}: holds no rows", source);
      descriptions_.push_back(fmt::format("{} of {}{} ({})", rows_text(size_ - rows_before), source,
                                          num_files > 1 ? fmt::format(", {} files", num_files) : "",
                                          files_[first].mapper->description()));
    }
  }

  int64_t size() const override { return size_; }

  Row row(int64_t index) const override {
    if (index < 0 || index >= size_) throw input_error("row {} does not exist; rows count from 0 to {}", index, size_ - 1);
    const auto after = std::upper_bound(files_.begin(), files_.end(), index,
                                        [](int64_t wanted, const OpenFile& file) { return wanted < file.first_row; });
    const OpenFile& file = *(after - 1);
    Row row = file.source->place(index - file.first_row);
    row.index = index;
    const Cell record = file.source->record(index - file.first_row, row);
    file.mapper->fill(record, row);
    return row;
  }

  std::vector<std::string> files() const override {
    std::vector<std::string> paths;
    for (const OpenFile& file : files_) paths.push_back(file.source->file());
    return paths;
  }

  std::string description() const override {
    std::string text;
    for (const std::string& one : descriptions_) text += (text.empty() ? "" : "; ") + one;
    return text;
  }

 private:
  struct OpenFile {
    int64_t first_row = 0;
    std::unique_ptr<RecordSource> source;
    std::unique_ptr<RowMapper> mapper;
  };

  void open(const SourceFile& file, const RowMapping& mapping) {
    OpenFile opened;
    opened.first_row = size_;
    opened.source = open_file(file.path);
    if (opened.source->size() == 0) return;
    opened.mapper = std::make_unique<RowMapper>(mapping, *opened.source, file.kind);
    opened.source->use_columns(opened.mapper->used_columns());
    if (file.kind == RowMapper::SourceKind::kImageFolder) warn_of_unnamed_images(*opened.source, opened.mapper->image_column());
    size_ += opened.source->size();
    files_.push_back(std::move(opened));
  }

  int64_t size_ = 0;
  std::vector<OpenFile> files_;
  std::vector<std::string> descriptions_;
};

}  // namespace

RowError::RowError(RowFault fault) : std::runtime_error(what_of(fault)), fault_(std::move(fault)) {}

RowError row_error(const Row& row, const std::string& field, const std::string& value, const std::string& rule,
                   const std::string& reason) {
  RowFault fault;
  fault.row = row.index;
  fault.file = row.file;
  fault.line = row.line;
  fault.where = row.where;
  fault.field = field;
  fault.value = value;
  if (value.size() > kLongestValue) {
    size_t cut = kLongestValue;
    while (cut > 0 && (static_cast<unsigned char>(value[cut]) & 0xC0) == 0x80) --cut;  // not inside a character
    fault.value = value.substr(0, cut) + "…";
  }
  fault.rule = rule;
  fault.reason = reason;
  return RowError(std::move(fault));
}

const Cell* Cell::find(std::string_view name) const {
  if (kind != Kind::kObject) return nullptr;
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name) return items[i].is_null() ? nullptr : &items[i];
  }
  return nullptr;
}

std::string kind_name(const Cell& cell) {
  switch (cell.kind) {
    case Cell::Kind::kNull:
      return "null";
    case Cell::Kind::kBool:
      return "a truth value";
    case Cell::Kind::kNumber:
      return "a number";
    case Cell::Kind::kText:
      return "a string";
    case Cell::Kind::kBytes:
      return "binary";
    case Cell::Kind::kList:
      return "a list";
    case Cell::Kind::kObject:
      return "an object";
  }
  return "";
}

std::string shown(const Cell& cell) {
  switch (cell.kind) {
    case Cell::Kind::kNull:
      return "null";
    case Cell::Kind::kBytes:
      return fmt::format("<{} bytes>", cell.text.size());
    case Cell::Kind::kList:
      return fmt::format("[{} items]", cell.items.size());
    case Cell::Kind::kObject:
      return fmt::format("{{{}}}", join_some(cell.names, 4));
    default:
      return cell.text;
  }
}

std::unique_ptr<Dataset> open_dataset(const std::vector<std::string>& sources, const RowMapping& mapping) {
  return std::make_unique<FileDataset>(sources, mapping);
}

}  // namespace gemtune
