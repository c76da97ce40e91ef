#include "io/checkpoint.h"

#include "base/json.h"
#include "io/io_test.h"
#include "io/safetensors.h"

#include <nlohmann/json.hpp>

#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <random>

namespace gemtune {
namespace {

void save(const std::string& run, int64_t step, const std::string& content = "weights") {
  save_checkpoint(run, step, [&](const std::string& folder) {
    write_plain(join_path(folder, "optimizer.safetensors"), content);
    write_plain(join_path(folder, "tokenizer/tokenizer.json"), "{}");
  });
}

std::vector<std::string> checkpoints(const std::string& run) {
  return list_folder(join_path(run, "checkpoints"));
}

TEST(Checkpoint, ManifestListsEveryFileWithSizeAndChecksum) {
  const TemporaryFolder run;
  save(run.path(), 60);
  const std::string folder = checkpoint_folder(run.path(), 60);
  EXPECT_EQ(folder, run / "checkpoints/step-00000060");
  EXPECT_EQ(checkpoints(run.path()), std::vector<std::string>{"step-00000060"});
  const Json expected = {{"format", 1},
                         {"files",
                          {{"optimizer.safetensors", {{"size", 7}, {"sha256", sha256_of("weights")}}},
                           {"tokenizer/tokenizer.json", {{"size", 2}, {"sha256", sha256_of("{}")}}}}}};
  EXPECT_EQ(read_json_file(join_path(folder, "manifest.json")), expected);
  EXPECT_EQ(verify_manifest(folder), "");
}

TEST(Checkpoint, WithoutARunThereIsNone) {
  const TemporaryFolder run;
  CheckpointInfo found;
  EXPECT_FALSE(find_newest_checkpoint(run / "absent", &found, nullptr));
  EXPECT_FALSE(find_newest_checkpoint(run.path(), &found, nullptr));
}

TEST(Checkpoint, BrokenOnesAreSkippedAndNamed) {
  const TemporaryFolder run;
  for (const int64_t step : {20, 40, 60, 80, 100, 120}) save(run.path(), step, "weights");
  const auto file = [&](int64_t step, const char* name) { return join_path(checkpoint_folder(run.path(), step), name); };
  write_plain(file(40, "optimizer.safetensors"), "weighs");
  write_plain(file(60, "optimizer.safetensors"), "Weights");
  std::filesystem::remove(file(80, "tokenizer/tokenizer.json"));
  std::filesystem::remove(file(100, "manifest.json"));
  write_plain(file(120, "manifest.json"), R"({"format":2,"files":{}})");
  std::filesystem::create_directories(run / "checkpoints/.tmp-step-00000140");
  std::filesystem::create_directories(run / "checkpoints/step-200");
  CheckpointInfo found;
  std::vector<std::string> ignored;
  ASSERT_TRUE(find_newest_checkpoint(run.path(), &found, &ignored));
  EXPECT_EQ(found.step, 20);
  EXPECT_EQ(found.folder, checkpoint_folder(run.path(), 20));
  const std::vector<std::string> expected = {".tmp-step-00000140: a save that did not finish",
                                             "step-00000120: manifest.json has format 2, this version reads 1",
                                             "step-00000100: manifest.json is missing",
                                             "step-00000080: tokenizer/tokenizer.json is missing",
                                             "step-00000060: optimizer.safetensors has checksum " +
                                                 sha256_of("Weights").substr(0, 12) + ", its manifest says " +
                                                 sha256_of("weights").substr(0, 12),
                                             "step-00000040: optimizer.safetensors has 6 bytes, its manifest says 7"};
  EXPECT_EQ(ignored, expected);
}

TEST(Checkpoint, TruncatingAnyFileOfTheNewestMakesItBeSkipped) {
  const TemporaryFolder run;
  save(run.path(), 1);
  for (const char* name : {"optimizer.safetensors", "tokenizer/tokenizer.json", "manifest.json"}) {
    save(run.path(), 2);
    const std::string path = join_path(checkpoint_folder(run.path(), 2), name);
    std::filesystem::resize_file(path, static_cast<uintmax_t>(file_size(path)) - 1 - (std::string(name) == "manifest.json"));
    CheckpointInfo found;
    std::vector<std::string> ignored;
    ASSERT_TRUE(find_newest_checkpoint(run.path(), &found, &ignored));
    EXPECT_EQ(found.step, 1) << name;
    ASSERT_EQ(ignored.size(), 1u);
    EXPECT_TRUE(ignored[0].starts_with("step-00000002: ")) << ignored[0];
  }
}

TEST(Checkpoint, ManifestNamesOutsideTheFolderAndForeignPicklesAreFaults) {
  const TemporaryFolder run;
  save(run.path(), 1);
  const std::string folder = checkpoint_folder(run.path(), 1);
  write_plain(join_path(folder, "README.md"), "a note");
  EXPECT_EQ(verify_manifest(folder), "");
  write_plain(join_path(folder, "rng_state.pth"), "boom");
  EXPECT_EQ(verify_manifest(folder), "rng_state.pth is a pickle file that the manifest does not list; remove it");
  std::filesystem::remove(join_path(folder, "rng_state.pth"));
  for (const char* name : {"../x", "/etc/hostname", "a/../../x"}) {
    write_plain(join_path(folder, "manifest.json"),
                fmt::format(R"({{"format":1,"files":{{"{}":{{"size":1,"sha256":""}}}}}})", name));
    EXPECT_EQ(verify_manifest(folder), fmt::format("manifest.json names \"{}\", which is outside the folder", name));
  }
}

TEST(Checkpoint, AFailedSaveLeavesNothingAndTheEarlierOneWhole) {
  const TemporaryFolder run;
  save(run.path(), 1);
  EXPECT_EQ(error_of([&] {
              save_checkpoint(run.path(), 2, [](const std::string& folder) {
                write_plain(join_path(folder, "part"), "half");
                throw environment_error("the disk is full");
              });
            }),
            "the disk is full");
  EXPECT_EQ(checkpoints(run.path()), std::vector<std::string>{"step-00000001"});
  EXPECT_EQ(verify_manifest(checkpoint_folder(run.path(), 1)), "");
}

TEST(Checkpoint, SavingAStepAgainReplacesIt) {
  const TemporaryFolder run;
  save(run.path(), 1, "old");
  std::filesystem::create_directories(run / "checkpoints/.tmp-step-00000001/leftover");
  save(run.path(), 1, "new");
  const std::string folder = checkpoint_folder(run.path(), 1);
  EXPECT_EQ(read_file(join_path(folder, "optimizer.safetensors")), "new");
  EXPECT_EQ(verify_manifest(folder), "");
  EXPECT_FALSE(folder_exists(join_path(folder, "leftover")));
  EXPECT_EQ(checkpoints(run.path()), std::vector<std::string>{"step-00000001"});
}

TEST(Checkpoint, CommitFolderSwapsAndComesBackAfterAnInterruptedSwap) {
  const TemporaryFolder run;
  const auto commit = [&](const std::string& content) {
    commit_folder(run / "final", [&](const std::string& folder) { write_plain(join_path(folder, "a"), content); });
  };
  commit("1");
  std::filesystem::rename(run / "final", run / ".old-final");
  EXPECT_EQ(error_of([&] { commit_folder(run / "final", [](const std::string&) { throw environment_error("full"); }); }), "full");
  EXPECT_EQ(read_file(run / "final/a"), "1");
  commit("2");
  EXPECT_EQ(read_file(run / "final/a"), "2");
  EXPECT_EQ(verify_manifest(run / "final"), "");
  EXPECT_EQ(list_folder(run.path()), std::vector<std::string>{"final"});
}

TEST(Checkpoint, PruningKeepsTheNewestCompleteOnes) {
  const TemporaryFolder run;
  for (const int64_t step : {1, 2, 3, 4}) save(run.path(), step);
  std::filesystem::remove(join_path(checkpoint_folder(run.path(), 4), "manifest.json"));
  std::filesystem::create_directories(run / "checkpoints/.tmp-step-00000002");
  std::filesystem::create_directories(run / "checkpoints/.old-step-00000001");
  std::filesystem::create_directories(run / "checkpoints/.tmp-step-00000009");
  std::filesystem::create_directories(run / "checkpoints/mine");
  prune_checkpoints(run.path(), 2);
  const std::vector<std::string> expected = {".tmp-step-00000009", "mine", "step-00000002", "step-00000003", "step-00000004"};
  EXPECT_EQ(checkpoints(run.path()), expected);
  prune_checkpoints(run.path(), 0);
  const std::vector<std::string> one = {".tmp-step-00000009", "mine", "step-00000003", "step-00000004"};
  EXPECT_EQ(checkpoints(run.path()), one);
}

TEST(Checkpoint, PruningNeverRemovesTheOnlyGoodCopy) {
  const TemporaryFolder run;
  save(run.path(), 1, "weights");
  save(run.path(), 2, "weights");
  write_plain(join_path(checkpoint_folder(run.path(), 2), "optimizer.safetensors"), "damaged");
  prune_checkpoints(run.path(), 1);
  CheckpointInfo found;
  ASSERT_TRUE(find_newest_checkpoint(run.path(), &found, nullptr));
  EXPECT_EQ(found.step, 1);
}

TEST(Checkpoint, KillingASaveAtAnyMomentLosesNothing) {
  const TemporaryFolder run;
  const std::string weights(1 << 20, 'w');
  std::mt19937 random(7);
  int64_t newest = 0;
  int num_unfinished = 0;
  for (int round = 0; round < 20; ++round) {
    int reports[2];
    ASSERT_EQ(::pipe(reports), 0);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      // Every step is written twice, so that replacing is killed too.
      for (int64_t step = newest + 1;; ++step) {
        for (int copy = 0; copy < 2; ++copy) save(run.path(), step, weights);
        if (::write(reports[1], &step, sizeof step) != sizeof step) ::_exit(1);
        prune_checkpoints(run.path(), 2);
      }
    }
    ::close(reports[1]);
    // From the first finished step on, for about as long as one takes on this machine.
    const auto start = std::chrono::steady_clock::now();
    ASSERT_EQ(::read(reports[0], &newest, sizeof newest), static_cast<ssize_t>(sizeof newest));
    const auto step_us = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start).count();
    ::usleep(static_cast<useconds_t>(static_cast<uint64_t>(step_us) * (random() % 1000) / 1000));
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    int64_t step = 0;
    while (::read(reports[0], &step, sizeof step) == sizeof step) newest = step;
    ::close(reports[0]);

