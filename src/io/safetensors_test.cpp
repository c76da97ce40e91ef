#include "io/safetensors.h"

#include "base/json.h"
#include "io/io_test.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cstring>
#include <random>

namespace gemtune {
namespace {

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string file_with(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  return file + header + data;
}

std::string error_with(const std::string& header, const std::string& data) {
  const std::string file = file_with(header, data);
  return error_of([&] { parse_safetensors(bytes_of(file), "m"); });
}

std::string f32(const std::string& name, const std::string& shape, const std::string& offsets) {
  return fmt::format(R"("{}":{{"dtype":"F32","shape":{},"data_offsets":{}}})", name, shape, offsets);
}

TEST(Safetensors, WrittenTensorsAreReadBack) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.safetensors";
  const std::string first = "abcdefgh";
  const std::string second = "xyz";
  write_safetensors(path,
                    {{"w \"1\"", DType::kF32, {2, 1}, bytes_of(first)},
                     {"empty", DType::kBF16, {0, 4}, {}},
                     {"ü", DType::kU8, {3}, bytes_of(second)}},
                    {{"step", "7"}});
  const SafetensorsFile file(path);
  ASSERT_EQ(file.entries().size(), 3u);
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}, {"step", "7"}}));
  const TensorEntry* entry = file.find("w \"1\"");
  ASSERT_NE(entry, nullptr);
  EXPECT_EQ(entry->dtype, DType::kF32);
  EXPECT_EQ(entry->shape, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(std::memcmp(file.bytes(*entry).data(), first.data(), 8), 0);
  ASSERT_NE(file.find("ü"), nullptr);
  EXPECT_EQ(file.bytes(*file.find("ü")).size(), 3u);
  EXPECT_EQ(file.bytes(*file.find("empty")).size(), 0u);
  EXPECT_EQ(file.find("absent"), nullptr);
  EXPECT_EQ(list_folder(folder.path()), std::vector<std::string>{"a.safetensors"});
}

TEST(Safetensors, HeaderBytesAreThoseOfTheReferenceWriter) {
  const TemporaryFolder folder;
  const std::string data = "abcdefgh";
  write_safetensors(folder / "a.safetensors", {{"a", DType::kF32, {2}, bytes_of(data)}});
  const std::string header = R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  EXPECT_EQ(read_file(folder / "a.safetensors"), file_with(header + std::string((8 - header.size() % 8) % 8, ' '), data));
}

TEST(Safetensors, LengthsAreCheckedBeforeAnythingIsAllocated) {
  const std::string short_file = "1234567";
  EXPECT_EQ(error_of([&] { parse_safetensors(bytes_of(short_file), "m"); }),
            "m: 7 bytes are too few for a safetensors file; fetch or write it again");
  const std::string huge = std::string(8, '\xff') + "{}";
  EXPECT_EQ(error_of([&] { parse_safetensors(bytes_of(huge), "m"); }),
            "m: the header claims 18446744073709551615 bytes, at most 100000000 are read; not a safetensors file, or damaged");
  const std::string cut = file_with("{}      ", "").substr(0, 12);
  EXPECT_EQ(error_of([&] { parse_safetensors(bytes_of(cut), "m"); }),
            "m: the header claims 8 bytes, the file has 4 after its length; the file is truncated");
  EXPECT_EQ(error_with("[]", ""), "m: the header does not start with an open brace; not a safetensors file, or damaged");
  EXPECT_EQ(error_with("", ""), "m: the header does not start with an open brace; not a safetensors file, or damaged");
  EXPECT_EQ(error_with("{}", ""), "no error");
}

TEST(Safetensors, TensorsMustTileTheDataExactly) {
  const std::string four(4, 'x');
  const std::string eight(8, 'x');
  EXPECT_EQ(error_with("{" + f32("a", "[1]", "[0,4]") + "," + f32("b", "[1]", "[4,8]") + "}", eight), "no error");
  EXPECT_EQ(error_with("{" + f32("b", "[1]", "[4,8]") + "," + f32("a", "[1]", "[0,4]") + "}", eight), "no error");
  EXPECT_EQ(error_with("{" + f32("a", "[1]", "[0,4]") + "," + f32("b", "[1]", "[0,4]") + "}", four),
            "m: tensor \"b\" begins at byte 0 of the data, the tensors before it end at 4; the file is damaged");
  EXPECT_EQ(error_with("{" + f32("a", "[1]", "[4,8]") + "}", eight),
            "m: tensor \"a\" begins at byte 4 of the data, the tensors before it end at 0; the file is damaged");
  EXPECT_EQ(error_with("{" + f32("a", "[1]", "[0,4]") + "}", eight),
            "m: the tensors fill 4 bytes, the file has 8 bytes of data; the file is damaged");
  EXPECT_EQ(error_with("{" + f32("a", "[2]", "[0,8]") + "}", four),
            "m: tensor \"a\": ends at byte 8 of the data, the file has 4; the file is truncated or damaged");
  EXPECT_EQ(error_with("{" + f32("a", "[3]", "[0,8]") + "}", eight),
            "m: tensor \"a\": F32 [3] needs 12 bytes, data_offsets give 8; the file is damaged");
  EXPECT_EQ(
      error_with("{" + f32("a", "[0]", "[0,0]") + "," + f32("b", "[]", "[0,4]") + "," + f32("c", "[0]", "[4,4]") + "}", four),
      "no error");
}

