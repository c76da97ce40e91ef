#include "recipe/recipe.h"

#include <fmt/core.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <type_traits>

#include "base/error.h"
#include "base/file.h"
#include "base/hub.h"
#include "base/text.h"
#include "recipe/leaves.h"

namespace gemtune {
namespace {

constexpr int64_t kMaxFileBytes = int64_t{1} << 20;

// Names by which other programs call a key.
const std::map<std::string, std::string>& other_names() {
  static const std::map<std::string, std::string> names = [] {
    std::map<std::string, std::string> all = {
        {"r", "lora.rank"},
        {"lr", "optim.learning_rate"},
        {"lr_scheduler_type", "optim.schedule"},
        {"batch_size", "train.micro_batch"},
        {"gradient_accumulation", "train.accumulation"},
        {"gradient_checkpointing", "train.recompute"},
        {"target_modules", "lora.targets"},
        {"modules_to_save", "lora.train_tables"},
        {"load_in_4bit", "quant.base"},
        {"double_quant", "quant.double"},
        {"output_dir", "output.dir"},
        {"save_steps", "checkpoint.every"},
        {"save_strategy", "checkpoint.every"},
    };
    for (const TutorialFlag& flag : tutorial_flags()) {
      if (!flag.key.empty()) all[flag.flag.substr(2)] = flag.key;
    }
    return all;
  }();
  return names;
}

bool is_path(const std::string& key) {
  static const std::set<std::string> keys = {"model.path", "model.tokenizer", "data.train", "data.eval", "lora.init"};
  return keys.contains(key);
}

bool may_be_hub_id(const std::string& key) {
  return key == "model.path" || key == "data.train" || key == "data.eval";
}

std::string with_home(const std::string& path) {
  const char* home = std::getenv("HOME");
  return path.starts_with("~/") && home != nullptr ? join_path(home, path.substr(2)) : path;
}

// Absolute, so that the value means the same in every folder and in the run's stored recipe.
std::string resolved_path(const std::string& value, const std::string& key, const std::string& folder) {
  if (value.empty() || value.find("://") != std::string::npos) return value;
  namespace fs = std::filesystem;
  const fs::path path = fs::absolute(join_path(folder, with_home(value))).lexically_normal();
  std::error_code ignored;
  if (may_be_hub_id(key) && looks_like_hub_id(value) && !fs::exists(path, ignored)) return value;
  const std::string text = path.string();
  return text.size() > 1 && text.back() == '/' ? text.substr(0, text.size() - 1) : text;
}

class Loader {
 public:
  ResolvedRecipe load(const RecipeArguments& arguments) {
    visit_leaves(result_.recipe, [&](const std::string& key, auto&, const char*) {
      keys_.push_back(key);
      result_.origin[key] = "default";
    });
    result_.file = arguments.file;
    if (!arguments.file.empty()) {
      read_yaml(read_file(arguments.file, kMaxFileBytes), arguments.file, parent_folder(arguments.file));
    } else if (!arguments.tutorial_flags.empty()) {
      read_yaml(kTutorialYaml, "tutorial.yaml", ".");
    }
    for (const std::string& word : arguments.overrides) read_override(word);
    read_flags(arguments.tutorial_flags);
    derive_output();
    for (const Complaint& complaint : validate(result_.recipe)) {
      // A value that could not be read was named already; its key still holds the default.
      if (!unread_.contains(complaint.key)) complain(complaint.key, complaint.text);
    }
    if (!complaints_.empty()) throw input_error("{}", fmt::join(complaints_, "\n"));
    return std::move(result_);
  }

 private:
  void complain_at(const std::string& place, const std::string& text) { complaints_.push_back(place + ": " + text); }
  // Opens with where the key's value came from.
  void complain(const std::string& key, const std::string& text) {
    const auto place = place_.find(key);
    if (place != place_.end()) return complain_at(place->second, fmt::format("{}: {}", key, text));
    complain_at(key, text);
  }

  // `where`: "my.yaml:3", "command line", "--lora_r"; `origin` is what people read in the printed recipe.
  template <class Read>
  void set(const std::string& key, const std::string& where, const std::string& origin, const std::string& folder, Read&& read) {
    place_[key] = where;
    result_.origin[key] = origin;
    unread_.erase(key);
    visit_leaves(result_.recipe, [&](const std::string& name, auto& member, const char* help) {
      if (name != key) return;
      using Member = std::decay_t<decltype(member)>;
      Member value{};
      std::string complaint = read(value);
      if (!complaint.empty()) {
        unread_.insert(key);
        if constexpr (!std::is_same_v<Member, std::string>) complaint += fmt::format(" ({})", help);
        return complain(key, complaint);
      }
      if (is_path(key)) {
        if constexpr (std::is_same_v<Member, std::string>) value = resolved_path(value, key, folder);
        if constexpr (std::is_same_v<Member, std::vector<std::string>>) {
          for (std::string& item : value) item = resolved_path(item, key, folder);
        }
      }
      if constexpr (std::is_same_v<Member, std::string>) {
        if (key == "output.dir") value = with_home(value);
      }
      member = std::move(value);
    });
  }

