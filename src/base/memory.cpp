#include "base/memory.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <string>

namespace gemtune {
namespace {

// "12345" or "max"; none when the file is not there.
std::optional<int64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  int64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

}  // namespace

int64_t available_memory_bytes() {
  int64_t available = 0;
  std::ifstream info("/proc/meminfo");
  std::string key, unit;
  int64_t kib = 0;
  while (info >> key >> kib) {
    if (key == "MemAvailable:") available = kib * 1024;
    std::getline(info, unit);
  }
  const auto limit = number_in("/sys/fs/cgroup/memory.max");
  const auto used = number_in("/sys/fs/cgroup/memory.current");
  if (limit && used) available = std::min(available, std::max<int64_t>(0, *limit - *used));
  return available;
}

}  // namespace gemtune
