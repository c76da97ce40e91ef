#include "data/chat.h"

#include "base/error.h"
#include "data/dataset.h"
#include "data/test_tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace gemtune {
namespace {

using test::gemma_tokenizer;
using test::kNoAssets;
using test::SmallTokenizer;
using test::thrown_by;
using Ids = std::vector<int32_t>;

constexpr int32_t kSoftPerImage = 3;
constexpr const char* kFix = "; fix the row or set data.on_bad_row=skip";

ChatTokens small_tokens() {
  ChatTokens tokens;
  tokens.start_of_turn = 4;
  tokens.end_of_turn = 5;
  tokens.start_of_image = 6;
  tokens.end_of_image = 7;
  tokens.image_soft = 8;
  tokens.tokens_per_image = kSoftPerImage;
  return tokens;
}

std::shared_ptr<const Tokenizer> small_tokenizer() {
  static const auto tokenizer = SmallTokenizer().make();
  return tokenizer;
}

Chat small_chat(ChatOptions options = {}) {
  return Chat(small_tokenizer(), small_tokens(), options);
}

Part text(const std::string& value) {
  return {Part::Kind::kText, value};
}
Part image() {
  return {Part::Kind::kImage, ""};
}
Message system(const std::string& value) {
  return {Role::kSystem, {text(value)}, true};
}
Message user(const std::string& value) {
  return {Role::kUser, {text(value)}, true};
}
Message user(std::vector<Part> parts) {
  return {Role::kUser, std::move(parts), false};
}
Message assistant(const std::string& value) {
  return {Role::kAssistant, {text(value)}, true};
}

Row row_of(std::vector<Message> messages, size_t num_images = 0) {
  Row row;
  row.index = 3;
  row.where = "train.jsonl:4";
  row.file = "train.jsonl";
  row.line = 4;
  row.messages = std::move(messages);
  row.images.resize(num_images);
  return row;
}

std::string fault(const Row& row, ChatOptions options = {}) {
  return thrown_by<RowError>([&] { small_chat(options).sample(row); });
}

std::string fault_reason(const Row& row, ChatOptions options = {}) {
  try {
    small_chat(options).sample(row);
  } catch (const RowError& error) {
    return error.fault().reason;
  }
  return "";
}

// The pieces that carry loss, joined.
std::string targets(const Sample& sample, const Tokenizer& tokenizer = *small_tokenizer()) {
  Ids ids;
  for (size_t i = 0; i < sample.token_ids.size(); ++i) {
    if (sample.target_mask[i] != 0) ids.push_back(sample.token_ids[i]);
  }
  return tokenizer.decode(ids, Tokenizer::Special::kKeep);
}

std::string whole(const Sample& sample, const Tokenizer& tokenizer = *small_tokenizer()) {
  return tokenizer.decode(sample.token_ids, Tokenizer::Special::kKeep);
}

TEST(Chat, FoldsTheSystemTextIntoTheFirstUserTurn) {
  const Sample sample = small_chat().sample(row_of({system(" S "), user(" U\n"), assistant(" A ")}));
  EXPECT_EQ(sample.text, "<bos><start_of_turn>user\n S \n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n");
  EXPECT_EQ(whole(sample), sample.text);
  EXPECT_EQ(sample.row, 3);
}

TEST(Chat, OnlyAssistantTurnsAreTargets) {
  const Row row = row_of({user("U"), assistant("first"), user("V"), assistant("second")});
  EXPECT_EQ(targets(small_chat().sample(row)), "first<end_of_turn>second<end_of_turn>");
  EXPECT_EQ(targets(small_chat({.loss_on = LossOn::kLastAnswer}).sample(row)), "second<end_of_turn>");
  const Sample sample = small_chat().sample(row);
  EXPECT_EQ(sample.target_mask.size(), sample.token_ids.size());
  EXPECT_EQ(sample.target_mask.back(), 0);
  EXPECT_EQ(sample.num_targets(), std::count(sample.target_mask.begin(), sample.target_mask.end(), 1));
}

TEST(Chat, AllTextIsTargetAndTheLastNewlineGoes) {
  const Sample sample = small_chat({.loss_on = LossOn::kAll}).sample(row_of({user({text("U"), image()}), assistant("A")}, 1));
  EXPECT_EQ(sample.text, "<bos><start_of_turn>user\nU<start_of_image><end_of_turn>\n<start_of_turn>model\nA<end_of_turn>");
  EXPECT_EQ(targets(sample), "<start_of_turn>user\nU\n\n<end_of_image>\n\n<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>");
  EXPECT_EQ(sample.target_mask[0], 0);
  EXPECT_EQ(sample.num_targets(), static_cast<int64_t>(sample.token_ids.size()) - 1 - 1 - kSoftPerImage);
}

TEST(Chat, ImagesStandWhereTheirPartsStand) {
  const Sample sample = small_chat().sample(row_of({user({image(), text("U"), image(), image()}), assistant("A")}, 3));
  const std::string block = "<start_of_image><image_soft_token><image_soft_token><image_soft_token><end_of_image>";
  EXPECT_EQ(whole(sample), "<bos><start_of_turn>user\n\n\n" + block + "\n\nU\n\n" + block + "\n\n\n\n" + block +
                               "\n\n<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n");
  EXPECT_EQ(sample.text,
            "<bos><start_of_turn>user\n<start_of_image>U<start_of_image><start_of_image><end_of_turn>\n<start_of_turn>model\nA"
            "<end_of_turn>\n");
  ASSERT_EQ(sample.image_first_token.size(), 3u);
  for (const int32_t first : sample.image_first_token) {
    EXPECT_EQ(sample.token_ids[first - 1], 6);
    EXPECT_EQ(sample.token_ids[first], 8);
    EXPECT_EQ(sample.token_ids[first + kSoftPerImage], 7);
  }
  // Newlines of the turn and of the image are one token.
  EXPECT_EQ(sample.token_ids[sample.image_first_token[0] - 2], small_tokenizer()->id_of("\n\n\n"));
  EXPECT_EQ(sample.token_ids[sample.image_first_token[2] - 2], small_tokenizer()->id_of("\n\n\n\n"));
}

TEST(Chat, TextPartsAreStrippedAndJoined) {
  const Sample sample = small_chat().sample(row_of({user({text(" a\n"), text("\t b ")}), assistant("\n\nA\u00A0")}));
  EXPECT_EQ(sample.text, "<bos><start_of_turn>user\nab<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n");
  EXPECT_EQ(targets(sample), "A<end_of_turn>");
}

TEST(Chat, AnImageInAnAnswerIsNoTarget) {
  const Row row = row_of({user("U"), {Role::kAssistant, {text("see"), image(), text("it")}, false}}, 1);
  EXPECT_EQ(targets(small_chat().sample(row)), "seeit<end_of_turn>");
}

TEST(Chat, ThePromptEndsInTheOpenedModelTurn) {
  const Row row = row_of({system("S"), user({image(), text("U")}), assistant("A")}, 1);
  const Sample prompt = small_chat().prompt(row);
  EXPECT_EQ(prompt.text, "<bos><start_of_turn>user\nS\n\n<start_of_image>U<end_of_turn>\n<start_of_turn>model\n");
  EXPECT_EQ(prompt.num_targets(), 0);
  EXPECT_EQ(prompt.image_first_token.size(), 1u);
  // What is trained begins with what is asked.
  const Ids trained = small_chat().sample(row).token_ids;
  EXPECT_TRUE(std::equal(prompt.token_ids.begin(), prompt.token_ids.end(), trained.begin()));
  EXPECT_EQ(small_chat().prompt(row_of({user("U")})).text, "<bos><start_of_turn>user\nU<end_of_turn>\n<start_of_turn>model\n");
}

TEST(Chat, RolesOutOfOrderAreFaults) {
  EXPECT_EQ(fault(row_of({system("S"), system("T"), user("U"), assistant("A")})),
            std::string("train.jsonl:4: messages[1].role \"system\": only the first message may be the system's") + kFix);
  EXPECT_EQ(fault(row_of({user("U"), user("V"), assistant("A")})),
            std::string("train.jsonl:4: messages[1].role \"user\": expected assistant: turns alternate, the user begins") + kFix);
  EXPECT_EQ(fault(row_of({assistant("A")})),
            std::string("train.jsonl:4: messages[0].role \"assistant\": expected user: turns alternate, the user begins") + kFix);
  EXPECT_EQ(fault(row_of({system("S")})), std::string("train.jsonl:4: messages: there is no user turn") + kFix);
  EXPECT_EQ(fault(row_of({})), std::string("train.jsonl:4: messages: there is no user turn") + kFix);
  EXPECT_EQ(fault_reason(row_of({})), reason::kRoles);
}

TEST(Chat, RowsWithoutAnAnswerAreFaults) {
  EXPECT_EQ(fault(row_of({user("U")})),
            std::string("train.jsonl:4: messages[0].role \"user\": the last message must be the assistant's answer") + kFix);
  EXPECT_EQ(fault(row_of({user("U"), assistant(" \n")})),
            std::string("train.jsonl:4: messages[1].content: the answer is empty") + kFix);
  EXPECT_EQ(fault_reason(row_of({user("U"), assistant("")})), reason::kNoAnswer);
  const Row blank_between = row_of({user("U"), assistant(""), user("V"), assistant("A")});
  EXPECT_EQ(fault(blank_between), std::string("train.jsonl:4: messages[1].content: the answer is empty") + kFix);
  EXPECT_EQ(targets(small_chat({.loss_on = LossOn::kLastAnswer}).sample(blank_between)), "A<end_of_turn>");
}

TEST(Chat, SystemMessagesThatWouldLoseContentAreFaults) {
  EXPECT_EQ(
      fault(row_of({{Role::kSystem, {text("S"), text("T")}, false}, user("U"), assistant("A")})),
      std::string("train.jsonl:4: messages[0].content: a system message is one text, this one has 2 of them; join them") + kFix);
  EXPECT_EQ(
      fault(row_of({{Role::kSystem, {text("S"), image()}, false}, user("U"), assistant("A")}, 1)),
      std::string("train.jsonl:4: messages[0].content[1]: a system message holds no image; move it to the user's turn") + kFix);
}

TEST(Chat, ImageCountsMustAgree) {
  EXPECT_EQ(fault(row_of({system("S"), user({image(), image()}), assistant("A")}, 1)),
            std::string("train.jsonl:4: messages[1].content: 2 image parts, the row has 1 image") + kFix);
  EXPECT_EQ(fault(row_of({user({image()}), assistant("A")}, 2)),
            std::string("train.jsonl:4: images: 1 image part, the row has 2 images") + kFix);
  EXPECT_EQ(fault(row_of({user("U"), assistant("A")}, 1)),
            std::string("train.jsonl:4: images: 0 image parts, the row has 1 image") + kFix);
  EXPECT_EQ(fault_reason(row_of({user("U"), assistant("A")}, 1)), reason::kImageCount);
  EXPECT_EQ(thrown_by<RowError>([] { small_chat().prompt(row_of({user({image()})})); }),
            std::string("train.jsonl:4: messages[0].content: 1 image part, the row has 0 images") + kFix);
}

TEST(Chat, AModelWithoutVisionTakesNoImages) {
  ChatTokens tokens = small_tokens();
  tokens.has_vision = false;
  const Chat chat(small_tokenizer(), tokens, {});
  EXPECT_EQ(targets(chat.sample(row_of({user("U"), assistant("A")}))), "A<end_of_turn>");
  EXPECT_EQ(
      thrown_by<RowError>([&] {
        chat.sample(row_of({user({image()}), assistant("A")}, 1));
      }),
      "train.jsonl:4: images: 1 image, but this model has no vision tower; remove the images or choose a model that has one");
}

TEST(Chat, TypedControlStringsAreOrdinaryText) {
  const Row row =
      row_of({user({image(), text("<end_of_turn>\n<start_of_turn>model\n<start_of_image><bos>")}), assistant("A<pad>")}, 1);
  const Sample sample = small_chat().sample(row);
  EXPECT_EQ(std::count(sample.token_ids.begin(), sample.token_ids.end(), 2), 1);
  EXPECT_EQ(std::count(sample.token_ids.begin(), sample.token_ids.end(), 4), 2);
  EXPECT_EQ(std::count(sample.token_ids.begin(), sample.token_ids.end(), 5), 2);
  EXPECT_EQ(std::count(sample.token_ids.begin(), sample.token_ids.end(), 6), 1);
  EXPECT_EQ(std::count(sample.token_ids.begin(), sample.token_ids.end(), 0), 0);
  EXPECT_EQ(targets(sample), "A<pad><end_of_turn>");
}

TEST(Chat, TypedControlStringsMayBeParsed) {
  const ChatOptions parse{.special_tokens = SpecialTokens::kParse};
  const Sample sample = small_chat(parse).sample(row_of({user("a<start_of_image>b<end_of_turn>"), assistant("A<pad>")}, 1));
  EXPECT_EQ(sample.image_first_token.size(), 1u);
  EXPECT_EQ(std::count(sample.token_ids.begin(), sample.token_ids.end(), 5), 3);
  EXPECT_EQ(targets(sample), "A<end_of_turn>");  // padding is never a target
  EXPECT_EQ(
      fault(row_of({user("<start_of_image>"), assistant("A")}), parse),
      std::string("train.jsonl:4: messages[0].content: 0 image parts and 1 placeholder typed in text, the row has 0 images") +
          kFix);
  EXPECT_EQ(fault(row_of({user({image(), text("<image_soft_token>")}), assistant("A")}, 1), parse),
            "train.jsonl:4: messages: 1 start_of_image and 4 image tokens where 1 image would be 1 and 3; remove the ones typed "
            "in text");
  EXPECT_EQ(fault(row_of({user("<bos>"), assistant("A")}), parse),
            std::string("train.jsonl:4: messages: <bos> is typed in the text, and a row has exactly one, in front") + kFix);
}

TEST(Chat, TypedControlStringsMayBeRefused) {
  const ChatOptions reject{.special_tokens = SpecialTokens::kReject};
  EXPECT_EQ(fault(row_of({user({text("a"), text("b <end_of_turn>")}), assistant("A")}), reject),
            "train.jsonl:4: messages[0].content[1].text \"<end_of_turn>\": control strings in text are refused "
            "(data.special_tokens=reject); remove it or set data.special_tokens=text");
  EXPECT_EQ(fault_reason(row_of({user("U"), assistant("<eos>")}), reject), reason::kControlText);
  EXPECT_EQ(targets(small_chat(reject).sample(row_of({user("<b>U</b>"), assistant("A")}))), "A<end_of_turn>");
}

TEST(Chat, LongRowsAreFaultsWithTheirLength) {
  const Row row = row_of({user("U"), assistant("0123456789")});
  const int64_t length = static_cast<int64_t>(small_chat().sample(row).token_ids.size());
  EXPECT_EQ(
      fault(row, {.max_length = length - 1}),
      fmt::format("train.jsonl:4: length {}: the limit is {} tokens (data.max_length); shorten the row, raise the limit or set "
                  "data.on_too_long=skip",
                  length, length - 1));
  EXPECT_EQ(fault_reason(row, {.max_length = length - 1, .on_too_long = TooLong::kSkip}), reason::kTooLong);
  EXPECT_EQ(small_chat({.max_length = length}).sample(row).token_ids.size(), static_cast<size_t>(length));
}

TEST(Chat, OnlyTheAnswerIsShortened) {
  const Row row = row_of({user({image(), text("U")}), assistant("0123é")}, 1);
  const Sample full = small_chat().sample(row);
  const auto length = static_cast<int64_t>(full.token_ids.size());
  const auto shortened = [&](int64_t limit) {
    return small_chat({.max_length = limit, .on_too_long = TooLong::kShorten}).sample(row);
  };
  // One token off the end is the newline: the answer keeps its own end_of_turn.
  EXPECT_EQ(targets(shortened(length - 1)), "0123é<end_of_turn>");
  const Sample without_end = shortened(length - 2);
  EXPECT_EQ(targets(without_end), "0123é");
  EXPECT_TRUE(without_end.text.ends_with("<start_of_turn>model\n0123é")) << without_end.text;
  const Sample half_a_character = shortened(length - 3);
  EXPECT_EQ(half_a_character.num_targets(), 5);
  EXPECT_TRUE(half_a_character.text.ends_with("<start_of_turn>model\n0123")) << half_a_character.text;
  const Sample least = shortened(length - 7);
  EXPECT_EQ(targets(least), "0");
  EXPECT_EQ(least.image_first_token, full.image_first_token);
  EXPECT_TRUE(std::equal(least.token_ids.begin(), least.token_ids.end(), full.token_ids.begin()));
  EXPECT_EQ(
      fault(row, {.max_length = length - 8, .on_too_long = TooLong::kShorten}),
      fmt::format("train.jsonl:4: length {}: the prompt alone has {} tokens, the limit is {} (data.max_length); shorten the "
                  "prompt or raise the limit",
                  length, length - 8, length - 8));
}

TEST(Chat, AnAnswerWithAnImageIsNotCut) {
  const Row row = row_of({user("U"), {Role::kAssistant, {image(), text("0123456789")}, false}}, 1);
  EXPECT_EQ(
      fault(row, {.max_length = 30, .on_too_long = TooLong::kShorten}),
      fmt::format("train.jsonl:4: length {}: the limit is 30 tokens (data.max_length), and an answer with an image is not cut",
                  small_chat().sample(row).token_ids.size()));
}

TEST(Chat, TokensThatAreNoneAreRefused) {
  ChatTokens tokens = small_tokens();
  tokens.end_of_turn = 300;
  EXPECT_EQ(thrown_by<Error>([&] { Chat(small_tokenizer(), tokens, {}); }),
            fmt::format("tokenizer: end_of_turn has id 300, which is \"{}\", not an added token; tokenizer.json and config.json "
                        "must belong to one model",
                        small_tokenizer()->piece_of(300)));
  tokens = small_tokens();
  tokens.image_soft = 262144;
  EXPECT_EQ(
      thrown_by<Error>([&] { Chat(small_tokenizer(), tokens, {}); }),
      "tokenizer: image_soft has id 262144, which is nothing, not an added token; tokenizer.json and config.json must belong "
      "to one model");
}

class GemmaChat : public testing::Test {
 protected:
  void SetUp() override {
    if (gemma_tokenizer() == nullptr) GTEST_SKIP() << kNoAssets;
  }
  static Sample sample(const Row& row, ChatOptions options = {}) {
    return Chat(gemma_tokenizer(), ChatTokens(), options).sample(row);
  }
  static Ids targets_at(const Sample& sample) {
    Ids places;
    for (size_t i = 0; i < sample.target_mask.size(); ++i) {
      if (sample.target_mask[i] != 0) places.push_back(static_cast<int32_t>(i));
    }
    return places;
  }
};

TEST_F(GemmaChat, ATextConversationHasThePublishedIds) {
  const Sample found = sample(row_of({system("S"), user("U"), assistant("A")}));
  EXPECT_EQ(found.token_ids, (Ids{2, 105, 2364, 107, 236773, 108, 236836, 106, 107, 105, 4368, 107, 236776, 106, 107}));
  EXPECT_EQ(targets_at(found), (Ids{12, 13}));
}

TEST_F(GemmaChat, AnImageBehindTheTextHasThePublishedPlaces) {
  const Sample found = sample(row_of({user({text("U"), image()}), assistant("A")}, 1));
  ASSERT_EQ(found.token_ids.size(), 273u);
  EXPECT_EQ(found.image_first_token, Ids{7});
  EXPECT_EQ(targets_at(found), (Ids{270, 271}));
  EXPECT_EQ(found.token_ids[5], 108);
  EXPECT_EQ(found.token_ids[6], 255999);
  EXPECT_EQ(found.token_ids[262], 262144);
  EXPECT_EQ(found.token_ids[263], 256000);
  EXPECT_EQ(found.token_ids[264], 108);
  EXPECT_EQ(found.token_ids[272], 107);
}

TEST_F(GemmaChat, AnImageBeforeTheTextMergesItsNewlinesWithTheTurns) {
  const Sample found = sample(row_of({user({image(), text("U")}), assistant("A")}, 1));
  ASSERT_EQ(found.token_ids.size(), 272u);
  EXPECT_EQ(found.image_first_token, Ids{5});
  EXPECT_EQ(Ids(found.token_ids.begin(), found.token_ids.begin() + 6), (Ids{2, 105, 2364, 109, 255999, 262144}));
  const Sample with_system = sample(row_of({system("S"), user({image(), text("U")}), assistant("A")}, 1));
  ASSERT_EQ(with_system.token_ids.size(), 274u);
  EXPECT_EQ(Ids(with_system.token_ids.begin() + 4, with_system.token_ids.begin() + 7), (Ids{236773, 110, 255999}));
}

TEST_F(GemmaChat, TwoImagesHaveThePublishedLengths) {
  const Sample adjacent = sample(row_of({user({image(), image(), text("U")}), assistant("A")}, 2));
  ASSERT_EQ(adjacent.token_ids.size(), 531u);
  EXPECT_EQ(adjacent.image_first_token, (Ids{5, 264}));
  EXPECT_EQ(Ids(adjacent.token_ids.begin() + 261, adjacent.token_ids.begin() + 264), (Ids{256000, 110, 255999}));
  EXPECT_EQ(std::count(adjacent.token_ids.begin(), adjacent.token_ids.end(), 262144), 512);
  EXPECT_EQ(sample(row_of({user({text("U"), image(), image()}), assistant("A")}, 2)).token_ids.size(), 532u);
}

Row tutorial_row(const std::string& answer, size_t num_images) {
  std::vector<Part> parts = {
      text("Create a Short Product description based on the provided <PRODUCT> and <CATEGORY> and image.\n"
           "Only return description. The description should be SEO optimized and for a better mobile search "
           "experience.\n\n<PRODUCT>\nRed mug\n</PRODUCT>\n\n<CATEGORY>\nKitchen\n</CATEGORY>\n")};
  if (num_images > 0) parts.push_back(image());
  return row_of({system("You are an expert product description writer for Amazon."), user(parts), assistant(answer)}, num_images);
}

TEST_F(GemmaChat, TheTutorialsPromptHasThePublishedLengths) {
  const Chat chat(gemma_tokenizer(), ChatTokens(), {});
  EXPECT_EQ(chat.prompt(tutorial_row("A", 0)).token_ids.size(), 79u);
  EXPECT_EQ(chat.prompt(tutorial_row("A", 1)).token_ids.size(), 339u);
}

TEST_F(GemmaChat, ALimitNeverCutsAnImage) {
  EXPECT_EQ(
      thrown_by<RowError>([] { sample(tutorial_row("A", 1), {.max_length = 300, .on_too_long = TooLong::kShorten}); }),
      "train.jsonl:4: length 342: the prompt alone has 339 tokens, the limit is 300 (data.max_length); shorten the prompt or "
      "raise the limit");
  EXPECT_EQ(thrown_by<RowError>([] { sample(tutorial_row("A", 1), {.max_length = 300}); }),
            "train.jsonl:4: length 342: the limit is 300 tokens (data.max_length); shorten the row, raise the limit or set "
            "data.on_too_long=skip");
  std::string answer = "A sturdy red mug";
  for (int i = 0; i < 20; ++i) answer += " for every morning";
  const Sample cut = sample(tutorial_row(answer, 1), {.max_length = 345, .on_too_long = TooLong::kShorten});
  ASSERT_EQ(cut.token_ids.size(), 345u);
  EXPECT_EQ(std::count(cut.token_ids.begin(), cut.token_ids.end(), 262144), 256);
  EXPECT_EQ(targets_at(cut), (Ids{339, 340, 341, 342, 343, 344}));
  EXPECT_NE(cut.token_ids.back(), 106);
}

}  // namespace
}  // namespace gemtune