TEST(Safetensors, BadFieldsAreNamed) {
  const std::string damaged = "; the file is damaged";
  EXPECT_EQ(error_with(R"({"a":7})", ""), "m: tensor \"a\": expected an object with dtype, shape and data_offsets" + damaged);
  EXPECT_EQ(error_with(R"({"a":{"dtype":"F32","shape":[0]}})", ""), "m: tensor \"a\": field data_offsets is missing" + damaged);
  EXPECT_EQ(error_with(R"({"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0],"x":1}})", ""),
            "m: tensor \"a\": unknown field \"x\"; expected dtype, shape and data_offsets");
  EXPECT_EQ(error_with(R"({"a":{"dtype":"F31","shape":[0],"data_offsets":[0,0]}})", ""),
            "m: tensor \"a\": dtype \"F31\" is not supported; expected one of F64, F32, F16, BF16, I64, I32, I16, I8, U8, BOOL");
  EXPECT_EQ(error_with(R"({"a":{"dtype":1,"shape":[0],"data_offsets":[0,0]}})", ""),
            "m: tensor \"a\": dtype is not a string" + damaged);
  EXPECT_EQ(error_with("{" + f32("a", "7", "[0,0]") + "}", ""), "m: tensor \"a\": shape is not a list" + damaged);
  EXPECT_EQ(error_with("{" + f32("a", "[-1]", "[0,0]") + "}", ""),
            "m: tensor \"a\": shape holds -1, expected whole numbers from 0" + damaged);
  EXPECT_EQ(error_with("{" + f32("a", "[0.5]", "[0,0]") + "}", ""),
            "m: tensor \"a\": shape holds 0.5, expected whole numbers from 0" + damaged);
  EXPECT_EQ(error_with("{" + f32("a", "[9223372036854775808]", "[0,0]") + "}", ""),
            "m: tensor \"a\": shape holds 9223372036854775808, expected whole numbers from 0" + damaged);
  EXPECT_EQ(error_with("{" + f32("a", "[4294967296,4294967296]", "[0,0]") + "}", ""),
            "m: tensor \"a\": shape [4294967296, 4294967296] does not fit into 64 bits" + damaged);
  EXPECT_EQ(error_with("{" + f32("a", "[0]", "[0]") + "}", ""), "m: tensor \"a\": data_offsets is not a pair" + damaged);
  EXPECT_EQ(error_with("{" + f32("a", "[1]", "[4,0]") + "}", "xxxx"),
            "m: tensor \"a\": data_offsets [4,0] are not an ascending pair of whole numbers" + damaged);
  EXPECT_EQ(error_with(R"({"__metadata__":{"a":1}})", ""), "m: __metadata__ \"a\" is not a string" + damaged);
  EXPECT_EQ(error_with(R"({"__metadata__":[]})", ""), "m: __metadata__ is not an object of strings" + damaged);
}

TEST(Safetensors, DuplicateNamesAndDeepHeadersAreRefused) {
  EXPECT_NE(error_with("{" + f32("a", "[0]", "[0,0]") + "," + f32("a", "[0]", "[0,0]") + "}", ""), "no error");
  const std::string deep = "{\"a\":" + std::string(1'000'000, '[') + std::string(1'000'000, ']') + "}";
  EXPECT_NE(error_with(deep, ""), "no error");
  EXPECT_NE(error_with("{\"\xff\":{}}", ""), "no error");
}

TEST(Safetensors, AFileCutAnywhereIsRefused) {
  const std::string whole =
      file_with("{" + f32("a", "[2]", "[0,8]") + "," + f32("b", "[1]", "[8,12]") + "}", std::string(12, 'x'));
  ASSERT_NO_THROW(parse_safetensors(bytes_of(whole), "m"));
  for (size_t size = 0; size < whole.size(); ++size) {
    const std::string cut = whole.substr(0, size);
    EXPECT_THROW(parse_safetensors(bytes_of(cut), "m"), Error) << size;
  }
}

