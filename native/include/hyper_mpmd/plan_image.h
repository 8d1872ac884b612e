// A plan in memory: the record sections, checked once so that the engine may index without looking.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "hyper_mpmd/plan.h"

namespace hyper_mpmd {

// A plan whose sections lie elsewhere: what checks read.
struct PlanView {
  uint32_t rank = 0;
  uint32_t ranks = 1;
  std::span<const OpRecord> ops;
  std::span<const TensorRecord> tensors;
  std::span<const TaskRecord> tasks;
  std::span<const AccessRecord> accesses;
  std::span<const WaitRecord> waits;
  std::span<const SignalRecord> signals;
  std::span<const EventRecord> events;
  std::span<const QueueRecord> queues;
  std::span<const LaunchRecord> launches;
  std::span<const uint32_t> dependencies;
  std::span<const PeerRecord> peers;
  std::span<const uint32_t> outputs;  // tensors that peers write and the caller gets; empty where no proof asks

  uint32_t local_events() const;  // events before the first one of another rank
  uint64_t bytes_of(uint32_t tensor) const;
  uint64_t heap_words() const;  // counters that peers write, on this rank
  bool dispatched() const;      // the host dispatches launches one by one (O0)

  std::span<const AccessRecord> accesses_of(const TaskRecord& task) const {
    return accesses.subspan(task.access_begin, task.access_count);
  }
  std::span<const WaitRecord> waits_of(const TaskRecord& task) const {
    return waits.subspan(task.wait_begin, task.wait_count);
  }
  std::span<const SignalRecord> signals_of(const TaskRecord& task) const {
    return signals.subspan(task.signal_begin, task.signal_count);
  }

  // What makes the records unsafe to index: an index past its section, a box outside its tensor, sections that do not
  // fit together. Empty if nothing.
  std::string record_fault() const;
};

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

  PlanView view() const;
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

  // What makes the image unsafe to index or to run alone: its records, or what the certificate of prove.h finds.
  // Empty if nothing.
  std::string fault(bool hops = true) const;
};

// What makes the plans of a world (ranks in order) unsafe to read together: other tensors, boxes outside a peer's.
// Empty if nothing.
std::string world_record_fault(std::span<const PlanView> plans);

// That, and signals to a slot that nobody waits for, or too few of them.
std::string world_fault(const std::vector<const PlanImage*>& images);

}  // namespace hyper_mpmd
