// A plan in memory: the record sections, checked once so that the engine may index without looking.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hyper_mpmd/plan.h"

namespace hyper_mpmd {

struct PlanImage {
  uint32_t rank = 0;
  uint32_t ranks = 1;
  std::vector<OpRecord> ops;
  std::vector<TensorRecord> tensors;
  std::vector<TaskRecord> tasks;
  std::vector<AccessRecord> accesses;
  std::vector<WaitRecord> waits;
  std::vector<SignalRecord> signals;
  std::vector<EventRecord> events;
  std::vector<QueueRecord> queues;
  std::vector<LaunchRecord> launches;
  std::vector<uint32_t> dependencies;
  std::vector<PeerRecord> peers;

  uint32_t local_events() const;  // events before the first one of another rank
  uint64_t bytes_of(uint32_t tensor) const;
  uint64_t workspace_bytes() const;  // of the tensors in the workspace
  uint64_t symmetric_bytes() const;  // of the tensors that peers write, on this rank
  uint64_t heap_words() const;       // counters that peers write, on this rank
  bool dispatched() const;           // the host dispatches launches one by one (O0)

  // Lay out every heap with `stride` words a source rank instead of as few as this plan needs, so that plans of
  // different sizes share one heap and each rank keeps its lines. `symmetric_bytes`: what each rank has for the tensors
  // that peers write. Returns what does not fit, empty if all does.
  std::string spread(uint64_t stride, uint64_t symmetric_bytes);

  // What makes the image unsafe to index or to run alone: an index past its section, a box outside its tensor, a
  // threshold that differs from the number of its signals, a circle in queues, events and launches. Empty if nothing.
  std::string fault() const;
};

// What is wrong across the images of a world (ranks in order): a signal to a slot that nobody waits for, boxes on
// peers.
std::string world_fault(const std::vector<const PlanImage*>& images);

}  // namespace hyper_mpmd
