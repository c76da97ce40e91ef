#include "base/log.h"

#include <cstdio>
#include <mutex>
#include <string>

namespace gemtune {
namespace {
int g_rank = 0;
int g_world = 1;
std::mutex g_mutex;
}  // namespace

void set_log_rank(int rank, int world) {
  g_rank = rank;
  g_world = world;
}

void log_line(LogLevel level, std::string_view text) {
  if (level == LogLevel::kInfo && g_rank != 0) return;
  std::string line;
  if (level == LogLevel::kWarning) line = "warning: ";
  if (level == LogLevel::kError) line = "error: ";
  if (g_world > 1 && level != LogLevel::kInfo) line = fmt::format("[rank {}] {}", g_rank, line);
  line += text;
  line += '\n';
  std::lock_guard lock(g_mutex);
  std::fwrite(line.data(), 1, line.size(), stderr);
  std::fflush(stderr);
}

}  // namespace gemtune
