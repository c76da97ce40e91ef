// Inside the chat: which rows are conversations that Gemma 3's turn format can hold.
#pragma once

#include "data/row.h"

#include <cstdint>
#include <string>

namespace gemtune {

namespace reason {
inline constexpr const char* kNoVision = "no vision tower";  // an image for a model that sees none
}

inline constexpr const char* kFixOrSkip = "; fix the row or set data.on_bad_row=skip";

// "1 image", "2 images".
std::string counted(int64_t count, const std::string& noun);

// "messages[1].content", or "messages[1].content[0].text" in a list of parts.
std::string text_field(const Row& row, size_t message, size_t part);

// One system message at most, in front, of one text; then user and assistant in turn. Throws RowError.
void check_turns(const Row& row);

// Every answer, or the last one only, says something. The last message is an answer. Throws RowError.
enum class AnswersChecked { kEvery, kLast };
void check_answers(const Row& row, AnswersChecked checked);

}  // namespace gemtune
