#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>

#include "hyper_mpmd/engine.h"

namespace hyper_mpmd {

void Workspace::Free::operator()(std::byte* memory) const { std::free(memory); }

Workspace::Memory Workspace::allocate(uint64_t bytes) {
  if (bytes == 0) return {};
  const uint64_t whole = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kAlignment, whole));
  if (memory == nullptr) throw std::bad_alloc();
  return Memory(memory);
}

void Workspace::attach(std::byte* symmetric, uint64_t symmetric_bytes, uint32_t* words, uint64_t word_count) {
  attached_ = true;
  symmetric_ = symmetric;
  symmetric_bytes_ = symmetric_bytes;
  words_ = words;
  word_base_.assign(word_count, 0);
  std::fill_n(words, word_count, 0);
}

void Workspace::fit(const PlanImage& image) {
  if (pid_ == 0) pid_ = getpid();
  if (const uint64_t bytes = image.workspace_bytes(); bytes > workspace_bytes_) {
    workspace_.reset();  // nothing in it outlives a launch
    workspace_bytes_ = 0;
    workspace_ = allocate(bytes);
    workspace_bytes_ = bytes;
  }
  if (image.local_events() > cells_.size()) cells_.resize(image.local_events(), {start_, start_});
  if (attached_) {
    if (image.symmetric_bytes() > symmetric_bytes_ || image.heap_words() > word_base_.size()) {
      throw std::length_error("the plan needs " + std::to_string(image.symmetric_bytes()) + " symmetric bytes and " +
                              std::to_string(image.heap_words()) + " counters; attached are " +
                              std::to_string(symmetric_bytes_) + " and " + std::to_string(word_base_.size()));
    }
    return;
  }
  if (const uint64_t bytes = image.symmetric_bytes(); bytes > symmetric_bytes_) {
    own_symmetric_.reset();
    symmetric_bytes_ = 0;
    own_symmetric_ = allocate(bytes);
    symmetric_bytes_ = bytes;
  }
  if (image.heap_words() > word_base_.size()) {
    own_words_ = allocate(image.heap_words() * sizeof(uint32_t));
    words_ = reinterpret_cast<uint32_t*>(own_words_.get());
    word_base_.resize(image.heap_words());
    reset(start_);
  }
}

void Workspace::launched(const PlanImage& image) {
  const uint32_t local = image.local_events();
  for (uint32_t i = 0; i < local; ++i) cells_[i].base += image.events[i].threshold;
  for (size_t i = local; i < image.events.size(); ++i) word_base_[image.events[i].slot] += image.events[i].threshold;
}

void Workspace::reset(uint32_t start) {
  for (EventCell& cell : cells_) cell = {start, start};
  std::fill(word_base_.begin(), word_base_.end(), start);
  // Peers may still add to attached words: the group zeroes those itself, once all have left the launch.
  if (!attached_) std::fill_n(words_, word_base_.size(), start);
  pid_ = getpid();
}

bool Workspace::of_this_process() const { return pid_ == getpid(); }

}  // namespace hyper_mpmd
