#include "hyper_mpmd/plan_image.h"

#include <algorithm>
#include <map>

#include "hyper_mpmd/dtype.h"

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

// The boxes that each kernel reads and writes, 0xff: any number.
struct Shape {
  uint32_t reads, writes;
};
constexpr Shape kShapes[kKernelCount] = {{kNone, kNone}, {kNone, kNone}, {1, 1}, {2, 1}, {2, 1}, {2, 1},
                                         {3, 1},         {2, 1},         {2, 1}, {3, 1}, {4, 3}, {2, 1}};

std::string tensor_fault(const PlanImage& image) {
  for (size_t i = 0; i < image.tensors.size(); ++i) {
    const TensorRecord& tensor = image.tensors[i];
    if (tensor.dtype > 3) return at("tensor", i) + ": dtype " + std::to_string(tensor.dtype);
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
    if (image.ops[i].dtype > 3) return at("op", i) + ": no such dtype";
  }
  return {};
}

std::string task_fault(const PlanImage& image, size_t number) {
  const TaskRecord& task = image.tasks[number];
  const std::string name = at("task", number);
  if (task.op >= image.ops.size()) return name + ": no such op";
  if (task.launch >= image.launches.size()) return name + ": no such launch";
  if (task.peer >= image.ranks) return name + ": no such peer";
  if (!inside(task.access_begin, task.access_count, image.accesses.size())) return name + ": boxes past the end";
  if (!inside(task.wait_begin, task.wait_count, image.waits.size())) return name + ": waits past the end";
  if (!inside(task.signal_begin, task.signal_count, image.signals.size())) return name + ": signals past the end";
  const OpRecord& op = image.ops[task.op];
  const Shape shape = kShapes[op.kernel];
  if (op.read_count > task.access_count ||
      (shape.reads != kNone && (op.read_count != shape.reads || task.access_count != shape.reads + shape.writes))) {
    return name + ": " + std::to_string(task.access_count) + " boxes do not fit its kernel";
  }
  for (uint32_t i = 0; i < task.access_count; ++i) {
    const AccessRecord& box = image.accesses[task.access_begin + i];
    if (box.tensor >= image.tensors.size()) return name + ": no such tensor";
    if (box.rank >= image.ranks) return name + ": no such rank";
    const TensorRecord& tensor = image.tensors[box.tensor];
    const bool written = i >= op.read_count;
    if (box.rank != image.rank) {
      if (!written || tensor.role != static_cast<uint32_t>(Role::kSymmetric)) {
        return name + ": only symmetric tensors of a peer can be written, and none read";
      }
      if (!inside(box.row, box.rows, tensor.most_rows)) return name + ": rows outside the peer's tensor";
    } else if (!inside(box.row, box.rows, tensor.rows)) {
      return name + ": rows outside the tensor";
    }
    if (!inside(box.col, box.cols, tensor.cols)) return name + ": columns outside the tensor";
    if (written && tensor.role == static_cast<uint32_t>(Role::kInput)) return name + ": writes an input";
  }
  return {};
}

