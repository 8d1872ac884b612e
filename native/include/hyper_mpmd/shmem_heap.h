// One rank's end of a symmetric heap: its own memory, its peers' memory mapped beside it, and the words by which the
// group meets, ends together and notices a death. Usable without Python; an engine takes `base`, `aborted`, `abort`,
// `poll_peers` and its own words inside allocations.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hyper_mpmd/shmem_allocator.h"
#include "hyper_mpmd/shmem_layout.h"
#include "hyper_mpmd/shmem_mapping.h"
#include "hyper_mpmd/shmem_wait.h"

namespace hyper_mpmd::shmem {

enum class Status : int {
  kDone = 0,
  kPending = 1,  // the time given has passed; nothing else happened
  kAborted = 2,  // see abort_state()
  kLost = 3,     // see lost_rank()
};

enum class Comparison : int { kEq, kNe, kGt, kGe, kLt, kLe };
enum class SignalOperation : int { kSet, kAdd };

struct AbortState {
  int rank;
  AbortReason reason;
  std::string text;
};

// What a rank said on entering a collective.
struct Entry {
  Collective kind;
  bool refused;
  std::uint64_t a;
  std::uint64_t b;
  std::string text;
};

// Threads: put, get, signal, waits, abort and polls may run in any number at once. Allocation, collectives, meet and
// close are for one thread at a time; close only when no other call is running.
class SymmetricHeap {
 public:
  // Own memory of `heap_bytes` (rounded up to pages) behind a header; peers come with `attach`.
  SymmetricHeap(int rank, int world, std::uint64_t heap_bytes, Backing backing = Backing::kMemfd);
  SymmetricHeap(const SymmetricHeap&) = delete;
  SymmetricHeap& operator=(const SymmetricHeap&) = delete;

  // All ranks of a world in this process, for threads: same layout, same code as between processes.
  static std::vector<std::unique_ptr<SymmetricHeap>> local_world(int world, std::uint64_t heap_bytes);

  // Checks the header of a peer's memory and takes it; the process is the one the kernel named.
  void attach(int peer, std::shared_ptr<Mapping> memory, const ProcessId& process);
  // Waiters spin only where all ranks of this host have a processor each.
  void set_may_spin(bool may_spin) { may_spin_ = may_spin; }

  int rank() const { return rank_; }
  int world() const { return world_; }
  std::uint64_t heap_bytes() const { return heap_bytes_; }
  const ProcessId& process(int peer) const { return processes_.at(static_cast<std::size_t>(peer)); }
  HeapHeader& header(int peer) const;
  // Start of a peer's heap as mapped here; offsets are the same on all ranks.
  std::byte* base(int peer) const { return memory(peer)->base() + kHeaderBytes; }
  // The mapping itself, for what has to outlive `close`.
  const std::shared_ptr<Mapping>& memory(int peer) const;

  // Symmetric offsets. `allocate` takes real memory; it throws std::system_error when the machine has none.
  std::optional<std::uint64_t> allocate(std::uint64_t bytes, std::uint64_t alignment);
  bool free(std::uint64_t offset, std::uint64_t bytes);
  const OffsetAllocator& allocator() const { return allocator_; }

  // One-sided work. Ranges are checked; std::out_of_range says which.
  void put(int peer, std::uint64_t offset, const void* source, std::uint64_t bytes) const;
  void get(int peer, std::uint64_t offset, void* target, std::uint64_t bytes) const;
  // Everything put before is seen by who sees the signal.
  void signal(int peer, std::uint64_t offset, std::int32_t value, SignalOperation operation) const;
  std::int32_t read_signal(int peer, std::uint64_t offset) const;
  Status wait_signal(std::uint64_t offset, std::int32_t value, Comparison comparison, Clock::time_point until);

  // Collectives. `enter` says that this rank is here and returns the number; `wait_all` until everybody is, or `until`.
  // Once it is done for one rank it is done for all, whatever aborts meanwhile.
  std::uint64_t enter(Collective kind, std::uint64_t a, std::uint64_t b, bool refused, std::string_view text);
  Status wait_all(std::uint64_t number, Clock::time_point until);
  Entry entry(int peer, std::uint64_t number) const;
  bool has_entered(int peer, std::uint64_t number) const;
  std::uint64_t collectives() const { return number_; }

  // Ends what the whole group is doing. The first to abort a generation decides; its reason and text reach all. When
  // the collective `number` went through before, returns kDone and nothing is aborted.
  Status abort(AbortReason reason, std::string_view text, std::optional<std::uint64_t> number = std::nullopt);
  bool aborted() const { return is_active_abort(header(rank_).abort.load(std::memory_order_acquire)); }
  std::optional<AbortState> abort_state() const;
  // After an abort: all leave, meet here, and go on in the next generation with collectives counted from zero.
  Status meet(Clock::time_point until);
  bool has_met(int peer) const;
  std::uint32_t generation() const { return generation_; }

  // Asks the kernel for every peer, at most once in kPollEvery; returns a dead rank or -1. A death is for good.
  int poll_peers();
  int lost_rank() const;
  static constexpr std::chrono::milliseconds kPollEvery{50};

  void set_activity(std::string_view text) { header(rank_).activity.write(text); }
  std::string activity(int peer) const { return header(peer).activity.read(); }

  // Lets go of everything here, at once and without asking anybody.
  void close();
  bool closed() const { return memories_.empty(); }

 private:
  struct Adopt {};
  SymmetricHeap(Adopt, int rank, int world, std::shared_ptr<Mapping> own, std::uint64_t heap_bytes);

  bool is_active_abort(std::uint64_t word) const;
  // kDone once `ready`; a death or an abort only if not ready even afterwards.
  template <class Ready>
  Status wait(Ready ready, Clock::time_point until, bool heed_abort);
  Status commit(std::uint64_t number);
  std::byte* checked(int peer, std::uint64_t offset, std::uint64_t bytes, const char* what) const;
  void publish_abort(std::uint64_t word) const;

  int rank_;
  int world_;
  std::uint64_t heap_bytes_;
  bool may_spin_ = false;
  // Read by other threads' waits while meet() moves it on.
  std::atomic<std::uint32_t> generation_{1};
  std::uint64_t number_ = 0;
  std::atomic<std::int64_t> next_poll_ns_{0};
  OffsetAllocator allocator_;
  std::vector<std::shared_ptr<Mapping>> memories_;
  std::vector<ProcessId> processes_;
  std::mutex abort_lock_;  // the abort text has one writer
};

}  // namespace hyper_mpmd::shmem
