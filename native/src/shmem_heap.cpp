#include "hyper_mpmd/shmem_heap.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <utility>

#include "hyper_mpmd/shmem_process.h"

namespace hyper_mpmd::shmem {

namespace {

std::uint64_t whole_pages(std::uint64_t bytes) {
  if (bytes == 0 || bytes > kMaxHeapBytes) {
    throw std::invalid_argument("a heap has 1 to " + std::to_string(kMaxHeapBytes) + " bytes, got " +
                                std::to_string(bytes));
  }
  return (bytes + kPage - 1) / kPage * kPage;
}

void check_world(int rank, int world) {
  if (world < 1 || world > kMaxRanks || rank < 0 || rank >= world) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(world) +
                                ": a group has 1 to " + std::to_string(kMaxRanks) + " ranks");
  }
}

std::uint64_t ticket_of(std::uint32_t generation, std::uint64_t number) {
  return (std::uint64_t{generation} << kNumberBits) | number;
}

bool compare(std::int32_t have, std::int32_t want, Comparison comparison) {
  switch (comparison) {
    case Comparison::kEq:
      return have == want;
    case Comparison::kNe:
      return have != want;
    case Comparison::kGt:
      return have > want;
    case Comparison::kGe:
      return have >= want;
    case Comparison::kLt:
      return have < want;
    case Comparison::kLe:
      return have <= want;
  }
  throw std::invalid_argument("no such comparison");
}

}  // namespace

SymmetricHeap::SymmetricHeap(int rank, int world, std::uint64_t heap_bytes, Backing backing)
    : SymmetricHeap(Adopt{}, rank, world,
                    (check_world(rank, world), Mapping::create(kHeaderBytes + whole_pages(heap_bytes), backing)),
                    heap_bytes) {}

SymmetricHeap::SymmetricHeap(Adopt, int rank, int world, std::shared_ptr<Mapping> own, std::uint64_t heap_bytes)
    : rank_(rank),
      world_(world),
      heap_bytes_(whole_pages(heap_bytes)),
      allocator_(heap_bytes_),
      memories_(static_cast<std::size_t>(world)),
      processes_(static_cast<std::size_t>(world)) {
  own->commit(0, kHeaderBytes);
  auto* head = new (own->base()) HeapHeader{};
  head->magic = kMagic;
  head->version = kLayoutVersion;
  head->rank = rank;
  head->world = world;
  head->heap_bytes = heap_bytes_;
  head->process = this_process();
  head->generation.store(generation_, std::memory_order_relaxed);
  head->ready_for.store(generation_, std::memory_order_release);
  processes_[static_cast<std::size_t>(rank)] = head->process;
  memories_[static_cast<std::size_t>(rank)] = std::move(own);
}

std::vector<std::unique_ptr<SymmetricHeap>> SymmetricHeap::local_world(int world, std::uint64_t heap_bytes) {
  std::vector<std::unique_ptr<SymmetricHeap>> heaps;
  for (int rank = 0; rank < world; ++rank) heaps.push_back(std::make_unique<SymmetricHeap>(rank, world, heap_bytes));
  const bool may_spin = world <= usable_processors();
  for (auto& heap : heaps) {
    heap->set_may_spin(may_spin);
    for (int peer = 0; peer < world; ++peer) {
      const auto& other = heaps[static_cast<std::size_t>(peer)];
      if (peer != heap->rank()) heap->attach(peer, other->memory(peer), other->process(peer));
    }
  }
  return heaps;
}

void SymmetricHeap::attach(int peer, std::shared_ptr<Mapping> memory, const ProcessId& process) {
  const auto* head = reinterpret_cast<const HeapHeader*>(memory->base());
  if (memory->bytes() != kHeaderBytes + heap_bytes_ || head->magic != kMagic || head->version != kLayoutVersion ||
      head->rank != peer || head->world != world_ || head->heap_bytes != heap_bytes_ || !(head->process == process)) {
    throw std::runtime_error("what rank " + std::to_string(peer) + " sent is not its heap of this group");
  }
  processes_.at(static_cast<std::size_t>(peer)) = process;
  memories_.at(static_cast<std::size_t>(peer)) = std::move(memory);
}

