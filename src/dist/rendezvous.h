// How ranks find each other before a group exists: rank 0 listens at MASTER_ADDR:MASTER_PORT, the others say who they are.
#pragma once

#include "dist/group.h"
#include "dist/socket.h"

#include <functional>
#include <string>

namespace gemtune {

// The variable by which run_local_ranks hands rank 0 a socket that already listens on MASTER_PORT, so that no other program
// can take the port between choosing and using it.
inline constexpr const char* kListenerVariable = "GEMTUNE_LISTENER_FD";

// Rank 0: calls `joined(rank, socket)` once for each other rank. `check` is called several times a second and may throw to
// end the waiting. Throws Error(kJobFailed) naming the ranks that did not come in time or that belong to another world.
void gather_ranks(const RankPlace& place, double timeout_s, const std::function<void(int, Socket)>& joined,
                  const std::function<void()>& check);

// Other ranks: the connection to rank 0. Throws Error(kJobFailed) when it cannot be reached in time or refuses.
Socket join_first_rank(const RankPlace& place, double timeout_s);

}  // namespace gemtune
