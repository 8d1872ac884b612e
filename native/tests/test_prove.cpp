// The prover on plans made by hand, and on plans damaged at random: whatever the records say, it reads none out of
// bounds.
#include <random>
#include <string>

#include "check.h"
#include "hyper_mpmd/prove.h"
#include "plans.h"

namespace {

using namespace hyper_mpmd;

Verdict proof_of(const PlanImage& image) {
  const PlanView plan = image.view();
  return prove_plans({&plan, 1});
}

void sound_plans_are_proven() {
  for (const uint32_t queues : {1u, 2u, 3u, 7u}) {
    const Verdict chain = proof_of(plans::chain(50, queues, 8)), grid = proof_of(plans::grid(9, 6, queues));
    CHECK(chain.unsafe == Unsafe::kNothing);
    CHECK_EQ(chain.tasks, uint64_t{50});
    CHECK_EQ(chain.pairs, uint64_t{49});
    CHECK(grid.unsafe == Unsafe::kNothing);
    CHECK(grid.world);
  }
}

void a_missing_wait_is_a_race_of_the_two_tasks() {
  PlanImage image = plans::chain(10, 2, 8);
  const uint32_t victim = 6;  // on queue 1, with its input from queue 0
  image.tasks[victim].wait_count = 0;
  const Verdict verdict = proof_of(image);
  CHECK(verdict.unsafe == Unsafe::kRace);
  CHECK_EQ(verdict.race.rows, 1u);
  CHECK_EQ(verdict.race.cols, 8u);
  CHECK(verdict.race.first.task == victim || verdict.race.second.task == victim);
  CHECK(verdict.race.first.written != verdict.race.second.written);
}

void the_shortest_circle_is_found() {
  plans::Builder b(0, 1, 5);
  const uint32_t nop = b.op(Kernel::kNop, 0);
  // Queues 0, 1, 2 in a circle of three, queues 3 and 4 in one of two.
  for (const auto& ring : {std::vector<uint32_t>{0, 1, 2}, std::vector<uint32_t>{3, 4}}) {
    std::vector<uint32_t> events;
    for (size_t i = 0; i < ring.size(); ++i) events.push_back(b.event(1));
    for (size_t i = 0; i < ring.size(); ++i) {
      b.add(ring[i], {nop, {}, {{events[i], 1}}, {{0, events[(i + 1) % ring.size()]}}});
    }
  }
  const Verdict verdict = proof_of(b.build());
  CHECK(verdict.unsafe == Unsafe::kHang);
  CHECK_EQ(verdict.circle.size(), size_t{2});
}

void counts_that_differ_are_told() {
  plans::Builder b(0, 1, 2);
  const uint32_t nop = b.op(Kernel::kNop, 0);
  const uint32_t event = b.event(2);
  b.add(0, {nop, {}, {}, {{0, event}}});
  b.add(1, {nop, {}, {{event, 2}}, {}});
  const Verdict verdict = proof_of(b.build());
  CHECK(verdict.unsafe == Unsafe::kSignal);
  CHECK_EQ(verdict.signal.have, uint64_t{1});
  CHECK_EQ(verdict.signal.need, uint64_t{2});
}

template <class Record>
void damage(std::vector<Record>& records, std::mt19937& random) {
  if (records.empty()) return;
  static const uint32_t values[] = {0, 1, 2, 3, 7, 63, 64, 1000, 0x7fffffffu, 0x80000000u, kNone - 1, kNone};
  auto* words = reinterpret_cast<uint32_t*>(records.data());
  const size_t count = records.size() * sizeof(Record) / sizeof(uint32_t);
  words[random() % count] = random() % 2 ? values[random() % std::size(values)] : random() % 16;
}

void damaged_plans_are_refused_or_proven() {
  std::mt19937 random(7);
  uint32_t kinds[5] = {};
  for (uint32_t round = 0; round < 20'000; ++round) {
    PlanImage image = round % 2 ? plans::chain(12, 3, 8) : plans::grid(4, 4, 3);
    for (uint32_t n = 1 + random() % 3; n != 0; --n) {
      switch (random() % 10) {
        case 0:
          damage(image.ops, random);
          break;
        case 1:
          damage(image.tensors, random);
          break;
        case 2:
          damage(image.accesses, random);
          break;
        case 3:
          damage(image.waits, random);
          break;
        case 4:
          damage(image.signals, random);
          break;
        case 5:
          damage(image.events, random);
          break;
        case 6:
          damage(image.queues, random);
          break;
        case 7:
          damage(image.launches, random);
          break;
        case 8:
          damage(image.peers, random);
          break;
        default:
          damage(image.tasks, random);
          break;
      }
    }
    const Verdict verdict = proof_of(image);
    ++kinds[static_cast<uint32_t>(verdict.unsafe)];
    const PlanView plan = image.view();
    if (verdict.unsafe != Unsafe::kRecord) {
      // The certificate sees what is local of hangs and counts, and no races.
      const bool certified = certificate_fault(plan, false).empty();
      CHECK_EQ(certified, verdict.unsafe == Unsafe::kNothing || verdict.unsafe == Unsafe::kRace);
    }
  }
  for (const uint32_t count : kinds) CHECK(count > 50);
}

}  // namespace

int main() {
  sound_plans_are_proven();
  a_missing_wait_is_a_race_of_the_two_tasks();
  the_shortest_circle_is_found();
  counts_that_differ_are_told();
  damaged_plans_are_refused_or_proven();
  return check::status();
}