  void read_yaml(const std::string& text, const std::string& file, const std::string& folder) {
    if (!is_valid_utf8(text)) throw input_error("{}: expected YAML in UTF-8; save it as UTF-8 text", file);
    std::vector<YAML::Node> documents;
    try {
      documents = YAML::LoadAll(text);
    } catch (const YAML::Exception& error) {
      const std::string line = error.mark.is_null() ? "" : fmt::format(":{}", error.mark.line + 1);
      throw input_error("{}{}: not valid YAML: {}; a text with \": \", \" #\" or a leading brace needs quotes", file, line,
                        error.msg);
    }
    if (documents.size() > 1)
      throw input_error("{}: expected one YAML document, got {}; remove the others", file, documents.size());
    if (documents.empty() || documents[0].IsNull()) return;
    if (!documents[0].IsMap()) throw input_error("{}:1: expected sections such as \"model:\" with keys under them", file);
    std::set<std::string> sections;
    for (const auto& item : documents[0]) read_section(item.first, item.second, file, folder, sections);
  }

  static std::string at(const std::string& file, const YAML::Node& node) {
    return node.Mark().is_null() ? file : fmt::format("{}:{}", file, node.Mark().line + 1);
  }

  void read_section(const YAML::Node& name, const YAML::Node& body, const std::string& file, const std::string& folder,
                    std::set<std::string>& seen) {
    const std::string place = at(file, name);
    if (!name.IsScalar()) return complain_at(place, "expected the name of a section");
    const std::string section = name.Scalar();
    std::vector<std::string> sections;
    Recipe::visit(result_.recipe, [&](const char* known, auto&) { sections.emplace_back(known); });
    if (std::find(sections.begin(), sections.end(), section) == sections.end()) return unknown_section(section, sections, place);
    if (!seen.insert(section).second)
      return complain_at(place, fmt::format("{}: the section stands twice; join the two", section));
    if (body.IsNull()) return;
    if (!body.IsMap()) {
      return complain_at(place, fmt::format("{}: expected a section of keys, got {}", section, kind_of(body)));
    }
    std::set<std::string> keys;
    for (const auto& item : body) {
      if (!item.first.IsScalar()) {
        complain_at(at(file, item.first), fmt::format("{}: expected the name of a key", section));
        continue;
      }
      const std::string key = fmt::format("{}.{}", section, item.first.Scalar());
      const std::string where = at(file, item.first);
      if (!is_known(key)) {
        complain_at(where, unknown_key(key));
      } else if (!keys.insert(key).second) {
        complain_at(where, fmt::format("{}: stands twice; keep one", key));
      } else {
        const YAML::Node& value = item.second;
        set(key, where, at(base_name(file), item.first), folder, [&](auto& member) { return read_node(value, member); });
      }
    }
  }

  static std::string kind_of(const YAML::Node& node) {
    if (node.IsNull()) return "nothing";
    if (node.IsMap()) return "a map";
    if (node.IsSequence()) return "a list";
    return in_quotes(node.Scalar());
  }

  template <class Member>
  static std::string read_node(const YAML::Node& node, Member& member) {
    if (node.IsNull()) return "has no value; give one or remove the key";
    if constexpr (std::is_same_v<Member, std::vector<std::string>>) {
      if (node.IsSequence()) {
        for (const auto& item : node) {
          if (!item.IsScalar()) return fmt::format("expected a list of texts, one item is {}", kind_of(item));
          if (std::string complaint = read_value(item.Scalar(), member); !complaint.empty()) return complaint;
        }
        return "";
      }
    }
    if (node.IsScalar()) return read_value(node.Scalar(), member);
    constexpr bool kIsText = std::is_same_v<Member, std::string>;
    const char* remedy = node.IsMap() && kIsText ? "; put the text in quotes" : "";
    return fmt::format("expected one value, got {}{}", kind_of(node), remedy);
  }