    CheckpointInfo found;
    std::vector<std::string> ignored;
    const bool any = find_newest_checkpoint(run.path(), &found, &ignored);
    ASSERT_TRUE(any);
    // The step after the last reported one may have been finished too.
    EXPECT_GE(found.step, newest);
    EXPECT_LE(found.step, newest + 1);
    newest = found.step;
    for (const std::string& text : ignored) EXPECT_TRUE(text.ends_with(": a save that did not finish")) << text;
    num_unfinished += static_cast<int>(ignored.size());
    for (const std::string& name : checkpoints(run.path())) {
      if (!name.starts_with("step-")) continue;
      EXPECT_EQ(verify_manifest(join_path(run / "checkpoints", name)), "") << name;
    }
  }
  EXPECT_GE(newest, 20);
  EXPECT_GT(num_unfinished, 0);
}

TEST(Checkpoint, AFullDiskIsNamedAndLeavesTheEarlierOneWhole) {
  const TemporaryFolder disk;
  if (::mount("tmpfs", disk.path().c_str(), "tmpfs", 0, "size=4m") != 0) GTEST_SKIP() << "a tmpfs cannot be mounted here";
  const std::string megabyte(1 << 20, 'w');
  const std::string much(8 << 20, 'w');
  save(disk.path(), 1, megabyte);
  std::string text = "no error";
  ExitCode code = ExitCode::kDone;
  try {
    save_checkpoint(disk.path(), 2, [&](const std::string& folder) {
      write_safetensors(join_path(folder, "a.safetensors"),
                        {{"a", DType::kU8, {8 << 20}, std::as_bytes(std::span(much.data(), much.size()))}});
    });
  } catch (const Error& error) {
    text = error.what();
    code = error.code();
  }
  CheckpointInfo found;
  std::vector<std::string> ignored;
  const bool any = find_newest_checkpoint(disk.path(), &found, &ignored);
  const auto left = checkpoints(disk.path());
  ::umount(disk.path().c_str());
  EXPECT_EQ(code, ExitCode::kEnvironment);
  // 8 MiB of data, 8 bytes of length and 96 of header; 4 MiB less the first checkpoint's pages are free.
  EXPECT_TRUE(
      text.starts_with(disk / "checkpoints/.tmp-step-00000002/a.safetensors" + ": the disk is full: 8388712 bytes needed, 3"))
      << text;
  EXPECT_TRUE(text.ends_with(" bytes free; free some space or choose another folder")) << text;
  EXPECT_TRUE(any);
  EXPECT_EQ(found.step, 1);
  EXPECT_TRUE(ignored.empty());
  EXPECT_EQ(left, std::vector<std::string>{"step-00000001"});
}

}  // namespace
}  // namespace gemtune
