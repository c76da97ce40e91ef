#include "base/error.h"
#include "base/text.h"
#include "data/dataset_record.h"

namespace gemtune {

Template::Template(const std::string& text, const std::string& key) {
  std::string literal;
  const auto flush = [&] {
    if (!literal.empty()) pieces_.push_back({false, std::move(literal)});
    literal.clear();
  };
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c != '{' && c != '}') {
      literal += c;
      continue;
    }
    if (i + 1 < text.size() && text[i + 1] == c) {
      literal += c;
      ++i;
      continue;
    }
    if (c == '}') {
      throw input_error("{}: {}: \"}}\" at character {} closes nothing; write \"}}}}\" for a brace in the text", key,
                        in_quotes(text), i + 1);
    }
    const size_t end = text.find_first_of("{}", i + 1);
    if (end == std::string::npos || text[end] == '{') {
      throw input_error("{}: {}: \"{{\" at character {} is not closed; write \"{{{{\" for a brace in the text", key,
                        in_quotes(text), i + 1);
    }
    const std::string column = text.substr(i + 1, end - i - 1);
    if (strip(column).empty()) {
      throw input_error("{}: {}: the braces at character {} name no column; write \"{{{{}}}}\" for braces in the text", key,
                        in_quotes(text), i + 1);
    }
    flush();
    pieces_.push_back({true, column});
    i = end;
  }
  flush();
}

std::vector<std::string> Template::columns() const {
  std::vector<std::string> names;
  for (const Piece& piece : pieces_) {
    if (piece.is_column) names.push_back(piece.text);
  }
  return names;
}

std::string Template::render(const Cell& record, const Row& place) const {
  std::string out;
  for (const Piece& piece : pieces_) {
    if (!piece.is_column) {
      out += piece.text;
      continue;
    }
    const Cell* cell = record.find(piece.text);
    if (cell == nullptr) continue;
    switch (cell->kind) {
      case Cell::Kind::kText:
      case Cell::Kind::kNumber:
      case Cell::Kind::kBool:
        out += cell->text;
        break;
      default:
        throw row_error(place, piece.text, shown(*cell),
                        "is " + kind_name(*cell) + "; a template takes strings, numbers and truth values" + kFixRow,
                        reason::kMalformed);
    }
  }
  return out;
}

std::string Template::first_blank_column(const Cell& record) const {
  for (const Piece& piece : pieces_) {
    if (!piece.is_column) continue;
    const Cell* cell = record.find(piece.text);
    if (cell == nullptr || (cell->kind == Cell::Kind::kText && strip(cell->text).empty())) return piece.text;
  }
  return "";
}

}  // namespace gemtune
