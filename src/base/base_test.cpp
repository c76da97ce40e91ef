#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/text.h"

namespace gemtune {
namespace {

class Folder {
 public:
  Folder() {
    std::string pattern = ::testing::TempDir() + "gemtune_base_XXXXXX";
    path_ = ::mkdtemp(pattern.data());
  }
  ~Folder() { remove_recursively(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

template <class Call>
std::string error_of(Call&& call, ExitCode expected = ExitCode::kInput) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), expected);
    return error.what();
  }
  return "no error";
}

TEST(Text, SuggestsTheNearestCandidateOnlyForALikelyTypo) {
  const std::vector<std::string> keys = {"rank", "alpha", "dropout", "learning_rate", "warmup_ratio"};
  EXPECT_EQ(did_you_mean("rnak", keys), "rank");
  EXPECT_EQ(did_you_mean("Alpha", keys), "alpha");
  EXPECT_EQ(did_you_mean("learning-rate", keys), "learning_rate");
  EXPECT_EQ(did_you_mean("warmup", keys), "");
  EXPECT_EQ(did_you_mean("banana", keys), "");
  EXPECT_EQ(did_you_mean("", keys), "");
  EXPECT_EQ(did_you_mean("x", {"r"}), "");
}

TEST(Text, BytesAreShownInBinaryUnits) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(1024), "1.0 KiB");
  EXPECT_EQ(human_bytes(1048575), "1.0 MiB");
  EXPECT_EQ(human_bytes(1342504960), "1.3 GiB");
  EXPECT_EQ(human_bytes(-2048), "-2.0 KiB");
  EXPECT_EQ(human_bytes(std::numeric_limits<int64_t>::max()), "8192.0 PiB");
}

TEST(Text, DurationsNeverShowSixtySeconds) {
  EXPECT_EQ(human_duration(4.2), "4.2 s");
  EXPECT_EQ(human_duration(59.96), "1m 00s");
  EXPECT_EQ(human_duration(185), "3m 05s");
  EXPECT_EQ(human_duration(3720), "1h 02m");
  EXPECT_EQ(human_duration(3599.9), "1h 00m");
  EXPECT_EQ(human_duration(-1), "0.0 s");
  EXPECT_EQ(human_duration(std::numeric_limits<double>::infinity()), "unknown");
}

TEST(Text, LongListsEndWithTheNumberLeftOut) {
  EXPECT_EQ(join_some({}), "");
  EXPECT_EQ(join_some({"a", "b"}, 2), "a, b");
  EXPECT_EQ(join_some({"a", "b", "c", "d"}, 2), "a, b and 2 more");
}

TEST(Text, Utf8RefusesOverlongFormsSurrogatesAndCutCharacters) {
  EXPECT_TRUE(is_valid_utf8(""));
  EXPECT_TRUE(is_valid_utf8("aé€\xF0\x9F\x98\x80"));
  EXPECT_FALSE(is_valid_utf8("\xC0\xAF"));
  EXPECT_FALSE(is_valid_utf8("\xE0\x80\xAF"));
  EXPECT_FALSE(is_valid_utf8("\xED\xA0\x80"));
  EXPECT_FALSE(is_valid_utf8("\xF4\x90\x80\x80"));
  EXPECT_FALSE(is_valid_utf8("a\xE2\x82"));
  EXPECT_FALSE(is_valid_utf8("\x80"));
}

TEST(Text, StripRemovesWhatPythonCallsSpace) {
  EXPECT_EQ(strip("  a b\n"), "a b");
  EXPECT_EQ(strip("\u3000\u00A0\x1C x \u2028\u0085"), "x");
  EXPECT_EQ(strip("\u200Bx\u200B"), "\u200Bx\u200B");
  EXPECT_EQ(strip(" \n\t"), "");
  EXPECT_EQ(strip("é"), "é");
}

TEST(Text, QuotedValuesStayOnOneLine) {
  EXPECT_EQ(in_quotes("a\"b\\c"), "\"a\\\"b\\\\c\"");
  EXPECT_EQ(in_quotes("a\nb\t\x1b[0m\r"), "\"a\\nb\\t\\x1b[0m\\r\"");
  EXPECT_EQ(in_quotes("\xFF\u202E"), "\"\\xff\\u202e\"");
  EXPECT_EQ(in_quotes("ééé", 5), "\"éé…\"");
  EXPECT_EQ(in_quotes("ééé", 6), "\"ééé\"");
}