TEST(Safetensors, MutatedFilesGiveAnErrorOrATiledFile) {
  const std::string seed_file =
      file_with(R"({"__metadata__":{"format":"pt"},)" + f32("a", "[2,3]", "[0,24]") + "," + f32("b", "[]", "[24,28]") + "}",
                std::string(28, 'x'));
  std::mt19937 random(20);
  const std::string alphabet = "{}[]\":,0123456789-.eE truenlFBI\\u\xff";
  int num_accepted = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::string file = seed_file;
    const int num_changes = 1 + static_cast<int>(random() % 4);
    for (int i = 0; i < num_changes && !file.empty(); ++i) {
      const size_t at = random() % file.size();
      switch (random() % 5) {
        case 0:
          file[at] = static_cast<char>(random());
          break;
        case 1:
          file[at] = alphabet[random() % alphabet.size()];
          break;
        case 2:
          file.erase(at, 1 + random() % 8);
          break;
        case 3:
          file.insert(at, 1 + random() % 4, alphabet[random() % alphabet.size()]);
          break;
        default:
          file.resize(at);
      }
    }
    try {
      const SafetensorsHeader header = parse_safetensors(bytes_of(file), "m");
      int64_t covered = 0;
      for (const TensorEntry& entry : header.entries) covered += entry.end - entry.begin;
      EXPECT_EQ(header.data_begin + covered, static_cast<int64_t>(file.size()));
      ++num_accepted;
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()).substr(0, 1), "m");
      EXPECT_EQ(error.code(), ExitCode::kInput);
    }
  }
  EXPECT_GT(num_accepted, 0);
  EXPECT_LT(num_accepted, 20'000);
}

TEST(Safetensors, ContradictingTensorsAreNotWritten) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.safetensors";
  const std::string data = "abcd";
  EXPECT_EQ(error_of([&] {
              write_safetensors(path, {{"a", DType::kF32, {2}, bytes_of(data)}});
            }),
            path + ": tensor \"a\": F32 [2] needs 8 bytes, got 4");
  EXPECT_EQ(error_of([&] {
              write_safetensors(path, {{"a", DType::kF32, {1}, bytes_of(data)}, {"a", DType::kF32, {1}, bytes_of(data)}});
            }),
            path + ": tensor name \"a\" is used twice; choose another");
  EXPECT_EQ(error_of([&] {
              write_safetensors(path, {{"__metadata__", DType::kF32, {1}, bytes_of(data)}});
            }),
            path + ": tensor name \"__metadata__\" is reserved; choose another");
  EXPECT_TRUE(list_folder(folder.path()).empty());
}

class ModelFolder : public testing::Test {
 protected:
  void write_shard(const std::string& name, const std::string& tensor) {
    write_safetensors(folder_ / name, {{tensor, DType::kF32, {2}, bytes_of(data_)}});
  }
  void write_index(const std::string& weight_map) {
    write_plain(folder_ / "model.safetensors.index.json", "{\"metadata\":{},\"weight_map\":" + weight_map + "}");
  }
  std::string error() {
    return error_of([&] { TensorFolder unused(folder_.path()); });
  }
  TemporaryFolder folder_;
  std::string data_ = "abcdefgh";
};

TEST_F(ModelFolder, WithoutWeightsIsEmpty) {
  write_plain(folder_ / "config.json", "{}");
  write_plain(folder_ / "training_args.bin", "pickle");
  EXPECT_TRUE(TensorFolder(folder_.path()).empty());
}

TEST_F(ModelFolder, SingleFileIsRead) {
  write_shard("model.safetensors", "a");
  write_plain(folder_ / "pytorch_model.bin", "never opened");
  const TensorFolder folder(folder_.path());
  ASSERT_EQ(folder.tensors().size(), 1u);
  EXPECT_EQ(folder.tensors().at("a").file->bytes(*folder.tensors().at("a").entry).size(), 8u);
}

TEST_F(ModelFolder, ShardsOfTheIndexAreRead) {
  write_shard("model-1.safetensors", "a");
  write_shard("model-2.safetensors", "b");
  write_index(R"({"a":"model-1.safetensors","b":"model-2.safetensors"})");
  EXPECT_EQ(TensorFolder(folder_.path()).tensors().size(), 2u);
}

TEST_F(ModelFolder, MissingShardsAreListed) {
  write_shard("model-1.safetensors", "a");
  write_index(R"({"a":"model-1.safetensors","b":"model-2.safetensors","c":"model-3.safetensors"})");
  EXPECT_EQ(error(), folder_ / "model.safetensors.index.json" +
                         ": 2 of 3 shards are missing: model-2.safetensors, model-3.safetensors; fetch the model again");
}

