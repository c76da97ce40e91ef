#include "data/chat_render.h"

#include "base/text.h"

namespace gemtune {

Renderer::Renderer(const Tokenizer& tokenizer, const ChatTokens& tokens, SpecialTokens special_tokens)
    : bos_(tokenizer.piece_of(tokens.bos)),
      start_of_turn_(tokenizer.piece_of(tokens.start_of_turn)),
      end_of_turn_(tokenizer.piece_of(tokens.end_of_turn)),
      parse_typed_(special_tokens == SpecialTokens::kParse) {
  if (!tokens.has_vision) return;
  start_of_image_ = tokenizer.piece_of(tokens.start_of_image);
  image_block_ = "\n\n" + start_of_image_;
  for (int32_t i = 0; i < tokens.tokens_per_image; ++i) image_block_ += tokenizer.piece_of(tokens.image_soft);
  image_block_ += tokenizer.piece_of(tokens.end_of_image) + "\n\n";
}

void Renderer::add(std::string_view text, bool may_hold_control, Rendering& out) const {
  if (text.empty()) return;
  out.spans.push_back({std::string(text), may_hold_control});
  out.num_bytes += static_cast<int64_t>(text.size());
  out.shown += text;
}

void Renderer::add_image(Rendering& out) const {
  out.spans.push_back({image_block_, true});
  out.num_bytes += static_cast<int64_t>(image_block_.size());
  out.shown += start_of_image_;
  ++out.num_images;
}

int64_t Renderer::count_typed_images(std::string_view text) const {
  if (!parse_typed_ || start_of_image_.empty()) return 0;
  int64_t count = 0;
  for (size_t at = text.find(start_of_image_); at != std::string_view::npos; at = text.find(start_of_image_, at + 1)) ++count;
  return count;
}

void Renderer::add_typed(std::string_view text, Rendering& out) const {
  if (parse_typed_ && !start_of_image_.empty()) {
    for (size_t at = text.find(start_of_image_); at != std::string_view::npos; at = text.find(start_of_image_)) {
      add(text.substr(0, at), true, out);
      add_image(out);
      text.remove_prefix(at + start_of_image_.size());
    }
  }
  add(text, parse_typed_, out);
}

void Renderer::add_body(const Message& message, Rendering& out) const {
  const bool is_answer = message.role == Role::kAssistant;
  if (is_answer) out.answers.push_back({out.num_bytes, static_cast<int64_t>(out.shown.size()), 0, {}});
  const int64_t images_before = out.num_images;
  for (const Part& part : message.parts) {
    if (part.kind == Part::Kind::kImage) {
      add_image(out);
      continue;
    }
    const int64_t begin = out.num_bytes;
    add_typed(strip(part.text), out);
    if (is_answer) out.answers.back().texts.push_back({begin, out.num_bytes});
  }
  if (is_answer) out.answers.back().num_images = out.num_images - images_before;
}

Rendering Renderer::render(const Row& row, size_t num_messages, Ending ending) const {
  Rendering out;
  const bool has_system = row.messages[0].role == Role::kSystem;
  const size_t first_turn = has_system ? 1 : 0;
  add(bos_, true, out);
  for (size_t m = first_turn; m < num_messages; ++m) {
    const Message& message = row.messages[m];
    const bool is_answer = message.role == Role::kAssistant;
    add(start_of_turn_ + (is_answer ? "model\n" : "user\n"), true, out);
    if (has_system && m == first_turn) {
      add_typed(row.messages[0].parts[0].text, out);
      add("\n\n", true, out);
    }
    add_body(message, out);
    const int64_t end = out.num_bytes;
    add(end_of_turn_, true, out);
    if (is_answer) out.answers.back().texts.push_back({end, out.num_bytes});
    if (m + 1 < num_messages || ending != Ending::kNothing) add("\n", true, out);
  }
  if (ending == Ending::kModelTurn) add(start_of_turn_ + "model\n", true, out);
  return out;
}

}  // namespace gemtune
