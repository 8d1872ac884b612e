// The engine on plans made by hand: right data on any number of workers, worlds in step, and every bad end.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <thread>

#include "../src/engine_adverse.h"
#include "check.h"
#include "hyper_mpmd/engine.h"
#include "plans.h"

using namespace hyper_mpmd;

namespace {

LaunchOptions with(uint32_t workers, double timeout = 60) {
  LaunchOptions options;
  options.workers = workers;
  options.timeout_s = timeout;
  return options;
}

LaunchOutcome run_one(const PlanImage& image, Workspace& workspace, std::vector<void*> tensors, uint32_t workers,
                      double timeout = 60) {
  std::vector<RankLaunch> ranks;
  ranks.push_back({&image, &workspace, std::move(tensors), {}, nullptr});
  return launch(ranks, with(workers, timeout));
}

// Near the wrap-around, so that counters pass it within a few launches.
constexpr uint32_t kNearWrap = 0xfffffffbu;

void chains_carry_data_through() {
  const uint32_t length = 2000, cols = 17;
  for (uint32_t queues : {1u, 2u, 5u}) {
    const PlanImage image = plans::chain(length, queues, cols);
    CHECK_EQ(image.fault(), std::string());
    for (uint32_t workers : {1u, 2u, 4u}) {
      Workspace workspace(kNearWrap);
      for (float value = 1; value < 9; ++value) {
        std::vector<float> x(cols, value), y(size_t{length} * cols, -1);
        CHECK(run_one(image, workspace, {x.data(), y.data()}, workers).status == LaunchStatus::kDone);
        CHECK(y == std::vector<float>(size_t{length} * cols, value));
      }
    }
  }
}

void grids_carry_data_through() {
  const uint32_t steps = 60, columns = 24;
  const PlanImage image = plans::grid(steps, columns, 4);
  CHECK_EQ(image.fault(), std::string());
  for (uint32_t workers : {1u, 2u, 3u, 4u}) {
    Workspace workspace(kNearWrap);
    for (int round = 0; round < 8; ++round) {
      std::vector<float> x(columns), y(size_t{steps} * columns, -1);
      for (uint32_t c = 0; c < columns; ++c) x[c] = static_cast<float>(100 * round + c);
      CHECK(run_one(image, workspace, {x.data(), y.data()}, workers).status == LaunchStatus::kDone);
      for (uint32_t i = 0; i < steps * columns; ++i) CHECK_EQ(y[i], x[i % columns]);
    }
  }
}

void rings_hand_rows_on(uint32_t ranks) {
  const uint32_t cols = 33;
  std::vector<PlanImage> images;
  for (uint32_t r = 0; r < ranks; ++r) images.push_back(plans::ring(r, ranks, cols));
  std::vector<const PlanImage*> world;
  std::vector<std::unique_ptr<Workspace>> workspaces;
  for (const PlanImage& image : images) {
    CHECK_EQ(image.fault(false), std::string());  // one op for all: no hop levels
    world.push_back(&image);
    workspaces.push_back(std::make_unique<Workspace>(kNearWrap));
  }
  CHECK_EQ(world_fault(world), std::string());
  for (int round = 0; round < 300; ++round) {
    std::vector<std::vector<float>> x, y(ranks, std::vector<float>(cols, -1));
    for (uint32_t r = 0; r < ranks; ++r) x.emplace_back(cols, static_cast<float>(1000 * r + round));
    std::vector<RankLaunch> launches;
    for (uint32_t r = 0; r < ranks; ++r) {
      launches.push_back({&images[r], workspaces[r].get(), {x[r].data(), nullptr, y[r].data()}, {}, nullptr});
    }
    CHECK(launch(launches, with(1 + round % 2)).status == LaunchStatus::kDone);
    for (uint32_t r = 0; r < ranks; ++r) CHECK(y[r] == x[(r + ranks - 1) % ranks]);
  }
}

void launches_are_dispatched_in_their_order() {
  const uint32_t steps = 20, columns = 6;
  plans::Builder b(0, 1, 3);
  const uint32_t x = b.tensor(Role::kInput, 1, columns), y = b.tensor(Role::kOutput, steps, columns);
  const uint32_t copy = b.op(Kernel::kCopy, 1);
  b.chain_of_launches(steps);
  for (uint32_t s = 0; s < steps; ++s) {
    for (uint32_t c = 0; c < columns; ++c) {
      const AccessRecord from =
          s == 0 ? AccessRecord{x, 0, 0, 1, c, 1} : AccessRecord{y, 0, s - 1, 1, (c + 1) % columns, 1};
      b.add(c % 3, {copy, {from, {y, 0, s, 1, c, 1}}, {}, {}, s});
    }
  }
  const PlanImage image = b.build();
  CHECK_EQ(image.fault(), std::string());
  CHECK(image.dispatched());
  Workspace workspace;
  for (uint32_t workers : {1u, 2u, 3u}) {
    std::vector<float> in(columns), out(size_t{steps} * columns, -1);
    for (uint32_t c = 0; c < columns; ++c) in[c] = static_cast<float>(c);
    CHECK(run_one(image, workspace, {in.data(), out.data()}, workers).status == LaunchStatus::kDone);
    for (uint32_t s = 0; s < steps; ++s) {
      for (uint32_t c = 0; c < columns; ++c) CHECK_EQ(out[s * columns + c], in[(c + s) % columns]);
    }
  }
}

void a_deadline_ends_the_launch_and_names_what_was_missing() {
  plans::Builder b(0, 1, 2);
  const uint32_t nop = b.op(Kernel::kNop, 0);
  const uint32_t event = b.event(2);
  b.add(0, {nop, {}, {}, {{0, event}}});
  b.add(1, {nop, {}, {{event, 2}}, {}});
  const PlanImage image = b.build();
  CHECK(image.fault().find("threshold 2, but 1 signals") != std::string::npos);
  Workspace workspace(kNearWrap);
  const LaunchOutcome outcome = run_one(image, workspace, {}, 2, 0.1);
  CHECK(outcome.status == LaunchStatus::kTimedOut);
  CHECK_EQ(outcome.cores.size(), size_t{2});
  if (outcome.cores.size() == 2) {
    CHECK(outcome.cores[0].state == static_cast<uint32_t>(CoreState::kDone));
    CHECK(outcome.cores[1].state == static_cast<uint32_t>(CoreState::kWaiting));
    CHECK_EQ(outcome.cores[1].queue, 1u);
    CHECK_EQ(outcome.cores[1].have, 1u);
    CHECK_EQ(outcome.cores[1].need, 2u);
    CHECK(outcome.cores[1].elapsed_ns >= 100'000'000);
  }
  CHECK_EQ(outcome.stuck.size(), size_t{0});
  const PlanImage good = plans::chain(50, 2, 3);
  Workspace fresh;
  std::vector<float> x(3, 4), y(150, 0);
  CHECK(run_one(good, fresh, {x.data(), y.data()}, 2).status == LaunchStatus::kDone);
}

void a_bad_index_ends_the_launch_and_names_the_task() {
  plans::Builder b(0, 1, 2);
  const uint32_t x = b.tensor(Role::kInput, 4, 3), index = b.tensor(Role::kInput, 4, 1, 2),
                 y = b.tensor(Role::kOutput, 4, 3);
  const uint32_t permute = b.op(Kernel::kPermute, 2);
  for (uint32_t i = 0; i < 4; ++i) {
    b.add(i % 2, {permute, {{x, 0, 0, 4, 0, 3}, {index, 0, i, 1, 0, 1}, {y, 0, i, 1, 0, 3}}, {}, {}});
  }
  const PlanImage image = b.build();
  CHECK_EQ(image.fault(), std::string());
  Workspace workspace;
  std::vector<float> in(12, 1), out(12, 0);
  std::vector<int32_t> rows = {0, 1, 2, 4};
  const LaunchOutcome outcome = run_one(image, workspace, {in.data(), rows.data(), out.data()}, 2);
  CHECK(outcome.status == LaunchStatus::kTaskFailed);
  CHECK_EQ(outcome.task, 3u);  // queue 1, second
  CHECK(outcome.reason.find("index 4") != std::string::npos);
}

void python_tasks_call_back_and_nested_launches_are_refused() {
  plans::Builder b(0, 1, 1);
  const uint32_t op = b.op(Kernel::kPython, 0);
  b.add(0, {op, {}, {}, {}});
  const PlanImage image = b.build();
  Workspace workspace;
  struct Context {
    const PlanImage* image;
    Workspace* workspace;
    LaunchStatus inner = LaunchStatus::kDone;
  } context{&image, &workspace};
  std::vector<RankLaunch> ranks;
  ranks.push_back({&image, &workspace, {}, {}, nullptr});
  LaunchOptions options = with(1);
  options.context = &context;
  options.python_task = [](void* c, uint32_t, uint32_t) {
    auto* self = static_cast<Context*>(c);
    self->inner = run_one(*self->image, *self->workspace, {}, 1).status;
    return true;
  };
  CHECK(launch(ranks, options).status == LaunchStatus::kDone);
  CHECK(context.inner == LaunchStatus::kNested);
}

void an_interrupt_ends_the_launch() {
  plans::Builder b(0, 1, 1);
  const uint32_t nop = b.op(Kernel::kNop, 0);
  b.add(0, {nop, {}, {{b.event(1), 1}}, {}});
  const PlanImage image = b.build();
  Workspace workspace;
  std::vector<RankLaunch> ranks;
  ranks.push_back({&image, &workspace, {}, {}, nullptr});
  LaunchOptions options = with(1, 0);
  options.interrupted = [](void*) { return true; };
  CHECK(launch(ranks, options).status == LaunchStatus::kInterrupted);
}

void callers_take_turns() {
  const PlanImage image = plans::chain(200, 2, 5);
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&image, c] {
      Workspace workspace;
      for (int round = 0; round < 20; ++round) {
        std::vector<float> x(5, static_cast<float>(c * 100 + round)), y(1000, -1);
        CHECK(run_one(image, workspace, {x.data(), y.data()}, 1 + c % 2).status == LaunchStatus::kDone);
        CHECK(y == std::vector<float>(1000, x[0]));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

void a_body_that_hangs_is_left_and_refuses_launches_until_it_ends() {
  plans::Builder b(0, 1, 2);
  const uint32_t op = b.op(Kernel::kPython, 0), nop = b.op(Kernel::kNop, 0), event = b.event(1);
  b.add(0, {op, {}, {}, {{0, event}}});
  b.add(1, {nop, {}, {{event, 1}}, {}});
  const auto image = std::make_shared<PlanImage>(b.build());
  const auto workspace = std::make_shared<Workspace>(kNearWrap);
  static std::atomic<bool> hangs;
  hangs = true;
  LaunchOptions options = with(2, 0.05);
  auto kept = std::make_shared<int>(1);
  options.keep = kept;
  options.python_task = [](void*, uint32_t, uint32_t) {
    while (hangs) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return true;
  };
  const std::vector<RankLaunch> ranks = {{image.get(), workspace.get(), {}, {}, nullptr}};
  const LaunchOutcome outcome = launch(ranks, options);
  CHECK(outcome.status == LaunchStatus::kTimedOut);
  CHECK_EQ(outcome.stuck.size(), size_t{1});
  CHECK_EQ(outcome.cores.size(), size_t{2});
  if (outcome.stuck.size() == 1) CHECK_EQ(outcome.stuck[0].task, 0u);
  {
    const LaunchOutcome refused = launch(ranks, options);
    CHECK(refused.status == LaunchStatus::kHung);
    CHECK_EQ(refused.task, 0u);
    CHECK(refused.hung == kept);
  }
  options.keep.reset();
  CHECK_EQ(kept.use_count(), 2L);  // the body may still use what it was given
  hangs = false;
  options.timeout_s = 60;
  LaunchStatus status = LaunchStatus::kHung;
  for (int wait = 0; wait < 5000 && status == LaunchStatus::kHung; ++wait) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    status = launch(ranks, options).status;
  }
  CHECK(status == LaunchStatus::kDone);  // the late body has signalled nothing, or this one would have hung or raced
  CHECK_EQ(kept.use_count(), 1L);
}

void held_up_workers_make_the_same() {
  const PlanImage image = plans::chain(60, 3, 5);
  Workspace workspace(kNearWrap);
  for (uint64_t seed = 1; seed < 200; ++seed) {
    set_adversity({.seed = seed, .incoherent = true});
    std::vector<float> x(5, static_cast<float>(seed)), y(300, -1);
    CHECK(run_one(image, workspace, {x.data(), y.data()}, 1 + seed % 3).status == LaunchStatus::kDone);
    CHECK(y == std::vector<float>(300, x[0]));
  }
  set_adversity({});
}

void counters_polled_through_a_cache_are_found() {
  const PlanImage image = plans::chain(60, 3, 5);
  int found = 0;
  for (uint64_t seed = 1; seed < 30; ++seed) {
    set_adversity({.seed = seed, .incoherent = true, .poll_cached = true});
    Workspace workspace;
    std::vector<float> x(5, 1), y(300, -1);
    const LaunchOutcome outcome = run_one(image, workspace, {x.data(), y.data()}, 3, 5);
    found += outcome.status == LaunchStatus::kTaskFailed && outcome.reason.find("stale read") == 0;
  }
  set_adversity({});
  CHECK(found > 20);
  LineWriters writers;
  alignas(64) uint32_t line[32];
  CHECK(writers.store(line, 0).empty());
  CHECK(writers.store(line + 1, 0).empty());
  CHECK(writers.store(line + 16, 1).empty());
  CHECK(writers.store(line + 15, 1).find("two writers of a line") == 0);
}

void a_dropped_signal_is_missed() {
  const PlanImage image = plans::chain(6, 2, 5);
  set_adversity({.drop_rank = 0, .drop_task = 2, .drop_signal = 0});
  Workspace workspace(kNearWrap);
  std::vector<float> x(5, 1), y(30, -1);
  const LaunchOutcome outcome = run_one(image, workspace, {x.data(), y.data()}, 2, 0.1);
  set_adversity({});
  CHECK(outcome.status == LaunchStatus::kTimedOut);
  CHECK(run_one(image, workspace, {x.data(), y.data()}, 2).status == LaunchStatus::kDone);
}

void circles_are_refused() {
  plans::Builder b(0, 1, 2);
  const uint32_t nop = b.op(Kernel::kNop, 0);
  const uint32_t first = b.event(1), second = b.event(1);
  b.add(0, {nop, {}, {{second, 1}}, {}});
  b.add(0, {nop, {}, {}, {{0, first}}});
  b.add(1, {nop, {}, {{first, 1}}, {{0, second}}});
  CHECK(b.build().fault().find("waits for itself") != std::string::npos);
}

}  // namespace

int main() {
  set_processors(2);
  chains_carry_data_through();
  grids_carry_data_through();
  rings_hand_rows_on(2);
  rings_hand_rows_on(4);
  launches_are_dispatched_in_their_order();
  a_deadline_ends_the_launch_and_names_what_was_missing();
  a_bad_index_ends_the_launch_and_names_the_task();
  python_tasks_call_back_and_nested_launches_are_refused();
  an_interrupt_ends_the_launch();
  callers_take_turns();
  a_body_that_hangs_is_left_and_refuses_launches_until_it_ends();
  held_up_workers_make_the_same();
  counters_polled_through_a_cache_are_found();
  a_dropped_signal_is_missed();
  circles_are_refused();
  close_engine();
  CHECK_EQ(worker_threads(), 0u);
  const PlanImage image = plans::chain(3, 1, 1);
  Workspace workspace;
  CHECK(run_one(image, workspace, {nullptr, nullptr}, 1).status == LaunchStatus::kClosed);
  return check::status();
}