TEST_F(ModelFolder, ATensorAbsentFromItsShardIsNamed) {
  write_shard("model-1.safetensors", "a");
  write_index(R"({"b":"model-1.safetensors"})");
  EXPECT_EQ(error(), folder_ / "model.safetensors.index.json" +
                         ": tensor \"b\" should be in model-1.safetensors and is not; fetch the model again");
}

TEST_F(ModelFolder, ATensorInTwoShardsIsNamed) {
  write_shard("model-1.safetensors", "a");
  write_safetensors(folder_ / "model-2.safetensors",
                    {{"a", DType::kF32, {2}, bytes_of(data_)}, {"b", DType::kF32, {2}, bytes_of(data_)}});
  write_index(R"({"a":"model-1.safetensors","b":"model-2.safetensors"})");
  EXPECT_EQ(error(), folder_ / "model-2.safetensors" + ": tensor \"a\" is also in model-1.safetensors; keep one of the two");
}

TEST_F(ModelFolder, ShardNamesThatLeaveTheFolderAreRefused) {
  for (const std::string name : {"../other.safetensors", "/etc/x.safetensors", "a\\\\b.safetensors", "C:x.safetensors", "..", "",
                                 "pytorch_model.bin", "sub/x.safetensors"}) {
    write_index("{\"a\":\"" + name + "\"}");
    const std::string text = error();
    EXPECT_NE(text.find(": tensor \"a\" is in "), std::string::npos) << text;
    EXPECT_NE(text.find(", expected a plain *.safetensors file name in the same folder; refused"), std::string::npos) << text;
  }
  write_index("[]");
  EXPECT_EQ(error(), folder_ / "model.safetensors.index.json" + ": weight_map is missing or not an object; fetch the file again");
}

TEST_F(ModelFolder, PickledWeightsAreRefusedByName) {
  for (const char* name : {"pytorch_model.bin", "pytorch_model.bin.index.json", "rng_state.pth", "model.ckpt"}) {
    write_plain(folder_ / name, "boom");
    EXPECT_EQ(error(), folder_ / name +
                           ": pickle files can run code and are never opened, and the folder has no model.safetensors; save the "
                           "model again with safe_serialization=True");
    std::filesystem::remove(folder_ / name);
  }
}

// The two tests below are one side of tests/parity/test_safetensors.py, which runs them in a folder of its own.
const char* oracle_folder() {
  return std::getenv("GEMTUNE_ORACLE_DIR");
}

TEST(SafetensorsOracle, WritesOneTensorOfEachType) {
  if (!oracle_folder()) GTEST_SKIP() << "GEMTUNE_ORACLE_DIR is unset: the parity test runs this";
  std::string data(64, '\0');
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i % 2);
  std::vector<TensorToWrite> tensors;
  for (const DType dtype : {DType::kF64, DType::kI64, DType::kF32, DType::kI32, DType::kF16, DType::kBF16, DType::kI16,
                            DType::kI8, DType::kU8, DType::kBool}) {
    const int64_t count = 6;
    tensors.push_back({fmt::format("t.{}", dtype_name(dtype)),
                       dtype,
                       {2, 3},
                       bytes_of(data).first(static_cast<size_t>(count * dtype_size(dtype)))});
  }
  tensors.push_back({"scalar", DType::kU8, {}, bytes_of(data).first(1)});
  tensors.push_back({"empty", DType::kF32, {0, 7}, {}});
  write_safetensors(join_path(oracle_folder(), "ours.safetensors"), tensors, {{"note", "\"quoted\" ü"}});
}

TEST(SafetensorsOracle, ReportsWhatItReads) {
  if (!oracle_folder()) GTEST_SKIP() << "GEMTUNE_ORACLE_DIR is unset: the parity test runs this";
  Json report = Json::object();
  for (const std::string& name : list_folder(join_path(oracle_folder(), "read"))) {
    Json& item = report[name];
    try {
      const SafetensorsFile file(join_path(join_path(oracle_folder(), "read"), name));
      item["metadata"] = file.metadata();
      item["tensors"] = Json::object();
      for (const TensorEntry& entry : file.entries()) {
        const auto bytes = file.bytes(entry);
        item["tensors"][entry.name] = {{"dtype", dtype_name(entry.dtype)},
                                       {"shape", entry.shape},
                                       {"sha256", sha256_of({reinterpret_cast<const char*>(bytes.data()), bytes.size()})}};
      }
    } catch (const Error& error) {
      item = {{"error", error.what()}};
    }
  }
  write_plain(join_path(oracle_folder(), "report.json"), report.dump());
}

}  // namespace
}  // namespace gemtune
