// The explorer on plans made by hand: it finds what is missing, and damaged records do it no harm.
#include <random>
#include <stdexcept>

#include "check.h"
#include "hyper_mpmd/explore.h"
#include "plans.h"

namespace {

using namespace hyper_mpmd;
namespace ex = hyper_mpmd::explore;

ex::Sections sections(const PlanImage& image) {
  return {image.ops,    image.tensors, image.tasks,    image.accesses,     image.waits, image.signals,
          image.events, image.queues,  image.launches, image.dependencies, image.peers, {}};
}

ex::Verdict explore(const std::vector<PlanImage>& world, ex::Method method) {
  std::vector<ex::Sections> plans;
  for (const PlanImage& image : world) plans.push_back(sections(image));
  return ex::explore(plans, 2, 1 << 20, method);
}

ex::Kind kind(const std::vector<PlanImage>& world) {
  const ex::Kind found = explore(world, ex::Method::kStates).kind;
  CHECK(explore(world, ex::Method::kPairs).kind == found);
  return found;
}

std::vector<PlanImage> ring(uint32_t ranks) {
  std::vector<PlanImage> world;
  for (uint32_t r = 0; r < ranks; ++r) world.push_back(plans::ring(r, ranks, 4));
  return world;
}

void test_sound_plans() {
  CHECK(kind({plans::chain(5, 2, 3)}) == ex::Kind::kSound);
  CHECK(kind({plans::grid(4, 3, 3)}) == ex::Kind::kSound);
  CHECK(kind(ring(2)) == ex::Kind::kSound);
  CHECK(kind(ring(3)) == ex::Kind::kSound);
}

void test_every_wait_of_a_chain_and_of_a_ring_is_needed() {
  for (const std::vector<PlanImage>& world : {std::vector{plans::chain(4, 2, 3)}, ring(3)}) {
    for (size_t r = 0; r < world.size(); ++r) {
      for (size_t t = 0; t < world[r].tasks.size(); ++t) {
        if (world[r].tasks[t].wait_count == 0) continue;
        std::vector<PlanImage> broken = world;
        --broken[r].tasks[t].wait_count;
        CHECK(kind(broken) == ex::Kind::kRace);
      }
    }
  }
}

void test_a_race_is_shown_the_shortest_way() {
  std::vector<PlanImage> world{plans::chain(4, 4, 3)};
  world[0].tasks[2].wait_count = 0;
  const ex::Verdict found = explore(world, ex::Method::kStates);
  CHECK(found.ended.size() == 1);  // task 0; then 1 may write what 2 reads
  CHECK(found.clashes.size() == 1);
  CHECK(found.clashes[0].first.task == 1 && found.clashes[0].second.task == 2);
}

void test_a_lost_signal_hangs() {
  std::vector<PlanImage> world{plans::chain(4, 2, 3)};
  world[0].tasks[0].signal_count = 0;
  CHECK(kind(world) == ex::Kind::kHang);
}

// Numbers changed at random: a verdict or a refusal, and the sanitizers have nothing to say.
void test_damaged_records() {
  std::mt19937 random(1);
  const std::vector<uint32_t> odd{0, 1, 2, 7, 100, 0x7fffffff, 0x80000000, 0xfffffffe, 0xffffffff};
  int refused = 0, judged = 0;
  for (int round = 0; round < 3000; ++round) {
    std::vector<PlanImage> world = round % 2 ? ring(3) : std::vector{plans::grid(3, 3, 2)};
    PlanImage& image = world[random() % world.size()];
    const auto damage = [&](auto& records) {
      if (records.empty()) return;
      auto* words = reinterpret_cast<uint32_t*>(records.data());
      words[random() % (records.size() * sizeof(records[0]) / 4)] = odd[random() % odd.size()];
    };
    switch (random() % 8) {
      case 0:
        damage(image.tensors);
        break;
      case 1:
        damage(image.tasks);
        break;
      case 2:
        damage(image.accesses);
        break;
      case 3:
        damage(image.waits);
        break;
      case 4:
        damage(image.signals);
        break;
      case 5:
        damage(image.events);
        break;
      case 6:
        damage(image.queues);
        break;
      default:
        damage(image.peers);
        break;
    }
    try {
      explore(world, random() % 2 ? ex::Method::kPairs : ex::Method::kStates);
      ++judged;
    } catch (const std::invalid_argument&) {
      ++refused;
    }
  }
  CHECK(refused > 100 && judged > 100);
}

}  // namespace

int main() {
  test_sound_plans();
  test_every_wait_of_a_chain_and_of_a_ring_is_needed();
  test_a_race_is_shown_the_shortest_way();
  test_a_lost_signal_hangs();
  test_damaged_records();
  return check::status();
}