const std::shared_ptr<Mapping>& SymmetricHeap::memory(int peer) const {
  if (closed()) throw std::logic_error("the heap is closed");
  if (peer < 0 || peer >= world_) {
    throw std::out_of_range("rank " + std::to_string(peer) + " is not in 0.." + std::to_string(world_ - 1));
  }
  const auto& memory = memories_[static_cast<std::size_t>(peer)];
  if (!memory) throw std::logic_error("rank " + std::to_string(peer) + " is not attached");
  return memory;
}

HeapHeader& SymmetricHeap::header(int peer) const { return *reinterpret_cast<HeapHeader*>(memory(peer)->base()); }

std::optional<std::uint64_t> SymmetricHeap::allocate(std::uint64_t bytes, std::uint64_t alignment) {
  if (alignment == 0 || (alignment & (alignment - 1)) != 0 || alignment > kBaseAlignment) {
    throw std::invalid_argument("an alignment is a power of two up to " + std::to_string(kBaseAlignment) + ", got " +
                                std::to_string(alignment));
  }
  const auto offset = allocator_.allocate(bytes, alignment);
  if (!offset) return std::nullopt;
  try {
    memory(rank_)->commit(kHeaderBytes + *offset, OffsetAllocator::rounded(bytes));
  } catch (...) {
    allocator_.free(*offset);
    throw;
  }
  return offset;
}

bool SymmetricHeap::free(std::uint64_t offset, std::uint64_t bytes) {
  if (!allocator_.free(offset)) return false;
  if (!closed()) memory(rank_)->discard(kHeaderBytes + offset, OffsetAllocator::rounded(bytes));
  return true;
}

void SymmetricHeap::close() { memories_.clear(); }

std::byte* SymmetricHeap::checked(int peer, std::uint64_t offset, std::uint64_t bytes, const char* what) const {
  if (bytes > heap_bytes_ || offset > heap_bytes_ - bytes) {
    throw std::out_of_range(std::string(what) + " of " + std::to_string(bytes) + " bytes at offset " +
                            std::to_string(offset) + " leaves the heap of " + std::to_string(heap_bytes_) + " bytes");
  }
  return base(peer) + offset;
}

void SymmetricHeap::put(int peer, std::uint64_t offset, const void* source, std::uint64_t bytes) const {
  std::memmove(checked(peer, offset, bytes, "put"), source, bytes);  // source and target may be one buffer
}

void SymmetricHeap::get(int peer, std::uint64_t offset, void* target, std::uint64_t bytes) const {
  std::memmove(target, checked(peer, offset, bytes, "get"), bytes);
}

namespace {
std::atomic_ref<std::int32_t> signal_word(std::byte* at) {
  if (reinterpret_cast<std::uintptr_t>(at) % sizeof(std::int32_t) != 0) {
    throw std::invalid_argument("a signal lies at a multiple of 4 bytes");
  }
  return std::atomic_ref<std::int32_t>(*reinterpret_cast<std::int32_t*>(at));
}
}  // namespace

void SymmetricHeap::signal(int peer, std::uint64_t offset, std::int32_t value, SignalOperation operation) const {
  const auto word = signal_word(checked(peer, offset, sizeof(std::int32_t), "signal"));
  // Release: what this thread put before is in the peer's memory for whoever acquires the new value.
  if (operation == SignalOperation::kSet) {
    word.store(value, std::memory_order_release);
  } else {
    word.fetch_add(value, std::memory_order_acq_rel);
  }
}

std::int32_t SymmetricHeap::read_signal(int peer, std::uint64_t offset) const {
  return signal_word(checked(peer, offset, sizeof(std::int32_t), "signal")).load(std::memory_order_acquire);
}

Status SymmetricHeap::wait_signal(std::uint64_t offset, std::int32_t value, Comparison comparison,
                                  Clock::time_point until) {
  const auto word = signal_word(checked(rank_, offset, sizeof(std::int32_t), "wait_signal"));
  return wait([&] { return compare(word.load(std::memory_order_acquire), value, comparison); }, until, true);
}

