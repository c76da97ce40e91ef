// Small text helpers shared by every layer: suggestions, byte counts, durations, UTF-8.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gemtune {

// The candidate nearest to `word` by edit distance, or "" when none is near enough to be a likely typo.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

// "1.3 GiB", "512 B".
std::string human_bytes(int64_t bytes);

// "1h 02m", "3m 05s", "4.2 s".
std::string human_duration(double seconds);

// "a, b and 12 more": at most `limit` items, then how many are left.
std::string join_some(const std::vector<std::string>& items, size_t limit = 10);

// True when `bytes` is valid UTF-8 (no overlong forms, no surrogates).
bool is_valid_utf8(std::string_view bytes);

// Python's str.strip(): removes leading and trailing Unicode white space.
std::string_view strip(std::string_view text);

// `value` as it should appear in a one-line message: quoted, control bytes escaped, cut after `limit` bytes.
std::string in_quotes(std::string_view value, size_t limit = 80);

}  // namespace gemtune
