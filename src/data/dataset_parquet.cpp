// Parquet read by row groups. Decoded groups stay in memory up to a bound; the groups beyond it are decoded once into an
// unnamed file that is mapped, so that rows can be read in any order while memory stays flat.
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/text.h"
#include "data/dataset_record.h"

#include <arrow/api.h>
#include <arrow/io/api.h>
#include <arrow/ipc/api.h>
#include <fmt/core.h>
#include <parquet/arrow/reader.h>
#include <parquet/exception.h>
#include <parquet/file_reader.h>
#include <parquet/properties.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <future>
#include <map>
#include <mutex>
#include <utility>

namespace gemtune {
namespace {

constexpr int64_t kSpillBatchRows = 64;

void check(const arrow::Status& status, const std::string& path) {
  if (status.ok()) return;
  std::string text = status.message();
  std::replace(text.begin(), text.end(), '\n', ' ');
  if (status.IsOutOfMemory()) throw environment_error("{}: out of memory while reading: {}", path, text);
  throw input_error("{}: cannot be read as parquet: {}", path, text);
}

template <class T>
T value_of(arrow::Result<T> result, const std::string& path) {
  check(result.status(), path);
  return std::move(result).ValueUnsafe();
}

// As Python prints it: shortest digits that read back the same, ".0" on whole numbers.
template <class T>
std::string number_text(T value) {
  std::string text = fmt::format("{}", value);
  if (text.find_first_not_of("-0123456789") == std::string::npos) text += ".0";
  return text;
}

Cell cell_of(const arrow::Scalar& scalar, const std::string& path);

Cell list_cell(const arrow::Array& items, const std::string& path) {
  Cell cell;
  cell.kind = Cell::Kind::kList;
  cell.items.reserve(static_cast<size_t>(items.length()));
  for (int64_t i = 0; i < items.length(); ++i) cell.items.push_back(cell_of(*value_of(items.GetScalar(i), path), path));
  return cell;
}

Cell cell_of(const arrow::Scalar& scalar, const std::string& path) {
  using arrow::Type;
  if (!scalar.is_valid) return {};
  switch (scalar.type->id()) {
    case Type::NA:
      return {};
    case Type::BOOL:
      return {Cell::Kind::kBool, static_cast<const arrow::BooleanScalar&>(scalar).value ? "true" : "false", {}, {}};
    case Type::FLOAT: {
      const float value = static_cast<const arrow::FloatScalar&>(scalar).value;
      if (std::isnan(value)) return {};  // pandas writes missing numbers so
      return {Cell::Kind::kNumber, number_text(value), {}, {}};
    }
    case Type::DOUBLE: {
      const double value = static_cast<const arrow::DoubleScalar&>(scalar).value;
      if (std::isnan(value)) return {};
      return {Cell::Kind::kNumber, number_text(value), {}, {}};
    }
    case Type::STRING:
    case Type::LARGE_STRING:
    case Type::STRING_VIEW:
      return Cell::of_text(std::string(static_cast<const arrow::BaseBinaryScalar&>(scalar).view()));
    case Type::BINARY:
    case Type::LARGE_BINARY:
    case Type::BINARY_VIEW:
    case Type::FIXED_SIZE_BINARY:
      return {Cell::Kind::kBytes, std::string(static_cast<const arrow::BaseBinaryScalar&>(scalar).view()), {}, {}};
    case Type::LIST:
    case Type::LARGE_LIST:
    case Type::LIST_VIEW:
    case Type::LARGE_LIST_VIEW:
    case Type::FIXED_SIZE_LIST:
      return list_cell(*static_cast<const arrow::BaseListScalar&>(scalar).value, path);
    case Type::STRUCT: {
      const auto& object = static_cast<const arrow::StructScalar&>(scalar);
      Cell cell;
      cell.kind = Cell::Kind::kObject;
      for (int i = 0; i < scalar.type->num_fields(); ++i) {
        cell.names.push_back(scalar.type->field(i)->name());
        cell.items.push_back(cell_of(*object.value[static_cast<size_t>(i)], path));
      }
      return cell;
    }
    case Type::DICTIONARY:
      return cell_of(*value_of(static_cast<const arrow::DictionaryScalar&>(scalar).GetEncodedValue(), path), path);
    case Type::EXTENSION:
      return cell_of(*static_cast<const arrow::ExtensionScalar&>(scalar).value, path);
    case Type::MAP:
      return list_cell(*static_cast<const arrow::BaseListScalar&>(scalar).value, path);
    default:  // integers, decimals, dates, times
      return {
          arrow::is_integer(scalar.type->id()) || arrow::is_decimal(scalar.type->id()) ? Cell::Kind::kNumber : Cell::Kind::kText,
          scalar.ToString(),
          {},
          {}};
  }
}

using TablePtr = std::shared_ptr<arrow::Table>;

// Bytes of decoded row groups held in memory, over all parquet files of the process.
std::atomic<int64_t> g_bytes_in_memory{0};

class ParquetSource : public RecordSource {
 public:
  ParquetSource(const std::string& path, const ParquetLimits& limits) : path_(path), limits_(limits) {
    with_parquet_errors([&] {
      auto file = value_of(arrow::io::ReadableFile::Open(path_), path_);
      auto reader = parquet::ParquetFileReader::Open(file);
      metadata_ = reader->metadata();
    });
    const parquet::SchemaDescriptor& schema = *metadata_->schema();
    for (int i = 0; i < schema.group_node()->field_count(); ++i) columns_.push_back(schema.group_node()->field(i)->name());
    use_columns(columns_);
    for (int i = 0; i < metadata_->num_row_groups(); ++i) {
      group_starts_.push_back(num_rows_);
      num_rows_ += metadata_->RowGroup(i)->num_rows();
    }
    if (num_rows_ != metadata_->num_rows()) {
      throw input_error("{}: its row groups hold {} rows, its footer says {}; write the file again", path_, num_rows_,
                        metadata_->num_rows());
    }
  }

