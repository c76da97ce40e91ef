#include "data/dataset.h"

#include "base/error.h"
#include "data/test_files.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace gemtune {
namespace {

using test::TempFolder;
using test::thrown_by;

constexpr const char* kFix = "; fix the row or set data.on_bad_row=skip";

RowMapping templates(const std::string& prompt, const std::string& answer) {
  RowMapping mapping;
  mapping.prompt = prompt;
  mapping.answer = answer;
  return mapping;
}

std::string user_text(const Row& row) {
  for (const Message& message : row.messages) {
    if (message.role != Role::kUser) continue;
    std::string text;
    for (const Part& part : message.parts) text += part.kind == Part::Kind::kImage ? "[image]" : part.text;
    return text;
  }
  return "";
}

std::string answer_text(const Row& row) {
  return row.messages.back().parts.at(0).text;
}

std::string row_fault(const Dataset& dataset, int64_t row) {
  return thrown_by<RowError>([&] { dataset.row(row); });
}

std::string open_fault(const std::string& source, const RowMapping& mapping = {}) {
  return thrown_by<Error>([&] { open_dataset({source}, mapping); });
}

TEST(Jsonl, MessagesKeepRolesPartsAndImagesInOrder) {
  TempFolder folder;
  folder.write("a.jpg", "A");
  folder.write("b.jpg", "B");
  const std::string file = folder.write(
      "train.jsonl",
      R"({"messages":[{"role":"system","content":"S"},{"role":"user","content":[{"type":"image"},{"type":"text","text":"U"},{"type":"image"}]},{"role":"assistant","content":"A"}],"images":["a.jpg","b.jpg"]})"
      "\n");
  const auto dataset = open_dataset({file}, {});
  ASSERT_EQ(dataset->size(), 1);
  const Row row = dataset->row(0);
  EXPECT_EQ(row.where, file + ":1");
  EXPECT_EQ(row.file, file);
  EXPECT_EQ(row.line, 1);
  ASSERT_EQ(row.messages.size(), 3u);
  EXPECT_EQ(row.messages[0].role, Role::kSystem);
  EXPECT_TRUE(row.messages[0].is_plain_string);
  EXPECT_EQ(user_text(row), "[image]U[image]");
  EXPECT_FALSE(row.messages[1].is_plain_string);
  EXPECT_EQ(row.messages[2].role, Role::kAssistant);
  ASSERT_EQ(row.images.size(), 2u);
  EXPECT_EQ(row.images[0].path, folder / "a.jpg");
  EXPECT_EQ(row.images[1].path, folder / "b.jpg");
}

TEST(Jsonl, AnImagePartMayNameItsOwnFile) {
  TempFolder folder;
  for (const char* name : {"a.jpg", "b.jpg", "c.jpg", "d.jpg"}) folder.write(name, "x");
  const std::string file = folder.write(
      "train.jsonl",
      R"({"messages":[{"role":"user","content":[{"type":"image","image":"a.jpg"},{"type":"image"},{"type":"image","path":"b.jpg"},{"type":"image_url","image_url":{"url":"c.jpg"}}]},{"role":"assistant","content":"A"}],"images":"d.jpg"})");
  const Row row = open_dataset({file}, {})->row(0);
  ASSERT_EQ(row.images.size(), 4u);
  EXPECT_EQ(row.images[0].path, folder / "a.jpg");
  EXPECT_EQ(row.images[1].path, folder / "d.jpg");
  EXPECT_EQ(row.images[2].path, folder / "b.jpg");
  EXPECT_EQ(row.images[3].path, folder / "c.jpg");
}

TEST(Jsonl, ATextPartWithANullImageIsText) {
  TempFolder folder;
  const std::string file = folder.write(
      "train.jsonl",
      R"({"messages":[{"role":"user","content":[{"type":"text","image":null,"text":"U"},{"image":null,"text":"V"}]},{"role":"assistant","content":[{"type":"text","text":"A","image":null}]}]})");
  const Row row = open_dataset({file}, {})->row(0);
  EXPECT_EQ(user_text(row), "UV");
  EXPECT_TRUE(row.images.empty());
}

TEST(Jsonl, PlacesAndImagesThatDifferStayVisible) {
  TempFolder folder;
  folder.write("a.jpg", "A");
  const std::string file = folder.write(
      "train.jsonl",
      R"({"messages":[{"role":"user","content":[{"type":"image"},{"type":"image"}]},{"role":"assistant","content":"A"}],"images":["a.jpg"]})"
      "\n"
      R"({"messages":[{"role":"user","content":"U"},{"role":"assistant","content":"A"}],"images":["a.jpg"]})");
  const auto dataset = open_dataset({file}, {});
  EXPECT_EQ(dataset->row(0).images.size(), 1u);
  EXPECT_EQ(dataset->row(0).messages[0].parts.size(), 2u);
  EXPECT_EQ(dataset->row(1).images.size(), 1u);
}

TEST(Jsonl, LinesCountFromOneAndBlankLinesAreNoRows) {
  TempFolder folder;
  const std::string file =
      folder.write("train.jsonl",
                   "\xEF\xBB\xBF{\"prompt\":\"p0\",\"completion\":\"c0\"}\r\n\r\n  \n{\"prompt\":\"p1\",\"completion\":\"c1\"}\n"
                   "{\"prompt\":\"p2\",\"completion\":\"c2\"}");
  const auto dataset = open_dataset({file}, {});
  ASSERT_EQ(dataset->size(), 3);
  EXPECT_EQ(dataset->row(0).line, 1);
  EXPECT_EQ(dataset->row(1).line, 4);
  EXPECT_EQ(dataset->row(2).line, 5);
  EXPECT_EQ(dataset->row(2).where, file + ":5");
  EXPECT_EQ(answer_text(dataset->row(0)), "c0");
  EXPECT_EQ(answer_text(dataset->row(2)), "c2");
}

TEST(Jsonl, ABrokenLineNamesItsPlace) {
  TempFolder folder;
  const std::string file = folder.write("train.jsonl",
                                        "{\"prompt\":\"p\",\"completion\":\"c\"}\n"
                                        "{\"prompt\":\"p\" \"completion\":\"c\"}\n"
                                        "[1]\n"
                                        "{\"prompt\":\"p\",\"prompt\":\"c\"}\n"
                                        "{\"prompt\":\"\xff\",\"completion\":\"c\"}\n" +
                                            std::string(100, '[') + "\n");
  const auto dataset = open_dataset({file}, {});
  EXPECT_EQ(
      row_fault(*dataset, 1),
      file + ":2: \"{\\\"prompt\\\":\\\"p\\\" \\\"completion\\\":\\\"c\\\"}\": is not JSON: wrong at byte 26 of the line" + kFix);
  EXPECT_EQ(row_fault(*dataset, 2), file + ":3: \"[1 items]\": is a list; expected a JSON object" + kFix);
  EXPECT_EQ(row_fault(*dataset, 3), file + ":4: the key \"prompt\" stands twice in one object" + kFix);
  EXPECT_EQ(row_fault(*dataset, 4), file + ":5: the line is not valid UTF-8" + kFix);
  EXPECT_EQ(row_fault(*dataset, 5), file + ":6: is nested deeper than 64 levels" + kFix);
}

TEST(Jsonl, MessagesThatAreNoneNameTheField) {
  TempFolder folder;
  const std::string file =
      folder.write("train.jsonl",
                   "{\"messages\":[]}\n"
                   "{\"messages\":[{\"role\":\"boss\",\"content\":\"U\"}]}\n"
                   "{\"messages\":[{\"role\":\"user\",\"content\":7}]}\n"
                   "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"video\"}]}]}\n"
                   "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"U\",\"image\":\"a.jpg\"}]}]}\n"
                   "{\"messages\":[{\"role\":\"user\",\"content\":null}]}\n");
  const auto dataset = open_dataset({file}, {});
  EXPECT_EQ(row_fault(*dataset, 0),
            file + ":1: messages \"[0 items]\": must be a list of messages, each with role and content" + kFix);
  EXPECT_EQ(row_fault(*dataset, 1), file + ":2: messages[0].role \"boss\": must be system, user or assistant" + kFix);
  EXPECT_EQ(row_fault(*dataset, 2), file +
                                        ":3: messages[0].content 7: must be a string or a list of parts {\"type\": \"text\", "
                                        "\"text\": …} and {\"type\": \"image\"}" +
                                        kFix);
  EXPECT_EQ(row_fault(*dataset, 3), file + ":4: messages[0].content[0].type \"video\": must be text or image" + kFix);
  EXPECT_EQ(
      row_fault(*dataset, 4),
      file + ":5: messages[0].content[0].image \"a.jpg\": a text part holds no image; give the image a part of its own" + kFix);
  EXPECT_EQ(row_fault(*dataset, 5), file +
                                        ":6: messages[0].content: must be a string or a list of parts {\"type\": \"text\", "
                                        "\"text\": …} and {\"type\": \"image\"}" +
                                        kFix);
}

TEST(Jsonl, AFaultCarriesItsFields) {
  TempFolder folder;
  const std::string file =
      folder.write("train.jsonl", "{\"question\":\"q\",\"answer\":\"a\"}\n{\"question\":\"q\",\"answer\":null}\n");
  const auto dataset = open_dataset({file}, {});
  try {
    dataset->row(1);
    FAIL() << "nothing was thrown";
  } catch (const RowError& error) {
    EXPECT_EQ(error.fault().row, 1);
    EXPECT_EQ(error.fault().file, file);
    EXPECT_EQ(error.fault().line, 2);
    EXPECT_EQ(error.fault().where, file + ":2");
    EXPECT_EQ(error.fault().field, "answer");
    EXPECT_EQ(error.fault().value, "");
    EXPECT_EQ(error.fault().rule, std::string("is empty, and data.answer is made from it") + kFix);
    EXPECT_EQ(error.fault().reason, reason::kNoAnswer);
  }
}

TEST(Jsonl, AMissingImageIsNamedWithItsRow) {
  TempFolder folder;
  const std::string file = folder.write(
      "train.jsonl",
      R"({"messages":[{"role":"user","content":[{"type":"image"}]},{"role":"assistant","content":"A"}],"images":["a/b.jpg"]})");
  const auto dataset = open_dataset({file}, {});
  EXPECT_EQ(row_fault(*dataset, 0), file + ":1: images[0] \"a/b.jpg\": the file does not exist" + kFix);
}

TEST(Jsonl, ReadsTheSameFromManyThreads) {
  TempFolder folder;
  std::string text;
  for (int i = 0; i < 500; ++i) text += "{\"prompt\":\"p\",\"completion\":\"c" + std::to_string(i) + "\"}\n";
  const auto dataset = open_dataset({folder.write("train.jsonl", text)}, {});
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = t; i < 500; i += 3) {
        if (answer_text(dataset->row(i)) != "c" + std::to_string(i)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Jsonl, DataUrisHoldTheImage) {
  TempFolder folder;
  const std::string file = folder.write("train.jsonl",
                                        "{\"image\":\"data:image/png;base64,QUJD/+8=\",\"caption\":\"c\"}\n"
                                        "{\"image\":\"data:image/png;base64,Q*\",\"caption\":\"c\"}\n");
  const auto dataset = open_dataset({file}, {});
  EXPECT_EQ(dataset->row(0).images.at(0).bytes, "ABC\xff\xef");
  EXPECT_EQ(row_fault(*dataset, 1),
            file + ":2: image \"data:image/png;base64,Q*\": is not of the form data:image/…;base64,…" + kFix);
}

TEST(Templates, RenderColumnsAsWritten) {
  TempFolder folder;
  const std::string file = folder.write(
      "train.jsonl",
      R"({"Product Name":"Red mug","price":19.90,"big":12345678901234567890123,"count":3,"new":true,"none":null,"answer":" A mug. "})");
  const Row row = open_dataset({file}, templates("{{{Product Name}}} {price} {big} {count} {new}|{none}|", "{answer}"))->row(0);
  EXPECT_EQ(user_text(row), "{Red mug} 19.90 12345678901234567890123 3 true||");
  EXPECT_EQ(answer_text(row), " A mug. ");
}

TEST(Templates, TheSystemTurnAndThePlaceOfThePicture) {
  TempFolder folder;
  folder.write("a.png", "x");
  const std::string file = folder.write("train.jsonl", R"({"file_name":"a.png","cat":"Kitchen","a":"A"})");
  RowMapping mapping = templates("About {cat}.", "{a}");
  mapping.system = "You sell {cat}.";
  Row row = open_dataset({file}, mapping)->row(0);
  ASSERT_EQ(row.messages.size(), 3u);
  EXPECT_EQ(row.messages[0].parts.at(0).text, "You sell Kitchen.");
  EXPECT_EQ(user_text(row), "About Kitchen.[image]");
  mapping.image_first = true;
  row = open_dataset({file}, mapping)->row(0);
  EXPECT_EQ(user_text(row), "[image]About Kitchen.");
}

TEST(Templates, ARowWithoutAPictureIsATextRow) {
  TempFolder folder;
  folder.write("a.png", "x");
  const std::string file = folder.write("train.jsonl",
                                        "{\"image\":\"a.png\",\"question\":\"q\",\"answer\":\"a\"}\n"
                                        "{\"image\":null,\"question\":\"q\",\"answer\":\"a\"}\n"
                                        "{\"question\":\"q\",\"answer\":\"a\"}\n"
                                        "{\"image\":[\"a.png\",\"a.png\"],\"question\":\"q\",\"answer\":\"a\"}\n");
  const auto dataset = open_dataset({file}, {});
  EXPECT_EQ(user_text(dataset->row(0)), "q[image]");
  EXPECT_EQ(user_text(dataset->row(1)), "q");
  EXPECT_EQ(user_text(dataset->row(2)), "q");
  EXPECT_EQ(user_text(dataset->row(3)), "q[image][image]");
}

TEST(Jsonl, PicturesMayComeLongAfterTextRows) {
  TempFolder folder;
  folder.write("a.png", "x");
  std::string text;
  for (int i = 0; i < 150; ++i)
    text += "{\"messages\":[{\"role\":\"user\",\"content\":\"U\"},{\"role\":\"assistant\",\"content\":\"A\"}]}\n";
  text += R"({"messages":[{"role":"user","content":[{"type":"image"}]},{"role":"assistant","content":"A"}],"images":["a.png"]})";
  const auto dataset = open_dataset({folder.write("train.jsonl", text)}, {});
  EXPECT_EQ(dataset->row(150).images.size(), 1u);
  EXPECT_TRUE(dataset->row(0).images.empty());
}

TEST(Templates, ABlankAnswerIsAFault) {
  TempFolder folder;
  const std::string file = folder.write(
      "train.jsonl", "{\"q\":\"q\",\"a\":\"  \"}\n{\"q\":\"q\"}\n{\"q\":\"\",\"a\":\"a\"}\n{\"q\":[1],\"a\":\"a\"}\n");
  const auto dataset = open_dataset({file}, templates("{q}", "Answer: {a}"));
  EXPECT_EQ(row_fault(*dataset, 0), file + ":1: a: is empty, and data.answer is made from it" + kFix);
  EXPECT_EQ(row_fault(*dataset, 1), file + ":2: a: is empty, and data.answer is made from it" + kFix);
  EXPECT_EQ(row_fault(*dataset, 2), file + ":3: data.prompt: the row has neither a prompt nor a picture" + kFix);
  EXPECT_EQ(row_fault(*dataset, 3),
            file + ":4: q \"[1 items]\": is a list; a template takes strings, numbers and truth values" + kFix);
}

TEST(Templates, AnUnknownColumnIsRefusedWithASuggestion) {
  TempFolder folder;
  const std::string file = folder.write("train.jsonl", R"({"Product Name":"x","Category":"y"})");
  EXPECT_EQ(open_fault(file, templates("{Prodct Name}", "{Category}")),
            "data.prompt: " + file +
                " has no column \"Prodct Name\"; did you mean \"Product Name\"? (columns: Product Name, Category)");
  EXPECT_EQ(open_fault(file, templates("{Category}", "{zzzzzzzzzz}")),
            "data.answer: " + file + " has no column \"zzzzzzzzzz\" (columns: Product Name, Category)");
  RowMapping mapping = templates("{Category}", "{Category}");
  mapping.image_column = "categry";
  EXPECT_EQ(
      open_fault(file, mapping),
      "data.image_column: " + file + " has no column \"categry\"; did you mean \"Category\"? (columns: Product Name, Category)");
}

TEST(Templates, BracesThatDoNotPairAreRefused) {
  TempFolder folder;
  const std::string file = folder.write("train.jsonl", R"({"q":"x","a":"y"})");
  EXPECT_EQ(open_fault(file, templates("say {q", "{a}")),
            "data.prompt: \"say {q\": \"{\" at character 5 is not closed; write \"{{\" for a brace in the text");
  EXPECT_EQ(open_fault(file, templates("q}", "{a}")),
            "data.prompt: \"q}\": \"}\" at character 2 closes nothing; write \"}}\" for a brace in the text");
  EXPECT_EQ(open_fault(file, templates("{}", "{a}")),
            "data.prompt: \"{}\": the braces at character 1 name no column; write \"{{}}\" for braces in the text");
}

TEST(Templates, HalfASettingIsRefused) {
  TempFolder folder;
  const std::string file = folder.write("train.jsonl", R"({"q":"x","a":"y"})");
  EXPECT_EQ(open_fault(file, templates("{q}", "")),
            "data.answer: is not set, though data.prompt is; write the template of the answer, such as \"{a}\"");
  EXPECT_EQ(open_fault(file, templates("", "{a}")),
            "data.prompt: is not set, and " + file + " has no picture column, so the user turn would be empty (columns: q, a)");
  EXPECT_EQ(open_fault(file, templates("{q}", "yes")),
            "data.answer: \"yes\" names no column, so every row would have the same answer (columns: q, a)");
}

TEST(Columns, CommonPairsAreRecognisedAndSaid) {
  TempFolder folder;
  const std::string file = folder.write("train.jsonl", R"({"id":1,"Question":"q","Answer":"a"})");
  const auto dataset = open_dataset({file}, {});
  EXPECT_EQ(user_text(dataset->row(0)), "q");
  EXPECT_EQ(answer_text(dataset->row(0)), "a");
  EXPECT_EQ(
      dataset->description(),
      "1 row of " + file + " (columns: id, Question, Answer; recognised: data.prompt=\"{Question}\" data.answer=\"{Answer}\")");
}

TEST(Columns, ACaptionBesideAPictureIsRecognised) {
  TempFolder folder;
  folder.write("a.png", "x");
  const std::string file = folder.write("train.jsonl", R"({"image":"a.png","caption":"A duck."})");
  const Row row = open_dataset({file}, {})->row(0);
  EXPECT_EQ(user_text(row), "[image]");
  EXPECT_EQ(answer_text(row), "A duck.");
}

TEST(Columns, WhatIsAmbiguousIsRefusedWithTheLinesToWrite) {
  TempFolder folder;
  const auto fault = [&](const char* text) {
    const std::string file = folder.write("train.jsonl", text);
    std::string what = open_fault(file);
    if (what.starts_with(file)) what.erase(0, file.size());
    return what;
  };
  EXPECT_EQ(
      fault(R"({"a":"x","b":"y"})"),
      ": cannot tell which columns are the prompt and the answer (columns: a, b); say it in the recipe's data section, such as "
      "prompt: \"{a}\" and answer: \"{b}\"");
  EXPECT_EQ(
      fault(R"({"question":"x","answer":"y","prompt":"z","response":"w"})"),
      ": cannot tell which columns are the prompt and the answer (columns: question, answer, prompt, response); say it in the "
      "recipe's data section, such as prompt: \"{question}\" and answer: \"{response}\"");
  EXPECT_EQ(
      fault(R"({"instruction":"x","input":"i","output":"y"})"),
      ": cannot tell which columns are the prompt and the answer (columns: instruction, input, output); say it in the recipe's "
      "data section, such as prompt: \"{instruction}\" and answer: \"{output}\"");
  EXPECT_EQ(fault(R"({"image":"x","images":"i","question":"y","answer":"a"})"),
            ": columns image and images may both hold the picture; name one with data.image_column");
}

TEST(Sources, AreConcatenatedInOrder) {
  TempFolder folder;
  const std::string b =
      folder.write("b.jsonl", "{\"prompt\":\"p\",\"completion\":\"b0\"}\n{\"prompt\":\"p\",\"completion\":\"b1\"}\n");
  const std::string a = folder.write("a.csv", "question,answer\nq,a0\n");
  const auto dataset = open_dataset({b, a}, {});
  ASSERT_EQ(dataset->size(), 3);
  EXPECT_EQ(answer_text(dataset->row(1)), "b1");
  const Row last = dataset->row(2);
  EXPECT_EQ(answer_text(last), "a0");
  EXPECT_EQ(last.index, 2);
  EXPECT_EQ(last.where, a + ":2");
  EXPECT_EQ(dataset->files(), (std::vector<std::string>{b, a}));
  EXPECT_EQ(thrown_by<Error>([&] { dataset->row(3); }), "row 3 does not exist; rows count from 0 to 2");
}

TEST(Sources, AGlobIsSorted) {
  TempFolder folder;
  folder.write("part-2.jsonl", R"({"prompt":"p","completion":"2"})");
  folder.write("part-1.jsonl", R"({"prompt":"p","completion":"1"})");
  const auto dataset = open_dataset({folder / "part-*.jsonl"}, {});
  EXPECT_EQ(answer_text(dataset->row(0)), "1");
  EXPECT_EQ(answer_text(dataset->row(1)), "2");
  EXPECT_EQ(open_fault(folder / "none-*.jsonl"), folder / "none-*.jsonl: no file matches the pattern");
}

TEST(Sources, ThatHoldNothingAreRefusedNeverEmpty) {
  TempFolder folder;
  const std::string empty = folder.write("empty.jsonl", "");
  const std::string blank = folder.write("blank.jsonl", "\n \n");
  const std::string list = folder.write("list.jsonl", "[{\"a\":1}]\n");
  const std::string text = folder.write("notes.txt", "x");
  const std::string header = folder.write("header.csv", "question,answer\n");
  EXPECT_EQ(open_fault(empty), empty + ": is empty; expected one JSON object a line");
  EXPECT_EQ(open_fault(blank), blank + ": holds no rows, only blank lines; expected one JSON object a line");
  EXPECT_EQ(open_fault(list), list + ":1: opens a JSON list; expected one JSON object a line (jq -c '.[]' FILE writes it so)");
  EXPECT_EQ(open_fault(text), text + ": is no source of rows; expected .jsonl, .csv, .parquet or a folder");
  EXPECT_EQ(open_fault(header), header + ": holds a header but no rows");
  EXPECT_EQ(open_fault(folder / "absent.jsonl"), folder /
                                                     "absent.jsonl: no such file or folder; a data set of the hub is downloaded "
                                                     "first by: hf download --repo-type dataset ID");
  EXPECT_EQ(open_fault("gs://bucket/train.jsonl"),
            "gs://bucket/train.jsonl: rows are read from local files; copy the data beside the job first (gcloud storage cp -r, "
            "aws s3 cp)");
  EXPECT_EQ(thrown_by<Error>([] { open_dataset({}, {}); }),
            "data.train: names no source; expected a .jsonl, .csv or .parquet file or a folder");
  EXPECT_EQ(
      open_fault(folder.path()),
      folder.path() + ": holds no metadata.jsonl, metadata.csv or .parquet file; expected an image folder or parquet files");
}

TEST(Csv, QuotedFieldsHoldCommasQuotesAndLines) {
  TempFolder folder;
  const std::string file =
      folder.write("train.csv", "\xEF\xBB\xBFquestion,answer\r\n\"a, \"\"b\"\"\nc\",5\" pipe\r\n\r\nq,1.50\n");
  const auto dataset = open_dataset({file}, {});
  ASSERT_EQ(dataset->size(), 2);
  EXPECT_EQ(user_text(dataset->row(0)), "a, \"b\"\nc");
  EXPECT_EQ(answer_text(dataset->row(0)), "5\" pipe");
  EXPECT_EQ(dataset->row(0).line, 2);
  EXPECT_EQ(answer_text(dataset->row(1)), "1.50");
  EXPECT_EQ(dataset->row(1).line, 5);
}

TEST(Csv, RaggedRowsAreFaults) {
  TempFolder folder;
  const std::string file = folder.write("train.csv", "question,answer\nq,a\nq,a,b\n\"q,a\n");
  const auto dataset = open_dataset({file}, {});
  EXPECT_EQ(row_fault(*dataset, 1), file + ":3: has 3 fields, the header has 2" + kFix);
  EXPECT_EQ(row_fault(*dataset, 2), file + ":4: a quoted field is not closed before the end of the file" + kFix);
  const std::string twice = folder.write("twice.csv", "a,a\n1,2\n");
  EXPECT_EQ(open_fault(twice), twice + ":1: column \"a\" stands twice in the header; rename one");
}

TEST(ImageFolder, MetadataNamesTheImagesAlsoInSubfolders) {
  TempFolder folder;
  folder.write("pictures/duck.png", "x");
  folder.write("pictures/sub/mug.png", "y");
  folder.write("pictures/metadata.csv", "file_name,text\nduck.png,A duck.\nsub/mug.png,A mug.\n");
  const auto dataset = open_dataset({folder / "pictures"}, {});
  ASSERT_EQ(dataset->size(), 2);
  EXPECT_EQ(dataset->row(1).images.at(0).path, folder / "pictures/sub/mug.png");
  EXPECT_EQ(answer_text(dataset->row(1)), "A mug.");
  EXPECT_EQ(dataset->files(), std::vector<std::string>{folder / "pictures/metadata.csv"});
}

TEST(ImageFolder, ImagesWithoutARowAreWarnedOfOnce) {
  TempFolder folder;
  folder.write("duck.png", "x");
  folder.write("sub/mug.png", "y");
  folder.write("lost.jpg", "z");
  folder.write("notes.txt", "z");
  const std::string file = folder.write("metadata.jsonl", "{\"file_name\":\"./duck.png\",\"text\":\"A duck.\"}\n");
  testing::internal::CaptureStderr();
  open_dataset({folder.path()}, {});
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find(file + ": 2 images in the folder are named by no row and not used: lost.jpg, sub/mug.png"),
            std::string::npos)
      << log;
}

TEST(ImageFolder, WithoutMetadataIsRefused) {
  TempFolder folder;
  folder.write("duck.png", "x");
  EXPECT_EQ(
      open_fault(folder.path()),
      folder.path() + ": holds 1 images but no metadata.jsonl or metadata.csv; write one that names them in column file_name");
  folder.write("metadata.jsonl", R"({"name":"duck.png","text":"A duck."})");
  EXPECT_EQ(open_fault(folder.path()),
            folder /
                "metadata.jsonl: has no column file_name, which names each row's image (columns: name, "
                "text); rename the column or set data.image_column");
  folder.write("metadata.csv", "file_name,text\nduck.png,x\n");
  EXPECT_EQ(open_fault(folder.path()), folder.path() + ": holds both metadata.csv and metadata.jsonl; keep one");
}

class ImagePaths : public testing::Test {
 protected:
  // The fault of a row that names `name`, without the place.
  std::string fault_of(const std::string& name) {
    const std::string file = folder_.write("data/train.jsonl", "{\"image\":\"" + name + "\",\"caption\":\"c\"}");
    const auto dataset = open_dataset({file}, {});
    std::string what = row_fault(*dataset, 0);
    EXPECT_TRUE(what.starts_with(file + ":1: image ")) << what;
    return what.substr((file + ":1: image ").size());
  }
  TempFolder folder_;
};

TEST_F(ImagePaths, ThatLeaveTheFolderAreRefused) {
  folder_.write("secret.png", "x");
  const std::string climbs = std::string(": leaves the folder of the file that names it") + kFix;
  const std::string absolute = std::string(": an absolute path; name a file in the folder of the file that names it") + kFix;
  EXPECT_EQ(fault_of("../secret.png"), "\"../secret.png\"" + climbs);
  EXPECT_EQ(fault_of("a/../../secret.png"), "\"a/../../secret.png\"" + climbs);
  EXPECT_EQ(fault_of("/etc/hostname"), "\"/etc/hostname\"" + absolute);
  EXPECT_EQ(fault_of("C:/x.png"), "\"C:/x.png\"" + absolute);
  EXPECT_EQ(
      fault_of("file:///etc/hostname"),
      std::string("\"file:///etc/hostname\": file:// is not read; name a file in the folder of the file that names it") + kFix);
  EXPECT_EQ(
      fault_of("http://host/a.png"),
      std::string("\"http://host/a.png\": http:// is not read; name a file in the folder of the file that names it") + kFix);
}

TEST_F(ImagePaths, SymbolicLinksOutOfTheFolderAreRefusedUnread) {
  const std::string secret = folder_.write("secret.png", "x");
  std::filesystem::create_directories(folder_ / "data/inner");
  folder_.write("data/inner/ok.png", "x");
  std::filesystem::create_symlink(secret, folder_ / "data/link.png");
  std::filesystem::create_directory_symlink(folder_.path(), folder_ / "data/up");
  std::filesystem::create_symlink("inner/ok.png", folder_ / "data/fine.png");
  struct stat before {};
  ASSERT_EQ(::stat(secret.c_str(), &before), 0);
  const std::string out = std::string(": a symbolic link leads out of the folder of the file that names it") + kFix;
  EXPECT_EQ(fault_of("link.png"), "\"link.png\"" + out);
  EXPECT_EQ(fault_of("up/secret.png"), "\"up/secret.png\"" + out);
  struct stat after {};
  ASSERT_EQ(::stat(secret.c_str(), &after), 0);
  EXPECT_EQ(before.st_atim.tv_nsec, after.st_atim.tv_nsec);

  const std::string file = folder_.write(
      "data/train.jsonl", "{\"image\":\"fine.png\",\"caption\":\"c\"}\n{\"image\":\"inner/../inner/ok.png\",\"caption\":\"c\"}");
  const auto dataset = open_dataset({file}, {});
  EXPECT_EQ(dataset->row(0).images.at(0).path, folder_ / "data/fine.png");
  EXPECT_EQ(dataset->row(1).images.size(), 1u);
}

TEST_F(ImagePaths, OnlyRegularFilesAreOpened) {
  std::filesystem::create_directories(folder_ / "data/folder.png");
  ASSERT_EQ(::mkfifo((folder_ / "data/pipe.png").c_str(), 0600), 0);
  EXPECT_EQ(fault_of("folder.png"), std::string("\"folder.png\": is not a regular file") + kFix);
  EXPECT_EQ(fault_of("pipe.png"), std::string("\"pipe.png\": is not a regular file") + kFix);
}

TEST_F(ImagePaths, TheHubsCacheMayLinkToItsBlobs) {
  folder_.write("hub/datasets--o--n/blobs/abc", "x");
  const std::string snapshot = "hub/datasets--o--n/snapshots/rev/";
  folder_.write("outside.png", "x");
  const std::string file =
      folder_.write(snapshot + "train.jsonl", "{\"image\":\"a.png\",\"caption\":\"c\"}\n{\"image\":\"b.png\",\"caption\":\"c\"}");
  std::filesystem::create_symlink("../../blobs/abc", folder_ / (snapshot + "a.png"));
  std::filesystem::create_symlink("../../../../outside.png", folder_ / (snapshot + "b.png"));
  const auto dataset = open_dataset({file}, {});
  EXPECT_EQ(dataset->row(0).images.at(0).path, folder_ / (snapshot + "a.png"));
  EXPECT_NE(row_fault(*dataset, 1).find("a symbolic link leads out"), std::string::npos);
}

}  // namespace
}  // namespace gemtune