template <class Ready>
Status SymmetricHeap::wait(Ready ready, Clock::time_point until, bool heed_abort) {
  // The waiter's own reference: a close by another thread must not unmap what is being read.
  const std::shared_ptr<Mapping> own = memory(rank_);
  Backoff backoff(may_spin_);
  constexpr int kSpinsPerLook = 64;  // reading the clock costs as much as a few pauses
  while (true) {
    for (int turn = 0; turn < kSpinsPerLook; ++turn) {
      if (ready()) return Status::kDone;
      if (heed_abort && aborted()) return ready() ? Status::kDone : Status::kAborted;
      const bool cheap = backoff.spinning();
      backoff.pause();
      if (!cheap) break;
    }
    // Whoever died may have done its part, or ended the group, just before: look again once the death is known.
    if (poll_peers() >= 0) {
      if (ready()) return Status::kDone;
      return heed_abort && aborted() ? Status::kAborted : Status::kLost;
    }
    if (Clock::now() >= until) return ready() ? Status::kDone : Status::kPending;
  }
}

// Collectives ---------------------------------------------------------------------------------------------------------

std::uint64_t SymmetricHeap::enter(Collective kind, std::uint64_t a, std::uint64_t b, bool refused,
                                   std::string_view text) {
  if (number_ == kMaxCollective) throw std::overflow_error("a generation holds no more collectives");
  const std::uint64_t number = ++number_;
  CollectiveSlot& slot = header(rank_).slots[number % 2];
  slot.kind.store(static_cast<std::uint32_t>(kind), std::memory_order_relaxed);
  slot.refused.store(refused ? 1 : 0, std::memory_order_relaxed);
  slot.a.store(a, std::memory_order_relaxed);
  slot.b.store(b, std::memory_order_relaxed);
  slot.text.write(text);
  // Release: the fields above, and all this rank put before, are there for who sees the ticket.
  slot.ticket.store(ticket_of(generation_, number), std::memory_order_release);
  return number;
}

bool SymmetricHeap::has_entered(int peer, std::uint64_t number) const {
  const std::uint64_t mine = ticket_of(generation_, number);
  // A peer that left this collective may already have entered the next one, in the other slot.
  const auto& slots = header(peer).slots;
  return slots[number % 2].ticket.load(std::memory_order_acquire) == mine ||
         slots[(number + 1) % 2].ticket.load(std::memory_order_acquire) == mine + 1;
}

Status SymmetricHeap::wait_all(std::uint64_t number, Clock::time_point until) {
  int waiting_for = 0;  // ranks below have entered
  const Status status = wait(
      [&] {
        while (waiting_for < world_ && has_entered(waiting_for, number)) ++waiting_for;
        return waiting_for == world_;
      },
      until, true);
  if (status == Status::kDone) return commit(number);
  if (status == Status::kAborted) {
    // Another rank may have found everybody here before the abort: then it is done for all.
    const Decision decision = Decision::unpack(header(0).arbiter.load(std::memory_order_acquire));
    if (decision.generation == generation_ && decision.covers(number)) return Status::kDone;
  }
  return status;
}

Status SymmetricHeap::commit(std::uint64_t number) {
  auto& arbiter = header(0).arbiter;
  Decision through;
  through.generation = generation_;
  through.number = static_cast<std::uint16_t>(number);
  std::uint64_t word = arbiter.load(std::memory_order_acquire);
  while (true) {
    const Decision now = Decision::unpack(word);
    if (now.generation > through.generation) return Status::kAborted;  // the others have met and gone on
    if (now.generation == through.generation) {
      if (now.covers(number)) return Status::kDone;
      if (now.aborted) {
        publish_abort(word);  // the one who aborted may not have come round to us yet
        return Status::kAborted;
      }
    }
    if (arbiter.compare_exchange_weak(word, through.pack(), std::memory_order_acq_rel)) return Status::kDone;
  }
}

Entry SymmetricHeap::entry(int peer, std::uint64_t number) const {
  const CollectiveSlot& slot = header(peer).slots[number % 2];
  return {static_cast<Collective>(slot.kind.load(std::memory_order_relaxed)),
          slot.refused.load(std::memory_order_relaxed) != 0, slot.a.load(std::memory_order_relaxed),
          slot.b.load(std::memory_order_relaxed), slot.text.read()};
}

// Abort and meeting ---------------------------------------------------------------------------------------------------