  void unknown_section(const std::string& name, const std::vector<std::string>& sections, const std::string& place) {
    const std::string guess = did_you_mean(name, sections);
    std::string remedy;
    if (is_known(name)) {
      const size_t dot = name.find('.');
      remedy = fmt::format("write \"{}:\" and under it \"{}:\"", name.substr(0, dot), name.substr(dot + 1));
    } else if (is_half_precision(name)) {
      remedy = kHalfPrecisionRefusal;
    } else if (!guess.empty()) {
      remedy = fmt::format("did you mean {}?", guess);
    } else if (const auto known = other_names().find(name); known != other_names().end()) {
      remedy = fmt::format("did you mean {}?", known->second);
    } else {
      remedy = fmt::format("expected one of {}", fmt::join(sections, ", "));
    }
    complain_at(place, fmt::format("{}: unknown section; {}", name, remedy));
  }

  bool is_known(const std::string& key) const { return std::find(keys_.begin(), keys_.end(), key) != keys_.end(); }

  // "lora.rnak: unknown key; did you mean lora.rank?"
  std::string unknown_key(const std::string& key) const {
    const size_t dot = key.find('.');
    const std::string section = key.substr(0, dot);
    const std::string leaf = dot == std::string::npos ? key : key.substr(dot + 1);
    if (is_half_precision(leaf)) return fmt::format("{}: unknown key; {}", key, kHalfPrecisionRefusal);
    std::vector<std::string> in_section;
    std::string elsewhere;
    for (const std::string& known : keys_) {
      const size_t at_dot = known.find('.');
      if (known.substr(0, at_dot) == section) in_section.push_back(known.substr(at_dot + 1));
      if (known.substr(at_dot + 1) == leaf && elsewhere.empty()) elsewhere = known;
    }
    std::string guess = did_you_mean(leaf, in_section);
    if (!guess.empty()) guess = fmt::format("{}.{}", section, guess);
    if (guess.empty()) guess = elsewhere;
    if (const auto known = other_names().find(leaf); guess.empty() && known != other_names().end()) guess = known->second;
    if (guess.empty()) guess = did_you_mean(key, keys_);
    if (!guess.empty()) return fmt::format("{}: unknown key; did you mean {}?", key, guess);
    if (in_section.empty()) return fmt::format("{}: unknown key; gemtune recipe --help-keys lists all", key);
    return fmt::format("{}: unknown key; {} has {}", key, section, fmt::join(in_section, ", "));
  }

  // key=value. Texts are taken as they stand, unless they are in quotes: a template's braces are no YAML.
  void read_override(const std::string& word) {
    const std::string where = "command line";
    const size_t equals = word.find('=');
    if (equals == std::string::npos || equals == 0) {
      return complain_at(where, fmt::format("expected key=value, got {}", in_quotes(word)));
    }
    const std::string key = word.substr(0, equals);
    const std::string text = word.substr(equals + 1);
    if (!is_known(key)) return complain_at(where, unknown_key(key));
    set(key, where, where, ".", [&](auto& member) { return read_word(text, member); });
  }

  template <class Member>
  static std::string read_word(const std::string& text, Member& member) {
    constexpr bool kIsText = std::is_same_v<Member, std::string>;
    constexpr bool kIsList = std::is_same_v<Member, std::vector<std::string>>;
    const bool is_quoted = text.size() > 1 && (text[0] == '"' || text[0] == '\'') && text.back() == text[0];
    const bool is_list = kIsList && text.starts_with('[') && text.ends_with(']');
    if (kIsList && strip(text).empty()) return "";
    if (!(kIsText || kIsList) && strip(text).empty()) return "has no value; give one after the equals sign";
    if ((kIsText || kIsList) && !is_quoted && !is_list) return read_value(text, member);
    try {
      return read_node(YAML::Load(text), member);
    } catch (const YAML::Exception& error) {
      return fmt::format("not valid YAML: {}", error.msg);
    }
  }

  // The value of a flag that is handled specially; "" when it was not given.
  static std::string last_of(const std::vector<std::pair<std::string, std::string>>& flags, const std::string& name,
                             bool& given) {
    std::string value;
    given = false;
    for (const auto& [flag, text] : flags) {
      if (flag == name) value = text, given = true;
    }
    return value;
  }

  // A key that key=value sets too cannot follow the flag as well.
  bool is_free(const std::string& key, const std::string& flag) {
    if (result_.origin.at(key) != "command line") return true;
    complain_at(flag, fmt::format("{}: is also set by {}=…; give one of the two", key, key));
    return false;
  }