TEST(Paths, JoinKeepsAbsoluteNamesAndUris) {
  EXPECT_EQ(join_path("a", "b.txt"), "a/b.txt");
  EXPECT_EQ(join_path("a/", "b"), "a/b");
  EXPECT_EQ(join_path("a", "/b"), "/b");
  EXPECT_EQ(join_path("a", "gs://b/c"), "gs://b/c");
  EXPECT_EQ(join_path("gs://b/c", "d"), "gs://b/c/d");
  EXPECT_EQ(join_path("gs://b", "d"), "gs://b/d");
  EXPECT_EQ(join_path("", "b"), "b");
  EXPECT_EQ(join_path(".", "b"), "b");
  EXPECT_EQ(join_path("a", ""), "a");
  EXPECT_EQ(join_path("/", "b"), "/b");
}

TEST(Paths, ParentAndNameStopAtTheRootAndTheBucket) {
  EXPECT_EQ(parent_folder("a/b/c"), "a/b");
  EXPECT_EQ(parent_folder("a/b/"), "a");
  EXPECT_EQ(parent_folder("a"), ".");
  EXPECT_EQ(parent_folder("/a"), "/");
  EXPECT_EQ(parent_folder("/"), "/");
  EXPECT_EQ(parent_folder("gs://bucket/a/b"), "gs://bucket/a");
  EXPECT_EQ(parent_folder("gs://bucket/a"), "gs://bucket");
  EXPECT_EQ(parent_folder("gs://bucket"), "gs://bucket");
  EXPECT_EQ(base_name("a/b/"), "b");
  EXPECT_EQ(base_name("a"), "a");
  EXPECT_EQ(base_name("/"), "/");
  EXPECT_EQ(base_name("s3://bucket/x.json"), "x.json");
}

TEST(File, WritesAndReadsBackEveryByte) {
  const Folder folder;
  const std::string path = folder / "a.bin";
  std::string content;
  for (int i = 0; i < 3000000; ++i) content += static_cast<char>(i * 7);
  write_file_atomically(path, content);
  EXPECT_EQ(read_file(path), content);
  EXPECT_EQ(file_size(path), 3000000);
  write_file_atomically(path, "");
  EXPECT_EQ(read_file(path), "");
  EXPECT_EQ(list_folder(folder.path()), std::vector<std::string>{"a.bin"});
}

TEST(File, ReadsPipesAndFilesWithoutASize) {
  EXPECT_NE(read_file("/proc/self/status").find("VmSize"), std::string::npos);
  const Folder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  std::thread writer([&] { std::ofstream(folder / "pipe") << std::string(100000, 'x'); });
  EXPECT_EQ(read_file(folder / "pipe").size(), 100000u);
  writer.join();
}

TEST(File, UnreadableFilesAreNamedWithTheReason) {
  const Folder folder;
  const std::string path = folder / "a";
  EXPECT_EQ(error_of([&] { read_file(path); }), path + ": no such file; check the path");
  EXPECT_EQ(error_of([&] { file_size(path); }), path + ": no such file; check the path");
  EXPECT_EQ(error_of([&] { read_file(folder.path()); }), folder.path() + ": is a folder, expected a file; name a file in it");
  EXPECT_EQ(error_of([&] { list_folder(path); }), path + ": no such folder; check the path");
  write_file_atomically(path, "12345");
  EXPECT_EQ(error_of([&] { list_folder(path); }), path + ": is a file, expected a folder; check the path");
  EXPECT_EQ(error_of([&] { read_file(path, 4); }), path + ": 5 bytes, expected at most 4; this is not the file it is taken for");
  EXPECT_EQ(read_file(path, 5), "12345");
}

TEST(File, UnwritableFoldersAreNamedWithTheReason) {
  const Folder folder;
  EXPECT_EQ(error_of([&] { write_file_atomically(folder / "no/a", "x"); }, ExitCode::kEnvironment),
            folder / "no/a: cannot be written: No such file or directory; check the folder's permissions");
  EXPECT_EQ(error_of([&] { write_file_atomically(folder.path(), "x"); }, ExitCode::kEnvironment),
            folder.path() + ": is a folder, expected a file; remove it or choose another name");
  write_file_atomically(folder / "a", "x");
  EXPECT_EQ(error_of([&] { make_folders(folder / "a/b"); }, ExitCode::kEnvironment),
            folder / "a/b: the folder cannot be made: Not a directory; check the permissions above it");
  EXPECT_EQ(error_of([&] { make_folders(folder / "a"); }, ExitCode::kEnvironment),
            folder / "a: the folder cannot be made: Not a directory; check the permissions above it");
  EXPECT_EQ(error_of([&] { rename_path(folder / "x", folder / "y"); }, ExitCode::kEnvironment),
            folder / "x: cannot be renamed to " + (folder / "y: No such file or directory; check both folders"));
}