  ~ParquetSource() override { g_bytes_in_memory -= bytes_in_memory_; }

  int64_t size() const override { return num_rows_; }
  Row place(int64_t index) const override {
    Row row;
    row.file = path_;
    row.where = fmt::format("{}: row {}", path_, index);
    return row;
  }
  std::vector<std::string> columns() const override { return columns_; }
  std::string file() const override { return path_; }

  void use_columns(const std::vector<std::string>& columns) override {
    leaves_.clear();
    const parquet::SchemaDescriptor& schema = *metadata_->schema();
    for (int i = 0; i < schema.num_columns(); ++i) {
      const std::string top = schema.GetColumnRoot(i)->name();
      if (std::find(columns.begin(), columns.end(), top) != columns.end()) leaves_.push_back(i);
    }
  }

  Cell record(int64_t index, const Row&) const override {
    const auto after = std::upper_bound(group_starts_.begin(), group_starts_.end(), index);
    const auto group = static_cast<int>(after - group_starts_.begin()) - 1;
    const TablePtr table = group_table(group);
    const int64_t at = index - group_starts_[static_cast<size_t>(group)];
    Cell cells;
    cells.kind = Cell::Kind::kObject;
    for (int c = 0; c < table->num_columns(); ++c) {
      cells.names.push_back(table->field(c)->name());
      cells.items.push_back(cell_of(*value_of(table->column(c)->GetScalar(at), path_), path_));
    }
    return cells;
  }

 private:
  // The library reports through exceptions in places, through Status in others.
  template <class F>
  void with_parquet_errors(F&& work) const {
    try {
      work();
    } catch (const parquet::ParquetException& error) {
      std::string text = error.what();
      std::replace(text.begin(), text.end(), '\n', ' ');
      throw input_error("{}: cannot be read as parquet: {}", path_, text);
    }
  }

  // A group is decoded by the first thread that asks; the others wait for it.
  TablePtr group_table(int group) const {
    std::promise<TablePtr> mine;
    std::shared_future<TablePtr> table;
    bool is_mine = false;
    {
      const std::lock_guard lock(mutex_);
      const auto found = groups_.find(group);
      if (found != groups_.end()) {
        table = found->second;
      } else {
        is_mine = true;
        table = mine.get_future().share();
        groups_.emplace(group, table);
      }
    }
    if (!is_mine) return table.get();
    try {
      bool keep = true;
      mine.set_value(load(group, keep));
      if (!keep) {
        const std::lock_guard lock(mutex_);
        groups_.erase(group);
      }
    } catch (...) {
      mine.set_exception(std::current_exception());
      const std::lock_guard lock(mutex_);
      groups_.erase(group);
    }
    return table.get();
  }

  int64_t decoded_bytes(int group) const {
    const auto info = metadata_->RowGroup(group);
    int64_t bytes = 0;
    for (const int leaf : leaves_) bytes += info->ColumnChunk(leaf)->total_uncompressed_size();
    return bytes;
  }

