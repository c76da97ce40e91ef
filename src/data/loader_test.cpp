#include "data/loader.h"

#include "base/error.h"
#include "data/loader_plan.h"
#include "data/test_files.h"

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace gemtune {
namespace {

using test::TempFolder;
using test::thrown_by;

constexpr int kImageSize = 4;
constexpr int32_t kTokensPerImage = 3;

// A tokenizer.json of Gemma's kind with one token a letter.
std::string small_tokenizer_json() {
  std::vector<std::string> vocabulary = {"<pad>", "<eos>", "<bos>", "<unk>"};
  for (int byte = 0; byte < 256; ++byte) vocabulary.push_back(fmt::format("<0x{:02X}>", byte));
  vocabulary.push_back("\\n");
  vocabulary.push_back("▁");
  for (char c = 'a'; c <= 'z'; ++c) vocabulary.emplace_back(1, c);
  for (char c = 'A'; c <= 'Z'; ++c) vocabulary.emplace_back(1, c);
  for (char c = '0'; c <= '9'; ++c) vocabulary.emplace_back(1, c);
  vocabulary.push_back("ab");
  const std::vector<std::string> controls = {"<pad>",
                                             "<eos>",
                                             "<bos>",
                                             "<unk>",
                                             "<start_of_turn>",
                                             "<end_of_turn>",
                                             "<start_of_image>",
                                             "<end_of_image>",
                                             "<image_soft_token>"};
  std::string added;
  std::string vocab;
  for (size_t i = 0; i < vocabulary.size(); ++i) vocab += fmt::format("{}\"{}\":{}", i == 0 ? "" : ",", vocabulary[i], i);
  for (size_t i = 4; i < controls.size(); ++i) vocab += fmt::format(",\"{}\":{}", controls[i], 400 + i);
  const auto token = [&](const std::string& content, size_t id, bool special) {
    added += fmt::format(
        "{}{{\"id\":{},\"content\":\"{}\",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false,"
        "\"special\":{}}}",
        added.empty() ? "" : ",", id, content, special);
  };
  for (size_t i = 0; i < controls.size(); ++i) token(controls[i], i < 4 ? i : 400 + i, true);
  return R"({"version":"1.0","truncation":null,"padding":null,"added_tokens":[)" + added +
         R"(],"normalizer":{"type":"Replace","pattern":{"String":" "},"content":"▁"},)"
         R"("pre_tokenizer":{"type":"Split","pattern":{"String":" "},"behavior":"MergedWithPrevious","invert":false},)"
         R"("post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<bos>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],)"
         R"("pair":[{"SpecialToken":{"id":"<bos>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],)"
         R"("special_tokens":{"<bos>":{"id":"<bos>","ids":[2],"tokens":["<bos>"]}}},)"
         R"("decoder":{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"}]},)"
         R"("model":{"type":"BPE","dropout":null,"unk_token":"<unk>","continuing_subword_prefix":null,"end_of_word_suffix":null,)"
         R"("fuse_unk":true,"byte_fallback":true,"ignore_merges":false,"vocab":{)" +
         vocab + R"(},"merges":[["a","b"]]}})";
}

ChatTokens small_chat_tokens() {
  ChatTokens tokens;
  tokens.start_of_turn = 404;
  tokens.end_of_turn = 405;
  tokens.start_of_image = 406;
  tokens.end_of_image = 407;
  tokens.image_soft = 408;
  tokens.tokens_per_image = kTokensPerImage;
  return tokens;
}

// A bitmap of one colour.
std::string bitmap(uint8_t red, uint8_t green, uint8_t blue) {
  std::string file = "BM";
  const auto u32 = [&](uint32_t value) {
    for (int i = 0; i < 4; ++i) file += static_cast<char>((value >> (8 * i)) & 0xff);
  };
  const auto u16 = [&](uint32_t value) {
    for (int i = 0; i < 2; ++i) file += static_cast<char>((value >> (8 * i)) & 0xff);
  };
  u32(14 + 40 + 4);
  u32(0);
  u32(14 + 40);
  u32(40);  // header
  u32(1);   // width
  u32(1);   // height
  u16(1);
  u16(24);
  for (int i = 0; i < 6; ++i) u32(i == 1 ? 4 : 0);
  for (const uint8_t value : {blue, green, red, uint8_t{0}}) file += static_cast<char>(value);
  return file;
}

class LoaderTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_.write("tokenizer.json", small_tokenizer_json());
    chat_ = std::make_shared<const Chat>(Tokenizer::load(folder_ / "tokenizer.json"), small_chat_tokens(), ChatOptions{});
  }

  // Rows with 0, 1 or 2 pictures in turn; the answer of row i has i mod 5 + 1 letters.
  std::shared_ptr<const Dataset> rows(int64_t count, int max_images = 2) {
    std::string text;
    for (int i = 0; i < 4; ++i) folder_.write(fmt::format("{}.bmp", i), bitmap(static_cast<uint8_t>(i * 10), 5, 200));
    for (int64_t i = 0; i < count; ++i) {
      std::string images;
      for (int64_t k = 0; k < i % (max_images + 1); ++k) images += fmt::format("{}\"{}.bmp\"", k == 0 ? "" : ",", (i + k) % 4);
      text += fmt::format("{{\"images\":[{}],\"question\":\"row {}\",\"answer\":\"{}\"}}\n", images, i,
                          std::string(static_cast<size_t>(i % 5 + 1), 'x'));
    }
    return open_dataset({folder_.write("train.jsonl", text)}, {});
  }

  std::vector<int64_t> all(const Dataset& dataset) {
    std::vector<int64_t> rows(static_cast<size_t>(dataset.size()));
    std::iota(rows.begin(), rows.end(), 0);
    return rows;
  }

  std::unique_ptr<Loader> loader(const std::shared_ptr<const Dataset>& dataset, const LoaderOptions& options, Cursor start = {}) {
    return std::make_unique<Loader>(dataset, chat_, ImageOptions{}, all(*dataset), options, start);
  }

  LoaderOptions options() {
    LoaderOptions options;
    options.micro_batch = 2;
    options.accumulation = 2;
    options.image_size = kImageSize;
    return options;
  }

  TempFolder folder_;
  std::shared_ptr<const Chat> chat_;
};

std::vector<int64_t> rows_of(const StepBatches& step) {
  std::vector<int64_t> rows;
  for (const Batch& batch : step.micro_batches) rows.insert(rows.end(), batch.rows.begin(), batch.rows.end());
  return rows;
}

TEST(RandomPermutation, IsTorchsRandperm) {
  EXPECT_EQ(random_permutation(10, 42), (std::vector<int64_t>{2, 6, 1, 8, 4, 5, 0, 9, 3, 7}));
  const auto first = [](uint64_t seed) {
    std::vector<int64_t> order = random_permutation(1345, seed);
    std::vector<int64_t> head(order.begin(), order.begin() + 16);
    head.push_back(order.back());
    return head;
  };
  EXPECT_EQ(first(42),
            (std::vector<int64_t>{57, 948, 132, 1161, 13, 240, 1198, 477, 1254, 426, 278, 1105, 271, 67, 1336, 1067, 406}));
  EXPECT_EQ(first(43),
            (std::vector<int64_t>{1243, 1153, 1323, 1000, 1124, 375, 859, 1204, 919, 612, 761, 569, 427, 947, 630, 757, 988}));
  EXPECT_EQ(first(44),
            (std::vector<int64_t>{372, 420, 153, 1064, 646, 144, 42, 367, 60, 152, 192, 1107, 1230, 324, 233, 490, 217}));
}

TEST(RandomPermutation, EdgesHold) {
  EXPECT_TRUE(random_permutation(0, 1).empty());
  EXPECT_EQ(random_permutation(1, 1), std::vector<int64_t>{0});
  EXPECT_EQ(thrown_by<Error>([] { random_permutation(214748364, 1); }),
            "214748364 rows cannot be shuffled; the limit is 214748363: split the data set");
}

