// Names in adapter files, in every spelling that PEFT, Unsloth and older transformers have given them.
#pragma once

#include <string>

namespace gemtune {

// What PEFT puts before a module's path.
constexpr const char* kPeftPrefix = "base_model.model.";

// "base_model.model.X.lora_A.weight" → {canonical module X, 'A'}; 'B' alike, 'T' for a whole trained matrix (modules_to_save).
// `module` is "" for a name that is no module of such a model.
struct AdapterKey {
  std::string module;
  char part = '?';
};
AdapterKey parse_adapter_key(const std::string& key, bool has_vision);

}  // namespace gemtune
