#include "data/chat.h"

#include "base/error.h"
#include "base/text.h"
#include "data/chat_render.h"
#include "data/chat_rules.h"
#include "data/dataset.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace gemtune {
namespace {

using Pieces = std::vector<Tokenizer::Piece>;

void require_token(const Tokenizer& tokenizer, const char* name, int32_t id) {
  const std::string piece = tokenizer.piece_of(id);
  if (tokenizer.is_added(id)) return;
  throw input_error(
      "tokenizer: {} has id {}, which is {}, not an added token; tokenizer.json and config.json must belong to one model", name,
      id, piece.empty() ? "nothing" : in_quotes(piece));
}

void refuse_control_strings(const Row& row, const Tokenizer& tokenizer) {
  for (size_t m = 0; m < row.messages.size(); ++m) {
    for (size_t p = 0; p < row.messages[m].parts.size(); ++p) {
      const std::string control = tokenizer.find_control(row.messages[m].parts[p].text);
      if (control.empty()) continue;
      throw row_error(
          row, text_field(row, m, p), control,
          "control strings in text are refused (data.special_tokens=reject); remove it or set data.special_tokens=text",
          reason::kControlText);
    }
  }
}

// Places of images in the messages against the images of the row, before anything is rendered.
void check_image_count(const Row& row, const Renderer& renderer, const ChatTokens& tokens) {
  const auto num_images = static_cast<int64_t>(row.images.size());
  int64_t num_parts = 0;
  int64_t num_typed = 0;
  size_t first_excess = row.messages.size();
  for (size_t m = 0; m < row.messages.size(); ++m) {
    for (const Part& part : row.messages[m].parts) {
      if (part.kind == Part::Kind::kImage) {
        ++num_parts;
      } else {
        num_typed += renderer.count_typed_images(part.text);
      }
    }
    if (num_parts + num_typed > num_images) first_excess = std::min(first_excess, m);
  }
  const std::string excess_field = fmt::format("messages[{}].content", first_excess);
  if (!tokens.has_vision && (num_parts > 0 || num_images > 0)) {
    throw row_error(row, num_images > 0 ? "images" : excess_field, "",
                    fmt::format("{}, but this model has no vision tower; remove the images or choose a model that has one",
                                counted(std::max(num_images, num_parts), "image")),
                    reason::kNoVision);
  }
  if (num_parts + num_typed == num_images) return;
  std::string places = counted(num_parts, "image part");
  if (num_typed > 0) places += fmt::format(" and {} typed in text", counted(num_typed, "placeholder"));
  throw row_error(row, first_excess < row.messages.size() ? excess_field : "images", "",
                  fmt::format("{}, the row has {}{}", places, counted(num_images, "image"), kFixOrSkip), reason::kImageCount);
}

// The ids must show what was rendered: one bos, and whole images. Only control strings typed by hand can break this.
void place_images(const Row& row, const Rendering& rendering, const ChatTokens& tokens, Sample& sample) {
  const std::vector<int32_t>& ids = sample.token_ids;
  if (std::count(ids.begin(), ids.end(), tokens.bos) != 1) {
    throw row_error(row, "messages", "",
                    std::string("<bos> is typed in the text, and a row has exactly one, in front") + kFixOrSkip,
                    reason::kControlText);
  }
  const auto num_marks = tokens.has_vision ? std::count(ids.begin(), ids.end(), tokens.start_of_image) : 0;
  const auto num_soft = std::count(ids.begin(), ids.end(), tokens.image_soft);
  const int64_t expected = rendering.num_images * tokens.tokens_per_image;
  if (num_marks != rendering.num_images || num_soft != expected) {
    throw row_error(
        row, "messages", "",
        fmt::format("{} and {} where {} would be {} and {}; remove the ones typed in text", counted(num_marks, "start_of_image"),
                    counted(num_soft, "image token"), counted(rendering.num_images, "image"), rendering.num_images, expected),
        reason::kImageCount);
  }
  for (size_t i = 0; i < ids.size() && num_soft > 0; ++i) {
    if (ids[i] == tokens.image_soft && ids[i - 1] != tokens.image_soft)
      sample.image_first_token.push_back(static_cast<int32_t>(i));
  }
}

void mark_targets(const Rendering& rendering, const Pieces& pieces, const ChatTokens& tokens, LossOn loss_on, Sample& sample) {
  sample.target_mask.assign(pieces.size(), loss_on == LossOn::kAll ? 1 : 0);
  size_t next = 0;
  for (size_t a = 0; a < rendering.answers.size() && loss_on != LossOn::kAll; ++a) {
    if (loss_on == LossOn::kLastAnswer && a + 1 < rendering.answers.size()) continue;
    for (const Rendering::Range& range : rendering.answers[a].texts) {
      while (next < pieces.size() && pieces[next].begin < range.begin) ++next;
      for (; next < pieces.size() && pieces[next].begin < range.end; ++next) sample.target_mask[next] = 1;
    }
  }
  sample.target_mask[0] = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const int32_t id = pieces[i].id;
    const bool never = id == tokens.pad || (tokens.has_vision && (id == tokens.start_of_image || id == tokens.image_soft));
    const bool no_answer = tokens.has_vision && id == tokens.end_of_image && loss_on != LossOn::kAll;
    if (never || no_answer) sample.target_mask[i] = 0;
  }
}

