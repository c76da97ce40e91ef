#include "base/json.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/text.h"

namespace gemtune {
namespace {

constexpr size_t kMaxDepth = 200;

// Reads the text and tells how far the parser has come, which its events do not.
class CountingIterator {
 public:
  using iterator_category = std::forward_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, const char** furthest) : at_(at), furthest_(furthest) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    *furthest_ = ++at_;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator old = *this;
    ++*this;
    return old;
  }
  bool operator==(const CountingIterator& other) const { return at_ == other.at_; }
  bool operator!=(const CountingIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  const char** furthest_;
};

// "line 3, column 7" of the byte at `offset`; columns count characters.
std::string position_of(std::string_view text, size_t offset) {
  const std::string_view before = text.substr(0, std::min(offset, text.size()));
  const auto lines = std::count(before.begin(), before.end(), '\n');
  const size_t start = before.rfind('\n') == std::string_view::npos ? 0 : before.rfind('\n') + 1;
  const auto column = std::count_if(before.begin() + static_cast<std::ptrdiff_t>(start), before.end(),
                                    [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
  return fmt::format("line {}, column {}", lines + 1, column + 1);
}

// The library's message without its prefix and without the text it read, which can be a whole file.
std::string reason_of(const nlohmann::json::exception& error) {
  std::string text = error.what();
  if (const size_t at = text.find(": "); at != std::string::npos) text = text.substr(at + 2);
  const size_t start = text.find("; last read: '");
  if (start == std::string::npos) return text;
  const size_t end = text.rfind('\'');
  const size_t expected = text.rfind("'; expected ");
  text.erase(start, (expected != std::string::npos ? expected : end) + 1 - start);
  return text;
}

// Builds the document; refuses what a plain parse lets through.
class Builder final : public nlohmann::json_sax<Json> {
 public:
  Builder(std::string_view text, const std::string& where) : text_(text), where_(where), furthest_(text.data()) {}

  Json build() {
    const char* end = text_.data() + text_.size();
    Json::sax_parse(CountingIterator(text_.data(), &furthest_), CountingIterator(end, &furthest_), this);
    return std::move(root_);
  }

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool number_float(number_float_t value, const string_t&) override { return put(value); }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t& value) override { return put(std::move(value)); }
  bool start_object(size_t) override { return open(Json::object()); }
  bool start_array(size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    auto& members = open_.back()->get_ref<Json::object_t&>();
    const auto [place, is_new] = members.emplace(std::move(name), nullptr);
    if (!is_new) {
      throw input_error("{}: {}: the key {} stands twice in one object; keep one of them", where_,
                        position_of(text_, start_of_last_string()), in_quotes(place->first));
    }
    slot_ = &place->second;
    return true;
  }

  bool parse_error(size_t byte, const std::string&, const nlohmann::json::exception& error) override {
    throw input_error("{}: {}: not valid JSON: {}", where_, position_of(text_, byte == 0 ? 0 : byte - 1), reason_of(error));
  }

 private:
  Json* place(Json value) {
    Json* target = &root_;
    if (!open_.empty() && open_.back()->is_array()) {
      target = &open_.back()->get_ref<Json::array_t&>().emplace_back();
    } else if (!open_.empty()) {
      target = slot_;
    }
    *target = std::move(value);
    return target;
  }
  template <class T>
  bool put(T&& value) {
    place(Json(std::forward<T>(value)));
    return true;
  }
  bool open(Json container) {
    if (open_.size() >= kMaxDepth) {
      throw input_error("{}: {}: nested deeper than {} levels; flatten the document", where_, position_of(text_, offset() - 1),
                        kMaxDepth);
    }
    open_.push_back(place(std::move(container)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  size_t offset() const { return static_cast<size_t>(furthest_ - text_.data()); }

  // Offset of the opening quote of the string whose closing quote was read last.
  size_t start_of_last_string() const {
    size_t at = offset() - 1;
    while (at > 0) {
      --at;
      if (text_[at] != '"') continue;
      size_t slashes = 0;
      while (slashes < at && text_[at - 1 - slashes] == '\\') ++slashes;
      if (slashes % 2 == 0) break;
    }
    return at;
  }

  std::string_view text_;
  const std::string& where_;
  const char* furthest_;
  Json root_;
  std::vector<Json*> open_;
  Json* slot_ = nullptr;
};

}  // namespace

Json parse_json(std::string_view text, const std::string& where) {
  return Builder(text, where).build();
}

Json read_json_file(const std::string& path) {
  return parse_json(read_file(path), path);
}

}  // namespace gemtune
