// What lies at the start of every rank's heap: the words by which ranks meet, end together and notice a death.
//
// The header is shared memory that several processes read and write, so everything that changes after the heap is
// connected is an atomic, on a line of its own where two ranks write. Nothing here needs a lock that a dead rank could
// keep.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace hyper_mpmd::shmem {

inline constexpr std::uint64_t kMagic = 0x70616568'646d706dULL;
inline constexpr std::uint32_t kLayoutVersion = 1;
inline constexpr std::size_t kLine = 64;                    // what one rank writes, no other rank's line holds
inline constexpr std::size_t kPage = 4096;                  // unit of the header and of giving memory back
inline constexpr std::size_t kBaseAlignment = 2ULL << 20;   // of every heap, so the largest alignment of an allocation
inline constexpr int kMaxRanks = 256;                       // of one group on one host
inline constexpr std::uint64_t kMaxHeapBytes = 1ULL << 46;  // address space of a process is 47 bits
inline constexpr std::uint32_t kMaxGeneration = 0xFFFFFFU;  // 24 bits of a decision word
inline constexpr int kNumberBits = 40;                      // of a ticket: collectives of one generation
inline constexpr std::uint64_t kMaxCollective = (1ULL << kNumberBits) - 2;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "a lock inside shared memory would die with its holder");
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

// A short text with one writer. Readers take a whole text or none: the version is odd while it changes. Every word is
// stored with release and loaded with acquire, so the version cannot be seen to change after the words did.
template <std::size_t Words>
class SharedText {
 public:
  static constexpr std::size_t kBytes = Words * sizeof(std::uint64_t);

  void write(std::string_view text) {
    version_.fetch_add(1, std::memory_order_acq_rel);
    for (std::size_t i = 0; i < Words; ++i) {
      std::uint64_t word = 0;
      const std::size_t at = i * sizeof word;
      if (at < text.size()) std::memcpy(&word, text.data() + at, std::min(sizeof word, text.size() - at));
      words_[i].store(word, std::memory_order_release);
    }
    version_.fetch_add(1, std::memory_order_acq_rel);
  }

  std::string read() const {
    std::array<char, kBytes> bytes{};
    for (int attempt = 0; attempt < 100; ++attempt) {
      const std::uint64_t before = version_.load(std::memory_order_acquire);
      for (std::size_t i = 0; i < Words; ++i) {
        const std::uint64_t word = words_[i].load(std::memory_order_acquire);
        std::memcpy(bytes.data() + i * sizeof word, &word, sizeof word);
      }
      if (before % 2 == 0 && version_.load(std::memory_order_relaxed) == before) {
        return std::string(bytes.data(), strnlen(bytes.data(), kBytes));
      }
    }
    return {};  // its writer died while writing, or writes without end
  }

 private:
  std::atomic<std::uint64_t> version_;
  std::array<std::atomic<std::uint64_t>, Words> words_;
};

// The process behind a rank. A pid alone may be given to another process; with its start time it names one for good.
struct ProcessId {
  std::int64_t pid = 0;
  std::uint64_t start = 0;  // clock ticks since boot (/proc/<pid>/stat, field 22)
  bool operator==(const ProcessId&) const = default;
};

// Why a group left what it was doing.
enum class AbortReason : std::uint32_t { kNone = 0, kDeadline = 1, kInterrupted = 2, kError = 3 };

enum class Collective : std::uint32_t {
  kBarrier = 1,
  kEmpty = 2,
  kFree = 3,
  kAllGather = 4,
  kAllGatherEnd = 5,
  kRelease = 6
};

// What one rank says on entering a collective. Two slots suffice: nobody can enter number n + 2 before everybody has
// entered n + 1, and with that left n.
struct alignas(kLine) CollectiveSlot {
  std::atomic<std::uint64_t> ticket;  // generation and number; stored last, with release
  std::atomic<std::uint32_t> kind;
  std::atomic<std::uint32_t> refused;  // the rank refused its own arguments; the text says why
  std::atomic<std::uint64_t> a;        // arguments that have to be equal on all ranks
  std::atomic<std::uint64_t> b;
  SharedText<64> text;
};

inline constexpr std::size_t kAbortTextWords = 56;

struct alignas(kLine) HeapHeader {
  // Written before any peer maps the heap, never after.
  std::uint64_t magic;
  std::uint32_t version;
  std::int32_t rank;
  std::int32_t world;
  std::uint32_t reserved;
  std::uint64_t heap_bytes;
  ProcessId process;

  // Copy of the group's decision once it is an abort: what this rank's waiters and workers poll.
  alignas(kLine) std::atomic<std::uint64_t> abort;
  // A dead rank + 1; for good.
  alignas(kLine) std::atomic<std::uint64_t> lost;
  // The group's last decision (see Decision); rank 0's copy counts.
  alignas(kLine) std::atomic<std::uint64_t> arbiter;
  // The generation this rank is in, and the one it is ready to enter: it has left everything of those before.
  alignas(kLine) std::atomic<std::uint64_t> generation;
  std::atomic<std::uint64_t> ready_for;
  // What the rank is doing, for the messages of those who wait for it.
  alignas(kLine) SharedText<16> activity;
  alignas(kLine) SharedText<kAbortTextWords> abort_text;
  std::array<CollectiveSlot, 2> slots;
};

inline constexpr std::size_t kHeaderBytes = (sizeof(HeapHeader) + kPage - 1) / kPage * kPage;

// One word that settles, for all ranks alike, whether a collective went through before the group was aborted: either
// "number n went through" or "aborted by this rank, after n went through". It changes by compare-and-swap only.
struct Decision {
  std::uint32_t generation = 0;  // 24 bits
  bool aborted = false;
  AbortReason reason = AbortReason::kNone;  // 7 bits
  std::uint32_t rank = 0;                   // 16 bits; who aborted
  std::uint16_t number = 0;                 // low bits of the last collective that went through

  static Decision unpack(std::uint64_t word) {
    return {static_cast<std::uint32_t>(word >> 40), ((word >> 39) & 1) != 0,
            static_cast<AbortReason>((word >> 32) & 0x7F), static_cast<std::uint32_t>((word >> 16) & 0xFFFF),
            static_cast<std::uint16_t>(word & 0xFFFF)};
  }
  std::uint64_t pack() const {
    return (std::uint64_t{generation} << 40) | (std::uint64_t{aborted} << 39) |
           (static_cast<std::uint64_t>(reason) << 32) | (std::uint64_t{rank} << 16) | number;
  }
  // Ranks are never more than one collective apart, so 16 bits and a signed difference order them.
  bool covers(std::uint64_t collective) const {
    return static_cast<std::int16_t>(static_cast<std::uint16_t>(number - static_cast<std::uint16_t>(collective))) >= 0;
  }
};

}  // namespace hyper_mpmd::shmem
