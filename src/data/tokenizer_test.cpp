#include "data/tokenizer.h"

#include "base/error.h"
#include "data/test_tokenizer.h"

#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <thread>

namespace gemtune {
namespace {

using test::gemma_tokenizer;
using test::kNoAssets;
using test::ScopedEnvironment;
using test::SmallTokenizer;
using test::TempFolder;
using test::thrown_by;
using Ids = std::vector<int32_t>;

std::vector<std::string> pieces_of(const Tokenizer& tokenizer, const std::vector<TextSpan>& spans) {
  std::vector<std::string> pieces;
  for (const int32_t id : tokenizer.encode(spans)) pieces.push_back(tokenizer.piece_of(id));
  return pieces;
}
std::vector<std::string> pieces_of(const Tokenizer& tokenizer, const std::string& text) {
  return pieces_of(tokenizer, {{text, true}});
}
using Pieces = std::vector<std::string>;

std::string parse_error(const SmallTokenizer& file) {
  return thrown_by<Error>([&] { file.make(); });
}

TEST(Tokenizer, MergesByRankAndThenFromTheLeft) {
  const auto tokenizer = SmallTokenizer().make();
  EXPECT_EQ(pieces_of(*tokenizer, "user"), (Pieces{"user"}));
  EXPECT_EQ(pieces_of(*tokenizer, "a user"), (Pieces{"a", "▁", "user"}));
  EXPECT_EQ(pieces_of(*tokenizer, " us"), (Pieces{"▁us"}));
  SmallTokenizer runs;
  runs.merges = {{"a", "a"}};
  EXPECT_EQ(pieces_of(*runs.make(), "aaaaa"), (Pieces{"aa", "aa", "a"}));
}

TEST(Tokenizer, UnknownCharactersBecomeTheirBytes) {
  const auto tokenizer = SmallTokenizer().make();
  EXPECT_EQ(pieces_of(*tokenizer, "é"), (Pieces{"<0xC3>", "<0xA9>"}));
  EXPECT_EQ(pieces_of(*tokenizer, "a\xFF\xC3"), (Pieces{"a", "<0xFF>", "<0xC3>"}));
}

TEST(Tokenizer, TheLongestAddedTokenMatchesFirst) {
  const auto tokenizer = SmallTokenizer().make();
  EXPECT_EQ(pieces_of(*tokenizer, "\n\n\n\n\n"), (Pieces{"\n\n\n\n", "\n"}));
  EXPECT_EQ(pieces_of(*tokenizer, "<b>x</b>"), (Pieces{"<b>", "x", "</b>"}));
}

TEST(Tokenizer, NewlineRunsMatchAcrossSpans) {
  const auto tokenizer = SmallTokenizer().make();
  EXPECT_EQ(pieces_of(*tokenizer, {{"a\n", true}, {"\nb", false}}), (Pieces{"a", "\n\n", "b"}));
}

TEST(Tokenizer, ControlStringsMatchOnlyWhereTheyMayStand) {
  const auto tokenizer = SmallTokenizer().make();
  const int32_t end_of_turn = tokenizer->id_of("<end_of_turn>");
  EXPECT_EQ(tokenizer->encode("<end_of_turn>"), Ids{end_of_turn});
  const auto held = [&](const std::vector<TextSpan>& spans) {
    const Ids ids = tokenizer->encode(spans);
    return std::count(ids.begin(), ids.end(), end_of_turn);
  };
  EXPECT_EQ(held({{"<end_of_turn>", false}}), 0);
  EXPECT_EQ(held({{"<end_of_", true}, {"turn>", true}}), 1);
  EXPECT_EQ(held({{"<end_of_", false}, {"turn>", true}}), 0);
  EXPECT_EQ(held({{"<end_of_", true}, {"turn>", false}}), 0);
  EXPECT_EQ(held({{"x", false}, {"<end_of_turn>", true}, {"<end_of_turn>", false}}), 1);
}

TEST(Tokenizer, MergesNeverMakeAControlToken) {
  SmallTokenizer file;
  file.more_vocabulary = R"(,"<p":900,"ad>":901,"d>":902)";
  file.more_merges = R"(,["<","p"],["d",">"],["a","d>"],["<p","ad>"])";
  const auto tokenizer = file.make();
  EXPECT_EQ(pieces_of(*tokenizer, {{"<pad>", false}}), (Pieces{"<p", "ad>"}));
  EXPECT_EQ(pieces_of(*tokenizer, {{"<pad>", true}}), (Pieces{"<pad>"}));
}

TEST(Tokenizer, PiecesTileTheTextByBytes) {
  const auto tokenizer = SmallTokenizer().make();
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (const Tokenizer::Piece& piece : tokenizer->encode_pieces({{"a user", false}, {"é\n", false}})) {
    ranges.emplace_back(piece.begin, piece.end);
  }
  EXPECT_EQ(ranges, (std::vector<std::pair<int64_t, int64_t>>{{0, 1}, {1, 2}, {2, 6}, {6, 7}, {7, 8}, {8, 9}}));
}

TEST(Tokenizer, DecodingRestoresTextAndReplacesBrokenBytesOneByOne) {
  const auto tokenizer = SmallTokenizer().make();
  const auto id = [&](const char* piece) { return tokenizer->id_of(piece); };
  const std::string text = "a user\n\nwith é and 😊";
  EXPECT_EQ(tokenizer->decode(tokenizer->encode(text), Tokenizer::Special::kKeep), text);
  EXPECT_EQ(tokenizer->decode({id("<0xC3>"), id("<0xA9>"), id("<0xFF>")}, Tokenizer::Special::kKeep), "\uFFFD\uFFFD\uFFFD");
  const Ids ids = {id("<bos>"), id("a"), id("<end_of_turn>"), id("\n"), 100000, -1};
  EXPECT_EQ(tokenizer->decode(ids, Tokenizer::Special::kKeep), "<bos>a<end_of_turn>\n");
  EXPECT_EQ(tokenizer->decode(ids, Tokenizer::Special::kSkip), "a\n");
}

TEST(Tokenizer, KnowsItsPieces) {
  const auto tokenizer = SmallTokenizer().make();
  EXPECT_EQ(tokenizer->id_of("<bos>"), 2);
  EXPECT_EQ(tokenizer->id_of("nothing"), -1);
  EXPECT_EQ(tokenizer->piece_of(2), "<bos>");
  EXPECT_EQ(tokenizer->piece_of(-1), "");
  EXPECT_EQ(tokenizer->piece_of(1 << 30), "");
  EXPECT_TRUE(tokenizer->is_special(2));
  EXPECT_FALSE(tokenizer->is_special(tokenizer->id_of("\n")));
  EXPECT_FALSE(tokenizer->is_special(1 << 30));
  EXPECT_TRUE(tokenizer->is_added(tokenizer->id_of("\n")));
  EXPECT_FALSE(tokenizer->is_added(tokenizer->id_of("user")));
  EXPECT_EQ(tokenizer->vocab_size(), tokenizer->id_of("▁us") + 1);
}

TEST(Tokenizer, FindsTheFirstControlString) {
  const auto tokenizer = SmallTokenizer().make();
  EXPECT_EQ(tokenizer->find_control("a <end_of_turn> <bos>"), "<end_of_turn>");
  EXPECT_EQ(tokenizer->find_control("<b>\n\n< bos>"), "");
}

TEST(Tokenizer, LongRunsTakeLinearithmicTime) {
  SmallTokenizer file;
  file.merges = {{"a", "a"}, {"aa", "aa"}};
  const auto tokenizer = file.make();
  const auto seconds = [&](size_t length) {
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(tokenizer->encode(std::string(length, 'a')).size(), length / 4);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  // A quadratic merge would take hours.
  EXPECT_LT(seconds(1000000), 60);
}

TEST(Tokenizer, ThreadsGetTheSameIds) {
  const auto tokenizer = SmallTokenizer().make();
  const std::string text = "a user wrote <b>this</b>\n\n é";
  const Ids expected = tokenizer->encode(text);
  std::vector<std::thread> threads;
  std::vector<int> equal(4, 0);
  for (size_t t = 0; t < equal.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) equal[t] += tokenizer->encode(text) == expected ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(equal, std::vector<int>(4, 200));
}

TEST(TokenizerFile, OtherModelsAndNormalizersAreRefusedByName) {
  SmallTokenizer unigram;
  unigram.model_type = "Unigram";
  EXPECT_EQ(parse_error(unigram),
            "tokenizer.json: model.type: is \"Unigram\", only BPE is supported; use the tokenizer.json that comes with Gemma 3");
  SmallTokenizer nfc;
  nfc.normalizer = R"({"type":"NFC"})";
  EXPECT_EQ(
      parse_error(nfc),
      "tokenizer.json: normalizer.type: is \"NFC\", only Replace is supported; use the tokenizer.json that comes with Gemma 3");
  SmallTokenizer sequence;
  sequence.normalizer = R"({"type":"Sequence","normalizers":[)" + sequence.normalizer + R"(,{"type":"Prepend","prepend":"▁"}]})";
  EXPECT_EQ(
      parse_error(sequence),
      "tokenizer.json: normalizer.normalizers[1].type: is \"Prepend\", only Replace is supported; use the tokenizer.json that "
      "comes with Gemma 3");
  SmallTokenizer bytes;
  bytes.pre_tokenizer = R"({"type":"ByteLevel"})";
  EXPECT_EQ(
      parse_error(bytes),
      "tokenizer.json: pre_tokenizer.type: is \"ByteLevel\", only Split is supported; use the tokenizer.json that comes with "
      "Gemma 3");
  SmallTokenizer ignoring;
  ignoring.more_model = R"("ignore_merges":true,)";
  EXPECT_EQ(
      parse_error(ignoring),
      "tokenizer.json: model.ignore_merges: is true, only false is supported; use the tokenizer.json that comes with Gemma 3");
  SmallTokenizer stripping;
  stripping.more_added = R"(,{"id":900,"content":"<x>","lstrip":true})";
  EXPECT_EQ(
      parse_error(stripping),
      "tokenizer.json: added_tokens[15].lstrip: is true, which is not supported; use the tokenizer.json that comes with Gemma 3");
}

TEST(TokenizerFile, HostileContentIsRefusedBeforeAnythingIsAllocatedByIt) {
  SmallTokenizer missing;
  missing.more_merges = R"(,["a","zzzz"])";
  EXPECT_EQ(parse_error(missing),
            "tokenizer.json: model.merges[4]: joins \"a\" and \"zzzz\", but model.vocab has no piece \"zzzz\"");
  SmallTokenizer no_product;
  no_product.more_merges = R"(,["a","user"])";
  EXPECT_EQ(parse_error(no_product),
            "tokenizer.json: model.merges[4]: joins \"a\" and \"user\", but model.vocab has no piece \"auser\"");
  SmallTokenizer huge;
  huge.more_vocabulary = R"(,"zz":18446744073709551615)";
  EXPECT_EQ(
      parse_error(huge),
      "tokenizer.json: model.vocab: piece \"zz\": id 18446744073709551615 is above the limit of 4194303; use the tokenizer.json "
      "that comes with Gemma 3");
  SmallTokenizer huge_added;
  huge_added.more_added = R"(,{"id":4000000000,"content":"<x>"})";
  EXPECT_EQ(
      parse_error(huge_added),
      "tokenizer.json: added_tokens[15]: id 4000000000 is above the limit of 4194303; use the tokenizer.json that comes with "
      "Gemma 3");
  SmallTokenizer negative;
  negative.more_vocabulary = R"(,"zz":-1)";
  EXPECT_EQ(parse_error(negative), "tokenizer.json: model.vocab: piece \"zz\" has no whole number as its id");
  SmallTokenizer twice;
  twice.more_vocabulary = R"(,"zz":2)";
  EXPECT_EQ(parse_error(twice), "tokenizer.json: model.vocab: pieces \"<bos>\" and \"zz\" have the same id 2");
  SmallTokenizer repeated;
  repeated.more_vocabulary = R"(,"a":900)";
  EXPECT_EQ(parse_error(repeated), "tokenizer.json: model.vocab: piece \"a\" stands there twice");
  SmallTokenizer clash;
  clash.more_added = R"(,{"id":2,"content":"<x>"})";
  EXPECT_EQ(parse_error(clash), "tokenizer.json: added_tokens[15]: \"<x>\" has id 2, which is the id of \"<bos>\"");
  SmallTokenizer moved;
  moved.more_added = R"(,{"id":900,"content":"a"})";
  EXPECT_EQ(parse_error(moved),
            fmt::format("tokenizer.json: added_tokens[15]: \"a\" has id 900, model.vocab or an earlier added token gives it {}",
                        SmallTokenizer().make()->id_of("a")));
  SmallTokenizer three;
  three.more_merges = R"(,["a","b","c"])";
  EXPECT_EQ(parse_error(three), "tokenizer.json: model.merges[5]: a merge is two strings");
  SmallTokenizer line;
  line.more_merges = R"(,"a b c")";
  EXPECT_EQ(parse_error(line), "tokenizer.json: model.merges[4]: \"a b c\" is not two pieces with one space between them");
  SmallTokenizer deep;
  deep.normalizer = std::string(100000, '[') + std::string(100000, ']');
  EXPECT_EQ(parse_error(deep).substr(0, 27), "tokenizer.json: normalizer[");
  EXPECT_EQ(thrown_by<Error>([] { Tokenizer::parse("{\"model\": nul", "tokenizer.json"); }),
            "tokenizer.json: is not valid JSON at byte 14; fetch the file again");
  EXPECT_EQ(thrown_by<Error>([] { Tokenizer::parse("[]", "tokenizer.json"); }),
            "tokenizer.json: model.type: is absent, only BPE is supported; use the tokenizer.json that comes with Gemma 3");
}

TEST(TokenizerFile, BytePiecesMustBeComplete) {
  std::string json = SmallTokenizer().json();
  json.replace(json.find("<0x41>"), 6, "<0xGG>");
  EXPECT_EQ(thrown_by<Error>([&] { Tokenizer::parse(json, "tokenizer.json"); }),
            "tokenizer.json: model.vocab: has no piece \"<0x41>\", which model.byte_fallback needs");
}

TEST(TokenizerFile, AFolderOrAFileMayBeNamed) {
  const TempFolder folder;
  const std::string json = SmallTokenizer().json();
  folder.write("tokenizer.json", json);
  EXPECT_EQ(Tokenizer::load(folder.path())->encode("user"), Tokenizer::load(folder / "tokenizer.json")->encode("user"));
  EXPECT_EQ(read_tokenizer_json(folder.path()), json);
  const TempFolder empty;
  EXPECT_EQ(thrown_by<Error>([&] { Tokenizer::load(empty.path()); }),
            empty.path() + ": holds no tokenizer.json; name the folder or file in model.tokenizer");
}

TEST(TokenizerFile, VocabularyFilesElsewhereAreRefused) {
  for (const std::string name : {"/etc/passwd", "../../secret", "a/../../b", "file:///x", "C:\\\\x"}) {
    const TempFolder folder;
    folder.write("tokenizer.json", SmallTokenizer().json());
    folder.write("tokenizer_config.json", R"({"vocab_file":")" + name + R"("})");
    EXPECT_EQ(thrown_by<Error>([&] { Tokenizer::load(folder.path()); }).substr(0, folder.path().size() + 38),
              folder / "tokenizer_config.json" + ": vocab_file: \"" + name.substr(0, 1));
  }
  const TempFolder folder;
  folder.write("tokenizer.json", SmallTokenizer().json());
  folder.write("tokenizer_config.json", R"({"vocab_file":"tokenizer.model","extra_special_tokens":{}})");
  EXPECT_NO_THROW(Tokenizer::load(folder.path()));
}

// Large enough to be cached.
std::string large_tokenizer_json() {
  SmallTokenizer file;
  for (int i = 0; i < 60000; ++i) file.more_vocabulary += fmt::format(",\"unused piece {}\":{}", i, 1000 + i);
  return file.json();
}

TEST(TokenizerCache, IsUsedAndReplacedWhenDamaged) {
  const TempFolder folder;
  const ScopedEnvironment cache("XDG_CACHE_HOME", folder / "cache");
  folder.write("tokenizer.json", large_tokenizer_json());
  const std::string text = "a user wrote this\n\n é";
  const Ids expected = Tokenizer::load(folder.path())->encode(text);
  const std::string kept_folder = folder / "cache/gemtune/tokenizers";
  std::vector<std::filesystem::path> kept(std::filesystem::directory_iterator(kept_folder), {});
  ASSERT_EQ(kept.size(), 1u);
  const auto size = std::filesystem::file_size(kept[0]);
  EXPECT_EQ(Tokenizer::load(folder.path())->encode(text), expected);

  for (const std::streamoff place : {std::streamoff{0}, std::streamoff{70}, static_cast<std::streamoff>(size / 2)}) {
    {
      std::fstream file(kept[0], std::ios::in | std::ios::out | std::ios::binary);
      file.seekg(place);
      const int byte = file.get();
      file.seekp(place);
      file.put(static_cast<char>(byte ^ 0x55));
    }
    EXPECT_EQ(Tokenizer::load(folder.path())->encode(text), expected);
  }
  std::filesystem::resize_file(kept[0], size / 2);
  EXPECT_EQ(Tokenizer::load(folder.path())->encode(text), expected);
  EXPECT_EQ(std::filesystem::file_size(kept[0]), size);
}

TEST(TokenizerCache, AChangedFileIsReadAnew) {
  const TempFolder folder;
  const ScopedEnvironment cache("XDG_CACHE_HOME", folder / "cache");
  std::string json = large_tokenizer_json();
  folder.write("tokenizer.json", json);
  EXPECT_EQ(Tokenizer::load(folder.path())->id_of("unused piece 7"), 1007);
  json.replace(json.find("unused piece 7\""), 14, "another name 7");
  folder.write("tokenizer.json", json);
  EXPECT_EQ(Tokenizer::load(folder.path())->id_of("another name 7"), 1007);
}

TEST(TokenizerCache, AnUnusableCacheFolderIsNoError) {
  const TempFolder folder;
  folder.write("cache", "a file where the folder should be");
  const ScopedEnvironment cache("XDG_CACHE_HOME", folder / "cache");
  folder.write("tokenizer.json", large_tokenizer_json());
  EXPECT_EQ(Tokenizer::load(folder.path())->encode("user").size(), 1u);
}

TEST(GemmaTokenizer, GivesTheIdsOfThePublicFile) {
  const auto tokenizer = gemma_tokenizer();
  if (tokenizer == nullptr) GTEST_SKIP() << kNoAssets;
  EXPECT_EQ(tokenizer->vocab_size(), 262145);
  const std::vector<std::pair<std::string, Ids>> cases = {
      {"상품 설명", {163212, 59587}},
      {"\U0001F44D\U0001F3FD", {240493, 242713}},
      {"\U0001F468\u200D\U0001F469\u200D\U0001F467", {243874, 237243, 243767, 237243, 244814}},
      {"\t\t\t\t\t\ttest", {255973, 2181}},
      {"a    b", {236746, 140, 236763}},
      {"Café déjà vu — 123 😊", {160319, 236859, 29234, 11042, 2192, 236743, 236770, 236778, 236800, 103453}},
      {"\u00E9", {236859}},
      {"e\u0301", {236744, 238288}},
      {"\n", {107}},
      {"\n\n\n", {109}},
      {"<start_of_turn>user\n", {105, 2364, 107}},
      {"", {}},
  };
  for (const auto& [text, ids] : cases) {
    EXPECT_EQ(tokenizer->encode(text), ids) << text;
    EXPECT_EQ(tokenizer->decode(ids, Tokenizer::Special::kKeep), text);
  }
}

TEST(GemmaTokenizer, OrdinaryTextHoldsNoneOfTheNineControlTokens) {
  const auto tokenizer = gemma_tokenizer();
  if (tokenizer == nullptr) GTEST_SKIP() << kNoAssets;
  std::vector<int32_t> special;
  for (int32_t id = 0; id < tokenizer->vocab_size(); ++id) {
    if (tokenizer->is_special(id)) special.push_back(id);
  }
  EXPECT_EQ(special, (Ids{0, 1, 2, 3, 105, 106, 255999, 256000, 262144}));
  for (const int32_t id : special) {
    const std::string text = tokenizer->piece_of(id);
    EXPECT_EQ(tokenizer->encode(text), Ids{id});
    const Ids typed = tokenizer->encode(text, false);
    for (const int32_t other : typed) EXPECT_FALSE(tokenizer->is_special(other)) << text;
    EXPECT_EQ(tokenizer->decode(typed, Tokenizer::Special::kKeep), text);
  }
}

}  // namespace
}  // namespace gemtune
