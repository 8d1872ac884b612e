#include "hyper_mpmd/plan_image.h"

#include <algorithm>
#include <bit>

#include "hyper_mpmd/dtype.h"
#include "hyper_mpmd/prove.h"

namespace hyper_mpmd {

namespace {

uint64_t round_up(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

uint64_t bytes_of(const TensorRecord& tensor) {
  return tensor.rows * tensor.cols * static_cast<uint64_t>(size_of(static_cast<DType>(tensor.dtype)));
}

// Bytes that every rank sets aside for it.
uint64_t room_of(const TensorRecord& tensor) {
  return uint64_t{tensor.most_rows} * tensor.cols * static_cast<uint64_t>(size_of(static_cast<DType>(tensor.dtype)));
}

uint64_t span_of(const PlanImage& image, Role role) {
  uint64_t end = 0;
  for (const TensorRecord& tensor : image.tensors) {
    if (tensor.role == static_cast<uint32_t>(role)) end = std::max(end, tensor.offset + round_up(room_of(tensor)));
  }
  return end;
}

std::string at(const char* what, uint64_t index) { return std::string(what) + " " + std::to_string(index); }

bool inside(uint64_t begin, uint64_t count, uint64_t size) { return begin <= size && count <= size - begin; }

template <class Record>
std::span<const Record> borrowed(const std::vector<Record>& records) {
  return records;
}

// The boxes that each kernel reads and writes, 0xff: any number.
struct Shape {
  uint32_t reads, writes;
};
constexpr Shape kShapes[kKernelCount] = {{kNone, kNone}, {kNone, kNone}, {1, 1}, {2, 1}, {2, 1}, {2, 1},
                                         {3, 1},         {2, 1},         {2, 1}, {3, 1}, {4, 3}, {2, 1}};

std::string tensor_fault(const PlanView& image) {
  for (size_t i = 0; i < image.tensors.size(); ++i) {
    const TensorRecord& tensor = image.tensors[i];
    if (tensor.dtype >= kDTypeCount) return at("tensor", i) + ": dtype " + std::to_string(tensor.dtype);
    if (tensor.role > 3) return at("tensor", i) + ": role " + std::to_string(tensor.role);
    if (tensor.most_rows < tensor.rows) return at("tensor", i) + ": more rows than any rank has";
    if (tensor.rows > kMaxIndex || tensor.cols > kMaxIndex) return at("tensor", i) + ": larger than an index can reach";
    if (tensor.offset % kAlignment || tensor.offset > (uint64_t{1} << 56)) {
      return at("tensor", i) + ": offset " + std::to_string(tensor.offset) + " is not aligned";
    }
    if (room_of(tensor) > (uint64_t{1} << 56)) return at("tensor", i) + ": too many bytes";
    if (tensor.storage >= image.tensors.size()) return at("tensor", i) + ": its storage does not exist";
    const TensorRecord& home = image.tensors[tensor.storage];
    if (home.role != tensor.role || home.offset != tensor.offset || home.rows != tensor.rows ||
        home.most_rows != tensor.most_rows || home.cols != tensor.cols || home.dtype != tensor.dtype) {
      return at("tensor", i) + ": differs from the tensor whose memory it shares";
    }
  }
  for (size_t i = 0; i < image.ops.size(); ++i) {
    if (image.ops[i].kernel >= kKernelCount) return at("op", i) + ": no such kernel";
    if (image.ops[i].dtype >= kDTypeCount) return at("op", i) + ": no such dtype";
    const float limit = std::bit_cast<float>(image.ops[i].limit_bits);
    if (!(limit > 0.0f)) return at("op", i) + ": limit " + std::to_string(limit);
  }
  return {};
}

std::string task_fault(const PlanView& image, size_t number) {
  const TaskRecord& task = image.tasks[number];
  const auto name = [&] { return at("task", number); };
  if (task.op >= image.ops.size()) return name() + ": no such op";
  if (task.launch >= image.launches.size()) return name() + ": no such launch";
  if (task.peer >= image.ranks) return name() + ": no such peer";
  if (!inside(task.access_begin, task.access_count, image.accesses.size())) return name() + ": boxes past the end";
  if (!inside(task.wait_begin, task.wait_count, image.waits.size())) return name() + ": waits past the end";
  if (!inside(task.signal_begin, task.signal_count, image.signals.size())) return name() + ": signals past the end";
  const OpRecord& op = image.ops[task.op];
  const Shape shape = kShapes[op.kernel];
  if (op.read_count > task.access_count ||
      (shape.reads != kNone && (op.read_count != shape.reads || task.access_count != shape.reads + shape.writes))) {
    return name() + ": " + std::to_string(task.access_count) + " boxes do not fit its kernel";
  }
  for (uint32_t i = 0; i < task.access_count; ++i) {
    const AccessRecord& box = image.accesses[task.access_begin + i];
    if (box.tensor >= image.tensors.size()) return name() + ": no such tensor";
    if (box.rank >= image.ranks) return name() + ": no such rank";
    const TensorRecord& tensor = image.tensors[box.tensor];
    const bool written = i >= op.read_count;
    if (box.rank != image.rank) {
      if (tensor.role != static_cast<uint32_t>(Role::kSymmetric)) {
        return name() + ": only symmetric tensors of a peer can be read or written";
      }
      if (!inside(box.row, box.rows, tensor.most_rows)) return name() + ": rows outside the peer's tensor";
    } else if (!inside(box.row, box.rows, tensor.rows)) {
      return name() + ": rows outside the tensor";
    }
    if (!inside(box.col, box.cols, tensor.cols)) return name() + ": columns outside the tensor";
    if (written && tensor.role == static_cast<uint32_t>(Role::kInput)) return name() + ": writes an input";
  }
  return {};
}

// The sizes that a native kernel takes from one box must agree with the others.
std::string box_fault(const PlanView& image, size_t number) {
  const TaskRecord& task = image.tasks[number];
  const OpRecord& op = image.ops[task.op];
  const AccessRecord* box = image.accesses.data() + task.access_begin;
  auto dtype = [&](int i) { return image.tensors[box[i].tensor].dtype; };
  const auto float_like = [](uint32_t d) { return d == 0 || is_half(static_cast<DType>(d)); };
  const auto same_size = [&](int i, int j) { return box[i].rows == box[j].rows && box[i].cols == box[j].cols; };
  // One float32 for each row of box j, side by side in memory.
  const auto scalar_a_row = [&](int i, int j) {
    return box[i].rows == box[j].rows && box[i].cols == 1 && image.tensors[box[i].tensor].cols == 1 && dtype(i) == 0;
  };
  bool good = true;
  switch (static_cast<Kernel>(op.kernel)) {
    case Kernel::kCopy:
      good = box[0].rows == box[1].rows && box[0].cols == box[1].cols && dtype(0) == dtype(1);
      break;
    case Kernel::kPermute:
      good = box[1].rows == box[2].rows && box[1].cols == 1 && box[0].cols == box[2].cols && dtype(0) == dtype(2) &&
             dtype(1) == 2;
      break;
    case Kernel::kGemm:
      good = box[0].rows == box[2].rows && box[0].cols == box[1].rows && box[1].cols == box[2].cols &&
             dtype(0) == dtype(1) && dtype(0) == dtype(2) && float_like(dtype(0));
      break;
    case Kernel::kGemmWT:
      good = box[0].rows == box[2].rows && box[0].cols == box[1].cols && box[1].rows == box[2].cols &&
             dtype(0) == dtype(1) && dtype(0) == dtype(2) && float_like(dtype(0));
      break;
    case Kernel::kGemmXT:
      good = box[0].cols == box[2].rows && box[0].rows == box[1].rows && box[1].cols == box[2].cols &&
             dtype(0) == dtype(1) && dtype(0) == dtype(2) && float_like(dtype(0));
      break;
    case Kernel::kSwiGLU:
      good = box[0].rows == box[2].rows && box[1].rows == box[2].rows && box[0].cols == box[2].cols &&
             box[1].cols == box[2].cols && dtype(0) == dtype(2) && dtype(1) == dtype(2) && float_like(dtype(0));
      break;
    case Kernel::kWeightedSwiGLU:
      good = same_size(0, 3) && same_size(1, 3) && scalar_a_row(2, 3) && dtype(0) == dtype(3) && dtype(1) == dtype(3) &&
             float_like(dtype(3));
      break;
    case Kernel::kSwiGLUGrad:
      good = scalar_a_row(3, 2) && scalar_a_row(6, 2) && float_like(dtype(2));
      for (const int i : {0, 1, 4, 5}) good = good && same_size(i, 2) && dtype(i) == dtype(2);
      break;
    case Kernel::kGatherSum:
      good = box[1].rows == box[2].rows && box[0].cols == box[2].cols && dtype(0) == dtype(2) && float_like(dtype(0)) &&
             dtype(1) == 2 && box[1].cols == image.tensors[box[1].tensor].cols;
      break;
    case Kernel::kUnpermute:
      good = box[1].rows == box[3].rows && box[2].rows == box[3].rows && box[1].cols == box[2].cols &&
             box[0].cols == box[3].cols && dtype(0) == dtype(3) && float_like(dtype(0)) && dtype(1) == 2 &&
             dtype(2) == 0 && box[1].cols == image.tensors[box[1].tensor].cols &&
             box[2].cols == image.tensors[box[2].tensor].cols;
      break;
    case Kernel::kNop:
    case Kernel::kPython:
      break;
  }
  return good ? std::string() : at("task", number) + ": its boxes do not fit its kernel";
}

std::string event_fault(const PlanView& image) {
  const uint32_t local = image.local_events();
  for (size_t i = 0; i < image.events.size(); ++i) {
    const EventRecord& event = image.events[i];
    const bool mine = i < local;
    if (mine != (event.slot == kNone)) return at("event", i) + ": local events must come first";
    if (mine ? event.signaller != image.rank : event.signaller >= image.ranks || event.signaller == image.rank) {
      return at("event", i) + ": no such signaller";
    }
    if (event.threshold > kMaxThreshold) return at("event", i) + ": threshold past " + std::to_string(kMaxThreshold);
    if (event.op != kNone && event.op >= image.ops.size()) return at("event", i) + ": no such op";
    if (!mine && event.slot >= image.heap_words()) return at("event", i) + ": slot past the heap";
  }
  for (size_t i = 0; i < image.signals.size(); ++i) {
    const SignalRecord& signal = image.signals[i];
    if (signal.rank >= image.ranks) return at("signal", i) + ": no such rank";
    const uint64_t limit = signal.rank == image.rank ? local : image.peers[signal.rank].heap_words;
    if (signal.event >= limit) return at("signal", i) + ": no such event";
  }
  for (const WaitRecord& wait : image.waits) {
    if (wait.event >= image.events.size()) return "a wait for an event that does not exist";
  }
  return {};
}

std::string queue_fault(const PlanView& image) {
  uint64_t next = 0;
  for (size_t i = 0; i < image.queues.size(); ++i) {
    const QueueRecord& queue = image.queues[i];
    if (queue.kind > 2) return at("queue", i) + ": no such core kind";
    if (queue.begin != next || !inside(queue.begin, queue.count, image.tasks.size())) {
      return at("queue", i) + ": its tasks do not follow the queue before";
    }
    next += queue.count;
  }
  if (next != image.tasks.size()) return "tasks that stand in no queue";
  std::vector<uint64_t> members(image.launches.size(), 0);
  for (const TaskRecord& task : image.tasks) ++members[task.launch];
  for (size_t i = 0; i < image.launches.size(); ++i) {
    const LaunchRecord& launch = image.launches[i];
    if (launch.task_count != members[i]) return at("launch", i) + ": counts its tasks wrong";
    if (!inside(launch.dependency_begin, launch.dependency_count, image.dependencies.size())) {
      return at("launch", i) + ": dependencies past the end";
    }
    for (uint32_t d = 0; d < launch.dependency_count; ++d) {
      if (image.dependencies[launch.dependency_begin + d] >= i) return at("launch", i) + ": waits for a later launch";
    }
  }
  return {};
}

}  // namespace

uint32_t PlanView::local_events() const {
  uint32_t count = 0;
  while (count < events.size() && events[count].slot == kNone) ++count;
  return count;
}
uint64_t PlanView::bytes_of(uint32_t tensor) const { return hyper_mpmd::bytes_of(tensors[tensor]); }
uint64_t PlanView::heap_words() const { return peers.empty() ? 0 : peers[rank].heap_words; }
bool PlanView::dispatched() const { return launches.size() != 1 || launches[0].op != kNone; }

PlanView PlanImage::view() const {
  return {rank,
          ranks,
          borrowed(ops),
          borrowed(tensors),
          borrowed(tasks),
          borrowed(accesses),
          borrowed(waits),
          borrowed(signals),
          borrowed(events),
          borrowed(queues),
          borrowed(launches),
          borrowed(dependencies),
          borrowed(peers),
          {}};
}

uint32_t PlanImage::local_events() const { return view().local_events(); }
uint64_t PlanImage::bytes_of(uint32_t tensor) const { return hyper_mpmd::bytes_of(tensors[tensor]); }

uint64_t PlanImage::workspace_bytes() const { return span_of(*this, Role::kWorkspace); }
uint64_t PlanImage::symmetric_bytes() const { return span_of(*this, Role::kSymmetric); }
uint64_t PlanImage::heap_words() const { return view().heap_words(); }
bool PlanImage::dispatched() const { return view().dispatched(); }

std::string PlanImage::fault(bool hops) const {
  const PlanView plan = view();
  std::string what = plan.record_fault();
  return what.empty() ? certificate_fault(plan, hops) : what;
}

std::string PlanView::record_fault() const {
  if (ranks == 0 || ranks > kMaxRanks || rank >= ranks)
    return "rank " + std::to_string(rank) + " of " + std::to_string(ranks);
  for (const uint64_t size : {tasks.size(), accesses.size(), waits.size(), signals.size(), events.size()}) {
    if (size > kMaxIndex) return "more records than an index can reach";
  }
  if (peers.size() != ranks) return "peers: one record a rank is needed";
  for (const PeerRecord& peer : peers) {
    if (peer.heap_words > (1u << 30) || (peer.heap_words && peer.credit_slot >= peer.heap_words))
      return "peers: credit past the heap";
  }
  for (const uint32_t tensor : outputs) {
    if (tensor >= tensors.size()) return at("output tensor", tensor) + ": no such tensor";
  }
  if (std::string what = tensor_fault(*this); !what.empty()) return what;
  for (size_t i = 0; i < tasks.size(); ++i) {
    std::string what = task_fault(*this, i);
    if (what.empty()) what = box_fault(*this, i);
    if (!what.empty()) return what;
  }
  if (std::string what = event_fault(*this); !what.empty()) return what;
  return queue_fault(*this);
}

std::string PlanImage::spread(uint64_t stride, uint64_t room) {
  if (this->symmetric_bytes() > room) return "symmetric tensors need more than " + std::to_string(room) + " bytes";
  std::vector<uint64_t> old(ranks);
  for (uint32_t p = 0; p < ranks; ++p) {
    old[p] = peers[p].heap_words / ranks;
    if (old[p] * ranks != peers[p].heap_words || old[p] > stride || stride * ranks > (1u << 30)) {
      return at("peer", p) + ": " + std::to_string(old[p]) + " words a rank do not fit in " + std::to_string(stride);
    }
  }
  const auto moved = [&](uint64_t slot, uint32_t p) {
    return static_cast<uint32_t>(old[p] ? slot / old[p] * stride + slot % old[p] : slot);
  };
  for (EventRecord& event : events) {
    if (event.slot != kNone) event.slot = moved(event.slot, rank);
  }
  for (SignalRecord& signal : signals) {
    if (signal.rank != rank) signal.event = moved(signal.event, signal.rank);
  }
  for (uint32_t p = 0; p < ranks; ++p) {
    peers[p] = {moved(peers[p].credit_slot, p), static_cast<uint32_t>(old[p] ? stride * ranks : 0)};
  }
  return {};
}

std::string world_record_fault(std::span<const PlanView> plans) {
  for (const PlanView& plan : plans) {
    if (plan.ranks != plans.size()) return "the plans of a world must be of as many ranks as there are plans";
  }
  for (size_t r = 0; r < plans.size(); ++r) {
    const PlanView& plan = plans[r];
    const std::string mine = "rank " + std::to_string(r) + ": ";
    if (plan.rank != r) return mine + "the plan is of rank " + std::to_string(plan.rank);
    // What peers write lies at one place and in one form on all ranks.
    const auto alike = [](const TensorRecord& a, const TensorRecord& b) {
      return a.role == b.role && (a.role != static_cast<uint32_t>(Role::kSymmetric) ||
                                  (a.dtype == b.dtype && a.cols == b.cols && a.offset == b.offset));
    };
    if (!std::ranges::equal(plan.tensors, plans[0].tensors, alike)) return mine + "another graph than rank 0's";
    for (size_t s = 0; s < plans.size(); ++s) {
      if (s == r) continue;
      const PlanView& peer = plans[s];
      if (peer.peers[r].heap_words != plan.heap_words())
        return mine + "rank " + std::to_string(s) + " sees another heap";
      for (const TaskRecord& task : peer.tasks) {
        for (uint32_t i = 0; i < task.access_count; ++i) {
          const AccessRecord& box = peer.accesses[task.access_begin + i];
          if (box.rank == r && !inside(box.row, box.rows, plan.tensors[box.tensor].rows)) {
            return mine + "rank " + std::to_string(s) + " reaches outside tensor " + std::to_string(box.tensor);
          }
        }
      }
    }
  }
  return {};
}

std::string world_fault(const std::vector<const PlanImage*>& images) {
  std::vector<PlanView> plans;
  for (const PlanImage* image : images) plans.push_back(image->view());
  if (std::string what = world_record_fault(plans); !what.empty()) return what;
  for (size_t r = 0; r < plans.size(); ++r) {
    const PlanView& plan = plans[r];
    const std::string mine = "rank " + std::to_string(r) + ": ";
    std::vector<uint32_t> arrivals(plan.heap_words(), 0);
    for (size_t s = 0; s < plans.size(); ++s) {
      if (s == r) continue;
      for (const TaskRecord& task : plans[s].tasks) {
        for (uint32_t i = 0; i < task.signal_count; ++i) {
          const SignalRecord& signal = plans[s].signals[task.signal_begin + i];
          if (signal.rank == r) ++arrivals[signal.event];
        }
      }
      if (plan.heap_words()) ++arrivals[plans[s].peers[r].credit_slot];
    }
    for (size_t e = plan.local_events(); e < plan.events.size(); ++e) {
      const EventRecord& event = plan.events[e];
      if (arrivals[event.slot] != event.threshold) {
        return mine + at("event", e) + " needs " + std::to_string(event.threshold) + " signals and gets " +
               std::to_string(arrivals[event.slot]);
      }
      arrivals[event.slot] = 0;
    }
    if (std::ranges::any_of(arrivals, [](uint32_t n) { return n != 0; })) {
      return mine + "signals arrive that no event counts";
    }
  }
  return {};
}

}  // namespace hyper_mpmd
