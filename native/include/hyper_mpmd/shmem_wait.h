// How a rank waits for another: spin where every local rank has a processor, else give the processor away at once.
#pragma once

#include <sched.h>
#include <time.h>

#include <chrono>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace hyper_mpmd::shmem {

using Clock = std::chrono::steady_clock;

inline void pause_processor() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// One wait's patience: a while of spinning (if allowed), then of yielding, then sleeps that grow to a millisecond.
class Backoff {
 public:
  explicit Backoff(bool may_spin) : spins_left_(may_spin ? kSpins : 0) {}

  void pause() {
    if (spins_left_ > 0) {
      --spins_left_;
      pause_processor();
    } else if (yields_left_ > 0) {
      --yields_left_;
      ::sched_yield();
    } else {
      const timespec length{0, sleep_ns_};
      ::nanosleep(&length, nullptr);
      if (sleep_ns_ < kLongestSleepNs) sleep_ns_ = sleep_ns_ * 3 / 2;
    }
  }
  // Whether the next pause costs less than reading the clock.
  bool spinning() const { return spins_left_ > 0; }

 private:
  static constexpr int kSpins = 20'000;  // about 0.5 ms
  static constexpr int kYields = 200;
  static constexpr long kFirstSleepNs = 20'000;
  static constexpr long kLongestSleepNs = 1'000'000;
  int spins_left_;
  int yields_left_ = kYields;
  long sleep_ns_ = kFirstSleepNs;
};

}  // namespace hyper_mpmd::shmem
