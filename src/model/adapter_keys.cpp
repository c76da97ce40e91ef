#include "model/adapter_keys.h"

#include "model/model.h"

namespace gemtune {

AdapterKey parse_adapter_key(const std::string& key, bool has_vision) {
  std::string name = key;
  if (name.starts_with(kPeftPrefix)) name = name.substr(std::string_view(kPeftPrefix).size());
  for (const char* middle : {".default", ".modules_to_save"}) {
    if (const size_t at = name.find(middle); at != std::string::npos) name.erase(at, std::string_view(middle).size());
  }
  const auto module_of = [&](std::string_view suffix) {
    const std::string weight = canonical_name(name.substr(0, name.size() - suffix.size()) + ".weight", has_vision);
    return weight.empty() ? "" : weight.substr(0, weight.size() - std::string_view(".weight").size());
  };
  if (name.ends_with(".lora_A.weight")) return {module_of(".lora_A.weight"), 'A'};
  if (name.ends_with(".lora_B.weight")) return {module_of(".lora_B.weight"), 'B'};
  if (name.ends_with(".weight")) return {module_of(".weight"), 'T'};
  return {};
}

}  // namespace gemtune
