// The files of deploy/gke that the program carries: profiles and manifest templates, byte for byte. The build makes the table.
#pragma once

#include <map>
#include <string>
#include <string_view>

namespace gemtune {

// "profiles/a4.yaml" → its text.
const std::map<std::string, std::string_view>& deployed_files();

}  // namespace gemtune
