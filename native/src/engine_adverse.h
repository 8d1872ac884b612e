// Test modes of the engine: workers held up at random, and a cache a worker that nobody keeps coherent.
#pragma once

#include <sched.h>
#include <time.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>

#include "hyper_mpmd/plan.h"

namespace hyper_mpmd {

// Holds a thread up at random: mostly not at all, sometimes for as long as a task or two. Some threads are slow
// throughout. Rare orders of steps become common so.
class Delays {
 public:
  Delays(uint64_t seed, uint64_t thread) : state_(mixed(seed * 0x9e3779b97f4a7c15u + thread + 1)) {
    slow_ = next() % 4 == 0;
    never_ = seed == 0 || next() % 8 == 0;
  }

  void step() {
    if (never_) return;
    const uint64_t drawn = next();
    const uint32_t what = drawn % 256;
    const auto amount = static_cast<uint32_t>(drawn >> 40);
    if (what < 160) return;
    if (what < 240) {
      for (volatile uint32_t spin = amount % 400; spin > 0;) spin = spin - 1;
    } else if (what < (slow_ ? 250u : 254u)) {
      sched_yield();
    } else {
      const timespec nap{0, 1000 + amount % 60'000};
      nanosleep(&nap, nullptr);
    }
  }

  uint64_t next() {  // xorshift64*, Vigna 2016
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545f4914f6cdd1du;
  }

 private:
  static uint64_t mixed(uint64_t value) {
    value ^= value >> 31;
    value *= 0xbf58476d1ce4e5b9u;
    return (value ^ value >> 29) | 1;
  }

  uint64_t state_;
  bool slow_, never_;
};

// The scalar cache of one worker: 64-byte lines, filled at the first cached read, never invalidated while the launch
// runs. A cached read whose memory has changed since would give an NPU the old value.
class ShadowCache {
 public:
  static constexpr uintptr_t kLine = 64;

  // The word as the worker's cache has it.
  uint32_t read(const uint32_t* word) {
    const auto address = reinterpret_cast<uintptr_t>(word);
    const auto [found, fresh] = lines_.try_emplace(address / kLine);
    Line& line = found->second;
    if (fresh) fill(line, reinterpret_cast<const uint32_t*>(address / kLine * kLine));
    const uint32_t cached = line.words[address % kLine / sizeof(uint32_t)];
    if (const uint32_t now = __atomic_load_n(word, __ATOMIC_ACQUIRE); now != cached && fault_.empty()) {
      fault_ = "stale read: a worker's cache holds " + std::to_string(cached) + " of a word that is " +
               std::to_string(now) + " in memory by now; words that change while a launch runs must be read past it";
    }
    return cached;
  }

  // What was read stale first; empty: nothing.
  const std::string& fault() const { return fault_; }

 private:
  static constexpr uint32_t kWords = kLine / sizeof(uint32_t);
  struct Line {
    uint32_t words[kWords];
  };

  // A line may begin before and end after what was allocated, as on the device: the sanitizers must not look.
  __attribute__((noinline, no_sanitize("address", "thread"))) static void fill(Line& line, const uint32_t* begin) {
    for (uint32_t i = 0; i < kWords; ++i) line.words[i] = __atomic_load_n(begin + i, __ATOMIC_RELAXED);
  }

  std::unordered_map<uintptr_t, Line> lines_;
  std::string fault_;
};

// Who stores into which line: a cache that writes whole lines back loses what a second writer stored.
class LineWriters {
 public:
  // Empty, or what is wrong with this store.
  std::string store(const void* address, uint32_t thread) {
    const std::lock_guard lock(mutex_);
    const auto [found, fresh] = writers_.try_emplace(reinterpret_cast<uintptr_t>(address) / ShadowCache::kLine, thread);
    if (fresh || found->second == thread) return {};
    return "two writers of a line: threads " + std::to_string(found->second) + " and " + std::to_string(thread) +
           " store into the same 64 bytes";
  }

 private:
  std::mutex mutex_;
  std::unordered_map<uintptr_t, uint32_t> writers_;
};

}  // namespace hyper_mpmd
