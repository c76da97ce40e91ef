#include "base/error.h"
#include "data/dataset_record.h"
#include "data/test_files.h"

#include <arrow/api.h>
#include <arrow/io/api.h>
#include <arrow/json/from_string.h>
#include <gtest/gtest.h>
#include <parquet/arrow/writer.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace gemtune {
namespace {

using test::TempFolder;
using test::thrown_by;

constexpr const char* kFix = "; fix the row or set data.on_bad_row=skip";

using Columns = std::vector<std::pair<std::string, std::shared_ptr<arrow::Array>>>;

std::shared_ptr<arrow::Array> column(const std::shared_ptr<arrow::DataType>& type, const std::string& json) {
  return arrow::json::ArrayFromJSONString(type, json).ValueOrDie();
}

std::string write_parquet(const std::string& path, const Columns& columns, int64_t rows_per_group = 1000) {
  arrow::FieldVector fields;
  arrow::ArrayVector arrays;
  for (const auto& [name, array] : columns) {
    fields.push_back(arrow::field(name, array->type()));
    arrays.push_back(array);
  }
  const auto table = arrow::Table::Make(arrow::schema(fields), arrays);
  auto out = arrow::io::FileOutputStream::Open(path).ValueOrDie();
  PARQUET_THROW_NOT_OK(parquet::arrow::WriteTable(*table, arrow::default_memory_pool(), out, rows_per_group));
  PARQUET_THROW_NOT_OK(out->Close());
  return path;
}

std::shared_ptr<arrow::DataType> image_type() {
  return arrow::struct_({arrow::field("bytes", arrow::binary()), arrow::field("path", arrow::utf8())});
}

std::string numbers(int64_t count, const std::string& before, const std::string& after) {
  std::string json = "[";
  for (int64_t i = 0; i < count; ++i) json += (i == 0 ? "" : ",") + before + std::to_string(i) + after;
  return json + "]";
}

TEST(Parquet, ImageCellsOfEveryShapeGiveTheSameImage) {
  TempFolder folder;
  folder.write("pixel.png", "PIXEL");
  const auto captions = column(arrow::utf8(), R"(["c","c","c"])");
  const auto read = [&](const std::string& name, const std::shared_ptr<arrow::Array>& images) {
    return open_dataset({write_parquet(folder / name, {{"image", images}, {"caption", captions}})}, {});
  };
  const auto structs =
      read("structs.parquet", column(image_type(), R"([["PIXEL",null],[null,"pixel.png"],["PIXEL","gone.png"]])"));
  const auto raw = read("raw.parquet", column(arrow::binary(), R"(["PIXEL","PIXEL","PIXEL"])"));
  const auto paths = read("paths.parquet", column(arrow::large_utf8(), R"(["pixel.png","pixel.png","pixel.png"])"));
  const auto lists =
      read("lists.parquet", column(arrow::list(image_type()), R"([[["PIXEL",null]],[["PIXEL",null],[null,"pixel.png"]],[]])"));
  const auto is_pixel = [&](const ImageSource& image) {
    return image.path.empty() ? image.bytes == "PIXEL" : image.bytes.empty() && image.path == folder / "pixel.png";
  };
  for (const auto* dataset : {structs.get(), raw.get(), paths.get()}) {
    ASSERT_EQ(dataset->size(), 3);
    for (int64_t row = 0; row < 3; ++row) {
      ASSERT_EQ(dataset->row(row).images.size(), 1u);
      EXPECT_TRUE(is_pixel(dataset->row(row).images[0])) << dataset->description() << row;
    }
  }
  EXPECT_EQ(structs->row(2).images[0].name(), "<embedded image gone.png>");
  EXPECT_EQ(lists->row(0).images.size(), 1u);
  ASSERT_EQ(lists->row(1).images.size(), 2u);
  EXPECT_TRUE(is_pixel(lists->row(1).images[0]));
  EXPECT_TRUE(is_pixel(lists->row(1).images[1]));
  EXPECT_EQ(thrown_by<RowError>([&] { lists->row(2); }),
            folder / "lists.parquet: row 2: data.prompt: the row has neither a prompt nor a picture" + kFix);
}

TEST(Parquet, AnImageCellWithNeitherBytesNorPathIsAFault) {
  TempFolder folder;
  const std::string file = write_parquet(
      folder / "a.parquet", {{"image", column(image_type(), R"([["x",null],[null,null],["",null],[null,"../x.png"]])")},
                             {"question", column(arrow::utf8(), R"(["q","q","q","q"])")},
                             {"answer", column(arrow::utf8(), R"(["a","a","a","a"])")}});
  const auto dataset = open_dataset({file}, {});
  EXPECT_EQ(thrown_by<RowError>([&] { dataset->row(1); }), file + ": row 1: image: holds neither bytes nor a path" + kFix);
  EXPECT_EQ(thrown_by<RowError>([&] { dataset->row(2); }), file + ": row 2: image: holds 0 bytes" + kFix);
  EXPECT_EQ(thrown_by<RowError>([&] { dataset->row(3); }),
            file + ": row 3: image \"../x.png\": leaves the folder of the file that names it" + kFix);
}

TEST(Parquet, MessagesMayHoldStringsOrParts) {
  TempFolder folder;
  const auto part = arrow::struct_(
      {arrow::field("type", arrow::utf8()), arrow::field("text", arrow::utf8()), arrow::field("image", arrow::utf8())});
  const auto parts_type =
      arrow::list(arrow::struct_({arrow::field("role", arrow::utf8()), arrow::field("content", arrow::list(part))}));
  const auto text_type =
      arrow::list(arrow::struct_({arrow::field("role", arrow::utf8()), arrow::field("content", arrow::utf8())}));
  const std::string parts = write_parquet(
      folder / "parts.parquet",
      {{"messages",
        column(parts_type, R"([[["user",[["text","U",null],["image",null,null]]],["assistant",[["text","A",null]]]]])")},
       {"images", column(arrow::list(arrow::binary()), R"([["PIXEL"]])")}});
  const std::string texts =
      write_parquet(folder / "texts.parquet", {{"messages", column(text_type, R"([[["user","U"],["assistant","A"]]])")}});
  const auto dataset = open_dataset({parts, texts}, {});
  const Row row = dataset->row(0);
  ASSERT_EQ(row.messages.size(), 2u);
  ASSERT_EQ(row.messages[0].parts.size(), 2u);
  EXPECT_EQ(row.messages[0].parts[0].text, "U");
  EXPECT_EQ(row.messages[0].parts[1].kind, Part::Kind::kImage);
  EXPECT_EQ(row.images.at(0).bytes, "PIXEL");
  EXPECT_EQ(dataset->row(1).messages[1].parts.at(0).text, "A");
  EXPECT_TRUE(dataset->row(1).images.empty());
  EXPECT_EQ(dataset->row(1).where, texts + ": row 0");
  EXPECT_EQ(dataset->row(1).index, 1);
}

TEST(Parquet, NumbersAndTruthValuesAreRenderedAsPythonPrintsNumbers) {
  TempFolder folder;
  const auto dictionary =
      arrow::DictionaryArray::FromArrays(column(arrow::int32(), "[1]"), column(arrow::utf8(), R"(["x","y"])")).ValueOrDie();
  const std::string file = write_parquet(folder / "a.parquet", {{"i", column(arrow::int64(), "[7]")},
                                                                {"u", column(arrow::uint8(), "[200]")},
                                                                {"d", column(arrow::float64(), "[19.9]")},
                                                                {"w", column(arrow::float64(), "[5]")},
                                                                {"f", column(arrow::float32(), "[0.1]")},
                                                                {"b", column(arrow::boolean(), "[true]")},
                                                                {"n", column(arrow::utf8(), "[null]")},
                                                                {"e", dictionary},
                                                                {"a", column(arrow::utf8(), R"(["A"])")}});
  RowMapping mapping;
  mapping.prompt = "{i} {u} {d} {w} {f} {b} [{n}] {e}";
  mapping.answer = "{a}";
  const auto dataset = open_dataset({file}, mapping);
  EXPECT_EQ(dataset->row(0).messages[0].parts.at(0).text, "7 200 19.9 5.0 0.1 true [] y");
}

TEST(Parquet, AFolderOfFilesIsReadInOrderOfNames) {
  TempFolder folder;
  std::filesystem::create_directories(folder / "data");
  for (const char* name : {"data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet"}) {
    const std::string text = std::string("[\"") + name[15] + "\"]";
    write_parquet(folder / name, {{"question", column(arrow::utf8(), R"(["q"])")}, {"answer", column(arrow::utf8(), text)}});
  }
  const auto dataset = open_dataset({folder.path()}, {});
  ASSERT_EQ(dataset->size(), 2);
  EXPECT_EQ(dataset->row(0).file, folder / "data/train-00000-of-00002.parquet");
  EXPECT_EQ(dataset->description(),
            "2 rows of " + folder.path() +
                ", 2 files (columns: question, answer; recognised: data.prompt=\"{question}\" data.answer=\"{answer}\")");

  write_parquet(folder / "data/test-00000-of-00001.parquet",
                {{"question", column(arrow::utf8(), R"(["q"])")}, {"answer", column(arrow::utf8(), R"(["a"])")}});
  EXPECT_EQ(thrown_by<Error>([&] { open_dataset({folder.path()}, {}); }),
            folder / "data: holds parquet files of several splits (test: 1, train: 2); name one, such as " + folder.path() +
                "/data/train-*.parquet");
  EXPECT_EQ(open_dataset({folder / "data/train-*.parquet"}, {})->size(), 2);
}

TEST(Parquet, RowsAreTheSameFromMemoryAndFromDiskInAnyOrderAndThread) {
  TempFolder folder;
  const test::ScopedEnvironment cache("XDG_CACHE_HOME", folder.path());
  const int64_t count = 1000;
  const std::string file = write_parquet(folder / "a.parquet",
                                         {{"image", column(image_type(), numbers(count, "[\"image ", "\",null]"))},
                                          {"unused", column(arrow::utf8(), numbers(count, "\"u", "\""))},
                                          {"caption", column(arrow::utf8(), numbers(count, "\"caption ", "\""))}},
                                         150);
  const auto in_memory = open_parquet(file);
  ParquetLimits none;
  none.bytes_in_memory = 0;
  const auto on_disk = open_parquet(file, none);
  on_disk->use_columns({"image", "caption"});
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = (i * 7919 + t * 31) % count;
        for (const auto* source : {in_memory.get(), on_disk.get()}) {
          const Cell cells = source->record(row, source->place(row));
          const Cell* image = cells.find("image");
          if (image == nullptr || image->find("bytes")->text != "image " + std::to_string(row)) ++wrong;
          if (cells.find("caption")->text != "caption " + std::to_string(row)) ++wrong;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(on_disk->record(0, on_disk->place(0)).find("unused"), nullptr);
  // Nothing is left behind under a name.
  EXPECT_TRUE(std::filesystem::is_empty(folder / "gemtune"));
}

TEST(Parquet, AFileThatIsNoneNamesItself) {
  TempFolder folder;
  const std::string file = folder.write("a.parquet", "PAR1 this is no parquet file at all, only its first letters are");
  const std::string what = thrown_by<Error>([&] { open_dataset({file}, {}); });
  EXPECT_TRUE(what.starts_with(file + ": cannot be read as parquet: ")) << what;
  EXPECT_EQ(what.find('\n'), std::string::npos);
  const std::string empty = write_parquet(folder / "empty.parquet",
                                          {{"question", column(arrow::utf8(), "[]")}, {"answer", column(arrow::utf8(), "[]")}});
  EXPECT_EQ(thrown_by<Error>([&] { open_dataset({empty}, {}); }), empty + ": holds no rows");
}

}  // namespace
}  // namespace gemtune
