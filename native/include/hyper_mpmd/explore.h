// What can happen in a small world: every order in which its tasks can run, over one launch after another.
//
// This is the judge of the prover, so the two share no code. The prover derives an order and compares; the explorer
// runs the plans on paper, in all ways, and looks.
//
// A task starts when the task before it in its queue has ended, its rank's launch before has ended, its O0 launch is
// open and all its waits are met. It touches its boxes from its start to its end; its signals land at its end. Counters
// only grow; a wait compares by signed 32-bit difference with the sum of past thresholds and its own.
//
// A launch of a rank ends with a step of its host, once the rank's tasks have ended and what peers put there has
// arrived (where all ranks share a process: once the tasks of all have ended). The host reads what peers wrote for the
// caller, then gives its credit to every peer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "hyper_mpmd/plan.h"

namespace hyper_mpmd::explore {

// The records of one rank's plan, borrowed.
struct Sections {
  std::span<const OpRecord> ops;
  std::span<const TensorRecord> tensors;
  std::span<const TaskRecord> tasks;
  std::span<const AccessRecord> accesses;
  std::span<const WaitRecord> waits;
  std::span<const SignalRecord> signals;
  std::span<const EventRecord> events;
  std::span<const QueueRecord> queues;
  std::span<const LaunchRecord> launches;
  std::span<const uint32_t> dependencies;
  std::span<const PeerRecord> peers;
  std::span<const uint32_t> outputs;  // tensors that the caller gets
};

inline constexpr uint32_t kMaxTasks = 4096;  // of all ranks: conflicts are kept as a table of pairs
inline constexpr uint32_t kMaxLaunches = 8;
inline constexpr uint64_t kMaxCap = uint64_t{1} << 28;

enum class Kind : uint32_t {
  kSound = 0,
  kHang = 1,
  kRace = 2,
  kStaleCounter = 3,  // at the end of a launch a counter differs from its base and threshold
  kOverflow = 4,      // a box leaves its tensor
  kUnfinished = 5,    // not a proof: the cap was reached
};

// A task of one of the launches; kNone for the end of the rank's launch.
struct Moment {
  uint32_t rank, task, launch;
};

// The next task of a queue that cannot go on, and the first thing it lacks. event kNone: `launch_record` has to end,
// or, where that is kNone as well, the rank's launch before.
struct Stuck {
  Moment next;
  uint32_t event, launch_record, have, need;
};

// A counter that ends wrong, after one launch. event kNone: signals arrive in a word of the heap that no event counts.
struct Stale {
  uint32_t rank, event, word, have, need;
};

// Two boxes that share bytes, one of them written; for an overflow only the first.
struct Clash {
  Moment first, second;
  uint32_t first_access, second_access;  // indices into the accesses; for the end of a launch, the tensor
};

struct Verdict {
  Kind kind = Kind::kSound;
  uint64_t states = 0;         // looked at
  std::vector<Moment> ended;   // the tasks that run, each from start to end, in this order, before the harm
  std::vector<Stuck> stuck;    // of a hang: one a queue that has tasks left
  std::vector<Stale> stale;    // of stale counters: all of them
  std::vector<Clash> clashes;  // of a race or an overflow: one
};

enum class Method {
  kStates,  // enumerate all reachable states, breadth first: the shortest way to a race
  kPairs,   // for each two tasks that touch the same bytes, ask whether both can be running: any number of states
};

// Explore the plans of a world, ranks in order, over `launches` launches of it. At most `cap` states (kStates only).
// Throws std::invalid_argument where a record points past its section, std::length_error for a world that is not small.
Verdict explore(std::span<const Sections> world, uint32_t launches, uint64_t cap, Method method);

}  // namespace hyper_mpmd::explore