// The sizes that a native kernel takes from one box must agree with the others.
std::string box_fault(const PlanImage& image, size_t number) {
  const TaskRecord& task = image.tasks[number];
  const OpRecord& op = image.ops[task.op];
  const AccessRecord* box = image.accesses.data() + task.access_begin;
  auto dtype = [&](int i) { return image.tensors[box[i].tensor].dtype; };
  const auto float_like = [](uint32_t d) { return d <= 1; };
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

std::string event_fault(const PlanImage& image) {
  const uint32_t local = image.local_events();
  std::vector<uint64_t> signals(local, 0);
  for (size_t i = 0; i < image.events.size(); ++i) {
    const EventRecord& event = image.events[i];
    const bool mine = i < local;
    if (mine != (event.slot == kNone)) return at("event", i) + ": local events must come first";
    if (mine ? event.signaller != image.rank : event.signaller >= image.ranks || event.signaller == image.rank) {
      return at("event", i) + ": no such signaller";
    }
    if (event.threshold > kMaxThreshold) return at("event", i) + ": threshold past " + std::to_string(kMaxThreshold);
    if (!mine && event.slot >= image.heap_words()) return at("event", i) + ": slot past the heap";
  }
  for (size_t i = 0; i < image.signals.size(); ++i) {
    const SignalRecord& signal = image.signals[i];
    if (signal.rank >= image.ranks) return at("signal", i) + ": no such rank";
    const uint64_t limit = signal.rank == image.rank ? local : image.peers[signal.rank].heap_words;
    if (signal.event >= limit) return at("signal", i) + ": no such event";
  }
  for (const TaskRecord& task : image.tasks) {
    for (uint32_t i = 0; i < task.signal_count; ++i) {
      const SignalRecord& signal = image.signals[task.signal_begin + i];
      if (signal.rank == image.rank) ++signals[signal.event];
    }
    for (uint32_t i = 0; i < task.wait_count; ++i) {
      const WaitRecord& wait = image.waits[task.wait_begin + i];
      if (wait.event >= image.events.size()) return "a wait for an event that does not exist";
      if (wait.threshold > image.events[wait.event].threshold) return at("event", wait.event) + ": waited for too much";
      // Peers give credit once they have finished: this launch can only wait for that of earlier ones.
      if (wait.event >= local && image.events[wait.event].op == kNone && wait.threshold != 0) {
        return at("event", wait.event) + ": credit of the launch that waits for it";
      }
    }
  }
  for (uint32_t i = 0; i < local; ++i) {
    if (signals[i] != image.events[i].threshold) {
      return at("event", i) + ": threshold " + std::to_string(image.events[i].threshold) + ", but " +
             std::to_string(signals[i]) + " signals";
    }
  }
  return {};
}

std::string queue_fault(const PlanImage& image) {
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

// Kahn's algorithm over queue order, local events and launches. Events of peers are taken to arrive.
std::string circle(const PlanImage& image) {
  const uint32_t local = image.local_events();
  const size_t tasks = image.tasks.size();
  std::vector<uint32_t> left(image.events.size(), 0), done(image.launches.size(), 0);
  std::vector<uint8_t> open(image.launches.size(), 0);
  for (uint32_t e = 0; e < local; ++e) left[e] = image.events[e].threshold;
  std::vector<uint32_t> cursor, end;
  for (const QueueRecord& queue : image.queues) {
    cursor.push_back(queue.begin);
    end.push_back(queue.begin + queue.count);
  }
  // Queues blocked on an event or a launch, woken when it completes.
  std::vector<std::vector<uint32_t>> on_event(local), on_launch(image.launches.size());
  std::vector<uint32_t> stack;
  for (uint32_t q = 0; q < cursor.size(); ++q) stack.push_back(q);
  auto try_open = [&](uint32_t launch) {
    const LaunchRecord& record = image.launches[launch];
    for (uint32_t d = 0; d < record.dependency_count; ++d) {
      const uint32_t before = image.dependencies[record.dependency_begin + d];
      if (!open[before] || done[before] != image.launches[before].task_count) return;
    }
    if (open[launch]) return;
    open[launch] = 1;
    stack.insert(stack.end(), on_launch[launch].begin(), on_launch[launch].end());
    on_launch[launch].clear();
  };
  auto open_all = [&] {
    for (uint32_t launch = 0; launch < image.launches.size(); ++launch) try_open(launch);
  };
  open_all();
  size_t finished = 0;
  while (!stack.empty()) {
    const uint32_t q = stack.back();
    stack.pop_back();
    while (cursor[q] != end[q]) {
      const TaskRecord& task = image.tasks[cursor[q]];
      if (!open[task.launch]) {
        on_launch[task.launch].push_back(q);
        break;
      }
      bool blocked = false;
      for (uint32_t i = 0; i < task.wait_count && !blocked; ++i) {
        const WaitRecord& wait = image.waits[task.wait_begin + i];
        if (wait.event < local && image.events[wait.event].threshold - left[wait.event] < wait.threshold) {
          on_event[wait.event].push_back(q);
          blocked = true;
        }
      }
      if (blocked) break;
      ++cursor[q];
      ++finished;
      for (uint32_t i = 0; i < task.signal_count; ++i) {
        const SignalRecord& signal = image.signals[task.signal_begin + i];
        if (signal.rank != image.rank) continue;
        --left[signal.event];
        if (left[signal.event] == 0 || !on_event[signal.event].empty()) {
          stack.insert(stack.end(), on_event[signal.event].begin(), on_event[signal.event].end());
          on_event[signal.event].clear();
        }
      }
      if (++done[task.launch] == image.launches[task.launch].task_count && image.launches.size() > 1) open_all();
    }
  }
  if (finished == tasks) return {};
  for (uint32_t q = 0; q < cursor.size(); ++q) {
    if (cursor[q] != end[q]) return at("task", cursor[q]) + ": waits for itself through queues, events and launches";
  }
  return {};
}

}  // namespace

uint32_t PlanImage::local_events() const {
  uint32_t count = 0;
  while (count < events.size() && events[count].slot == kNone) ++count;
  return count;
}

uint64_t PlanImage::bytes_of(uint32_t tensor) const { return hyper_mpmd::bytes_of(tensors[tensor]); }

uint64_t PlanImage::workspace_bytes() const { return span_of(*this, Role::kWorkspace); }
uint64_t PlanImage::symmetric_bytes() const { return span_of(*this, Role::kSymmetric); }
uint64_t PlanImage::heap_words() const { return peers.empty() ? 0 : peers[rank].heap_words; }
bool PlanImage::dispatched() const { return launches.size() != 1 || launches[0].op != kNone; }

std::string PlanImage::fault() const {
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
  if (std::string what = tensor_fault(*this); !what.empty()) return what;
  for (size_t i = 0; i < tasks.size(); ++i) {
    std::string what = task_fault(*this, i);
    if (what.empty()) what = box_fault(*this, i);
    if (!what.empty()) return what;
  }
  if (std::string what = event_fault(*this); !what.empty()) return what;
  if (std::string what = queue_fault(*this); !what.empty()) return what;
  return circle(*this);
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

std::string world_fault(const std::vector<const PlanImage*>& images) {
  for (const PlanImage* image : images) {
    if (image->ranks != images.size()) return "the plans of a world must be of as many ranks as there are plans";
  }
  for (size_t r = 0; r < images.size(); ++r) {
    const PlanImage& image = *images[r];
    const std::string mine = "rank " + std::to_string(r) + ": ";
    if (image.rank != r) return mine + "the plan is of rank " + std::to_string(image.rank);
    // What peers write lies at one place and in one form on all ranks.
    const auto alike = [](const TensorRecord& a, const TensorRecord& b) {
      return a.role == b.role && (a.role != static_cast<uint32_t>(Role::kSymmetric) ||
                                  (a.dtype == b.dtype && a.cols == b.cols && a.offset == b.offset));
    };
    if (!std::equal(image.tensors.begin(), image.tensors.end(), images[0]->tensors.begin(), images[0]->tensors.end(),
                    alike)) {
      return mine + "another graph than rank 0's";
    }
    std::vector<uint32_t> arrivals(image.heap_words(), 0);
    for (size_t s = 0; s < images.size(); ++s) {
      if (s == r) continue;
      const PlanImage& peer = *images[s];
      if (peer.peers[r].heap_words != image.heap_words())
        return mine + "rank " + std::to_string(s) + " sees another heap";
      for (const TaskRecord& task : peer.tasks) {
        for (uint32_t i = 0; i < task.signal_count; ++i) {
          const SignalRecord& signal = peer.signals[task.signal_begin + i];
          if (signal.rank == r) ++arrivals[signal.event];
        }
        for (uint32_t i = 0; i < task.access_count; ++i) {
          const AccessRecord& box = peer.accesses[task.access_begin + i];
          if (box.rank == r && !inside(box.row, box.rows, image.tensors[box.tensor].rows)) {
            return mine + "rank " + std::to_string(s) + " writes outside tensor " + std::to_string(box.tensor);
          }
        }
      }
      if (image.heap_words()) ++arrivals[peer.peers[r].credit_slot];
    }
    for (size_t e = image.local_events(); e < image.events.size(); ++e) {
      const EventRecord& event = image.events[e];
      if (arrivals[event.slot] != event.threshold) {
        return mine + at("event", e) + " needs " + std::to_string(event.threshold) + " signals and gets " +
               std::to_string(arrivals[event.slot]);
      }
      arrivals[event.slot] = 0;
    }
    if (image.heap_words() && std::any_of(arrivals.begin(), arrivals.end(), [](uint32_t n) { return n != 0; })) {
      return mine + "signals arrive that no event counts";
    }
  }
  return {};
}

}  // namespace hyper_mpmd
