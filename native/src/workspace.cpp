#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <new>

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

Workspace::Workspace(const PlanImage& image, uint32_t start)
    : workspace_(allocate(image.workspace_bytes())),
      symmetric_(allocate(image.symmetric_bytes())),
      heap_memory_(allocate(image.heap_words() * sizeof(uint32_t))),
      heap_words_(image.heap_words()),
      cells_(image.local_events()),
      heap_base_(image.events.size() - image.local_events()) {
  heap_ = reinterpret_cast<uint32_t*>(heap_memory_.get());
  reset(start);
}

void Workspace::launched(const PlanImage& image) {
  const size_t local = cells_.size();
  for (size_t i = 0; i < local; ++i) cells_[i].base += image.events[i].threshold;
  for (size_t i = 0; i < heap_base_.size(); ++i) heap_base_[i] += image.events[local + i].threshold;
}

void Workspace::reset(uint32_t start) {
  for (EventCell& cell : cells_) cell = {start, start};
  for (uint32_t& base : heap_base_) base = start;
  for (uint64_t i = 0; i < heap_words_; ++i) heap_[i] = start;
  pid_ = getpid();
}

bool Workspace::of_this_process() const { return pid_ == getpid(); }

}  // namespace hyper_mpmd
