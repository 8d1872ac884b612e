// The certificate of a plan: linear, and quick enough for every launch.
#include <algorithm>

#include "hyper_mpmd/prove.h"

namespace hyper_mpmd {

namespace {

std::string at(const char* what, uint64_t index) { return std::string(what) + " " + std::to_string(index); }

class Certificate {
 public:
  explicit Certificate(const PlanView& plan) : plan_(plan), local_(plan.local_events()) {}
  std::string counts();
  std::string circle();
  std::string hops() const;

 private:
  void wake(std::vector<uint32_t>& first, uint32_t index) {
    for (uint32_t q = first[index]; q != kNone; q = next_[q]) ready_.push_back(q);
    first[index] = kNone;
  }
  bool open(uint32_t launch) const {
    const LaunchRecord& record = plan_.launches[launch];
    for (const uint32_t before : plan_.dependencies.subspan(record.dependency_begin, record.dependency_count)) {
      if (left_[before] != 0) return false;
    }
    return true;
  }
  // Whether the task may run; otherwise its queue is put where it will be woken.
  bool may_run(uint32_t queue, const TaskRecord& task);

  const PlanView& plan_;
  const uint32_t local_;
  std::vector<uint8_t> partial_;                // [event] whether a task waits for less than all its signals
  std::vector<uint32_t> left_;                  // [launch] tasks that have not run
  std::vector<uint32_t> have_;                  // [event]
  std::vector<uint32_t> on_event_, on_launch_;  // the first queue that stands there; next_ links the others
  std::vector<uint32_t> next_, ready_;
};

std::string Certificate::counts() {
  std::vector<uint32_t> signals(local_, 0);
  partial_.assign(local_, 0);
  for (const TaskRecord& task : plan_.tasks) {
    for (const SignalRecord& signal : plan_.signals_of(task)) {
      if (signal.rank == plan_.rank) ++signals[signal.event];
    }
    for (const WaitRecord& wait : plan_.waits_of(task)) {
      const EventRecord& event = plan_.events[wait.event];
      if (wait.threshold > event.threshold) return at("event", wait.event) + ": waited for too much";
      if (wait.event < local_) {
        partial_[wait.event] |= wait.threshold < event.threshold;
      } else if (event.op == kNone && wait.threshold != 0) {
        // Peers give credit once they have finished: this launch can only wait for that of earlier ones.
        return at("event", wait.event) + ": credit of the launch that waits for it";
      }
    }
  }
  for (uint32_t i = 0; i < local_; ++i) {
    if (signals[i] != plan_.events[i].threshold) {
      return at("event", i) + ": threshold " + std::to_string(plan_.events[i].threshold) + ", but " +
             std::to_string(signals[i]) + " signals";
    }
  }
  return {};
}

bool Certificate::may_run(uint32_t queue, const TaskRecord& task) {
  if (!left_.empty() && !open(task.launch)) {
    next_[queue] = on_launch_[task.launch];
    on_launch_[task.launch] = queue;
    return false;
  }
  for (const WaitRecord& wait : plan_.waits_of(task)) {
    if (wait.event >= local_ || have_[wait.event] >= wait.threshold) continue;  // events of peers are taken to arrive
    next_[queue] = on_event_[wait.event];
    on_event_[wait.event] = queue;
    return false;
  }
  return true;
}

std::string Certificate::circle() {
  std::vector<uint32_t> cursor, end;
  for (uint32_t q = 0; q < plan_.queues.size(); ++q) {
    cursor.push_back(plan_.queues[q].begin);
    end.push_back(plan_.queues[q].begin + plan_.queues[q].count);
    ready_.push_back(q);
  }
  next_.assign(plan_.queues.size(), kNone);
  have_.assign(local_, 0);
  on_event_.assign(local_, kNone);
  if (plan_.dispatched()) {
    for (const LaunchRecord& launch : plan_.launches) left_.push_back(launch.task_count);
    on_launch_.assign(left_.size(), kNone);
  }
  size_t finished = 0;
  while (!ready_.empty()) {
    const uint32_t q = ready_.back();
    ready_.pop_back();
    for (; cursor[q] != end[q]; ++cursor[q]) {
      const TaskRecord& task = plan_.tasks[cursor[q]];
      if (!may_run(q, task)) break;
      ++finished;
      for (const SignalRecord& signal : plan_.signals_of(task)) {
        if (signal.rank != plan_.rank) continue;
        const uint32_t have = ++have_[signal.event];
        if (on_event_[signal.event] == kNone) continue;
        // Where somebody waits for less than all, whoever stands there looks again at each signal; such plans are rare.
        if (have == plan_.events[signal.event].threshold || partial_[signal.event]) wake(on_event_, signal.event);
      }
      if (left_.empty() || --left_[task.launch] != 0) continue;
      for (uint32_t launch = task.launch + 1; launch < left_.size(); ++launch) {
        if (on_launch_[launch] != kNone && open(launch)) wake(on_launch_, launch);
      }
    }
  }
  if (finished == plan_.tasks.size()) return {};
  for (uint32_t q = 0; q < cursor.size(); ++q) {
    if (cursor[q] != end[q]) return at("task", cursor[q]) + ": waits for itself through queues, events and launches";
  }
  return {};
}

std::string Certificate::hops() const {
  const auto hop = [&](const TaskRecord& task) { return plan_.ops[task.op].hop; };
  for (const QueueRecord& queue : plan_.queues) {
    for (uint32_t i = queue.begin + 1; i < queue.begin + queue.count; ++i) {
      if (hop(plan_.tasks[i]) < hop(plan_.tasks[i - 1])) return at("task", i) + ": its queue goes down in hop level";
    }
  }
  std::vector<uint32_t> highest(local_, 0), lowest_of(plan_.launches.size(), kNone), highest_of(lowest_of.size(), 0);
  for (const TaskRecord& task : plan_.tasks) {
    for (const SignalRecord& signal : plan_.signals_of(task)) {
      if (signal.rank == plan_.rank) highest[signal.event] = std::max(highest[signal.event], hop(task));
    }
    lowest_of[task.launch] = std::min(lowest_of[task.launch], hop(task));
    highest_of[task.launch] = std::max(highest_of[task.launch], hop(task));
  }
  for (size_t i = 0; i < plan_.tasks.size(); ++i) {
    for (const WaitRecord& wait : plan_.waits_of(plan_.tasks[i])) {
      const EventRecord& event = plan_.events[wait.event];
      const bool local = wait.event < local_;
      if (!local && event.op == kNone) continue;  // a credit is due from the launch before
      const uint32_t from = local ? highest[wait.event] : plan_.ops[event.op].hop + 1;
      if (hop(plan_.tasks[i]) < from) return at("task", i) + ": waits for a higher hop level";
    }
  }
  for (size_t i = 0; plan_.dispatched() && i < plan_.launches.size(); ++i) {
    const LaunchRecord& launch = plan_.launches[i];
    for (const uint32_t before : plan_.dependencies.subspan(launch.dependency_begin, launch.dependency_count)) {
      if (lowest_of[i] < highest_of[before]) return at("launch", i) + ": waits for a higher hop level";
    }
  }
  return {};
}

}  // namespace

std::string certificate_fault(const PlanView& plan, bool hops) {
  Certificate certificate(plan);
  std::string what = certificate.counts();
  if (what.empty()) what = certificate.circle();
  if (what.empty() && hops && plan.ranks > 1) what = certificate.hops();
  return what;
}

}  // namespace hyper_mpmd
