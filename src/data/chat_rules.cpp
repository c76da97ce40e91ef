#include "data/chat_rules.h"

#include "base/text.h"
#include "data/dataset.h"

#include <fmt/core.h>

namespace gemtune {
namespace {

std::string role_name(Role role) {
  switch (role) {
    case Role::kSystem:
      return "system";
    case Role::kUser:
      return "user";
    case Role::kAssistant:
      return "assistant";
  }
  return "";
}

RowError role_error(const Row& row, size_t message, const std::string& rule, const char* reason) {
  return row_error(row, fmt::format("messages[{}].role", message), role_name(row.messages[message].role), rule + kFixOrSkip,
                   reason);
}

// The template renders the first part of a system message and drops the others without a word.
void check_system(const Row& row) {
  const Message& system = row.messages[0];
  for (size_t p = 0; p < system.parts.size(); ++p) {
    if (system.parts[p].kind == Part::Kind::kImage) {
      throw row_error(row, fmt::format("messages[0].content[{}]", p), "",
                      std::string("a system message holds no image; move it to the user's turn") + kFixOrSkip, reason::kMessages);
    }
  }
  if (system.parts.size() != 1) {
    throw row_error(
        row, "messages[0].content", "",
        fmt::format("a system message is one text, this one has {} of them; join them{}", system.parts.size(), kFixOrSkip),
        reason::kMessages);
  }
}

bool says_something(const Message& message) {
  for (const Part& part : message.parts) {
    if (part.kind == Part::Kind::kText && !strip(part.text).empty()) return true;
  }
  return false;
}

}  // namespace

std::string counted(int64_t count, const std::string& noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

std::string text_field(const Row& row, size_t message, size_t part) {
  if (row.messages[message].is_plain_string) return fmt::format("messages[{}].content", message);
  return fmt::format("messages[{}].content[{}].text", message, part);
}

void check_turns(const Row& row) {
  const std::vector<Message>& messages = row.messages;
  const bool has_system = !messages.empty() && messages[0].role == Role::kSystem;
  const size_t first_turn = has_system ? 1 : 0;
  if (messages.size() == first_turn) {
    throw row_error(row, "messages", "", std::string("there is no user turn") + kFixOrSkip, reason::kRoles);
  }
  if (has_system) check_system(row);
  for (size_t m = first_turn; m < messages.size(); ++m) {
    if (messages[m].role == Role::kSystem) {
      throw role_error(row, m, "only the first message may be the system's", reason::kRoles);
    }
    const Role expected = (m - first_turn) % 2 == 0 ? Role::kUser : Role::kAssistant;
    if (messages[m].role != expected) {
      throw role_error(row, m, fmt::format("expected {}: turns alternate, the user begins", role_name(expected)), reason::kRoles);
    }
  }
}

void check_answers(const Row& row, AnswersChecked checked) {
  const size_t last = row.messages.size() - 1;
  if (row.messages[last].role != Role::kAssistant) {
    throw role_error(row, last, "the last message must be the assistant's answer", reason::kNoAnswer);
  }
  for (size_t m = 0; m <= last; ++m) {
    const bool counts = checked == AnswersChecked::kEvery || m == last;
    if (row.messages[m].role != Role::kAssistant || !counts || says_something(row.messages[m])) continue;
    throw row_error(row, fmt::format("messages[{}].content", m), "", std::string("the answer is empty") + kFixOrSkip,
                    reason::kNoAnswer);
  }
}

}  // namespace gemtune
