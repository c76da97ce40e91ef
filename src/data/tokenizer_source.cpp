// tokenizer.json is read as a stream of events: a document tree of its 800,000 strings would take a second and 200 MB.
#include "data/tokenizer_source.h"

#include "base/error.h"
#include "base/text.h"

#include <nlohmann/json.hpp>

#include <map>
#include <utility>

namespace gemtune {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxDepth = 32;
constexpr size_t kMaxSettings = 10000;
constexpr size_t kMaxPieceBytes = 4096;
constexpr size_t kMaxMerges = size_t{1} << 23;
constexpr const char* kUseGemma = "use the tokenizer.json that comes with Gemma 3";

// A scalar outside of the long lists, as it is written.
struct Setting {
  enum class Kind { kNull, kBool, kNumber, kText } kind = Kind::kNull;
  std::string text;
};

class Reader {
 public:
  explicit Reader(std::string where) : where_(std::move(where)) {}

  TokenizerSource finish();

  // Events of nlohmann::json::sax_parse.
  bool null() { return scalar({Setting::Kind::kNull, "null"}); }
  bool boolean(bool value) { return scalar({Setting::Kind::kBool, value ? "true" : "false"}); }
  bool number_integer(Json::number_integer_t value) { return scalar({Setting::Kind::kNumber, std::to_string(value)}); }
  bool number_unsigned(Json::number_unsigned_t value);
  bool number_float(Json::number_float_t, const std::string& text) { return scalar({Setting::Kind::kNumber, text}); }
  bool string(std::string& value);
  bool binary(Json::binary_t&) { return false; }
  bool key(std::string& name);
  bool start_object(size_t) { return start(false); }
  bool end_object() { return end(); }
  bool start_array(size_t) { return start(true); }
  bool end_array() { return end(); }
  bool parse_error(size_t position, const std::string&, const Json::exception&) {
    throw input_error("{}: is not valid JSON at byte {}; fetch the file again", where_, position);
  }

 private:
  enum class Place { kOther, kVocab, kMerges, kMergePair, kAdded, kAddedToken };
  struct Level {
    Place place;
    bool is_array;
    size_t path_bytes;  // of path_ up to and with this container
    size_t index = 0;   // of the next item, in arrays
  };

  bool scalar(Setting value);
  bool start(bool is_array);
  bool end();
  // Puts the name of the value that begins here at the end of path_.
  void enter_value();
  Place place() const { return levels_.empty() ? Place::kOther : levels_.back().place; }
  int32_t checked_id(uint64_t id, const std::string& field) const;
  void add_merge_line(std::string_view line);
  void check_piece(std::string_view piece, const std::string& field) const;
  std::string merge_field() const { return fmt::format("model.merges[{}]", source_.merge_sides.size() / 2); }

  // Settings by path: "normalizer.pattern.String".
  bool has(const std::string& path) const { return settings_.contains(path) && settings_.at(path).kind != Setting::Kind::kNull; }
  std::string text_of(const std::string& path) const { return has(path) ? settings_.at(path).text : ""; }
  bool flag(const std::string& path, bool otherwise) const { return has(path) ? text_of(path) == "true" : otherwise; }
  std::vector<std::string> steps_of(const std::string& field, const std::string& list) const;
  void refuse_unless(bool fine, const std::string& path, const std::string& rule) const;
  void check_model();
  void check_normalizer();
  void check_pre_tokenizer();
  void check_decoder() const;

