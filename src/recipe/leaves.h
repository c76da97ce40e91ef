// Walks the recipe's keys; what parsing, printing and validation share. Internal to the recipe layer.
#pragma once

#include "recipe/recipe.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gemtune {

// Calls f("lora.rank", member, help) for every leaf, in the order of the structs.
template <class Self, class F>
void visit_leaves(Self& recipe, F&& f) {
  Recipe::visit(recipe, [&](const char* section, auto& part) {
    part.visit(part, [&](const char* key, auto& member, const char* help) { f(std::string(section) + "." + key, member, help); });
  });
}

// Values that a help text "a|b|c: …" allows, empty when the key is free. "N" stands for any whole number above 0.
std::vector<std::string> choices_of(std::string_view help);

// One value as text → member. Returns "" or what was expected and got: `expected a whole number, got "x"`.
std::string read_value(std::string_view text, std::string& member);
std::string read_value(std::string_view text, bool& member);
std::string read_value(std::string_view text, int& member);
std::string read_value(std::string_view text, int64_t& member);
std::string read_value(std::string_view text, double& member);
std::string read_value(std::string_view text, std::vector<std::string>& member);

// A value as YAML that read_value (through YAML) turns back into the same value.
std::string yaml_of(const std::string& value);
std::string yaml_of(bool value);
std::string yaml_of(int value);
std::string yaml_of(int64_t value);
std::string yaml_of(double value);
std::string yaml_of(const std::vector<std::string>& value);

// A complaint about one key; the caller adds where the key's value came from.
struct Complaint {
  std::string key;
  std::string text;
};

// All complaints about a complete recipe: choices, ranges, contradictions.
std::vector<Complaint> validate(const Recipe& recipe);

// Why half precision is refused, wherever it is asked for.
bool is_half_precision(std::string_view word);
inline constexpr const char* kHalfPrecisionRefusal =
    "fp16 is refused: Gemma 3's activations exceed its largest number (65504) and become NaN; leave it out: the engine computes "
    "in bf16 "
    "with fp32 accumulation on GPUs and in fp32 on a CPU";

// recipes/tutorial.yaml, byte for byte.
extern const char* const kTutorialYaml;
// recipes/gpus.yaml, byte for byte.
extern const char* const kGpusYaml;

}  // namespace gemtune