// Cuts the last answer from its end, or throws.
void limit_length(const Row& row, const Rendering& rendering, const Pieces& pieces, const ChatOptions& options, Sample& sample) {
  const auto length = static_cast<int64_t>(pieces.size());
  const int64_t limit = options.max_length;
  if (limit <= 0 || length <= limit) return;
  const auto too_long = [&](const std::string& rule) {
    return row_error(row, "length", std::to_string(length), rule, reason::kTooLong);
  };
  if (options.on_too_long != TooLong::kShorten) {
    throw too_long(
        fmt::format("the limit is {} tokens (data.max_length); shorten the row, raise the limit or set "
                    "data.on_too_long={}",
                    limit, options.on_too_long == TooLong::kSkip ? "shorten" : "skip"));
  }
  const Rendering::Answer& answer = rendering.answers.back();
  if (answer.num_images > 0) {
    throw too_long(fmt::format("the limit is {} tokens (data.max_length), and an answer with an image is not cut", limit));
  }
  const auto first = std::find_if(pieces.begin(), pieces.end(), [&](const auto& piece) { return piece.begin >= answer.begin; });
  const int64_t prompt_length = first - pieces.begin();
  if (prompt_length >= limit) {
    throw too_long(
        fmt::format("the prompt alone has {} tokens, the limit is {} (data.max_length); shorten the prompt or raise "
                    "the limit",
                    prompt_length, limit));
  }
  const int64_t cut = pieces[static_cast<size_t>(limit)].begin;
  sample.token_ids.resize(static_cast<size_t>(limit));
  sample.target_mask.resize(static_cast<size_t>(limit));
  // A cut between the bytes of a character shows without the character.
  auto shown = static_cast<size_t>(answer.shown_begin + (cut - answer.begin));
  while (shown > 0 && (static_cast<uint8_t>(sample.text[shown]) & 0xC0) == 0x80) --shown;
  sample.text.resize(shown);
}

Sample tokenize(const Row& row, const Rendering& rendering, const Pieces& pieces, const ChatTokens& tokens) {
  Sample sample;
  sample.row = row.index;
  sample.text = rendering.shown;
  sample.token_ids.reserve(pieces.size());
  for (const Tokenizer::Piece& piece : pieces) sample.token_ids.push_back(piece.id);
  place_images(row, rendering, tokens, sample);
  return sample;
}

}  // namespace

int64_t Sample::num_targets() const {
  // The first token is predicted by nothing.
  return target_mask.empty() ? 0 : std::count(target_mask.begin() + 1, target_mask.end(), uint8_t{1});
}

Chat::Chat(std::shared_ptr<const Tokenizer> tokenizer, ChatTokens tokens, ChatOptions options)
    : tokenizer_(std::move(tokenizer)), tokens_(tokens), options_(options) {
  require_token(*tokenizer_, "bos", tokens_.bos);
  require_token(*tokenizer_, "start_of_turn", tokens_.start_of_turn);
  require_token(*tokenizer_, "end_of_turn", tokens_.end_of_turn);
  if (!tokens_.has_vision) return;
  require_token(*tokenizer_, "start_of_image", tokens_.start_of_image);
  require_token(*tokenizer_, "end_of_image", tokens_.end_of_image);
  require_token(*tokenizer_, "image_soft", tokens_.image_soft);
}

Sample Chat::sample(const Row& row) const {
  const Renderer renderer(*tokenizer_, tokens_, options_.special_tokens);
  check_turns(row);
  check_answers(row, options_.loss_on == LossOn::kLastAnswer ? AnswersChecked::kLast : AnswersChecked::kEvery);
  if (options_.special_tokens == SpecialTokens::kReject) refuse_control_strings(row, *tokenizer_);
  check_image_count(row, renderer, tokens_);

  const Ending ending = options_.loss_on == LossOn::kAll ? Ending::kNothing : Ending::kNewline;
  const Rendering rendering = renderer.render(row, row.messages.size(), ending);
  const Pieces pieces = tokenizer_->encode_pieces(rendering.spans);
  Sample sample = tokenize(row, rendering, pieces, tokens_);
  mark_targets(rendering, pieces, tokens_, options_.loss_on, sample);
  limit_length(row, rendering, pieces, options_, sample);
  return sample;
}

Sample Chat::prompt(const Row& row) const {
  const Renderer renderer(*tokenizer_, tokens_, options_.special_tokens);
  check_turns(row);
  if (options_.special_tokens == SpecialTokens::kReject) refuse_control_strings(row, *tokenizer_);
  check_image_count(row, renderer, tokens_);

  const bool answered = row.messages.back().role == Role::kAssistant;
  const Rendering rendering = renderer.render(row, row.messages.size() - (answered ? 1 : 0), Ending::kModelTurn);
  Sample sample = tokenize(row, rendering, tokenizer_->encode_pieces(rendering.spans), tokens_);
  sample.target_mask.assign(sample.token_ids.size(), 0);
  return sample;
}

}  // namespace gemtune
