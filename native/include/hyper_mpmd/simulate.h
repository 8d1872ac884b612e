// Simulation of a world of plans in virtual time: the very records that the engine runs, on a device of whose figures
// no machine need exist. Whole nanoseconds and whole parts of bytes throughout, so that the Python twin
// (hyper_mpmd/scheduler/twin/simulate.py) comes to the same times.
//
// A core takes the tasks of its queue in order: each starts when the one before it has ended, its launch is open and
// its waits are met. It has its core for `core_ns`, and meanwhile moves its bytes: through the main memory what the L2
// does not hold, and for a put through the links. A memory or a port serves all that use it at the same rate; a
// transfer over several ports is through when each of them has passed all of it. The task ends when core and bytes are
// through; its signals land a latency later.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "hyper_mpmd/plan_image.h"

namespace hyper_mpmd {

struct SimulatedDevice {
  int64_t vector_bytes, memory_bytes, link_bytes, link_total_bytes;  // a microsecond
  int64_t l2_bytes;
  int64_t task_ns, event_ns, remote_ns, launch_ns;
  // (ranks, ns): the latency between ranks of one block of so many; the first block that holds both counts.
  std::vector<std::pair<int64_t, int64_t>> near;

  int64_t latency(uint32_t from, uint32_t to) const {
    for (const auto& [ranks, ns] : near) {
      if (from / ranks == to / ranks) return ns;
    }
    return remote_ns;
  }
};

struct SimulateOptions {
  uint64_t seed = 0;
  uint32_t jitter_ppm = 0;  // a task has its core up to so many millionths longer
  // The longest path: a core for every task, links that nobody shares, no main memory and no host.
  bool path = false;
};

// What came last before a task could start.
enum class Held : uint32_t { kDispatch = 0, kData = 1, kComm = 2 };

struct SimulatedTask {
  int64_t blocked_ns;  // the core was free for it
  int64_t ready_ns;    // its launch was open and its waits were met
  int64_t start_ns;    // the later of the two
  int64_t end_ns;
  int64_t core_ns;       // what it needs its core for; the rest of its time it waited for its bytes
  int64_t memory_bytes;  // of this rank's main memory
  uint32_t held;         // Held
  uint32_t reserved;
};
static_assert(sizeof(SimulatedTask) == 56);

// The L2 is followed in pages of so many rows and columns of a tensor.
inline constexpr uint32_t kPageRows = 128, kPageCols = 256;
// Bytes are served in parts of this size.
inline constexpr uint32_t kByteParts = 256;

// Simulates the plans of all ranks, in order. gathered: [rank][op] a bit for each of the op's reads whose rows are
// chosen by data. tasks: [rank][task], filled in. Returns what keeps the records from being read or the tasks from
// running, empty if nothing. The records are borrowed.
struct SimulateFault {
  std::string record;
  uint64_t stuck = 0;  // tasks that never start
  uint32_t rank = 0, task = 0;
};
SimulateFault simulate_plans(std::span<const PlanView> plans, std::span<const std::vector<uint64_t>> gathered,
                             const SimulatedDevice& device, const SimulateOptions& options,
                             std::span<const std::span<SimulatedTask>> tasks);

}  // namespace hyper_mpmd
