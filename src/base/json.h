// JSON documents with errors that name the file. The library's heavy header stays in .cpp files:
// include <nlohmann/json.hpp> there.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <string_view>

namespace gemtune {

using Json = nlohmann::json;

// `where` opens every message: "config.json: line 3, column 7: …". Depth is limited, duplicate keys are an error.
Json parse_json(std::string_view text, const std::string& where);
Json read_json_file(const std::string& path);

}  // namespace gemtune
