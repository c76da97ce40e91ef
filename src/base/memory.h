// How much memory the process may still take.
#pragma once

#include <cstdint>

namespace gemtune {

// What the system says is available, or less where a container (cgroup v2) allows less. 0 when neither tells.
int64_t available_memory_bytes();

}  // namespace gemtune