  std::unique_ptr<parquet::arrow::FileReader> open_reader() const {
    // Opened for each group and closed again: a data set of many files holds no descriptors. Pages are read as they are
    // needed, so a huge row group costs a page, not the group.
    auto file = value_of(arrow::io::ReadableFile::Open(path_), path_);
    parquet::ReaderProperties properties = parquet::default_reader_properties();
    properties.enable_buffered_stream();
    parquet::ArrowReaderProperties arrow_properties;
    arrow_properties.set_batch_size(kSpillBatchRows);
    arrow_properties.set_pre_buffer(false);
    parquet::arrow::FileReaderBuilder builder;
    check(builder.Open(file, properties, metadata_), path_);
    builder.properties(arrow_properties);
    return value_of(builder.Build(), path_);
  }

  TablePtr load(int group, bool& keep) const {
    TablePtr table;
    with_parquet_errors([&] {
      const int64_t bytes = decoded_bytes(group);
      if (g_bytes_in_memory.fetch_add(bytes) + bytes <= limits_.bytes_in_memory) {
        bytes_in_memory_ += bytes;
        table = value_of(open_reader()->ReadRowGroup(group, leaves_), path_);
        return;
      }
      g_bytes_in_memory -= bytes;
      const std::string folder = cache_folder();
      // Strings and lists decode to somewhat more than the pages hold.
      if (free_bytes(folder) > 2 * bytes + (int64_t{1} << 30)) {
        table = spill(group, folder);
        return;
      }
      static std::atomic<bool> warned{false};
      if (!warned.exchange(true)) {
        log_warning("{}: too large for memory, and {} has {} free: row groups are decoded again for every row, which is slow",
                    path_, folder, human_bytes(free_bytes(folder)));
      }
      keep = false;
      table = value_of(open_reader()->ReadRowGroup(group, leaves_), path_);
    });
    return table;
  }

  // Decodes the group batch by batch into an unnamed file and maps it.
  TablePtr spill(int group, const std::string& folder) const {
    std::string name = join_path(folder, "rows-XXXXXX");
    const int descriptor = ::mkstemp(name.data());
    if (descriptor < 0)
      throw environment_error("{}: no temporary file can be made here; it holds decoded rows of {}", folder, path_);
    std::unique_ptr<MappedFile> map;
    try {
      auto sink = value_of(arrow::io::FileOutputStream::Open(descriptor), path_);  // owns the descriptor
      auto reader = open_reader();
      auto batches = value_of(reader->GetRecordBatchReader({group}, leaves_), path_);
      auto writer = value_of(arrow::ipc::MakeFileWriter(sink, batches->schema()), path_);
      for (;;) {
        std::shared_ptr<arrow::RecordBatch> batch;
        check(batches->ReadNext(&batch), path_);
        if (batch == nullptr) break;
        const arrow::Status written = writer->WriteRecordBatch(*batch);
        if (!written.ok()) throw environment_error("{}: decoded rows cannot be written: {}", folder, written.message());
      }
      check(writer->Close(), path_);
      check(sink->Close(), path_);
      map = std::make_unique<MappedFile>(name);
    } catch (...) {
      ::unlink(name.c_str());
      throw;
    }
    ::unlink(name.c_str());

    const auto bytes = map->bytes();
    auto buffer =
        std::make_shared<arrow::Buffer>(reinterpret_cast<const uint8_t*>(bytes.data()), static_cast<int64_t>(bytes.size()));
    auto reader = value_of(arrow::ipc::RecordBatchFileReader::Open(std::make_shared<arrow::io::BufferReader>(buffer)), path_);
    std::vector<std::shared_ptr<arrow::RecordBatch>> batches;
    for (int i = 0; i < reader->num_record_batches(); ++i) batches.push_back(value_of(reader->ReadRecordBatch(i), path_));
    TablePtr table = value_of(arrow::Table::FromRecordBatches(reader->schema(), batches), path_);
    arrow::default_memory_pool()->ReleaseUnused();  // pages and batches of the decoding
    const std::lock_guard lock(mutex_);
    maps_.push_back(std::move(map));
    return table;
  }

  std::string path_;
  ParquetLimits limits_;
  std::shared_ptr<parquet::FileMetaData> metadata_;
  std::vector<std::string> columns_;
  std::vector<int> leaves_;
  std::vector<int64_t> group_starts_;
  int64_t num_rows_ = 0;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<MappedFile>> maps_;  // before the tables that point into them
  mutable std::map<int, std::shared_future<TablePtr>> groups_;
  mutable std::atomic<int64_t> bytes_in_memory_{0};
};

}  // namespace

std::unique_ptr<RecordSource> open_parquet(const std::string& path, const ParquetLimits& limits) {
  return std::make_unique<ParquetSource>(path, limits);
}

}  // namespace gemtune