  std::string where_;
  std::string path_;
  std::vector<Level> levels_;
  std::string vocab_piece_;
  size_t num_pair_sides_ = 0;
  AddedToken token_;
  std::map<std::string, Setting> settings_;
  TokenizerSource source_;
};

void Reader::enter_value() {
  if (levels_.empty()) return;
  Level& level = levels_.back();
  if (!level.is_array) return;  // key() has done it
  path_.resize(level.path_bytes);
  path_ += fmt::format("[{}]", level.index++);
}

bool Reader::key(std::string& name) {
  if (place() == Place::kVocab) {
    check_piece(name, "model.vocab");
    vocab_piece_ = std::move(name);
    return true;
  }
  path_.resize(levels_.back().path_bytes);
  if (!path_.empty()) path_ += '.';
  path_ += name.size() <= 64 ? name : name.substr(0, 64);
  return true;
}

bool Reader::start(bool is_array) {
  if (levels_.size() >= kMaxDepth) throw input_error("{}: {}: is nested deeper than {} levels", where_, path_, kMaxDepth);
  const Place outer = place();
  if (outer == Place::kVocab) {
    throw input_error("{}: model.vocab: piece {} has no whole number as its id", where_, in_quotes(vocab_piece_));
  }
  if (outer == Place::kMergePair) throw input_error("{}: {}: a merge is two strings", where_, merge_field());
  if (outer != Place::kMerges) enter_value();
  Place inner = Place::kOther;
  if (outer == Place::kMerges) {
    if (!is_array) throw input_error("{}: {}: a merge is two strings", where_, merge_field());
    inner = Place::kMergePair;
    num_pair_sides_ = 0;
  } else if (path_ == "model.vocab") {
    if (is_array) throw input_error("{}: model.vocab: is a list, expected an object of pieces and ids; {}", where_, kUseGemma);
    inner = Place::kVocab;
  } else if (path_ == "model.merges") {
    inner = Place::kMerges;
  } else if (path_ == "added_tokens") {
    inner = Place::kAdded;
  } else if (outer == Place::kAdded) {
    inner = Place::kAddedToken;
    token_ = AddedToken();
  }
  levels_.push_back({inner, is_array, path_.size()});
  return true;
}

bool Reader::end() {
  const Place closed = place();
  levels_.pop_back();
  if (closed == Place::kMergePair && num_pair_sides_ != 2) {
    throw input_error("{}: model.merges[{}]: has {} string{}, a merge is two strings", where_,
                      (source_.merge_sides.size() - num_pair_sides_) / 2, num_pair_sides_, num_pair_sides_ == 1 ? "" : "s");
  }
  if (closed == Place::kAddedToken) {
    const std::string field = fmt::format("added_tokens[{}]", source_.added.size());
    if (token_.id < 0) throw input_error("{}: {}: has no id", where_, field);
    if (token_.content.empty()) throw input_error("{}: {}: has no content", where_, field);
    source_.added.push_back(std::move(token_));
  }
  return true;
}

int32_t Reader::checked_id(uint64_t id, const std::string& field) const {
  if (id > static_cast<uint64_t>(kMaxTokenId)) {
    throw input_error("{}: {}: id {} is above the limit of {}; {}", where_, field, id, kMaxTokenId, kUseGemma);
  }
  return static_cast<int32_t>(id);
}

void Reader::check_piece(std::string_view piece, const std::string& field) const {
  if (piece.size() > kMaxPieceBytes) {
    throw input_error("{}: {}: piece {} has {} bytes, the limit is {}", where_, field, in_quotes(piece, 32), piece.size(),
                      kMaxPieceBytes);
  }
}

bool Reader::number_unsigned(Json::number_unsigned_t value) {
  if (place() == Place::kVocab) {
    if (value > static_cast<uint64_t>(kMaxTokenId)) checked_id(value, "model.vocab: piece " + in_quotes(vocab_piece_));
    source_.piece_ids.push_back(static_cast<int32_t>(value));
    source_.pieces.add(vocab_piece_);
    return true;
  }
  if (place() == Place::kAddedToken && path_.ends_with(".id")) {
    token_.id = checked_id(value, fmt::format("added_tokens[{}]", source_.added.size()));
    return true;
  }
  return scalar({Setting::Kind::kNumber, std::to_string(value)});
}

void Reader::add_merge_line(std::string_view line) {
  const size_t space = line.find(' ');
  if (space == std::string_view::npos || line.find(' ', space + 1) != std::string_view::npos) {
    throw input_error("{}: {}: {} is not two pieces with one space between them", where_, merge_field(), in_quotes(line));
  }
  source_.merge_sides.add(line.substr(0, space));
  source_.merge_sides.add(line.substr(space + 1));
}

bool Reader::string(std::string& value) {
  switch (place()) {
    case Place::kMergePair:
      if (++num_pair_sides_ > 2) throw input_error("{}: {}: a merge is two strings", where_, merge_field());
      check_piece(value, "model.merges");
      if (source_.merge_sides.size() >= 2 * kMaxMerges) throw input_error("{}: model.merges: more than {}", where_, kMaxMerges);
      source_.merge_sides.add(value);
      return true;
    case Place::kMerges:
      check_piece(value, "model.merges");
      if (source_.merge_sides.size() >= 2 * kMaxMerges) throw input_error("{}: model.merges: more than {}", where_, kMaxMerges);
      add_merge_line(value);
      return true;
    case Place::kAddedToken:
      if (path_.ends_with(".content")) {
        check_piece(value, fmt::format("added_tokens[{}]", source_.added.size()));
        token_.content = std::move(value);
      }
      return true;
    default:
      return scalar({Setting::Kind::kText, std::move(value)});
  }
}

bool Reader::scalar(Setting value) {
  switch (place()) {
    case Place::kVocab:
      throw input_error("{}: model.vocab: piece {} has no whole number as its id", where_, in_quotes(vocab_piece_));
    case Place::kMerges:
    case Place::kMergePair:
      throw input_error("{}: {}: a merge is two strings", where_, merge_field());
    case Place::kAdded:
      throw input_error("{}: added_tokens[{}]: is {}, expected an object", where_, source_.added.size(), value.text);
    case Place::kAddedToken: {
      const bool on = value.text == "true";
      if (path_.ends_with(".special")) token_.special = on;
      if (path_.ends_with(".normalized")) token_.normalized = on;
      for (const char* name : {"lstrip", "rstrip", "single_word"}) {
        if (on && path_.ends_with(std::string(".") + name)) {
          throw input_error("{}: added_tokens[{}].{}: is true, which is not supported; {}", where_, source_.added.size(), name,
                            kUseGemma);
        }
      }
      return true;
    }
    case Place::kOther:
      break;
  }
  enter_value();
  if (!path_.starts_with("model") && !path_.starts_with("normalizer") && !path_.starts_with("pre_tokenizer") &&
      !path_.starts_with("decoder")) {
    return true;
  }
  if (settings_.size() >= kMaxSettings) throw input_error("{}: {}: more than {} settings", where_, path_, kMaxSettings);
  settings_.insert_or_assign(path_, std::move(value));
  return true;
}

void Reader::refuse_unless(bool fine, const std::string& path, const std::string& rule) const {
  if (fine) return;
  const auto found = settings_.find(path);
  const bool is_text = found != settings_.end() && found->second.kind == Setting::Kind::kText;
  const std::string value = found == settings_.end() ? "absent" : is_text ? in_quotes(found->second.text) : found->second.text;
  throw input_error("{}: {}: is {}, {}; {}", where_, path, value, rule, kUseGemma);
}

// Paths of the single steps of a component: itself, or the members of its "Sequence"; none when it is null.
std::vector<std::string> Reader::steps_of(const std::string& field, const std::string& list) const {
  if (!has(field + ".type")) return {};
  if (text_of(field + ".type") != "Sequence") return {field};
  std::vector<std::string> steps;
  while (true) {
    const std::string step = fmt::format("{}.{}[{}]", field, list, steps.size());
    if (!has(step + ".type")) return steps;
    steps.push_back(step);
  }
}

void Reader::check_model() {
  refuse_unless(text_of("model.type") == "BPE", "model.type", "only BPE is supported");
  const std::string dropout = text_of("model.dropout");
  refuse_unless(dropout.empty() || dropout == "0" || dropout == "0.0", "model.dropout", "only null is supported");
  for (const char* name : {"model.continuing_subword_prefix", "model.end_of_word_suffix"}) {
    refuse_unless(text_of(name).empty(), name, "only null is supported");
  }
  refuse_unless(!flag("model.ignore_merges", false), "model.ignore_merges", "only false is supported");
  source_.unknown_piece = text_of("model.unk_token");
  source_.byte_fallback = flag("model.byte_fallback", false);
  source_.fuse_unknown = flag("model.fuse_unk", false);
  if (source_.pieces.size() == 0) throw input_error("{}: model.vocab: is absent or empty; {}", where_, kUseGemma);
}

void Reader::check_normalizer() {
  for (const std::string& step : steps_of("normalizer", "normalizers")) {
    refuse_unless(text_of(step + ".type") == "Replace", step + ".type", "only Replace is supported");
    refuse_unless(text_of(step + ".pattern.String") == " ", step + ".pattern.String", "only \" \" is supported");
    refuse_unless(text_of(step + ".content") == "▁", step + ".content", "only \"▁\" is supported");
    source_.replace_space = true;
  }
}

void Reader::check_pre_tokenizer() {
  for (const std::string& step : steps_of("pre_tokenizer", "pretokenizers")) {
    refuse_unless(text_of(step + ".type") == "Split", step + ".type", "only Split is supported");
    refuse_unless(text_of(step + ".pattern.String") == " ", step + ".pattern.String", "only \" \" is supported");
    if (source_.replace_space) continue;  // no " " is left to split at
    refuse_unless(text_of(step + ".behavior") == "MergedWithPrevious", step + ".behavior",
                  "only MergedWithPrevious is supported");
    refuse_unless(!flag(step + ".invert", false), step + ".invert", "only false is supported");
    source_.split_after_space = true;
  }
}

void Reader::check_decoder() const {
  const std::vector<std::string> steps = steps_of("decoder", "decoders");
  static constexpr const char* kRule = "only Replace, ByteFallback, Fuse in this order are supported";
  const std::vector<std::string> known = {"Replace", "ByteFallback", "Fuse"};
  for (size_t i = 0; i < steps.size(); ++i) {
    refuse_unless(i < known.size() && text_of(steps[i] + ".type") == known[i], steps[i] + ".type", kRule);
  }
  if (steps.empty()) return;
  refuse_unless(text_of(steps[0] + ".pattern.String") == "▁", steps[0] + ".pattern.String", "only \"▁\" is supported");
  refuse_unless(text_of(steps[0] + ".content") == " ", steps[0] + ".content", "only \" \" is supported");
}

TokenizerSource Reader::finish() {
  check_model();
  check_normalizer();
  check_pre_tokenizer();
  check_decoder();
  return std::move(source_);
}

}  // namespace

TokenizerSource parse_tokenizer_source(std::string_view json, const std::string& where) {
  Reader reader(where);
  Json::sax_parse(json.begin(), json.end(), &reader);
  return reader.finish();
}

}  // namespace gemtune
