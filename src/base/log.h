// Messages for people, on stderr; stdout belongs to a command's result (`--json` prints one document there and nothing else).
#pragma once

#include <fmt/core.h>

#include <string_view>
#include <utility>

namespace gemtune {

enum class LogLevel { kInfo, kWarning, kError };

void log_line(LogLevel level, std::string_view text);

// Only rank 0 prints information; warnings and errors are prefixed by the rank that has them. Call once at start.
void set_log_rank(int rank, int world);

template <class... Args>
void log_info(fmt::format_string<Args...> text, Args&&... args) {
  log_line(LogLevel::kInfo, fmt::format(text, std::forward<Args>(args)...));
}
template <class... Args>
void log_warning(fmt::format_string<Args...> text, Args&&... args) {
  log_line(LogLevel::kWarning, fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace gemtune
