// Kubernetes manifests as trees: read from templates, filled, written as YAML. Substitution happens in the tree, so no value
// can change a manifest's structure.
#pragma once

#include <nlohmann/json.hpp>

#include <map>
#include <string>
#include <string_view>

namespace gemtune {

// Keys keep their order.
using Document = nlohmann::ordered_json;

// One YAML document; plain scalars become null, booleans and numbers as in YAML 1.2, quoted ones stay text. Throws
// Error(kInput) "WHERE:LINE: …".
Document parse_yaml_document(std::string_view text, const std::string& where);

// Fills "{{name}}": a scalar that is nothing else becomes the value with its type, inside other text the value must be text or a
// number. Then entries of maps and lists that are null are dropped. A name without a value throws Error(kInput).
Document fill_template(const Document& form, const std::map<std::string, Document>& values, const std::string& where);

// YAML text that every YAML 1.1 and 1.2 reader reads back to the same tree.
std::string to_yaml(const Document& document);
// Several documents in one file.
std::string to_yaml_stream(const std::vector<Document>& documents);

}  // namespace gemtune
