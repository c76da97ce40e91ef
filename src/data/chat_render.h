// Inside the chat: a conversation as the text that is tokenized, with the places of answers in it.
#pragma once

#include "data/chat.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gemtune {

// Byte ranges count in the joined spans.
struct Rendering {
  struct Range {
    int64_t begin;
    int64_t end;
  };
  // One assistant turn: the texts of its body, and the end_of_turn behind it as the last range.
  struct Answer {
    int64_t begin = 0;        // of the body
    int64_t shown_begin = 0;  // the same place in `shown`
    int64_t num_images = 0;
    std::vector<Range> texts;
  };
  std::vector<TextSpan> spans;
  int64_t num_bytes = 0;
  std::string shown;  // Sample::text
  int64_t num_images = 0;
  std::vector<Answer> answers;
};

// What stands behind the last message.
enum class Ending { kNewline, kNothing, kModelTurn };

class Renderer {
 public:
  Renderer(const Tokenizer& tokenizer, const ChatTokens& tokens, SpecialTokens special_tokens);

  // The first `num_messages` messages of a row whose turns are in order.
  Rendering render(const Row& row, size_t num_messages, Ending ending) const;

  // <start_of_image> typed in `text` where typed control strings are parsed: places of images, as for the reference.
  int64_t count_typed_images(std::string_view text) const;

 private:
  void add(std::string_view text, bool may_hold_control, Rendering& out) const;
  void add_typed(std::string_view text, Rendering& out) const;
  void add_image(Rendering& out) const;
  void add_body(const Message& message, Rendering& out) const;

  std::string bos_;
  std::string start_of_turn_;
  std::string end_of_turn_;
  std::string start_of_image_;  // "" for a model without vision
  std::string image_block_;     // what the reference's processor makes of <start_of_image>
  bool parse_typed_ = false;
};

}  // namespace gemtune
