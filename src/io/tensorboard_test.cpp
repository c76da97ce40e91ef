#include "io/tensorboard.h"

#include "io/io_test.h"

#include <cmath>
#include <cstring>

namespace gemtune {
namespace {

TEST(Tensorboard, ChecksumIsCastagnoli) {
  EXPECT_EQ(crc32c("123456789", 9), 0xE3069283u);
  EXPECT_EQ(crc32c("", 0), 0u);
  const std::string zeros(32, '\0');
  EXPECT_EQ(crc32c(zeros.data(), zeros.size()), 0x8A9136AAu);
}

TEST(Tensorboard, RecordsAreFramedWithTheirLength) {
  const TemporaryFolder folder;
  std::string path;
  {
    EventWriter writer(folder / "tensorboard");
    path = writer.path();
    writer.add_scalar("train/loss", 3, 0.5);
  }
  const std::string file = read_file(path);
  size_t at = 0;
  std::vector<std::string> events;
  while (at < file.size()) {
    uint64_t length = 0;
    ASSERT_LE(at + 16, file.size());
    std::memcpy(&length, file.data() + at, 8);
    ASSERT_LE(at + 16 + length, file.size());
    events.push_back(file.substr(at + 12, length));
    at += 16 + length;
  }
  ASSERT_EQ(events.size(), 2u);
  EXPECT_NE(events[0].find("brain.Event:2"), std::string::npos);
  // step 3; summary { value { tag, simple_value 0.5 } }
  EXPECT_EQ(events[1].substr(9), std::string("\x10\x03\x2a\x13\x0a\x11\x0a\x0atrain/loss\x15\x00\x00\x00\x3f", 23));
}

TEST(Tensorboard, TwoWritersNeverShareAFile) {
  const TemporaryFolder folder;
  EventWriter first(folder.path());
  EventWriter second(folder.path());
  EXPECT_NE(first.path(), second.path());
  EXPECT_EQ(list_folder(folder.path()).size(), 2u);
}

TEST(Tensorboard, AFolderThatCannotBeUsedIsNamed) {
  EXPECT_EQ(error_of([] { EventWriter unused("gs://bucket/run"); }),
            "gs://bucket/run: event files are appended to and need a local folder");
}

// One side of tests/parity/test_tensorboard.py, which reads these files with the tensorboard package.
TEST(TensorboardOracle, WritesARunThatResumes) {
  const char* folder = std::getenv("GEMTUNE_ORACLE_DIR");
  if (!folder) GTEST_SKIP() << "GEMTUNE_ORACLE_DIR is unset: the parity test runs this";
  {
    EventWriter writer(folder);
    for (int64_t step = 0; step < 10; ++step) writer.add_scalar("train/loss", step, 10.0 - static_cast<double>(step));
    writer.add_scalar("train/grad_norm", 1, std::nan(""));
    writer.add_text("recipe", 0, "# Recipe\n\n`rank: 16` ü");
  }
  EventWriter writer(folder, 6);
  for (int64_t step = 6; step < 9; ++step) writer.add_scalar("train/loss", step, 0.25 * static_cast<double>(step));
  writer.add_scalar("train/num_tokens", int64_t{5} << 32, 1e9);
}

}  // namespace
}  // namespace gemtune