TEST(StepPlan, TheTutorialHas22StepsAnEpochAndASmallerLastOne) {
  LoaderOptions options;
  options.accumulation = 4;
  options.world = 16;
  EXPECT_EQ(steps_per_epoch(1345, options), 22);
  options.rank = 1;
  StepPlan plan = plan_step({0, 0}, 1345, options);
  EXPECT_EQ(plan.num_micro_batches, 64);
  EXPECT_EQ(plan.micro_index, (std::vector<int64_t>{1, 17, 33, 49}));
  EXPECT_EQ(plan.micro_rows, (std::vector<std::vector<int64_t>>{{1}, {17}, {33}, {49}}));
  EXPECT_EQ(plan.end.position, 64);
  plan = plan_step({0, 1344}, 1345, options);
  EXPECT_EQ(plan.num_micro_batches, 1);
  EXPECT_TRUE(plan.micro_rows.empty());
  EXPECT_EQ(plan.end.epoch, 1);
  EXPECT_EQ(plan.end.position, 0);
  options.rank = 0;
  EXPECT_EQ(plan_step({0, 1344}, 1345, options).micro_rows, (std::vector<std::vector<int64_t>>{{1344}}));
  plan = plan_step({4, 1345}, 1345, options);
  EXPECT_EQ(plan.begin.epoch, 5);
  EXPECT_EQ(plan.begin.position, 0);
  EXPECT_EQ(
      thrown_by<Error>([&] {
        plan_step({0, 1346}, 1345, options);
      }),
      "the stored position is epoch 0, row 1346, but an epoch has 1345 rows; the data changed: start a new run with --fresh");
}

TEST(StepPlan, EveryRowIsSeenOnceAnEpochForEveryShape) {
  for (const int64_t num_rows : {1, 2, 7, 16, 23}) {
    for (const int world : {1, 2, 3, 5}) {
      for (const int micro_batch : {1, 2, 3}) {
        for (const int accumulation : {1, 2, 4}) {
          std::multiset<int64_t> seen;
          for (int rank = 0; rank < world; ++rank) {
            LoaderOptions options;
            options.world = world;
            options.rank = rank;
            options.micro_batch = micro_batch;
            options.accumulation = accumulation;
            Cursor at;
            int64_t steps = 0;
            for (; at.epoch == 0; ++steps) {
              const StepPlan plan = plan_step(at, num_rows, options);
              EXPECT_LE(plan.micro_rows.size(), static_cast<size_t>(accumulation));
              for (const auto& micro : plan.micro_rows) seen.insert(micro.begin(), micro.end());
              at = plan.end;
            }
            EXPECT_EQ(steps, steps_per_epoch(num_rows, options));
          }
          EXPECT_EQ(seen.size(), static_cast<size_t>(num_rows));
          EXPECT_EQ(std::set<int64_t>(seen.begin(), seen.end()).size(), static_cast<size_t>(num_rows));
        }
      }
    }
  }
}

