// Shared by the tokenizer's and the chat's unit tests: a small tokenizer of Gemma's kind, and Gemma's own where it is at hand.
#pragma once

#include "data/test_files.h"
#include "data/tokenizer.h"

#include <fmt/core.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace gemtune::test {

// Writes a tokenizer.json piece by piece. Ids count up: 256 byte pieces after the control tokens, then newline runs, "▁",
// printable ASCII, merged pieces.
struct SmallTokenizer {
  std::vector<std::string> special = {"<pad>",
                                      "<eos>",
                                      "<bos>",
                                      "<unk>",
                                      "<start_of_turn>",
                                      "<end_of_turn>",
                                      "<start_of_image>",
                                      "<end_of_image>",
                                      "<image_soft_token>"};
  std::vector<std::string> plain_added = {"\n", "\n\n", "\n\n\n", "\n\n\n\n", "<b>", "</b>"};
  std::vector<std::pair<std::string, std::string>> merges = {{"u", "s"}, {"e", "r"}, {"us", "er"}, {"▁", "us"}};
  std::string normalizer = R"({"type":"Replace","pattern":{"String":" "},"content":"▁"})";
  std::string pre_tokenizer = R"({"type":"Split","pattern":{"String":" "},"behavior":"MergedWithPrevious","invert":false})";
  std::string model_type = "BPE";
  std::string more_model;       // more members of "model", each with a comma behind it
  std::string more_vocabulary;  // more members of "vocab", each with a comma in front
  std::string more_merges;      // more items of "merges", each with a comma in front
  std::string more_added;       // more items of "added_tokens", each with a comma in front

  static std::string escaped(const std::string& text) {
    std::string out;
    for (const char c : text) {
      if (c == '\n') {
        out += "\\n";
      } else if (c == '"' || c == '\\') {
        out += std::string("\\") + c;
      } else {
        out += c;
      }
    }
    return "\"" + out + "\"";
  }

  std::string json() const {
    std::vector<std::string> pieces = special;
    for (int byte = 0; byte < 256; ++byte) pieces.push_back(fmt::format("<0x{:02X}>", byte));
    pieces.insert(pieces.end(), plain_added.begin(), plain_added.end());
    pieces.push_back("▁");
    for (char c = '!'; c <= '~'; ++c) pieces.emplace_back(1, c);
    for (const auto& [left, right] : merges) pieces.push_back(left + right);
    std::string vocabulary;
    std::string added;
    for (size_t id = 0; id < pieces.size(); ++id) {
      const std::string content = escaped(pieces[id]);
      vocabulary += fmt::format("{}{}:{}", id == 0 ? "" : ",", content, id);
      const bool is_special = id < special.size();
      const bool is_added = is_special || (id >= special.size() + 256 && id < special.size() + 256 + plain_added.size());
      if (!is_added) continue;
      added += fmt::format(R"({}{{"id":{},"content":{},"normalized":false,"special":{}}})", added.empty() ? "" : ",", id, content,
                           is_special);
    }
    std::string rules;
    for (const auto& [left, right] : merges) {
      rules += fmt::format("{}[{},{}]", rules.empty() ? "" : ",", escaped(left), escaped(right));
    }
    return fmt::format(
        R"({{"version":"1.0","added_tokens":[{}{}],"normalizer":{},"pre_tokenizer":{},"model":{{"type":"{}",{}"unk_token":"<unk>",)"
        R"("byte_fallback":true,"vocab":{{{}{}}},"merges":[{}{}]}}}})",
        added, more_added, normalizer, pre_tokenizer, model_type, more_model, vocabulary, more_vocabulary, rules, more_merges);
  }

  std::shared_ptr<const Tokenizer> make() const { return Tokenizer::parse(json(), "tokenizer.json"); }
};

// Gemma's tokenizer.json may not be shipped: tests that need it skip where GEMTUNE_TEST_ASSETS does not name its folder.
inline const char* kNoAssets = "GEMTUNE_TEST_ASSETS is not set: it names the folder of gemma3-tokenizer/tokenizer.json.xz";

// Unpacked once a process. nullptr when there is none.
inline std::shared_ptr<const Tokenizer> gemma_tokenizer() {
  static const std::shared_ptr<const Tokenizer> tokenizer = []() -> std::shared_ptr<const Tokenizer> {
    const char* assets = std::getenv("GEMTUNE_TEST_ASSETS");
    if (assets == nullptr) return nullptr;
    const TempFolder folder;
    const std::string unpack =
        fmt::format("xz -dc '{}/gemma3-tokenizer/tokenizer.json.xz' > '{}'", assets, folder / "tokenizer.json");
    if (std::system(unpack.c_str()) != 0) throw std::runtime_error("cannot unpack Gemma's tokenizer: " + unpack);
    const ScopedEnvironment cache("XDG_CACHE_HOME", folder / "cache");
    return Tokenizer::load(folder.path());
  }();
  return tokenizer;
}

}  // namespace gemtune::test
