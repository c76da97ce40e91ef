// Row → Sample: Gemma 3's turn format written out, tokenized as one text, targets marked by turn. docs/chat-format.md shows
// it with examples. Source: the chat template and processor of google/gemma-3-*-it.
#pragma once

#include "data/row.h"
#include "data/tokenizer.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace gemtune {

enum class LossOn { kAnswer, kLastAnswer, kAll };     // kAll: everything but padding, start_of_image and image tokens
enum class SpecialTokens { kText, kParse, kReject };  // control strings typed in user text
enum class TooLong { kError, kSkip, kShorten };

// Ids and counts the model folder gives, not constants.
struct ChatTokens {
  int32_t bos = 2;
  int32_t pad = 0;
  int32_t start_of_turn = 105;
  int32_t end_of_turn = 106;
  int32_t start_of_image = 255999;
  int32_t end_of_image = 256000;
  int32_t image_soft = 262144;
  int32_t tokens_per_image = 256;
  bool has_vision = true;
};

struct ChatOptions {
  LossOn loss_on = LossOn::kAnswer;
  SpecialTokens special_tokens = SpecialTokens::kText;
  int64_t max_length = 0;  // 0 = none
  TooLong on_too_long = TooLong::kError;
};

// What the model is trained on, before decoding pictures.
struct Sample {
  int64_t row = 0;
  // What the reference's chat template renders, bos included: each image as one <start_of_image>, without the newlines and
  // image tokens that the processor puts around and behind it. Cut where the answer was shortened.
  std::string text;
  std::vector<int32_t> token_ids;          // one bos, in front; no padding
  std::vector<uint8_t> target_mask;        // aligned with token_ids, unshifted: 1 = this token carries loss
  std::vector<int32_t> image_first_token;  // first soft token of image k
  int64_t num_targets() const;
};

// Targets (LossOn):
//   kAnswer      text and end_of_turn of every assistant turn; kLastAnswer: of the last one. The newline behind the last
//                end_of_turn is kept and is no target.
//   kAll         every token but bos at place 0 (nothing predicts it), padding, start_of_image and image tokens; the newline
//                behind the last end_of_turn is left out.
// A token is a target when it begins inside the answer. Answers are stripped and stand between newlines and end_of_turn, so
// no token reaches over their edges. Image tokens of any kind in an assistant turn are no targets.
//
// Safe from several threads.
class Chat {
 public:
  // Throws Error(kInput) when `tokens` are no added tokens of `tokenizer`.
  Chat(std::shared_ptr<const Tokenizer> tokenizer, ChatTokens tokens, ChatOptions options);

  // Validates roles, turns and image counts, renders and tokenizes. Throws RowError (data/dataset.h); rows longer than
  // max_length with reason kTooLong under kError and kSkip alike. kShorten cuts the last answer from its end: never the
  // prompt, never an image, and no end_of_turn is put behind what is left.
  Sample sample(const Row& row) const;

  // Prompt for generation: the messages up to the last user turn (an answer behind it is left out), then the opened model
  // turn. No targets, no length limit. image_first_token holds the images of these messages, the row's first ones.
  Sample prompt(const Row& row) const;

  const Tokenizer& tokenizer() const { return *tokenizer_; }
  const ChatTokens& tokens() const { return tokens_; }
  const ChatOptions& options() const { return options_; }

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  ChatTokens tokens_;
  ChatOptions options_;
};

}  // namespace gemtune