TEST(File, ObjectStoresAreRefusedByName) {
  EXPECT_TRUE(is_remote("gs://b/a"));
  EXPECT_TRUE(is_remote("s3://b/a"));
  EXPECT_FALSE(is_remote("gs:/b/a"));
  EXPECT_EQ(error_of([] { read_file("gs://b/a"); }, ExitCode::kEnvironment),
            "gs://b/a: this build reads and writes local folders only; mount the bucket or give a local path");
}

// A child process mounts a disk of 64 KiB that only it sees.
TEST(File, AFullDiskKeepsTheOldContentAndNamesTheBytes) {
  const Folder folder;
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::string outcome;
    const bool mounted = ::unshare(CLONE_NEWNS) == 0 && ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                         ::mount("gemtune", folder.path().c_str(), "tmpfs", 0, "size=64k") == 0;
    if (mounted) {
      try {
        write_file_atomically(folder / "a", "old");
        write_file_atomically(folder / "a", std::string(1000000, 'x'));
        outcome = "no error";
      } catch (const Error& error) {
        outcome = fmt::format("{} {} {} {}", static_cast<int>(error.code()), read_file(folder / "a"),
                              list_folder(folder.path()).size(), error.what());
      }
    }
    const ssize_t put = ::write(ends[1], outcome.data(), outcome.size());
    ::_exit(put == static_cast<ssize_t>(outcome.size()) ? 0 : 1);
  }
  ::close(ends[1]);
  std::string outcome(4096, '\0');
  outcome.resize(static_cast<size_t>(std::max<ssize_t>(::read(ends[0], outcome.data(), outcome.size()), 0)));
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (outcome.empty()) GTEST_SKIP() << "this user may not mount a small disk";
  EXPECT_EQ(outcome,
            "3 old 1 " + (folder / "a: the disk is full: 1000000 bytes needed, 61440 bytes free; free some space or choose "
                                   "another folder"));
}

TEST(File, FoldersAreListedSortedAndRemovedWhole) {
  const Folder folder;
  make_folders(folder / "x/y/z");
  make_folders(folder / "x/y/z");
  write_file_atomically(folder / "x/b", "1");
  write_file_atomically(folder / "x/.a", "1");
  EXPECT_EQ(list_folder(folder / "x"), (std::vector<std::string>{".a", "b", "y"}));
  EXPECT_TRUE(folder_exists(folder / "x/y"));
  EXPECT_FALSE(file_exists(folder / "x/y"));
  EXPECT_TRUE(file_exists(folder / "x/b"));
  EXPECT_FALSE(folder_exists(folder / "x/b"));
  rename_path(folder / "x/y", folder / "w");
  EXPECT_TRUE(folder_exists(folder / "w/z"));
  remove_recursively(folder / "x");
  remove_recursively(folder / "x");
  EXPECT_EQ(list_folder(folder.path()), std::vector<std::string>{"w"});
}

TEST(File, RemovingALinkLeavesItsTarget) {
  const Folder folder;
  make_folders(folder / "kept");
  write_file_atomically(folder / "kept/a", "1");
  ASSERT_EQ(::symlink((folder / "kept").c_str(), (folder / "link").c_str()), 0);
  remove_recursively(folder / "link");
  EXPECT_TRUE(file_exists(folder / "kept/a"));
}

TEST(File, FreeSpaceOfAFolderToComeIsThatOfItsDisk) {
  const Folder folder;
  EXPECT_GT(free_bytes(folder / "not/yet/there"), 0);
  EXPECT_GT(free_bytes("not/yet/there"), 0);
}

TEST(File, MapsWholeFilesAndEmptyOnes) {
  const Folder folder;
  write_file_atomically(folder / "a", "hello");
  const MappedFile full(folder / "a");
  ASSERT_EQ(full.bytes().size(), 5u);
  EXPECT_EQ(std::memcmp(full.bytes().data(), "hello", 5), 0);
  write_file_atomically(folder / "b", "");
  EXPECT_TRUE(MappedFile(folder / "b").bytes().empty());
  EXPECT_EQ(error_of([&] { MappedFile(folder / "c"); }), folder / "c: no such file; check the path");
}

