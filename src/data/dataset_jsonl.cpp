// One JSON object a line. The file is mapped and its line starts are indexed once; a line is parsed when it is asked for.
#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "data/dataset_record.h"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>
#include <unordered_set>
#include <utility>

namespace gemtune {
namespace {

constexpr size_t kMaxDepth = 64;
constexpr int64_t kRowsReadForColumns = 100;

// Builds cells and keeps numbers as they are written.
class CellReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  Cell root;
  std::string fault;    // "" = none
  size_t fault_at = 0;  // character, from 1; 0 = unknown

  bool null() override { return put({}); }
  bool boolean(bool value) override { return put({Cell::Kind::kBool, value ? "true" : "false", {}, {}}); }
  bool number_integer(number_integer_t value) override { return put({Cell::Kind::kNumber, fmt::format("{}", value), {}, {}}); }
  bool number_unsigned(number_unsigned_t value) override { return put({Cell::Kind::kNumber, fmt::format("{}", value), {}, {}}); }
  bool number_float(number_float_t, const string_t& written) override { return put({Cell::Kind::kNumber, written, {}, {}}); }
  bool string(string_t& value) override { return put({Cell::Kind::kText, std::move(value), {}, {}}); }
  bool binary(binary_t&) override { return false; }
  bool start_object(size_t) override { return open(Cell::Kind::kObject); }
  bool start_array(size_t) override { return open(Cell::Kind::kList); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    Cell& object = *open_.back();
    if (std::find(object.names.begin(), object.names.end(), name) != object.names.end()) {
      fault = "the key " + in_quotes(name) + " stands twice in one object";
      return false;
    }
    object.names.push_back(std::move(name));
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    fault = "is not JSON";
    fault_at = position;
    return false;
  }

 private:
  // Only the innermost open cell grows, so pointers to those around it stay valid.
  Cell& place(Cell cell) {
    if (open_.empty()) {
      root = std::move(cell);
      return root;
    }
    open_.back()->items.push_back(std::move(cell));
    return open_.back()->items.back();
  }
  bool put(Cell cell) {
    place(std::move(cell));
    return true;
  }
  bool open(Cell::Kind kind) {
    if (open_.size() >= kMaxDepth) {
      fault = fmt::format("is nested deeper than {} levels", kMaxDepth);
      return false;
    }
    Cell cell;
    cell.kind = kind;
    open_.push_back(&place(std::move(cell)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  std::vector<Cell*> open_;
};

// Whole characters around byte `at`.
std::string excerpt(std::string_view line, size_t at) {
  const auto inside_character = [&](size_t i) { return i < line.size() && (static_cast<unsigned char>(line[i]) & 0xC0) == 0x80; };
  size_t begin = at > 40 ? at - 40 : 0;
  size_t end = std::min(line.size(), at + 20);
  while (inside_character(begin)) ++begin;
  while (inside_character(end)) ++end;
  return std::string(line.substr(begin, end - begin));
}

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r") == std::string_view::npos;
}

class JsonlSource : public RecordSource {
 public:
  explicit JsonlSource(const std::string& path) : path_(path) {
    if (file_size(path) == 0) throw input_error("{}: is empty; expected one JSON object a line", path);
    map_ = std::make_unique<MappedFile>(path);
    text_ = {reinterpret_cast<const char*>(map_->bytes().data()), map_->bytes().size()};
    if (text_.starts_with("\xEF\xBB\xBF")) text_.remove_prefix(3);
    int64_t line = 0;
    for (size_t at = 0; at < text_.size();) {
      ++line;
      const std::string_view rest = line_at(at);
      if (!is_blank(rest)) {
        offsets_.push_back(at);
        if (static_cast<int64_t>(offsets_.size()) != line || !lines_.empty()) add_line(line);
      }
      at += rest.size() + 1;
    }
    if (offsets_.empty()) throw input_error("{}: holds no rows, only blank lines; expected one JSON object a line", path);
    if (line_at(offsets_[0]).starts_with("[")) {
      throw input_error("{}:{}: opens a JSON list; expected one JSON object a line (jq -c '.[]' FILE writes it so)", path,
                        line_of(0));
    }
    find_columns();
  }

  int64_t size() const override { return static_cast<int64_t>(offsets_.size()); }
  Row place(int64_t index) const override {
    Row row;
    row.file = path_;
    row.line = line_of(index);
    row.where = fmt::format("{}:{}", path_, row.line);
    return row;
  }
  Cell record(int64_t index, const Row& place) const override {
    return parse_record(line_at(offsets_[static_cast<size_t>(index)]), place);
  }
  std::vector<std::string> columns() const override { return columns_; }
  std::string file() const override { return path_; }

 private:
  std::string_view line_at(size_t offset) const {
    const char* begin = text_.data() + offset;
    const void* end = std::memchr(begin, '\n', text_.size() - offset);
    return {begin, end == nullptr ? text_.size() - offset : static_cast<size_t>(static_cast<const char*>(end) - begin)};
  }
  // Lines are kept apart only in a file with blank lines; else row i stands in line i + 1.
  void add_line(int64_t line) {
    while (lines_.size() + 1 < offsets_.size()) lines_.push_back(static_cast<int64_t>(lines_.size()) + 1);
    lines_.push_back(line);
  }
  int64_t line_of(int64_t index) const { return lines_.empty() ? index + 1 : lines_[static_cast<size_t>(index)]; }

  void find_columns() {
    std::unordered_set<std::string> seen;
    for (int64_t i = 0; i < std::min(size(), kRowsReadForColumns); ++i) {
      Cell cells;
      try {
        cells = record(i, place(i));
      } catch (const RowError&) {
        continue;  // the row's own matter, when it is asked for
      }
      for (const std::string& name : cells.names) {
        if (seen.insert(name).second) columns_.push_back(name);
      }
    }
    if (!columns_.empty()) return;
    try {
      record(0, place(0));
    } catch (const RowError& error) {
      throw input_error("{} (none of the first {} rows can be read)", error.what(), std::min(size(), kRowsReadForColumns));
    }
    throw input_error("{}: the first {} rows hold no columns; expected one JSON object a line", path_,
                      std::min(size(), kRowsReadForColumns));
  }

  std::string path_;
  std::unique_ptr<MappedFile> map_;
  std::string_view text_;
  std::vector<size_t> offsets_;
  std::vector<int64_t> lines_;
  std::vector<std::string> columns_;
};

}  // namespace

Cell parse_record(std::string_view line, const Row& place) {
  if (line.ends_with('\r')) line.remove_suffix(1);
  const auto bad_line = [&](const std::string& value, const std::string& rule) {
    return row_error(place, "", value, rule + kFixRow, reason::kMalformed);
  };
  if (!is_valid_utf8(line)) throw bad_line("", "the line is not valid UTF-8");
  CellReader reader;
  const bool whole = nlohmann::json::sax_parse(line.begin(), line.end(), &reader);
  if (!whole || !reader.fault.empty()) {
    if (reader.fault_at == 0) throw bad_line("", reader.fault);
    throw bad_line(excerpt(line, std::min(reader.fault_at, line.size())),
                   fmt::format("{}: wrong at byte {} of the line", reader.fault, reader.fault_at));
  }
  if (reader.root.kind != Cell::Kind::kObject) {
    throw bad_line(shown(reader.root), "is " + kind_name(reader.root) + "; expected a JSON object");
  }
  return std::move(reader.root);
}

std::unique_ptr<RecordSource> open_jsonl(const std::string& path) {
  return std::make_unique<JsonlSource>(path);
}

}  // namespace gemtune
