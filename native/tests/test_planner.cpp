// The planner by itself, for the sanitizers: random worlds through layout, tiling, lowering and both policies, and the
// sums that must agree between ranks.
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>

#include "hyper_mpmd/kernels.h"
#include "hyper_mpmd/planner.h"

namespace pl = hyper_mpmd::planner;
using namespace hyper_mpmd;

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

// tokens -> dispatch -> matmul -> scaling in place -> combine (put or pulled), within teams; on one rank copies.
pl::Descriptor make_graph(int64_t ranks, pl::Team team, int64_t groups, int64_t cols, bool pull) {
  const int64_t owned = groups / team.ranks, aic = 0, aiv = 1, hop = ranks > 1;
  const int64_t input = 0, workspace = 2, symmetric = 3;
  const int64_t none = pl::kAbsent, plain = pl::kPlain, space = pl::kSpace;
  pl::Descriptor d;
  d.ranks = ranks;
  d.space_names = {"tokens", "tokens.scatter"};
  d.spaces = {{groups, pl::kNoRoute, -1, 0, 1, 1}, {owned, pl::kScatter, 0, 0, team.ranks, team.stride}};
  d.tensor_names = {"x", "received", "w", "h", "scaled", "y"};
  d.tensors = {{0, 4, 0, 0, cols, 0, input, 0},
               {0, 4, 1, 0, cols, 0, symmetric, 1},
               {0, 4, -1, owned * cols, 48, cols, input, 2},
               {0, 4, 1, 0, 48, 0, pull ? symmetric : workspace, 3},
               {0, 4, 1, 0, 48, 0, pull ? symmetric : workspace, 3},
               {0, 4, 0, 0, 48, 0, pull ? workspace : symmetric, 5}};
  d.op_names = {"dispatch", "matmul", "scale", "combine"};
  const int64_t inf = std::bit_cast<uint32_t>(kernels::kNoLimit);
  d.ops = {{2, aiv,          0, 1,          groups,      0, space, 0,   none, 1, none, 1, 1, 0,
            0, pl::kScatter, 0, team.ranks, team.stride, 0, 0,     inf, 0,    1, 2},
           {4, aic, 0, 1, owned, 1, space, 1, plain, 48, plain, cols, 1, 1, 2, 0, 0, 1, 1, 0, hop, inf, 2, 2, 3},
           {1, aiv, 0, 0, 1, 1, space, 1, plain, 48, none, 1, 1, 1, 1, 0, 0, 1, 1, 0, hop, inf, 5, 1, 2},
           {2,   aiv,         0, 1,          owned,       1,    space,
            1,   none,        1, none,       1,           1,    0,
            0,   pl::kReturn, 0, team.ranks, team.stride, pull, hop + (pull && hop),
            inf, 7,           1, 2}};
  d.operands = {{0, pl::kRows, pl::kAll, 0, 0, 0},       {1, pl::kRows, pl::kAll, 0, 0, 1},
                {1, pl::kRows, pl::kReduction, 0, 0, 0}, {2, pl::kReduction, pl::kCols, 0, 1, 0},
                {3, pl::kRows, pl::kCols, 0, 0, 1},      {3, pl::kRows, pl::kCols, 0, 0, 0},
                {4, pl::kRows, pl::kCols, 0, 0, 1},      {4, pl::kRows, pl::kAll, 0, 0, 0},
                {5, pl::kRows, pl::kAll, 0, 0, 1}};
  return d;
}

pl::Device make_device(bool unified) {
  return {unified ? 3 : 2,
          3,
          unified,
          {700, 900},
          {300, 500},
          {1, 2},
          {1, 0},
          900,
          700,
          100,
          150,
          800,
          9000,
          5,
          3,
          7,
          40,
          90,
          {32, 16, 8},
          {32, 16}};
}

void run_world(std::mt19937& random, int64_t ranks, pl::Team team) {
  const int64_t groups = team.ranks * (1 + static_cast<int64_t>(random() % 4));
  const pl::Descriptor d = make_graph(ranks, team, groups, 1 + static_cast<int64_t>(random() % 40), random() % 2);
  std::vector<int64_t> counts;
  for (int64_t i = 0; i < ranks * groups; ++i) counts.push_back(random() % 3 ? static_cast<int64_t>(random() % 70) : 0);
  const pl::SpaceLoads loads[] = {{0, counts.data()}};
  const pl::Layout layout(d, loads);
  const pl::Device device = make_device(random() % 2);
  const pl::GivenTile given[] = {{1, 16, 16}};
  const auto tiles = pl::choose_tiles(d, layout, device, std::span(given, random() % 2));
  using How = pl::Policy::How;
  for (const pl::Policy& policy : {pl::Policy{.how = How::kOp}, pl::Policy{.how = How::kList},
                                   pl::Policy{.how = How::kStrided, .whole_groups = true},
                                   pl::Policy{.how = How::kList, .rotation = false, .interleave = false}}) {
    const pl::Landings landings(d, layout, tiles, policy);
    std::map<std::pair<uint32_t, uint32_t>, uint64_t> sent, awaited;  // (rank, slot) -> signals
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const auto me = static_cast<uint32_t>(rank);
      const pl::Program program = pl::lower(d, layout, landings, device, tiles, policy, rank);
      pl::check(pl::view(program));
      const pl::Plan plan = pl::assemble(pl::view(program), device, policy);
      require(plan.tasks.size() == program.tasks.size(), "every task is placed");
      std::map<uint32_t, uint64_t> local;
      for (const SignalRecord& signal : plan.signals) {
        if (signal.rank == me) {
          ++local[signal.event];
        } else {
          ++sent[{signal.rank, signal.event}];
        }
      }
      for (uint32_t event = 0; event < plan.events.size(); ++event) {
        const EventRecord& record = plan.events[event];
        if (record.slot == kNone) {
          require(local[event] == record.threshold, "thresholds equal signals");
        } else if (record.op != kNone) {
          awaited[{me, record.slot}] += record.threshold;
        }
      }
      size_t queued = 0;
      for (const QueueRecord& queue : plan.queues) {
        require(queue.begin == queued, "queues stand side by side");
        queued += queue.count;
        for (uint32_t i = 1; i < queue.count; ++i) {
          const TaskRecord& before = plan.tasks[queue.begin + i - 1];
          const TaskRecord& task = plan.tasks[queue.begin + i];
          require(before.end_ns <= task.start_ns, "a core runs one task at a time");
          require(plan.ops[before.op].hop <= plan.ops[task.op].hop, "queues do not go down in hop level");
        }
      }
    }
    require(sent == awaited, "what a rank signals to another is awaited there, and nothing else is");
  }
}

}  // namespace

int main() {
  std::mt19937 random(7);
  for (int round = 0; round < 150; ++round) {
    const pl::Team team{1 + static_cast<int64_t>(random() % 3), 1 + static_cast<int64_t>(random() % 2)};
    run_world(random, team.ranks * team.stride * (1 + static_cast<int64_t>(random() % 2)), team);
  }
  std::puts("planner: 150 random worlds");
}