TEST(File, Sha256IsTheStandardOne) {
  EXPECT_EQ(sha256_of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  const Folder folder;
  write_file_atomically(folder / "a", std::string(1000000, 'a'));
  EXPECT_EQ(sha256_of_file(folder / "a"), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(File, TheCacheFollowsXdgAndThenHome) {
  const Folder folder;
  const std::string home = std::getenv("HOME") != nullptr ? std::getenv("HOME") : "";
  ::setenv("XDG_CACHE_HOME", (folder / "xdg").c_str(), 1);
  EXPECT_EQ(cache_folder(), folder / "xdg/gemtune");
  EXPECT_TRUE(folder_exists(folder / "xdg/gemtune"));
  ::setenv("XDG_CACHE_HOME", "relative", 1);
  ::setenv("HOME", (folder / "home").c_str(), 1);
  EXPECT_EQ(cache_folder(), folder / "home/.cache/gemtune");
  ::unsetenv("XDG_CACHE_HOME");
  ::unsetenv("HOME");
  EXPECT_EQ(error_of([] { cache_folder(); }, ExitCode::kEnvironment),
            "the cache folder is unknown: HOME and XDG_CACHE_HOME are not absolute paths; set one of them");
  ::setenv("HOME", home.c_str(), 1);
}

TEST(JsonText, ParsesEveryKindOfValue) {
  const Json json = parse_json(R"({"a": [1, -2, 3.5, 18446744073709551615], "b": {"c": null, "d": true}, "é": "\u00e9"})", "x");
  EXPECT_EQ(json.dump(), R"({"a":[1,-2,3.5,18446744073709551615],"b":{"c":null,"d":true},"é":"é"})");
  EXPECT_EQ(parse_json("\xEF\xBB\xBF[]", "x").dump(), "[]");
  EXPECT_EQ(parse_json(" 7 ", "x").dump(), "7");
}

TEST(JsonText, ErrorsNameTheLineTheColumnAndWhatWasExpected) {
  EXPECT_EQ(
      error_of([] { parse_json("{\n  \"é\": 1,\n  \"b\" 2}", "config.json"); }),
      "config.json: line 3, column 7: not valid JSON: syntax error while parsing object separator - unexpected number literal; "
      "expected ':'");
  EXPECT_EQ(error_of([] { parse_json("", "a.json"); }),
            "a.json: line 1, column 1: not valid JSON: syntax error while parsing value - unexpected end of input; expected '[', "
            "'{', or "
            "a literal");
  EXPECT_EQ(
      error_of([] { parse_json("[1] x", "a.json"); }),
      "a.json: line 1, column 5: not valid JSON: syntax error while parsing value - invalid literal; expected end of input");
  EXPECT_EQ(error_of([] { parse_json("[\"ab\xFF\"]", "a.json"); }),
            "a.json: line 1, column 5: not valid JSON: syntax error while parsing value - invalid string: ill-formed UTF-8 byte");
  EXPECT_EQ(error_of([] { parse_json("[NaN]", "a.json"); }),
            "a.json: line 1, column 2: not valid JSON: syntax error while parsing value - invalid literal");
}

TEST(JsonText, AKeyThatStandsTwiceIsRefused) {
  EXPECT_EQ(error_of([] { parse_json("{\"a\": {\"x\": 1},\n \"b\": {\"x\": 1, \"x\": 2}}", "a.json"); }),
            "a.json: line 2, column 16: the key \"x\" stands twice in one object; keep one of them");
  EXPECT_EQ(error_of([] { parse_json(R"({"a\"": 1, "a\"": 2})", "a.json"); }),
            "a.json: line 1, column 12: the key \"a\\\"\" stands twice in one object; keep one of them");
}

TEST(JsonText, DepthIsLimited) {
  const auto nested = [](size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_NO_THROW(parse_json(nested(200), "a.json"));
  EXPECT_EQ(error_of([&] { parse_json(nested(201), "a.json"); }),
            "a.json: line 1, column 201: nested deeper than 200 levels; flatten the document");
  EXPECT_EQ(error_of([&] { parse_json(std::string(2000000, '['), "a.json"); }),
            "a.json: line 1, column 201: nested deeper than 200 levels; flatten the document");
}

TEST(JsonText, FilesAreNamedInErrors) {
  const Folder folder;
  write_file_atomically(folder / "a.json", "[1,]");
  EXPECT_EQ(
      error_of([&] { read_json_file(folder / "a.json"); }),
      folder /
          "a.json: line 1, column 4: not valid JSON: syntax error while parsing value - unexpected ']'; expected '[', '{', or "
          "a literal");
}

}  // namespace
}  // namespace gemtune