bool SymmetricHeap::is_active_abort(std::uint64_t word) const {
  const Decision decision = Decision::unpack(word);
  return decision.aborted && decision.generation == generation_.load(std::memory_order_relaxed);
}

Status SymmetricHeap::abort(AbortReason reason, std::string_view text, std::optional<std::uint64_t> number) {
  const std::lock_guard guard(abort_lock_);
  auto& arbiter = header(0).arbiter;
  std::uint64_t word = arbiter.load(std::memory_order_acquire);
  bool text_written = false;
  while (true) {
    const Decision now = Decision::unpack(word);
    if (now.generation > generation_) return Status::kAborted;  // the others have met: nothing is left to abort
    const bool this_generation = now.generation == generation_;
    if (number && this_generation && now.covers(*number)) return Status::kDone;
    if (this_generation && now.aborted) break;
    if (!text_written) header(rank_).abort_text.write(text);  // readable before the decision is
    text_written = true;
    Decision mine;
    mine.generation = generation_;
    mine.aborted = true;
    mine.reason = reason;
    mine.rank = static_cast<std::uint32_t>(rank_);
    mine.number = this_generation ? now.number : std::uint16_t{0};
    if (arbiter.compare_exchange_weak(word, mine.pack(), std::memory_order_acq_rel)) {
      word = mine.pack();
      break;
    }
  }
  publish_abort(word);
  return Status::kAborted;
}

void SymmetricHeap::publish_abort(std::uint64_t word) const {
  for (int peer = 0; peer < world_; ++peer) {
    auto& copy = header(peer).abort;
    std::uint64_t old = copy.load(std::memory_order_acquire);
    // Only forward: a rank held up for long must not bring back the abort of a generation gone by.
    while (old < word && !copy.compare_exchange_weak(old, word, std::memory_order_acq_rel)) {
    }
  }
}

std::optional<AbortState> SymmetricHeap::abort_state() const {
  const std::uint64_t word = header(rank_).abort.load(std::memory_order_acquire);
  if (!is_active_abort(word)) return std::nullopt;
  const Decision decision = Decision::unpack(word);
  return AbortState{static_cast<int>(decision.rank), decision.reason,
                    header(static_cast<int>(decision.rank)).abort_text.read()};
}

bool SymmetricHeap::has_met(int peer) const {
  return header(peer).ready_for.load(std::memory_order_acquire) > generation_;
}

Status SymmetricHeap::meet(Clock::time_point until) {
  const std::uint32_t next = generation_ + 1;
  if (next > kMaxGeneration)
    throw std::overflow_error("a heap holds no more generations; release it and acquire again");
  header(rank_).ready_for.store(next, std::memory_order_release);
  const Status status = wait(
      [&] {
        for (int peer = 0; peer < world_; ++peer) {
          if (!has_met(peer)) return false;
        }
        return true;
      },
      until, false);
  if (status != Status::kDone) return status;
  number_ = 0;
  generation_.store(next, std::memory_order_release);
  header(rank_).generation.store(next, std::memory_order_release);
  return Status::kDone;
}

// Liveness ------------------------------------------------------------------------------------------------------------

int SymmetricHeap::lost_rank() const {
  return static_cast<int>(header(rank_).lost.load(std::memory_order_acquire)) - 1;
}

int SymmetricHeap::poll_peers() {
  if (const int lost = lost_rank(); lost >= 0) return lost;
  const std::int64_t now = Clock::now().time_since_epoch().count();
  std::int64_t due = next_poll_ns_.load(std::memory_order_relaxed);
  const std::int64_t next = now + std::chrono::duration_cast<Clock::duration>(kPollEvery).count();
  if (now < due || !next_poll_ns_.compare_exchange_strong(due, next, std::memory_order_relaxed)) return -1;
  for (int peer = 0; peer < world_; ++peer) {
    if (process(peer) == process(rank_) || is_alive(process(peer))) continue;
    // Told to all, so that every survivor names the same rank, the first one noticed.
    for (int other = 0; other < world_; ++other) {
      std::uint64_t nobody = 0;
      header(other).lost.compare_exchange_strong(nobody, static_cast<std::uint64_t>(peer) + 1,
                                                 std::memory_order_acq_rel);
    }
    return lost_rank();
  }
  return -1;
}

}  // namespace hyper_mpmd::shmem