  void read_flags(std::vector<std::pair<std::string, std::string>> given) {
    // --max-seq-length is --max_seq_length.
    for (auto& [name, value] : given) {
      for (size_t i = 2; i < name.size(); ++i) name[i] = name[i] == '-' ? '_' : name[i];
    }
    std::vector<std::string> names;
    for (const TutorialFlag& flag : tutorial_flags()) names.push_back(flag.flag);
    for (const auto& [name, value] : given) {
      const auto& flags = tutorial_flags();
      const auto flag = std::find_if(flags.begin(), flags.end(), [&](const TutorialFlag& f) { return f.flag == name; });
      if (flag == flags.end()) {
        const std::string guess = did_you_mean(name, names);
        complain_at(name, "unknown flag" + (guess.empty() ? "" : fmt::format("; did you mean {}?", guess)));
      } else if (!flag->key.empty() && is_free(flag->key, name)) {
        const std::string text = flag->takes_value ? value : "true";
        set(flag->key, name, name, ".", [&](auto& member) {
          return strip(text).empty() ? std::string("has no value; give one after the flag") : read_value(text, member);
        });
      }
    }
    read_output_flags(given);
    read_save_flags(given);
  }

  void read_output_flags(const std::vector<std::pair<std::string, std::string>>& given) {
    bool has_dir = false;
    bool has_bucket = false;
    const std::string dir = last_of(given, "--output_dir", has_dir);
    std::string bucket = last_of(given, "--gcs_bucket", has_bucket);
    if (has_dir && strip(dir).empty()) return complain_at("--output_dir", "has no value; give a folder");
    if (has_dir && is_free("output.dir", "--output_dir")) set_text("output.dir", "--output_dir", dir);
    if (!has_bucket || !is_free("output.dir", "--gcs_bucket")) return;
    if (bucket.starts_with("gs://")) bucket = bucket.substr(5);
    while (bucket.ends_with('/')) bucket.pop_back();
    const std::string name = bucket.substr(0, bucket.find('/'));
    const auto allowed = [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '_' || c == '.';
    };
    if (name.size() < 3 || !std::all_of(name.begin(), name.end(), allowed)) {
      return complain_at("--gcs_bucket",
                         fmt::format("expected a Cloud Storage bucket such as my-bucket or gs://my-bucket, got {}",
                                     in_quotes(last_of(given, "--gcs_bucket", has_bucket))));
    }
    derive_output();
    const std::string run = base_name(result_.recipe.output.dir);
    set_text("output.dir", "--gcs_bucket", fmt::format("gs://{}/{}", bucket, run));
  }

  void read_save_flags(const std::vector<std::pair<std::string, std::string>>& given) {
    bool has_strategy = false;
    bool has_steps = false;
    const std::string strategy = last_of(given, "--save_strategy", has_strategy);
    const std::string steps = last_of(given, "--save_steps", has_steps);
    if (has_steps && strategy != "steps") {
      complain_at("--save_steps", "acts only with --save_strategy steps; add it or leave --save_steps out");
    }
    if (!has_strategy || !is_free("checkpoint.every", "--save_strategy")) return;
    if (strategy == "epoch") return set_text("checkpoint.every", "--save_strategy", "epoch");
    if (strategy == "no") return set_text("checkpoint.every", "--save_strategy", "never");
    if (strategy != "steps") {
      return complain_at("--save_strategy", fmt::format("expected epoch, steps or no, got {}", in_quotes(strategy)));
    }
    int64_t every = 100;
    const std::string complaint = has_steps ? read_value(steps, every) : "";
    if (!complaint.empty()) return complain_at("--save_steps", complaint);
    set_text("checkpoint.every", has_steps ? "--save_steps" : "--save_strategy", fmt::format("{}", every));
  }

  void set_text(const std::string& key, const std::string& flag, const std::string& text) {
    set(key, flag, flag, ".", [&](auto& member) { return read_value(text, member); });
  }

  void derive_output() {
    Recipe& recipe = result_.recipe;
    if (!recipe.output.dir.empty()) return;
    const std::string name =
        result_.file.empty() ? base_name(recipe.model.path) : std::filesystem::path(result_.file).stem().string();
    if (name.empty()) return;  // model.path is missing, which validation says
    recipe.output.dir = "runs/" + name;
    result_.origin["output.dir"] = "derived";
  }

  ResolvedRecipe result_;
  std::vector<std::string> keys_;
  std::map<std::string, std::string> place_;  // key → where its value was written
  std::set<std::string> unread_;              // keys whose value could not be read
  std::vector<std::string> complaints_;
};

}  // namespace

ResolvedRecipe load_recipe(const RecipeArguments& arguments) {
  return Loader().load(arguments);
}

}  // namespace gemtune
