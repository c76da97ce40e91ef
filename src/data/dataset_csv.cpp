// CSV with a header row (RFC 4180: quoted fields may hold commas, quotes written twice and line ends).
#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "data/dataset_record.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

namespace gemtune {
namespace {

struct RecordEnd {
  size_t next = 0;  // where the following record starts
  int64_t num_lines = 0;
  bool is_open = false;  // the file ends inside quotes
};

// Reads the record at `at`; `fields` may be null when only its end is wanted.
RecordEnd read_record(std::string_view text, size_t at, std::vector<std::string>* fields) {
  RecordEnd end;
  std::string field;
  bool in_quotes = false;
  bool at_start = true;
  const auto take = [&](char c) {
    if (fields != nullptr) field += c;
  };
  const auto finish = [&] {
    if (fields != nullptr) fields->push_back(std::move(field));
    field.clear();
    at_start = true;
  };
  for (; at < text.size(); ++at) {
    const char c = text[at];
    if (in_quotes) {
      if (c == '\n') ++end.num_lines;
      if (c != '"') {
        take(c);
      } else if (at + 1 < text.size() && text[at + 1] == '"') {
        take('"');
        ++at;
      } else {
        in_quotes = false;
      }
      continue;
    }
    if (c == '"' && at_start) {
      in_quotes = true;
      at_start = false;
    } else if (c == ',') {
      finish();
    } else if (c == '\n' || (c == '\r' && at + 1 < text.size() && text[at + 1] == '\n')) {
      at += c == '\r' ? 2 : 1;
      finish();
      ++end.num_lines;
      end.next = at;
      return end;
    } else {
      take(c);
      at_start = false;
    }
  }
  finish();
  ++end.num_lines;
  end.next = text.size();
  end.is_open = in_quotes;
  return end;
}

class CsvSource : public RecordSource {
 public:
  explicit CsvSource(const std::string& path) : path_(path) {
    if (file_size(path) == 0) throw input_error("{}: is empty; expected a header row and rows", path);
    map_ = std::make_unique<MappedFile>(path);
    text_ = {reinterpret_cast<const char*>(map_->bytes().data()), map_->bytes().size()};
    if (text_.starts_with("\xEF\xBB\xBF")) text_.remove_prefix(3);
    RecordEnd end = read_record(text_, 0, &columns_);
    for (size_t i = 0; i < columns_.size(); ++i) {
      if (!is_valid_utf8(columns_[i])) throw input_error("{}:1: the header is not valid UTF-8; save the file as UTF-8", path);
      if (std::find(columns_.begin(), columns_.begin() + static_cast<std::ptrdiff_t>(i), columns_[i]) !=
          columns_.begin() + static_cast<std::ptrdiff_t>(i)) {
        throw input_error("{}:1: column {} stands twice in the header; rename one", path, in_quotes(columns_[i]));
      }
    }
    int64_t line = 1 + end.num_lines;
    for (size_t at = end.next; at < text_.size(); at = end.next) {
      end = read_record(text_, at, nullptr);
      const std::string_view whole = text_.substr(at, end.next - at);
      if (whole.find_first_not_of(" \t\r\n") != std::string_view::npos) starts_.push_back({at, line});
      line += end.num_lines;
    }
    if (starts_.empty()) throw input_error("{}: holds a header but no rows", path);
  }

  int64_t size() const override { return static_cast<int64_t>(starts_.size()); }
  Row place(int64_t index) const override {
    Row row;
    row.file = path_;
    row.line = starts_[static_cast<size_t>(index)].line;
    row.where = fmt::format("{}:{}", path_, row.line);
    return row;
  }
  Cell record(int64_t index, const Row& place) const override {
    Cell cells;
    cells.kind = Cell::Kind::kObject;
    std::vector<std::string> fields;
    const RecordEnd end = read_record(text_, starts_[static_cast<size_t>(index)].offset, &fields);
    const auto bad_row = [&](const std::string& rule) { return row_error(place, "", "", rule + kFixRow, reason::kMalformed); };
    if (end.is_open) throw bad_row("a quoted field is not closed before the end of the file");
    if (fields.size() != columns_.size()) {
      throw bad_row(fmt::format("has {} fields, the header has {}", fields.size(), columns_.size()));
    }
    cells.names = columns_;
    for (std::string& field : fields) {
      if (!is_valid_utf8(field)) throw bad_row("the row is not valid UTF-8");
      cells.items.push_back(Cell::of_text(std::move(field)));
    }
    return cells;
  }
  std::vector<std::string> columns() const override { return columns_; }
  std::string file() const override { return path_; }

 private:
  struct Start {
    size_t offset;
    int64_t line;
  };
  std::string path_;
  std::unique_ptr<MappedFile> map_;
  std::string_view text_;
  std::vector<std::string> columns_;
  std::vector<Start> starts_;
};

}  // namespace

std::unique_ptr<RecordSource> open_csv(const std::string& path) {
  return std::make_unique<CsvSource>(path);
}

}  // namespace gemtune