TEST(Collate, PadsOnTheRightAndMarksImagesAndTargets) {
  Sample image_row;
  image_row.row = 7;
  image_row.token_ids = {2, 406, 408, 408, 407, 406, 408, 408, 407, 0, 11};
  image_row.target_mask = {0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1};
  image_row.image_first_token = {2, 6};
  Sample text_row;
  text_row.row = 3;
  text_row.token_ids = {2, 9, 9};
  text_row.target_mask = {1, 0, 1};
  const std::vector<uint8_t> one(12, 1);
  const std::vector<uint8_t> two(12, 2);
  const Batch batch = collate({text_row, image_row}, {{}, {one, two}}, 0, 2);
  EXPECT_EQ(batch.num_rows, 2);
  EXPECT_EQ(batch.num_tokens, 11);
  EXPECT_EQ(batch.rows, (std::vector<int64_t>{3, 7}));
  EXPECT_EQ(batch.token_ids,
            (std::vector<int64_t>{2, 9, 9, 0, 0, 0, 0, 0, 0, 0, 0, 2, 406, 408, 408, 407, 406, 408, 408, 407, 0, 11}));
  EXPECT_EQ(batch.valid, (std::vector<uint8_t>{1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(batch.target_mask, (std::vector<uint8_t>{1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1}));
  EXPECT_EQ(batch.image_group,
            (std::vector<int32_t>{-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 0, -1, -1, 1, 1, -1, -1, -1}));
  EXPECT_EQ(batch.num_images, 2);
  EXPECT_EQ(batch.num_targets, 3);  // position 0 is never predicted
  EXPECT_EQ(batch.num_valid, 14);
  std::vector<uint8_t> pixels = one;
  pixels.insert(pixels.end(), two.begin(), two.end());
  EXPECT_EQ(batch.pixels_NCHW, pixels);
  EXPECT_EQ(batch.decoded, (std::vector<int64_t>{0, 1}));

  const Batch partly = collate({text_row, image_row}, {{}, {{}, two}}, 0, 2);
  EXPECT_EQ(partly.num_images, 2);
  EXPECT_EQ(partly.decoded, (std::vector<int64_t>{1}));
  EXPECT_EQ(partly.pixels_NCHW, two);
  EXPECT_EQ(partly.image_group, batch.image_group);
}

TEST_F(LoaderTest, AKnownPictureIsNotDecodedAndARepeatedOneOnce) {
  const auto dataset = rows(4, 1);  // rows 1 and 3 show pictures 1 and 3
  folder_.write("3.bmp", bitmap(10, 5, 200));
  LoaderOptions with = options();
  with.micro_batch = 4;
  with.accumulation = 1;
  with.shuffle = false;
  const Batch all = std::move(loader(dataset, with)->next().micro_batches.at(0));
  EXPECT_EQ(all.decoded, (std::vector<int64_t>{0, 1}));
  ASSERT_EQ(all.picture_keys.size(), 2U);
  EXPECT_EQ(all.picture_keys[0], all.picture_keys[1]) << "the same bytes under two names";
  EXPECT_EQ(all.picture_keys[0], picture_key(bitmap(10, 5, 200), ImageOptions{}, kImageSize));

  with.is_known = [](const std::string&) { return false; };
  const Batch once = std::move(loader(dataset, with)->next().micro_batches.at(0));
  EXPECT_EQ(once.decoded, (std::vector<int64_t>{0}));
  EXPECT_EQ(once.pixels_NCHW.size(), all.pixels_NCHW.size() / 2);

  with.is_known = [&](const std::string& key) { return key == all.picture_keys[0]; };
  const Batch known = std::move(loader(dataset, with)->next().micro_batches.at(0));
  EXPECT_EQ(known.num_images, 2);
  EXPECT_TRUE(known.decoded.empty());
  EXPECT_TRUE(known.pixels_NCHW.empty());
  EXPECT_EQ(known.picture_keys, all.picture_keys);
}

TEST(PictureKey, ChangesWithTheFileAndWithWhatMakesPixelsOfIt) {
  ImageOptions white;
  white.alpha = AlphaPolicy::kWhite;
  ImageOptions as_stored;
  as_stored.exif = ExifPolicy::kIgnore;
  const std::set<std::string> keys = {picture_key("a", {}, 896), picture_key("b", {}, 896), picture_key("a", {}, 448),
                                      picture_key("a", white, 896), picture_key("a", as_stored, 896)};
  EXPECT_EQ(keys.size(), 5U);
}

TEST_F(LoaderTest, TheContentDoesNotDependOnTheNumberOfWorkers) {
  const auto dataset = rows(11);
  std::vector<std::vector<StepBatches>> runs;
  for (const int num_workers : {1, 4}) {
    LoaderOptions with = options();
    with.num_workers = num_workers;
    with.steps_ahead = num_workers;
    const auto steps = loader(dataset, with);
    runs.emplace_back();
    for (int i = 0; i < 7; ++i) runs.back().push_back(steps->next());
  }
  for (size_t i = 0; i < runs[0].size(); ++i) {
    const StepBatches& a = runs[0][i];
    const StepBatches& b = runs[1][i];
    EXPECT_EQ(a.begin.epoch, b.begin.epoch);
    EXPECT_EQ(a.end.position, b.end.position);
    EXPECT_EQ(a.micro_index, b.micro_index);
    ASSERT_EQ(a.micro_batches.size(), b.micro_batches.size());
    for (size_t m = 0; m < a.micro_batches.size(); ++m) {
      EXPECT_EQ(a.micro_batches[m].rows, b.micro_batches[m].rows);
      EXPECT_EQ(a.micro_batches[m].token_ids, b.micro_batches[m].token_ids);
      EXPECT_EQ(a.micro_batches[m].target_mask, b.micro_batches[m].target_mask);
      EXPECT_EQ(a.micro_batches[m].image_group, b.micro_batches[m].image_group);
      EXPECT_EQ(a.micro_batches[m].pixels_NCHW, b.micro_batches[m].pixels_NCHW);
    }
  }
}

TEST_F(LoaderTest, FollowsThePermutationOfSeedPlusEpoch) {
  const auto dataset = rows(11);
  const auto steps = loader(dataset, options());
  EXPECT_EQ(steps->steps_per_epoch(), 3);
  for (const uint64_t epoch : {0, 1}) {
    std::vector<int64_t> seen;
    for (int i = 0; i < 3; ++i) {
      const StepBatches step = steps->next();
      EXPECT_EQ(step.begin.epoch, static_cast<int64_t>(epoch));
      EXPECT_EQ(step.epoch_steps, 3);
      for (const int64_t row : rows_of(step)) seen.push_back(row);
    }
    EXPECT_EQ(seen, random_permutation(11, 42 + epoch));
  }
}

TEST_F(LoaderTest, ResumesInTheMiddleOfAnEpochExactly) {
  const auto dataset = rows(11);
  const auto whole = loader(dataset, options());
  whole->next();
  const Cursor stopped = whole->next().end;
  EXPECT_EQ(stopped.position, 8);
  const auto resumed = loader(dataset, options(), stopped);
  for (int i = 0; i < 5; ++i) {
    const StepBatches a = whole->next();
    const StepBatches b = resumed->next();
    EXPECT_EQ(rows_of(a), rows_of(b));
    EXPECT_EQ(a.end.epoch, b.end.epoch);
    EXPECT_EQ(a.end.position, b.end.position);
  }
}

TEST_F(LoaderTest, RanksShareAStepAndOneMayHaveNoRows) {
  const auto dataset = rows(5);
  std::vector<int64_t> seen;
  for (int rank = 0; rank < 2; ++rank) {
    LoaderOptions with = options();
    with.micro_batch = 2;
    with.accumulation = 1;
    with.world = 2;
    with.rank = rank;
    const auto steps = loader(dataset, with);
    const StepBatches first = steps->next();
    EXPECT_EQ(first.micro_index, std::vector<int64_t>{rank});
    EXPECT_EQ(first.num_micro_batches, 2);
    const StepBatches last = steps->next();
    EXPECT_EQ(last.num_micro_batches, 1);
    EXPECT_EQ(last.micro_batches.size(), rank == 0 ? 1u : 0u);
    EXPECT_EQ(last.end.epoch, 1);
    for (const StepBatches* step : {&first, &last}) {
      for (const int64_t row : rows_of(*step)) seen.push_back(row);
    }
  }
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(seen, (std::vector<int64_t>{0, 1, 2, 3, 4}));
}

TEST_F(LoaderTest, OnlyTheRowsGivenTakePart) {
  const auto dataset = rows(6);
  LoaderOptions with = options();
  with.shuffle = false;
  Loader steps(dataset, chat_, ImageOptions{}, {0, 2, 5}, with, {});
  EXPECT_EQ(rows_of(steps.next()), (std::vector<int64_t>{0, 2, 5}));
  EXPECT_EQ(thrown_by<Error>([&] { Loader(dataset, chat_, ImageOptions{}, {}, with, {}); }),
            "the data set has no rows to train on");
}

TEST_F(LoaderTest, ABadRowStopsItsStepWithItsOwnText) {
  const auto dataset = rows(6, 1);
  LoaderOptions with = options();
  with.micro_batch = 1;
  with.accumulation = 1;
  with.shuffle = false;
  with.num_workers = 3;
  with.steps_ahead = 4;
  // Odd rows have a picture, row 3 has 3.bmp.
  folder_.write("3.bmp", "");
  const auto again = loader(dataset, with);
  for (int i = 0; i < 3; ++i) again->next();
  for (int i = 0; i < 2; ++i) {
    const std::string what = thrown_by<RowError>([&] { again->next(); });
    EXPECT_TRUE(what.starts_with((folder_ / "train.jsonl:4: images[0] \"") + (folder_ / "3.bmp") + "\": ")) << what;
    EXPECT_TRUE(what.ends_with("data.on_bad_row=skip")) << what;
  }
}

TEST_F(LoaderTest, MayBeDroppedAtAnyTime) {
  const auto dataset = rows(40);
  for (int taken = 0; taken < 6; ++taken) {
    LoaderOptions with = options();
    with.num_workers = 4;
    with.steps_ahead = 3;
    const auto steps = loader(dataset, with);
    for (int i = 0; i < taken; ++i) steps->next();
  }
}

TEST_F(LoaderTest, AnEpochOfManyFilesRunsUnderALowDescriptorLimit) {
  std::string text;
  for (int i = 0; i < 5000; ++i) {
    folder_.write(fmt::format("many/{}.bmp", i), bitmap(1, 2, 3));
    text += fmt::format("{{\"file_name\":\"{}.bmp\",\"text\":\"a\"}}\n", i);
  }
  folder_.write("many/metadata.jsonl", text);
  const pid_t child = ::fork();
  if (child == 0) {
    const struct rlimit limit { 128, 128 };
    int status = 1;
    try {
      if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) ::_exit(3);
      const std::shared_ptr<const Dataset> dataset = open_dataset({folder_ / "many"}, {});
      LoaderOptions with = options();
      with.micro_batch = 50;
      with.num_workers = 4;
      with.steps_ahead = 4;
      const auto steps = loader(dataset, with);
      int64_t num_rows = 0;
      for (int64_t i = 0; i < steps->steps_per_epoch(); ++i) num_rows += static_cast<int64_t>(rows_of(steps->next()).size());
      status = num_rows == 5000 ? 0 : 2;
    } catch (const std::exception& error) {
      fmt::print(stderr, "{}\n", error.what());
    }
    ::_exit(status);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

class CheckTest : public LoaderTest {
 protected:
  DataReport check(const Dataset& dataset, CheckDepth depth = CheckDepth::kImages, int num_workers = 3) {
    return check_dataset(dataset, *chat_, ImageOptions{}, depth, num_workers);
  }
};

TEST_F(CheckTest, ReportsEveryBadRowWithItsReason) {
  rows(6, 1);
  folder_.write("bad.bmp", "<html></html>");
  folder_.write("empty.bmp", "");
  const std::string file = folder_.write("check.jsonl",
                                         "{\"image\":\"1.bmp\",\"question\":\"q\",\"answer\":\"abc\"}\n"
                                         "{\"image\":\"bad.bmp\",\"question\":\"q\",\"answer\":\"a\"}\n"
                                         "{\"image\":\"gone.bmp\",\"question\":\"q\",\"answer\":\"a\"}\n"
                                         "{\"image\":\"../x.bmp\",\"question\":\"q\",\"answer\":\"a\"}\n"
                                         "not json\n"
                                         "{\"image\":null,\"question\":\"q\",\"answer\":\"\"}\n"
                                         "{\"image\":\"gone too.bmp\",\"question\":\"q\",\"answer\":\"a\"}\n"
                                         "{\"image\":\"empty.bmp\",\"question\":\"q\",\"answer\":\"a\"}\n"
                                         "{\"image\":null,\"question\":\"q\",\"answer\":\"ab\"}\n");
  const auto dataset = open_dataset({file}, {});
  const DataReport report = check(*dataset);
  EXPECT_EQ(report.num_rows, 9);
  EXPECT_EQ(report.num_checked, 9);
  EXPECT_EQ(report.used, (std::vector<int64_t>{0, 8}));
  std::vector<std::pair<int64_t, std::string>> faults;
  for (const RowFault& fault : report.faults) faults.emplace_back(fault.row, fault.reason);
  EXPECT_EQ(faults, (std::vector<std::pair<int64_t, std::string>>{{1, reason::kDamagedImage},
                                                                  {2, reason::kMissingFile},
                                                                  {3, reason::kImagePath},
                                                                  {4, reason::kMalformed},
                                                                  {5, reason::kNoAnswer},
                                                                  {6, reason::kMissingFile},
                                                                  {7, reason::kDamagedImage}}));
  EXPECT_EQ(report.faults[0].field, "images[0]");
  EXPECT_EQ(report.faults[0].value, folder_ / "bad.bmp");
  EXPECT_EQ(report.faults[0].line, 2);
  std::vector<std::pair<std::string, int64_t>> skipped = {{reason::kDamagedImage, 2},
                                                          {reason::kMissingFile, 2},
                                                          {reason::kImagePath, 1},
                                                          {reason::kMalformed, 1},
                                                          {reason::kNoAnswer, 1}};
  EXPECT_EQ(report.skipped_by_reason, skipped);
  // bos, turn, "user", newline, "q", image with its two newlines on each side, …: the exact count is the chat layer's.
  ASSERT_EQ(report.lengths.size(), 2u);
  EXPECT_EQ(report.lengths[0], static_cast<int32_t>(chat_->sample(dataset->row(0)).token_ids.size()));
  EXPECT_GT(report.num_targets, 0);
  // Without decoding, damaged pictures are not seen.
  EXPECT_EQ(check(*dataset, CheckDepth::kTokens).used, (std::vector<int64_t>{0, 1, 7, 8}));
}

TEST_F(CheckTest, GivesTheSameReportForAnyNumberOfWorkers) {
  const auto dataset = rows(50);
  const DataReport one = check(*dataset, CheckDepth::kImages, 1);
  const DataReport four = check(*dataset, CheckDepth::kImages, 4);
  EXPECT_EQ(one.used.size(), 50u);
  EXPECT_EQ(one.used, four.used);
  EXPECT_EQ(one.lengths, four.lengths);
  EXPECT_EQ(one.num_targets, four.num_targets);
}

TEST_F(CheckTest, ANoteSaysOnceHowManyRowsHoldAnimations) {
  const std::string animated =
      "data:image/gif;base64,R0lGODlhAQABAIAAAP8AAAAA/yH5BAAKAAAALAAAAAABAAEAAAICRAEAIfkEAAoAAAAsAAAAAAEAAQAAAgJMAQA7";
  std::string text;
  for (int i = 0; i < 3; ++i) text += "{\"image\":\"" + animated + "\",\"question\":\"q\",\"answer\":\"a\"}\n";
  const auto dataset = open_dataset({folder_.write("gif.jsonl", text)}, {});
  EXPECT_EQ(check(*dataset).notes, std::vector<std::string>{"3 rows hold animated images: the first frame is used"});
}

TEST_F(CheckTest, StopsWithAPartialReportWhenAsked) {
  const auto dataset = rows(20);
  const std::atomic<bool> stop{true};
  CheckHooks hooks;
  hooks.stop = &stop;
  const DataReport report = check_dataset(*dataset, *chat_, ImageOptions{}, CheckDepth::kImages, 2, hooks);
  EXPECT_EQ(report.num_rows, 20);
  EXPECT_EQ(report.num_checked, 0);
  EXPECT_TRUE(report.used.empty());
}

TEST_F(CheckTest, TheCacheForgetsWhenAFileChanges) {
  const test::ScopedEnvironment cache("XDG_CACHE_HOME", folder_ / "cache");
  const auto dataset = rows(7);
  const std::string key = check_key(*dataset, "options");
  EXPECT_NE(key, check_key(*dataset, "other options"));
  EXPECT_FALSE(load_report(key).has_value());
  const DataReport report = check(*dataset);
  save_report(key, report);
  const std::optional<DataReport> loaded = load_report(key);
  ASSERT_TRUE(loaded.has_value());
  EXPECT_EQ(loaded->used, report.used);
  EXPECT_EQ(loaded->lengths, report.lengths);
  EXPECT_EQ(loaded->num_targets, report.num_targets);
  EXPECT_EQ(loaded->num_checked, 7);
  EXPECT_EQ(loaded->image_files.size(), 4u);

  folder_.write("2.bmp", "longer than it was before and damaged, which the check has to see again: it was 58 bytes");
  EXPECT_FALSE(load_report(key).has_value());
  folder_.write("train.jsonl", "{\"images\":[],\"question\":\"q\",\"answer\":\"a\"}\n");
  EXPECT_NE(key, check_key(*open_dataset({folder_ / "train.jsonl"}, {}), "options"));
}

TEST_F(CheckTest, ReportsThatMayHealAreNotKept) {
  const test::ScopedEnvironment cache("XDG_CACHE_HOME", folder_ / "cache");
  const auto dataset =
      open_dataset({folder_.write("gone.jsonl", "{\"image\":\"gone.bmp\",\"question\":\"q\",\"answer\":\"a\"}\n")}, {});
  const std::string key = check_key(*dataset, "");
  save_report(key, check(*dataset));
  EXPECT_FALSE(load_report(key).has_value());
}

}  // namespace
}  // namespace gemtune
