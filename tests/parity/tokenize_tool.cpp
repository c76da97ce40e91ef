// Tokenizes and renders for the parity tests: gemtune_tokenize TOKENIZER reads one JSON object a line on stdin and answers
// each with one on stdout.
//   {"text": …, "may_hold_control": true}  → {"ids": …, "ranges": [[begin, end], …]}
//   {"ids": […]}                           → {"decoded": …, "decoded_without_special": …}
//   {"messages": […], "num_images": 1, "tokens_per_image": 256, "loss_on": "all", "prompt": false}
//                                          → {"text": …, "ids": …, "target_mask": …, "image_first_token": …}
// An input error becomes {"error": …}.
#include "base/error.h"
#include "data/chat.h"
#include "data/dataset.h"
#include "data/tokenizer.h"

#include <nlohmann/json.hpp>

#include <iostream>
#include <string>

namespace gemtune {
namespace {

using Json = nlohmann::json;

Json encode(const Tokenizer& tokenizer, const Json& request) {
  const std::vector<TextSpan> spans = {{request.at("text"), request.value("may_hold_control", true)}};
  Json ids = Json::array();
  Json ranges = Json::array();
  for (const Tokenizer::Piece& piece : tokenizer.encode_pieces(spans)) {
    ids.push_back(piece.id);
    ranges.push_back({piece.begin, piece.end});
  }
  return {{"ids", ids}, {"ranges", ranges}};
}

Json decode(const Tokenizer& tokenizer, const Json& request) {
  const std::vector<int32_t> ids = request.at("ids");
  return {{"decoded", tokenizer.decode(ids, Tokenizer::Special::kKeep)},
          {"decoded_without_special", tokenizer.decode(ids, Tokenizer::Special::kSkip)}};
}

Row row_of(const Json& request) {
  Row row;
  row.where = "row 0";
  for (const Json& given : request.at("messages")) {
    const std::string role = given.at("role");
    Message message;
    message.role = role == "system" ? Role::kSystem : role == "user" ? Role::kUser : Role::kAssistant;
    const Json& content = given.at("content");
    if (content.is_string()) {
      message.is_plain_string = true;
      message.parts.push_back({Part::Kind::kText, content});
    } else {
      for (const Json& part : content) {
        const bool is_image = part.at("type") == "image";
        message.parts.push_back({is_image ? Part::Kind::kImage : Part::Kind::kText, is_image ? "" : part.at("text")});
      }
    }
    row.messages.push_back(message);
  }
  row.images.resize(request.value("num_images", 0));
  return row;
}

Json render(const std::shared_ptr<const Tokenizer>& tokenizer, const Json& request) {
  ChatTokens tokens;
  tokens.bos = tokenizer->id_of("<bos>");
  tokens.pad = tokenizer->id_of("<pad>");
  tokens.start_of_turn = tokenizer->id_of("<start_of_turn>");
  tokens.end_of_turn = tokenizer->id_of("<end_of_turn>");
  tokens.start_of_image = tokenizer->id_of("<start_of_image>");
  tokens.end_of_image = tokenizer->id_of("<end_of_image>");
  tokens.image_soft = tokenizer->id_of("<image_soft_token>");
  tokens.tokens_per_image = request.value("tokens_per_image", 256);
  ChatOptions options;
  const std::string loss_on = request.value("loss_on", "answer");
  options.loss_on = loss_on == "all" ? LossOn::kAll : loss_on == "last_answer" ? LossOn::kLastAnswer : LossOn::kAnswer;
  const std::string special = request.value("special_tokens", "text");
  options.special_tokens = special == "parse"    ? SpecialTokens::kParse
                           : special == "reject" ? SpecialTokens::kReject
                                                 : SpecialTokens::kText;
  const Chat chat(tokenizer, tokens, options);
  const Row row = row_of(request);
  const Sample sample = request.value("prompt", false) ? chat.prompt(row) : chat.sample(row);
  return {{"text", sample.text},
          {"ids", sample.token_ids},
          {"target_mask", sample.target_mask},
          {"image_first_token", sample.image_first_token}};
}

Json answer(const std::shared_ptr<const Tokenizer>& tokenizer, const Json& request) {
  try {
    if (request.contains("text")) return encode(*tokenizer, request);
    if (request.contains("ids")) return decode(*tokenizer, request);
    return render(tokenizer, request);
  } catch (const RowError& error) {
    return {{"error", error.what()}};
  } catch (const Error& error) {
    return {{"error", error.what()}};
  }
}

}  // namespace
}  // namespace gemtune

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: gemtune_tokenize TOKENIZER < REQUESTS\n";
    return 2;
  }
  try {
    const auto tokenizer = gemtune::Tokenizer::load(argv[1]);
    std::string line;
    while (std::getline(std::cin, line)) std::cout << gemtune::answer(tokenizer, gemtune::Json::parse(line)).dump() << '\n';
  } catch (const std::exception& error) {
    std::cerr << "gemtune_tokenize: " << error.what() << '\n';
    return 2;
  }
}
