// The launching thread's part: dispatching launches (O0), and where each rank is a process of its own, entering
// together, watching the others and giving them credit.
#pragma once

#include <chrono>
#include <cstring>
#include <vector>

#include "engine_standing.h"

namespace hyper_mpmd {

// Under O0 the launching thread is the host: it dispatches a launch once those it waits for have ended.
class Dispatcher {
 public:
  explicit Dispatcher(Job& job) : job_(job), ranks_(job.ranks.size()) {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const PlanImage& image = *job.ranks[r].image;
      if (!image.dispatched()) continue;
      ranks_[r].gates.assign(image.launches.size(), 0);
      ranks_[r].done.assign(image.launches.size(), 0);
      ranks_[r].left = image.launches.size();
      job.views[r].gates = ranks_[r].gates.data();
      job.views[r].launch_done = ranks_[r].done.data();
      left_ += ranks_[r].left;
    }
  }

  bool all_dispatched() const { return left_ == 0; }

  // Dispatch what can be; true if anything was.
  bool step() {
    bool any = false;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      Rank& rank = ranks_[r];
      const PlanImage& image = *job_.ranks[r].image;
      for (uint32_t l = 0; rank.left != 0 && l < image.launches.size(); ++l) {
        if (rank.gates[l] || !ended(image, rank, image.launches[l])) continue;
        __atomic_store_n(&rank.gates[l], 1, __ATOMIC_RELEASE);
        --rank.left;
        --left_;
        any = true;
      }
    }
    return any;
  }

 private:
  struct Rank {
    std::vector<uint32_t> gates, done;
    size_t left = 0;
  };

  static bool ended(const PlanImage& image, const Rank& rank, const LaunchRecord& launch) {
    for (uint32_t d = 0; d < launch.dependency_count; ++d) {
      const uint32_t before = image.dependencies[launch.dependency_begin + d];
      // Acquire: what the tasks of the ended launch wrote is handed on through the gate.
      if (__atomic_load_n(&rank.done[before], __ATOMIC_ACQUIRE) != image.launches[before].task_count) return false;
    }
    return true;
  }

  Job& job_;
  std::vector<Rank> ranks_;
  size_t left_ = 0;
};

// Memory of every tensor of every rank that this process can reach, and the words that ranks write in each other's
// heaps.
inline void bind(Job& job, std::vector<uint32_t*>& words) {
  std::vector<RankLaunch>& ranks = job.ranks;
  const Peers* peers = job.options.peers;
  job.tensors.resize(ranks[0].image->ranks);
  words.resize(ranks[0].image->ranks, nullptr);
  for (RankLaunch& launch : ranks) {
    const PlanImage& image = *launch.image;
    Workspace& workspace = *launch.workspace;
    if (!workspace.of_this_process()) workspace.reset(0);
    job.scratch = std::max(job.scratch, scratch_bytes(image));
    words[image.rank] = workspace.words();
    std::vector<void*>& tensors = job.tensors[image.rank];
    tensors = launch.tensors;
    tensors.resize(image.tensors.size(), nullptr);
    for (size_t t = 0; t < image.tensors.size(); ++t) {
      const TensorRecord& tensor = image.tensors[t];
      if (tensor.role == static_cast<uint32_t>(Role::kWorkspace)) {
        tensors[t] = workspace.workspace() + tensor.offset;
      } else if (tensor.role == static_cast<uint32_t>(Role::kSymmetric)) {
        tensors[t] = workspace.symmetric() + tensor.offset;
      } else if (tensor.storage != t) {
        tensors[t] = tensors[tensor.storage];
      }
    }
  }
  if (peers == nullptr) return;
  const PlanImage& image = *ranks[0].image;
  for (uint32_t peer = 0; peer < image.ranks; ++peer) {
    if (peer == image.rank) continue;
    words[peer] = peers->words[peer];
    job.tensors[peer].assign(image.tensors.size(), nullptr);
    for (size_t t = 0; t < image.tensors.size(); ++t) {
      if (image.tensors[t].role != static_cast<uint32_t>(Role::kSymmetric)) continue;
      job.tensors[peer][t] = peers->symmetric[peer] + image.tensors[t].offset;  // the same offset on every rank
    }
  }
}

// What a rank says in each peer's heap on entering a launch: in its own first line there, after the credit. Two places
// in turn, so that a peer one launch ahead leaves what the others still have to read.
struct Entry {
  uint64_t epoch;
  uint64_t tag;
};
inline Entry* entry_of(uint32_t* words, uint64_t stride, uint32_t writer, uint64_t epoch) {
  return reinterpret_cast<Entry*>(words + writer * stride + 4) + epoch % 2;
}

// One process a rank: enter the launch, watch that the others enter the same one, live, and do not end it.
class Watch {
 public:
  Watch(Job& job, Clock::time_point begin) : job_(job), peers_(job.options.peers), begin_(begin) {
    if (peers_ == nullptr) return;
    const PlanImage& image = *job.ranks[0].image;
    own_ = job.ranks[0].workspace->words();
    rank_ = image.rank;
    ranks_ = image.ranks;
    stride_ = peers_->stride;
    for (uint32_t peer = 0; peer < ranks_; ++peer) {
      if (peer == rank_) continue;
      Entry* entry = entry_of(peers_->words[peer], stride_, rank_, peers_->epoch);
      __atomic_store_n(&entry->tag, peers_->tag, __ATOMIC_RELAXED);
      __atomic_store_n(&entry->epoch, peers_->epoch, __ATOMIC_RELEASE);
    }
  }

