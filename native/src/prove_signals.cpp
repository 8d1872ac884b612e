// Do thresholds and signals add up?
#include <algorithm>

#include "prove_order.h"

namespace hyper_mpmd::prove {

Scene::Scene(std::span<const PlanView> given)
    : plans(given), world(given.size() == given[0].ranks), words_(given.size()) {
  uint64_t events = 0, tasks = 0;
  for (size_t p = 0; p < plans.size(); ++p) {
    const PlanView& plan = plans[p];
    event_begin.push_back(events);
    task_begin.push_back(tasks);
    rank_begin.push_back(static_cast<uint32_t>(chains.size()));
    events += plan.events.size();
    tasks += plan.tasks.size();
    for (uint32_t q = 0; q < plan.queues.size(); ++q) {
      const QueueRecord& queue = plan.queues[q];
      if (queue.count) chains.push_back({plan.rank, q, queue.begin, queue.begin + queue.count});
    }
    local.push_back(plan.local_events());
    for (uint32_t e = local[p]; e < plan.events.size(); ++e) words_[p].emplace_back(plan.events[e].slot, e);
    std::sort(words_[p].begin(), words_[p].end());
  }
  event_begin.push_back(events);
  task_begin.push_back(tasks);
  rank_begin.push_back(static_cast<uint32_t>(chains.size()));
}

uint32_t Scene::event_of_word(uint32_t rank, uint32_t word) const {
  const auto& words = words_[index(rank)];
  const auto found = std::lower_bound(words.begin(), words.end(), std::pair{word, 0u});
  return found == words.end() || found->first != word ? kNone : found->second;
}

std::pair<uint32_t, uint32_t> Scene::event_at(uint64_t number) const {
  const auto after = std::upper_bound(event_begin.begin(), event_begin.end(), number);
  const auto p = static_cast<size_t>(after - event_begin.begin()) - 1;
  return {plans[p].rank, static_cast<uint32_t>(number - event_begin[p])};
}

bool count_signals(const Scene& scene, std::vector<EventState>& events, Verdict& verdict) {
  using Why = SignalFault::Why;
  const auto refuse = [&](SignalFault fault) {
    verdict.unsafe = Unsafe::kSignal;
    verdict.signal = fault;
    return false;
  };
  events.resize(scene.event_begin.back());
  const auto from = [](EventState& event, uint32_t rank) {
    ++event.have;
    event.source = event.source == kNone || event.source == rank ? rank : kSeveral;
  };
  for (const PlanView& plan : scene.plans) {
    const uint32_t local = scene.local[scene.index(plan.rank)];
    for (uint32_t e = local; e < plan.events.size(); ++e) {
      const uint32_t first = scene.event_of_word(plan.rank, plan.events[e].slot);
      if (first != e) return refuse({Why::kShared, plan.rank, e, plan.rank, kNone, first, 0});
    }
    for (uint32_t t = 0; t < plan.tasks.size(); ++t) {
      for (const SignalRecord& signal : plan.signals_of(plan.tasks[t])) {
        uint32_t number = signal.event;
        if (signal.rank != plan.rank) {
          if (!scene.world) continue;
          number = scene.event_of_word(signal.rank, signal.event);
          if (number == kNone) return refuse({Why::kUncounted, signal.rank, signal.event, plan.rank, t, 0, 0});
        }
        from(events[scene.event(signal.rank, number)], plan.rank);
      }
      for (const WaitRecord& wait : plan.waits_of(plan.tasks[t])) {
        EventState& event = events[scene.event(plan.rank, wait.event)];
        const uint32_t threshold = plan.events[wait.event].threshold;
        ++event.waiters;
        event.partial |= wait.threshold < threshold;
        event.some |= 0 < wait.threshold && wait.threshold < threshold;
        if (wait.threshold > threshold) {
          return refuse({Why::kTooMuch, plan.rank, wait.event, plan.rank, t, threshold, wait.threshold});
        }
        const bool credit = wait.event >= local && plan.events[wait.event].op == kNone;
        if (credit && wait.threshold != 0) return refuse({Why::kOwnCredit, plan.rank, wait.event, plan.rank, t, 0, 0});
      }
    }
    if (!scene.world) continue;
    for (const PlanView& peer : scene.plans) {
      if (peer.rank == plan.rank || peer.heap_words() == 0) continue;
      const uint32_t word = plan.peers[peer.rank].credit_slot;
      const uint32_t number = scene.event_of_word(peer.rank, word);
      if (number == kNone) return refuse({Why::kUncounted, peer.rank, word, plan.rank, kNone, 0, 0});
      EventState& event = events[scene.event(peer.rank, number)];
      from(event, plan.rank);
      event.credit = true;
    }
  }
  for (const PlanView& plan : scene.plans) {
    for (uint32_t t = 0; scene.world && t < plan.tasks.size(); ++t) {
      for (const WaitRecord& wait : plan.waits_of(plan.tasks[t])) {
        if (wait.threshold == 0 || !events[scene.event(plan.rank, wait.event)].credit) continue;
        return refuse({Why::kOwnCredit, plan.rank, wait.event, plan.rank, t, 0, 0});
      }
    }
    const uint32_t local = scene.local[scene.index(plan.rank)];
    for (uint32_t e = 0; e < plan.events.size(); ++e) {
      EventState& event = events[scene.event(plan.rank, e)];
      const uint32_t threshold = plan.events[e].threshold;
      if (e >= local && !scene.world) {
        event.have = threshold;  // taken to arrive
      } else if (event.have != threshold) {
        return refuse({Why::kCount, plan.rank, e, plan.rank, kNone, event.have, threshold});
      } else {
        event.have = 0;
      }
    }
  }
  return true;
}

}  // namespace hyper_mpmd::prove
