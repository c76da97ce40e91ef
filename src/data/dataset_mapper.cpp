// Records → rows: ready messages, or turns made from templates over columns.
#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "data/dataset_record.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>

namespace gemtune {
namespace {

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

// "{Product}", with the column's own braces doubled.
std::string braced(const std::string& column) {
  std::string out = "{";
  for (const char c : column) {
    out += c;
    if (c == '{' || c == '}') out += c;
  }
  return out + "}";
}

std::string listed(const std::vector<std::string>& columns) {
  return join_some(columns, 40);
}

Part text_part(std::string text) {
  return {Part::Kind::kText, std::move(text)};
}
Part image_part() {
  return {Part::Kind::kImage, ""};
}

// Any key that makes a part an image, in the spellings in use. A null value is none.
const Cell* image_of_part(const Cell& part) {
  for (const char* key : {"image", "path", "url", "image_url"}) {
    if (const Cell* cell = part.find(key)) {
      if (cell->kind == Cell::Kind::kObject && cell->find("url") != nullptr) return cell->find("url");
      return cell;
    }
  }
  return nullptr;
}

Role role_of(const Cell& message, const std::string& at, const Row& row) {
  if (message.kind != Cell::Kind::kObject) {
    throw row_error(row, at, shown(message), "is " + kind_name(message) + "; a message has role and content" + kFixRow,
                    reason::kMessages);
  }
  const Cell* role = message.find("role");
  const std::string name = role != nullptr && role->kind == Cell::Kind::kText ? role->text : "";
  if (name == "system") return Role::kSystem;
  if (name == "user") return Role::kUser;
  if (name == "assistant" || name == "model") return Role::kAssistant;
  throw row_error(row, at + ".role", role == nullptr ? "" : shown(*role),
                  std::string("must be system, user or assistant") + kFixRow, reason::kRoles);
}

Part part_of(const Cell& part, const std::string& at, const Row& row) {
  if (part.kind == Cell::Kind::kText) return text_part(part.text);
  const auto bad_part = [&](const char* key, const Cell* value, const std::string& rule) {
    return row_error(row, at + key, value == nullptr ? "" : shown(*value), rule + kFixRow, reason::kMessages);
  };
  const Cell* type = part.find("type");
  const Cell* text = part.find("text");
  std::string kind = type != nullptr && type->kind == Cell::Kind::kText ? type->text : "";
  if (type == nullptr) {
    if (text != nullptr && image_of_part(part) == nullptr) kind = "text";
    if (text == nullptr && image_of_part(part) != nullptr) kind = "image";
  }
  if (kind == "image" || kind == "image_url") return image_part();
  if (kind != "text") throw bad_part(".type", type, "must be text or image");
  if (text == nullptr || text->kind != Cell::Kind::kText) throw bad_part(".text", text, "must be a string");
  if (const Cell* image = part.find("image")) {
    throw bad_part(".image", image, "a text part holds no image; give the image a part of its own");
  }
  return text_part(text->text);
}

}  // namespace

RowMapper::RowMapper(const RowMapping& mapping, const RecordSource& source, SourceKind kind)
    : columns_(source.columns()), image_first_(mapping.image_first), root_(parent_folder(source.file())) {
  choose_image_column(mapping, source.file(), kind);
  if (!mapping.system.empty()) {
    system_ = Template(mapping.system, "data.system");
    check_columns(system_, "data.system", source.file());
  }
  choose_turns(mapping, source.file());
  description_ = "columns: " + listed(columns_);
  if (!recognised_.empty()) description_ += "; " + recognised_;
}

bool RowMapper::has_column(std::string_view name) const {
  return std::find(columns_.begin(), columns_.end(), name) != columns_.end();
}

void RowMapper::check_columns(const Template& text, const std::string& key, const std::string& file) const {
  for (const std::string& column : text.columns()) {
    if (has_column(column)) continue;
    const std::string guess = did_you_mean(column, columns_);
    throw input_error("{}: {} has no column {}{} (columns: {})", key, file, in_quotes(column),
                      guess.empty() ? "" : "; did you mean " + in_quotes(guess) + "?", listed(columns_));
  }
}

void RowMapper::choose_image_column(const RowMapping& mapping, const std::string& file, SourceKind kind) {
  if (!mapping.image_column.empty()) {
    if (!has_column(mapping.image_column)) {
      const std::string guess = did_you_mean(mapping.image_column, columns_);
      throw input_error("data.image_column: {} has no column {}{} (columns: {})", file, in_quotes(mapping.image_column),
                        guess.empty() ? "" : "; did you mean " + in_quotes(guess) + "?", listed(columns_));
    }
    image_column_ = mapping.image_column;
    image_column_is_certain_ = true;
    return;
  }
  if (kind == SourceKind::kImageFolder) {
    if (!has_column("file_name")) {
      throw input_error(
          "{}: has no column file_name, which names each row's image (columns: {}); rename the column or set "
          "data.image_column",
          file, listed(columns_));
    }
    image_column_ = "file_name";
    image_column_is_certain_ = true;
    return;
  }
  if (has_column("image") && has_column("images")) {
    throw input_error("{}: columns image and images may both hold the picture; name one with data.image_column", file);
  }
  for (const char* name : kImageColumns) {
    if (!has_column(name)) continue;
    image_column_ = name;
    return;
  }
}

void RowMapper::choose_turns(const RowMapping& mapping, const std::string& file) {
  if (!mapping.prompt.empty() || !mapping.answer.empty()) {
    if (mapping.answer.empty()) {
      throw input_error("data.answer: is not set, though data.prompt is; write the template of the answer, such as \"{}\"",
                        columns_.empty() ? "{answer}" : braced(columns_.back()));
    }
    if (mapping.prompt.empty() && image_column_.empty()) {
      throw input_error("data.prompt: is not set, and {} has no picture column, so the user turn would be empty (columns: {})",
                        file, listed(columns_));
    }
    prompt_ = Template(mapping.prompt, "data.prompt");
    answer_ = Template(mapping.answer, "data.answer");
    check_columns(prompt_, "data.prompt", file);
    check_columns(answer_, "data.answer", file);
    if (answer_.columns().empty()) {
      throw input_error("data.answer: {} names no column, so every row would have the same answer (columns: {})",
                        in_quotes(mapping.answer), listed(columns_));
    }
    return;
  }
  if (has_column("messages")) {
    has_messages_ = true;
    return;
  }

  const auto column_like = [&](std::string_view name) -> std::string {
    for (const std::string& column : columns_) {
      if (column != image_column_ && lower(column) == name) return column;
    }
    return "";
  };
  static constexpr std::array<std::pair<const char*, const char*>, 4> kPairs = {
      {{"question", "answer"}, {"prompt", "response"}, {"prompt", "completion"}, {"instruction", "output"}}};
  std::vector<std::pair<std::string, std::string>> found;
  for (const auto& [prompt, answer] : kPairs) {
    const std::string left = column_like(prompt);
    const std::string right = column_like(answer);
    if (!left.empty() && !right.empty()) found.emplace_back(left, right);
  }
  // instruction + input + output: leaving the input out would train on half the question.
  const bool has_input = !column_like("input").empty();
  std::vector<std::string> captions;
  if (found.empty() && !image_column_.empty()) {
    for (const char* name : {"caption", "text"}) {
      if (const std::string column = column_like(name); !column.empty()) captions.push_back(column);
    }
  }
  if (found.size() == 1 && !has_input) {
    prompt_ = Template(braced(found[0].first), "data.prompt");
    answer_ = Template(braced(found[0].second), "data.answer");
    recognised_ =
        fmt::format("recognised: data.prompt=\"{}\" data.answer=\"{}\"", braced(found[0].first), braced(found[0].second));
    return;
  }
  if (captions.size() == 1) {
    answer_ = Template(braced(captions[0]), "data.answer");
    recognised_ = fmt::format("recognised: data.answer=\"{}\", the user turn is the picture alone", braced(captions[0]));
    return;
  }
  std::vector<std::string> texts;
  for (const std::string& column : columns_) {
    if (column != image_column_) texts.push_back(column);
  }
  const std::string answer = texts.empty() ? "{answer}" : braced(texts.back());
  const std::string prompt = texts.size() < 2 ? "Describe the picture." : braced(texts.front());
  throw input_error(
      "{}: cannot tell which columns are the prompt and the answer (columns: {}); say it in the recipe's data section, "
      "such as prompt: \"{}\" and answer: \"{}\"",
      file, listed(columns_), prompt, answer);
}

std::vector<std::string> RowMapper::used_columns() const {
  std::vector<std::string> used;
  const auto add = [&](const std::string& column) {
    if (std::find(used.begin(), used.end(), column) == used.end()) used.push_back(column);
  };
  if (!image_column_.empty()) add(image_column_);
  if (has_messages_) add("messages");
  for (const Template* text : {&system_, &prompt_, &answer_}) {
    for (const std::string& column : text->columns()) add(column);
  }
  return used;
}

void RowMapper::fill(const Cell& record, Row& row) const {
  if (has_messages_) {
    fill_from_messages(record, row);
  } else {
    fill_from_templates(record, row);
  }
}

void RowMapper::fill_from_templates(const Cell& record, Row& row) const {
  add_images_of_record(record, row, row.images);
  if (!system_.empty()) {
    std::string text = system_.render(record, row);
    if (!strip(text).empty()) row.messages.push_back({Role::kSystem, {text_part(std::move(text))}, true});
  }
  std::vector<Part> images(row.images.size(), image_part());
  Message user{Role::kUser, {}, images.empty()};
  std::string prompt = prompt_.render(record, row);
  if (image_first_) user.parts = images;
  if (!strip(prompt).empty()) user.parts.push_back(text_part(std::move(prompt)));
  if (!image_first_) user.parts.insert(user.parts.end(), images.begin(), images.end());
  if (user.parts.empty()) {
    throw row_error(row, "data.prompt", "", std::string("the row has neither a prompt nor a picture") + kFixRow,
                    reason::kMessages);
  }
  row.messages.push_back(std::move(user));

  const std::string blank = answer_.first_blank_column(record);
  if (!blank.empty()) {
    throw row_error(row, blank, "", std::string("is empty, and data.answer is made from it") + kFixRow, reason::kNoAnswer);
  }
  row.messages.push_back({Role::kAssistant, {text_part(answer_.render(record, row))}, true});
}

void RowMapper::fill_from_messages(const Cell& record, Row& row) const {
  const Cell* messages = record.find("messages");
  if (messages == nullptr || messages->kind != Cell::Kind::kList || messages->items.empty()) {
    throw row_error(row, "messages", messages == nullptr ? "" : shown(*messages),
                    std::string("must be a list of messages, each with role and content") + kFixRow, reason::kMessages);
  }
  std::vector<ImageSource> listed_images;
  add_images_of_record(record, row, listed_images);
  size_t next_listed = 0;

  for (size_t m = 0; m < messages->items.size(); ++m) {
    const std::string at = fmt::format("messages[{}]", m);
    const Cell& message = messages->items[m];
    Message out;
    out.role = role_of(message, at, row);
    const Cell* content = message.find("content");
    if (content != nullptr && content->kind == Cell::Kind::kText) {
      out.parts.push_back(text_part(content->text));
      out.is_plain_string = true;
      row.messages.push_back(std::move(out));
      continue;
    }
    if (content == nullptr || content->kind != Cell::Kind::kList || content->items.empty()) {
      throw row_error(
          row, at + ".content", content == nullptr ? "" : shown(*content),
          std::string("must be a string or a list of parts {\"type\": \"text\", \"text\": …} and {\"type\": \"image\"}") +
              kFixRow,
          reason::kMessages);
    }
    for (size_t p = 0; p < content->items.size(); ++p) {
      const Cell& part = content->items[p];
      const std::string part_at = fmt::format("{}.content[{}]", at, p);
      out.parts.push_back(part_of(part, part_at, row));
      if (out.parts.back().kind == Part::Kind::kText) continue;
      if (const Cell* own = image_of_part(part)) {
        row.images.push_back(image(*own, part_at + ".image", row));
      } else if (next_listed < listed_images.size()) {
        row.images.push_back(std::move(listed_images[next_listed++]));
      }
    }
    row.messages.push_back(std::move(out));
  }
  // Images without a place stay in the row: the chat layer compares places and images.
  for (; next_listed < listed_images.size(); ++next_listed) row.images.push_back(std::move(listed_images[next_listed]));

  if (!system_.empty() && row.messages[0].role != Role::kSystem) {
    std::string text = system_.render(record, row);
    if (!strip(text).empty()) {
      row.messages.insert(row.messages.begin(), {Role::kSystem, {text_part(std::move(text))}, true});
    }
  }
}

}  // namespace gemtune