  // One more look before a launch that went well has ended: it may have been too short for the others.
  void last_look() {
    if (peers_ == nullptr || all_entered_) return;
    for (uint32_t peer = 0; peer < ranks_; ++peer) {
      if (peer != rank_ && !same_program(peer)) return;
    }
  }

  // The deadline runs from when everybody had entered. Ends the launch if it has to.
  void look(Clock::time_point now, double timeout_s) {
    if (job_.stopped()) return;
    if (peers_ != nullptr) {
      if (peers_->heap->aborted() || peers_->heap->poll_peers() >= 0) return job_.end(LaunchStatus::kGroupEnded);
      if (!all_entered_ && !check_entries(now)) return;
    }
    if (timeout_s > 0 && std::chrono::duration<double>(now - begin_).count() > timeout_s) {
      job_.end(LaunchStatus::kTimedOut);
    }
  }

 private:
  // A peer that has entered the same launch with another tag ends it.
  bool same_program(uint32_t peer) {
    const Entry* entry = entry_of(own_, stride_, peer, peers_->epoch);
    if (__atomic_load_n(&entry->epoch, __ATOMIC_ACQUIRE) != peers_->epoch) return true;
    if (__atomic_load_n(&entry->tag, __ATOMIC_RELAXED) == peers_->tag) return true;
    job_.end(LaunchStatus::kWrongProgram, peer);
    return false;
  }

  bool check_entries(Clock::time_point now) {
    for (uint32_t peer = 0; peer < ranks_; ++peer) {
      if (peer == rank_) continue;
      const Entry* entry = entry_of(own_, stride_, peer, peers_->epoch);
      const uint64_t epoch = __atomic_load_n(&entry->epoch, __ATOMIC_ACQUIRE);
      if (epoch < peers_->epoch) {
        if (std::chrono::duration<double>(now - begin_).count() > peers_->entry_timeout_s) {
          job_.end(LaunchStatus::kNotEntered, peer);
        }
        return false;
      }
      if (!same_program(peer)) return false;
    }
    all_entered_ = true;
    begin_ = now;
    return true;
  }

  Job& job_;
  const Peers* peers_;
  Clock::time_point begin_;
  uint32_t* own_ = nullptr;
  uint32_t rank_ = 0, ranks_ = 1;
  uint64_t stride_ = 0;
  bool all_entered_ = false;
};

// Rows that peers put here and no task of this rank reads have to arrive as well before the launch has ended: they may
// be what the caller asked for. Returns the first event that lacks signals, kNone if none does. Events once met are not
// looked at again.
class Arrivals {
 public:
  explicit Arrivals(const RankView& view, const PlanImage& image)
      : view_(view), image_(image), next_(image.local_events()) {}

  uint32_t missing() {
    while (next_ < image_.events.size()) {
      const EventRecord& event = image_.events[next_];
      // A credit belongs to the launch after this one.
      if (event.op != kNone && !reached(count(), view_.heap_base[event.slot] + event.threshold)) return next_;
      ++next_;
    }
    return kNone;
  }
  // The host as one more core, which waits.
  CoreRecord blocked(uint64_t launch, int64_t elapsed_ns) const {
    const EventRecord& event = image_.events[next_];
    CoreRecord host{};
    host.rank = image_.rank;
    host.queue = host.kind = host.core = host.worker = host.task = kNone;
    host.state = static_cast<uint32_t>(CoreState::kWaiting);
    host.event = next_;
    host.have = count() - view_.heap_base[event.slot];
    host.need = event.threshold;
    host.launch = launch;
    host.elapsed_ns = elapsed_ns;
    return host;
  }

 private:
  uint32_t count() const { return Onlooker::load_acquire(&view_.heap[image_.events[next_].slot]); }

  const RankView& view_;
  const PlanImage& image_;
  uint32_t next_;
};

// This rank has finished: what peers wrote for the caller is copied out, then they may write the buffers again.
inline void finish(RankLaunch& launch, const std::vector<uint32_t*>& words) {
  const PlanImage& image = *launch.image;
  launch.workspace->launched(image);
  for (const RankLaunch::Copy& copy : launch.outputs) {
    const std::byte* source = launch.workspace->symmetric() + image.tensors[copy.tensor].offset;
    if (const uint64_t bytes = image.bytes_of(copy.tensor); bytes != 0) std::memcpy(copy.target, source, bytes);
  }
  if (image.heap_words() == 0) return;
  for (uint32_t peer = 0; peer < image.ranks; ++peer) {
    if (peer != image.rank) __atomic_fetch_add(&words[peer][image.peers[peer].credit_slot], 1, __ATOMIC_RELEASE);
  }
}

}  // namespace hyper_mpmd
