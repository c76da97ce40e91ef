// Ranks: who takes part, and the collectives they share. The engine knows no launcher: only torchrun's variables.
#pragma once

#include "base/error.h"

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace gemtune {

// RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT; absent = one process.
struct RankPlace {
  int rank = 0;
  int world = 1;
  int local_rank = 0;
  std::string master_address = "127.0.0.1";
  int master_port = 0;
};
// Throws Error(kInput) when some of the variables are set and others not, or out of range. An empty value counts as unset.
RankPlace rank_place_from_environment();

// Calls come from one thread a rank, in the same order on every rank.
class Group {
 public:
  virtual ~Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  int rank() const { return place_.rank; }
  int world() const { return place_.world; }
  int local_rank() const { return place_.local_rank; }
  bool is_first() const { return place_.rank == 0; }

  // In place; sums in rank order, so every rank gets the same bits. All ranks must call with the same size.
  virtual void all_reduce_sum(std::span<float> values) = 0;
  virtual void all_reduce_sum(std::span<double> values) = 0;
  // A NaN on any rank gives NaN.
  virtual void all_reduce_max(std::span<double> values) = 0;
  virtual void barrier() = 0;
  // Rank 0's bytes on every rank; what the others pass is ignored.
  virtual std::string broadcast(const std::string& bytes) = 0;

  // Tells the others that this rank failed with `text`; their next or current collective throws Error(code) with
  // "rank N: TEXT". A rank that vanishes is reported as "rank N was lost: …" (kJobFailed): at once when its process ended,
  // within the deadline when its machine or network did. Returns what all ranks end with, for the caller to throw or print:
  // of several failures the one that reached rank 0 first ("TEXT" itself in a world of one).
  virtual Error fail(const std::string& text, ExitCode code = ExitCode::kJobFailed) = 0;

 protected:
  explicit Group(RankPlace place) : place_(std::move(place)) {}
  RankPlace place_;
};

// One process: every collective is the identity.
std::unique_ptr<Group> make_single_group();

// TCP star through rank 0 (CPU, and start-up of other backends). A background thread on each rank sends heartbeats, so a rank
// may compute or save for as long as it likes between two calls; one whose heartbeats stop for `timeout_s` counts as lost.
// Make the group before long preparations. Set-up waits `setup_timeout_s` (default: timeout_s) for all ranks to appear and
// then throws Error(kJobFailed) naming the absent ones. Rank 0 listens on the first free port from MASTER_PORT (from the next
// one where torchrun's own store holds it) and the others look for it there.
std::unique_ptr<Group> make_socket_group(const RankPlace& place, double timeout_s, double setup_timeout_s = 0);

// Starts `nproc` copies of this program (argv[0] included; --nproc is removed) as local ranks with torchrun's variables set
// and OMP_NUM_THREADS dividing the cores where it is unset; forwards SIGTERM and SIGINT to them and returns the exit code of
// the job: 0 when every rank exited 0, 75 when all stopped on request, else that of the first rank that failed (5 for one
// ended by a signal), after which the others are ended too. No rank outlives this process. Output of all ranks goes where
// this process's goes. Call before threads are started.
int run_local_ranks(int nproc, const std::vector<std::string>& argv);

}  // namespace gemtune
