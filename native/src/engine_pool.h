// Worker threads that park between launches, and the turns that callers take.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <condition_variable>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "engine_job.h"

namespace hyper_mpmd {

// True in a worker thread: a launch from there would wait for itself.
inline thread_local bool in_worker = false;

// Worker threads of this process. They park between launches.
class Pool {
 public:
  ~Pool() { join(); }

  // Have `threads` workers alive, or as many as could be started: then false.
  bool grow(uint32_t threads) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals go to the threads that Python knows
    bool good = true;
    try {
      while (threads_.size() < threads) {
        threads_.emplace_back(
            [this, index = static_cast<uint32_t>(threads_.size()), seen = generation_] { loop(index, seen); });
      }
    } catch (const std::system_error&) {
      good = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return good;
  }

  void start(Job& job) {
    const std::lock_guard lock(mutex_);
    job_ = &job;
    running_ = job.threads;
    ++generation_;
    wake_.notify_all();
  }

  // Whether all workers have left the job, waiting for it at most `wait`.
  bool finished(Clock::duration wait) {
    std::unique_lock lock(mutex_);
    // The system clock, as in Turn.
    return idle_.wait_until(lock, std::chrono::system_clock::now() + wait, [this] { return running_ == 0; });
  }

  void join() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
      wake_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  uint32_t size() const { return static_cast<uint32_t>(threads_.size()); }

 private:
  void loop(uint32_t index, uint64_t seen) {
    in_worker = true;
    pthread_setname_np(pthread_self(), ("mpmd-" + std::to_string(index)).c_str());
    kernels::Scratch scratch;
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return closing_ || generation_ != seen; });
      if (closing_) return;
      seen = generation_;
      Job* job = job_;
      if (job == nullptr || index >= job->threads) continue;
      lock.unlock();
      work(*job, index, scratch);
      lock.lock();
      if (--running_ == 0) {
        job_ = nullptr;
        idle_.notify_all();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::vector<std::thread> threads_;
  Job* job_ = nullptr;
  uint64_t generation_ = 0;
  uint32_t running_ = 0;
  bool closing_ = false;
};

// One launch at a time; callers wait for theirs, looking up now and then.
class Turn {
 public:
  bool take(Clock::duration wait) {
    std::unique_lock lock(mutex_);
    // The system clock: ThreadSanitizer does not know the calls that wait on the steady one.
    if (!free_.wait_until(lock, std::chrono::system_clock::now() + wait, [this] { return !taken_; })) return false;
    taken_ = true;
    return true;
  }
  void give_back() {
    const std::lock_guard lock(mutex_);
    taken_ = false;
    free_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable free_;
  bool taken_ = false;
};

struct TurnGuard {
  Turn& turn;
  ~TurnGuard() { turn.give_back(); }
};

}  // namespace hyper_mpmd
