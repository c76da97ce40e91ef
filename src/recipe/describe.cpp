#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/text.h"
#include "recipe/leaves.h"

namespace gemtune {
namespace {

// A value on one line; long templates are cut.
std::string shown(const std::string& yaml) {
  constexpr size_t kLongest = 100;
  if (yaml.size() <= kLongest) return yaml;
  std::string cut = yaml.substr(0, kLongest);
  while (!is_valid_utf8(cut)) cut.pop_back();
  return cut + "…";
}

std::string escaped_for_table(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '|') out += '\\';
    out += c;
  }
  return out;
}

bool may_change_on_resume(const std::string& key) {
  static const std::set<std::string> keys = {"train.epochs", "train.max_steps", "train.vision_cache",
                                             "dist.nproc",   "checkpoint.keep", "output.dir"};
  return keys.contains(key) || key.starts_with("logging.");
}

}  // namespace

std::vector<KeyHelp> recipe_keys() {
  const Recipe defaults;
  std::vector<KeyHelp> keys;
  visit_leaves(defaults, [&](const std::string& key, const auto& member, const char* help) {
    const std::string value = yaml_of(member);
    keys.push_back({key, value == "\"\"" || value == "[]" ? "" : value, help});
  });
  return keys;
}

std::string to_yaml(const Recipe& recipe) {
  std::string text;
  std::string section;
  visit_leaves(recipe, [&](const std::string& key, const auto& member, const char*) {
    const size_t dot = key.find('.');
    if (key.substr(0, dot) != section) {
      section = key.substr(0, dot);
      text += section + ":\n";
    }
    text += fmt::format("  {}: {}\n", key.substr(dot + 1), yaml_of(member));
  });
  return text;
}

std::string describe(const ResolvedRecipe& resolved) {
  size_t width = 0;
  visit_leaves(resolved.recipe, [&](const std::string& key, const auto&, const char*) { width = std::max(width, key.size()); });
  std::string text;
  visit_leaves(resolved.recipe, [&](const std::string& key, const auto& member, const char*) {
    const auto origin = resolved.origin.find(key);
    text += fmt::format("{:<{}}  {}  ({})\n", key, width, shown(yaml_of(member)),
                        origin == resolved.origin.end() ? "default" : origin->second);
  });
  return text;
}

std::vector<std::string> differences_that_forbid_resume(const Recipe& stored, const Recipe& now) {
  std::vector<std::string> before;
  visit_leaves(stored, [&](const std::string&, const auto& member, const char*) { before.push_back(yaml_of(member)); });
  std::vector<std::string> differences;
  size_t i = 0;
  visit_leaves(now, [&](const std::string& key, const auto& member, const char*) {
    const std::string after = yaml_of(member);
    if (before[i] != after && !may_change_on_resume(key)) {
      differences.push_back(fmt::format("{}: {} in the run, {} now", key, shown(before[i]), shown(after)));
    }
    ++i;
  });
  return differences;
}

std::string full_recipe() {
  static const std::map<std::string, std::string> examples = {
      {"model.path", "google/gemma-3-4b-it"},
      {"data.train", "[train.jsonl]"},
  };
  std::string text =
      "# Every key with its default and meaning; model.path and data.train are examples. Copy what you change.\n"
      "# Made from the recipe's key list. After a change of a key run: GEMTUNE_UPDATE=1 recipe_test\n";
  std::string section;
  const Recipe defaults;
  visit_leaves(defaults, [&](const std::string& key, const auto& member, const char* help) {
    const size_t dot = key.find('.');
    if (key.substr(0, dot) != section) {
      section = key.substr(0, dot);
      text += fmt::format("\n{}:\n", section);
    }
    const auto example = examples.find(key);
    text += fmt::format("  # {}\n  {}: {}\n", help, key.substr(dot + 1),
                        example == examples.end() ? yaml_of(member) : example->second);
  });
  return text;
}

std::string recipe_document() {
  std::string text =
      "# Recipes\n"
      "\n"
      "<!-- Made from the recipe's key list. After a change of a key run: GEMTUNE_UPDATE=1 recipe_test -->\n"
      "\n"
      "A recipe is a YAML file of sections. `model.path` and `data.train` suffice (`recipes/minimal.yaml`); `recipes/full.yaml` "
      "shows every\n"
      "key, `recipes/tutorial.yaml` is a complete job. `key=value` after the file overrides any key: `gemtune train my.yaml "
      "lora.rank=8`.\n"
      "Unknown keys are errors. `gemtune recipe --help-keys` prints the table below.\n"
      "\n"
      "- Paths in a file are relative to its folder, paths given as `key=value` or by a flag to the current folder; `output.dir` "
      "is always\n"
      "  relative to the current folder.\n"
      "- `ORG/NAME` that is no such folder is an id of the hub. `gs://` and `s3://` paths stay as they are.\n"
      "- `key=value` takes a text as it stands, so a template needs no second pair of quotes: `'data.prompt={Category}: what is "
      "this?'`.\n"
      "  A list is written in brackets: `'data.train=[a.jsonl, b.jsonl]'`; one value is a list of one.\n"
      "- In a file, put a template that starts with a brace in quotes: `answer: \"{description}\"`.\n"
      "\n"
      "## Keys\n"
      "\n"
      "| key | default | meaning |\n"
      "|---|---|---|\n";
  for (const KeyHelp& key : recipe_keys()) {
    text += fmt::format("| `{}` | {} | {} |\n", key.key, key.default_value.empty() ? "–" : "`" + key.default_value + "`",
                        escaped_for_table(key.help));
  }
  text +=
      "\n"
      "## The tutorial script's arguments\n"
      "\n"
      "`gemtune train` takes each of them under its own name. Without a file they start from `recipes/tutorial.yaml`; with a "
      "file they\n"
      "override its values.\n"
      "\n"
      "| argument | key | meaning |\n"
      "|---|---|---|\n";
  for (const TutorialFlag& flag : tutorial_flags()) {
    text += fmt::format("| `{}` | {} | {} |\n", flag.flag, flag.key.empty() ? "–" : "`" + flag.key + "`",
                        escaped_for_table(flag.help));
  }
  return text;
}

}  // namespace gemtune
