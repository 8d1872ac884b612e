// Lowering and scheduling: from a graph's tables and this step's loads to the records of a plan.
// The Python twin in hyper_mpmd/scheduler/twin/ says the same the slow and obvious way; tests hold the two to the same
// records, bit for bit. All arithmetic is on integers.
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "hyper_mpmd/plan.h"

namespace hyper_mpmd::planner {

// A plan larger than its record fields can index.
struct PlanLimit : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Tasks that wait for one another in a circle.
struct Cycle : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A program, made by hand, whose records point outside one another.
struct BadProgram : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// ---- the tables of hyper_mpmd/scheduler/descriptor.py: one struct a table, one int64 a column, in the same order
// --------

struct SpaceRow {
  static constexpr const char* kColumns = "groups route parent shift team stride";
  int64_t groups, route, parent, shift, team, stride;
};

struct TensorRow {
  static constexpr const char* kColumns = "dtype item_bytes space rows cols block_rows role storage";
  int64_t dtype, item_bytes, space, rows, cols, block_rows, role, storage;
};

struct OpRow {
  static constexpr const char* kColumns =
      "kernel kind dtype by_group groups space rows_kind rows_value cols_kind cols_value reduction_kind "
      "reduction_value "
      "cut_rows cut_cols flops_per_point route shift team stride pull hop limit_bits operand_begin read_boxes boxes";
  int64_t kernel, kind, dtype, by_group, groups, space;
  int64_t rows_kind, rows_value, cols_kind, cols_value, reduction_kind, reduction_value;
  int64_t cut_rows, cut_cols, flops_per_point, route, shift, team, stride, pull, hop;
  int64_t limit_bits;  // of a float
  int64_t operand_begin, read_boxes, boxes;
};

struct OperandRow {
  static constexpr const char* kColumns = "tensor rows_axis cols_axis shift group write";
  int64_t tensor, rows_axis, cols_axis, shift, group, write;
};

enum ExtentKind : int64_t { kAbsent = 0, kPlain = 1, kSpace = 2 };
enum Axis : int64_t { kAll = 0, kRows = 1, kCols = 2, kReduction = 3 };
enum RouteKind : int64_t { kNoRoute = 0, kScatter = 1, kReturn = 2, kAllRanks = 3, kShift = 4 };

// The ranks that a route acts within: so many, `stride` apart; all ranks are shared out over such teams.
struct Team {
  int64_t ranks, stride;
  // The place of a rank in its team, from 0, and the rank at a place of the team that `rank` is in.
  int64_t place(int64_t rank) const { return rank % (ranks * stride) / stride; }
  int64_t member(int64_t rank, int64_t place) const { return rank + (place - this->place(rank)) * stride; }
  bool shared(int64_t a, int64_t b) const { return member(a, 0) == member(b, 0); }
};

struct Descriptor {
  int64_t ranks = 1;
  std::vector<SpaceRow> spaces;
  std::vector<TensorRow> tensors;
  std::vector<OpRow> ops;
  std::vector<OperandRow> operands;
  std::vector<std::string> space_names, tensor_names, op_names;

  std::span<const OperandRow> boxes(const OpRow& op) const {
    return std::span(operands).subspan(static_cast<size_t>(op.operand_begin), static_cast<size_t>(op.boxes));
  }
  // The row space in which a put's rows arrive.
  int64_t received_space(const OpRow& op) const { return tensors[boxes(op)[1].tensor].space; }
  bool is_routed(const OpRow& op) const { return op.route != kNoRoute && ranks > 1; }
};

struct Device {
  int64_t aic, aiv;
  bool unified;
  int64_t cube_flops[2], vector_flops[2];        // a microsecond: float32, 16-bit
  int64_t cube_ramp[2], vector_ramp[2];          // rows, columns that a tile pays for on top of its own
  int64_t cube_bytes, vector_bytes, link_bytes;  // a microsecond
  int64_t link_total_bytes;                      // of all cores together, in and out each
  int64_t memory_bytes, l2_bytes;                // main memory a microsecond, all cores together; size of the L2
  int64_t row_bytes;                             // of each row of a box that is not whole rows, on top
  int64_t task_ns, event_ns, remote_ns, launch_ns;
  std::vector<int64_t> row_tiles, col_tiles;
};

struct TileSize {
  int64_t rows, cols;
};

// How tasks are put on cores; see hyper_mpmd/scheduler/policies.py.
struct Policy {
  enum class How { kOp, kList, kStrided } how = How::kList;
  bool serial = false;        // one op at a time
  bool whole_groups = false;  // a tile waits for all rows of its group
  bool rotation = true;       // puts visit peers in rank-aware order
  bool priorities = true, interleave = true;
  bool bursts = true;  // a peer gets in turn the rows of a tile that reads them, else one tile

  bool dispatched() const { return how == How::kOp; }  // by the host, op by op
};

// ---- layout.cpp
// -------------------------------------------------------------------------------------------------------

// Consecutive rows that travel together: from the sender's rows to the receiver's, within one received group.
struct Segment {
  int64_t source_row, target_row, rows, target_group;
};

// Counts of one free row space: [ranks, groups], row by row.
struct SpaceLoads {
  int64_t space;
  const int64_t* counts;
};

// Group sizes and offsets of every row space on every rank.
class Layout {
 public:
  Layout(const Descriptor& descriptor, std::span<const SpaceLoads> loads);

  int64_t size(int64_t space, int64_t rank, int64_t group) const {
    const Space& s = spaces_[space];
    return s.sizes[rank * s.rank_stride + group];
  }
  int64_t offset(int64_t space, int64_t rank, int64_t group) const {
    const Space& s = spaces_[space];
    return s.offsets[rank * (s.rank_stride ? s.groups + 1 : 0) + group];
  }
  int64_t total(int64_t space, int64_t rank) const { return offset(space, rank, spaces_[space].groups); }
  int64_t groups(int64_t space) const { return spaces_[space].groups; }
  // Whether the space has the same groups on every rank.
  bool is_uniform(int64_t space) const { return spaces_[space].rank_stride == 0; }
  // The first row and the number of rows of all groups that some rows lie in.
  std::pair<int64_t, int64_t> whole_groups(int64_t space, int64_t rank, int64_t row, int64_t rows) const;
  int64_t tensor_rows(const TensorRow& tensor, int64_t rank) const {
    return tensor.space < 0 ? tensor.rows : total(tensor.space, rank);
  }

  // What `source` puts to `target` in this op, in order of the received group; empty segments left out.
  template <class Visit>
  void segments(const OpRow& op, int64_t source, int64_t target, Visit&& visit) const;

 private:
  struct Space {
    int64_t groups = 0;
    int64_t rank_stride = 0;        // 0: every rank has the same groups
    std::vector<int64_t> sizes;     // [ranks, groups]
    std::vector<int64_t> offsets;   // [ranks, groups + 1]
    int64_t sources = 0;            // of a scattered space: the ranks of a team
    std::vector<int64_t> arrivals;  // scattered spaces: [ranks, groups, sources], the first row that came from a source
  };
  void derive(size_t index);
  // The first row of a group that came from the rank at the place `source` of the team.
  int64_t arrival(int64_t space, int64_t rank, int64_t group, int64_t source) const {
    const Space& s = spaces_[space];
    return s.arrivals[(rank * s.groups + group) * s.sources + source];
  }

  const Descriptor& descriptor_;
  std::vector<Space> spaces_;
};

template <class Visit>
void Layout::segments(const OpRow& op, int64_t source, int64_t target, Visit&& visit) const {
  const Team team{op.team, op.stride};
  if (!team.shared(source, target)) return;
  const int64_t from = team.place(source), to = team.place(target);
  auto boxes = descriptor_.boxes(op);
  int64_t sent = descriptor_.tensors[boxes[0].tensor].space, received = descriptor_.tensors[boxes[1].tensor].space;
  auto put = [&](int64_t source_row, int64_t target_row, int64_t rows, int64_t group) {
    if (rows) visit(Segment{source_row, target_row, rows, group});
  };
  if (op.route == kScatter) {
    for (int64_t group = 0, owned = groups(received); group < owned; ++group) {
      int64_t expert = to * owned + group;
      put(offset(sent, source, expert), arrival(received, target, group, from), size(sent, source, expert), group);
    }
  } else if (op.route == kReturn) {
    for (int64_t group = 0, owned = groups(sent); group < owned; ++group) {
      int64_t expert = from * owned + group;
      put(arrival(sent, source, group, to), offset(received, target, expert), size(received, target, expert), expert);
    }
  } else if (op.route == kAllRanks) {
    for (int64_t group = 0, count = groups(sent); group < count; ++group) {
      int64_t landing = from * count + group;
      put(offset(sent, source, group), offset(received, target, landing), size(sent, source, group), landing);
    }
  } else if (to == (from + op.shift) % team.ranks) {
    for (int64_t group = 0; group < groups(sent); ++group) {
      int64_t row = offset(sent, source, group);
      put(row, row, size(sent, source, group), group);
    }
  }
}

// ---- tiling.cpp
// -------------------------------------------------------------------------------------------------------

// Cuts fall on these multiples, so that rows fill SIMD blocks and columns fill cache lines.
inline constexpr int64_t kRowUnit = 8, kColUnit = 16;

// The tile size <= tile that cuts `extent` most evenly: 130 rows at 128 become 72 + 58, not 128 + 2.
inline int64_t even_cut(int64_t extent, int64_t tile, int64_t unit) {
  if (extent <= tile) return extent;
  int64_t count = (extent + tile - 1) / tile;
  int64_t size = (extent + count - 1) / count;
  return tile % unit == 0 ? (size + unit - 1) / unit * unit : size;
}

// The rows of one group that an op is cut in: [begin, begin + rows), and the length of its reduction.
struct Slab {
  int64_t group, begin, rows, reduction_begin, reduction;
};

// The row intervals that the op works through on this rank, empty ones left out.
std::vector<Slab> slabs(const Layout& layout, const OpRow& op, int64_t rank);

// What a tile of one op costs.
class CostModel {
 public:
  CostModel(const Descriptor& descriptor, const Device& device, size_t op);
  // Nanoseconds on one core: the larger of arithmetic and memory time, and the task's overhead.
  int64_t tile(int64_t rows, int64_t cols, int64_t reduction) const;
  // The same where all cores are at such tiles: what does not fit into the L2 comes from main memory, which they share.
  int64_t streamed_tile(int64_t rows, int64_t cols, int64_t reduction) const;

 private:
  uint64_t moved_bytes(int64_t rows, int64_t cols, int64_t reduction) const;  // kMaxWork + 1 for more than kMaxWork

  struct Factor {
    int64_t rows_axis, cols_axis, all_rows, all_cols, item_bytes;
    bool chosen;  // rows chosen by data: a tile reads as many as it has
  };
  std::vector<Factor> factors_;
  const std::string& name_;
  uint64_t flops_per_point_, ramp_rows_, ramp_cols_, flops_per_us_, bytes_per_us_;
  uint64_t l2_bytes_, memory_bytes_per_us_, cores_;
  int64_t task_ns_, row_bytes_;
  bool route_;
};

struct GivenTile {
  int64_t op, rows, cols;
};

// Each op's tile sizes: what was given, else the cheapest over all ranks of the world, so that ranks agree on each
// other's tiles without asking.
std::vector<TileSize> choose_tiles(const Descriptor&, const Layout&, const Device&, std::span<const GivenTile> given);

// ---- landing.cpp
// ------------------------------------------------------------------------------------------------------

// Rows that one task puts to a peer or pulls from it.
struct PutTile {
  int64_t peer, group, source_row, target_row, rows;
  uint32_t slot;  // the word in the receiver's heap that says: they have been put, or may be pulled
};

// An event that another rank signals here: rows were put, rows may be pulled (op: the one that made them), or a reader
// has pulled all that it needs. `order`: how far along the other rank is with its tasks of the op when it signals.
struct Ghost {
  uint32_t op, source, order, tensor, row, rows, cols, slot, threshold;
};

// Puts and where they land: numbered from the counts alone, so that every rank comes to the same numbers.
class Landings {
 public:
  Landings(const Descriptor&, const Layout&, std::span<const TileSize> tiles, const Policy& policy);

  bool empty() const { return landings_.empty(); }
  // The tiles that run on `rank`, in rank-aware order (RATR): to, or from, rank, rank + 1, ... mod W, one tile each in
  // turn; without rotation the turns begin with rank 0.
  std::vector<PutTile> tiles(size_t op, int64_t rank) const;
  int64_t count(size_t op, int64_t rank) const;
  // The rows that go from `source` to `peer`, in order of the received row tiles.
  std::vector<PutTile> travels(size_t op, int64_t source, int64_t peer) const;
  // The events of this op that other ranks signal on `rank`.
  std::vector<Ghost> ghosts(size_t op, int64_t rank) const;
  // The word in the heap of `owner` that `reader` raises with each tile that it has pulled from there.
  int64_t taken_slot(size_t op, int64_t reader, int64_t owner) const {
    return credit_slot(reader, owner) + kWordsPerLine + landings_[op].taken[owner];
  }
  int64_t stride(int64_t rank) const { return strides_[rank]; }
  int64_t credit_slot(int64_t source, int64_t rank) const { return source * strides_[rank]; }

 private:
  struct Cut {
    int64_t height, first;  // rows of a tile; how many row tiles the rank may receive before this group's
  };
  const Cut& cut(size_t op, int64_t rank, int64_t group) const;
  template <class Visit>
  void put_tiles(size_t op, int64_t source, int64_t peer, Visit&& visit) const;
  // The turn of a peer among those that `rank` puts to, or pulls from.
  int64_t turn(int64_t rank, int64_t peer) const {
    return rotation_ ? (peer + descriptor_.ranks - rank) % descriptor_.ranks : peer;
  }
  std::vector<Ghost> landed(size_t op, int64_t rank) const;
  std::vector<Ghost> pulled(size_t op, int64_t rank) const;
  // Rows that so many tiles of the op which makes a pull's source write, from tile `first` on.
  struct Made {
    int64_t begin, end, first, count;
  };
  std::vector<Made> made(size_t writer, int64_t storage, int64_t rank) const;

  const Descriptor& descriptor_;
  const Layout& layout_;
  std::span<const TileSize> tiles_;
  bool rotation_;
  struct Landing {
    int64_t groups = 0;
    int64_t burst = 1;             // tiles that go to a peer in its turn
    std::vector<Cut> cuts;         // [ranks, groups]
    std::vector<uint32_t> counts;  // [sources, peers]: tiles from one to the other
    std::vector<int64_t> taken;    // [owners], of a pull: its word among those that each reader raises
  };
  std::vector<Landing> landings_;  // by op; empty where nothing is routed
  std::vector<int64_t> strides_;   // words that one source has in the heap of a rank
};

// ---- memory.cpp
// -------------------------------------------------------------------------------------------------------

// The plan's tensor records: sizes on this rank and offsets, one tensor after another by role; symmetric ones at the
// same offsets on every rank. Throws PlanLimit for what no address reaches.
std::vector<TensorRecord> place_tensors(const Descriptor& descriptor, const Layout& layout, int64_t rank);

// ---- lower.cpp
// --------------------------------------------------------------------------------------------------------

// The tile tasks of one rank, in program order (every edge leads to a later task); see hyper_mpmd/scheduler/program.py.
struct Program {
  int64_t rank = 0, ranks = 1;
  std::vector<OpRecord> ops;
  std::vector<TensorRecord> tensors;
  std::vector<TaskRecord> tasks;
  std::vector<AccessRecord> accesses;
  std::vector<WaitRecord> waits;
  std::vector<SignalRecord> signals;
  std::vector<EventRecord> events;
  std::vector<PeerRecord> peers;
  std::vector<int64_t> costs;
  int64_t local_events = 0;
};

Program lower(const Descriptor&, const Layout&, const Landings&, const Device&, std::span<const TileSize>,
              const Policy&, int64_t rank);

// ---- schedule.cpp
// -----------------------------------------------------------------------------------------------------

// A program made elsewhere, borrowed.
struct ProgramView {
  int64_t rank, ranks, local_events;
  std::span<const OpRecord> ops;
  std::span<const TensorRecord> tensors;
  std::span<const TaskRecord> tasks;
  std::span<const AccessRecord> accesses;
  std::span<const WaitRecord> waits;
  std::span<const SignalRecord> signals;
  std::span<const EventRecord> events;
  std::span<const PeerRecord> peers;
  std::span<const int64_t> costs;

  std::span<const WaitRecord> waits_of(size_t task) const {
    return waits.subspan(tasks[task].wait_begin, tasks[task].wait_count);
  }
  std::span<const SignalRecord> signals_of(size_t task) const {
    return signals.subspan(tasks[task].signal_begin, tasks[task].signal_count);
  }
  bool is_local(const SignalRecord& signal) const {
    return signal.rank == static_cast<uint32_t>(rank) && signal.event < static_cast<uint64_t>(local_events);
  }
  // Of the tasks of a communication op: whether it reads another rank's rows.
  bool is_pull(size_t task) const { return accesses[tasks[task].access_begin].rank != static_cast<uint32_t>(rank); }
  // How long a task keeps this rank's port; 0 unless it moves rows from or to another rank.
  int64_t wire_ns(size_t task, const Device& device) const;
  // How long the box of another rank's event keeps it.
  int64_t wire_ns(const EventRecord& event, const Device& device) const;
};

ProgramView view(const Program& program);
// Throws BadProgram where an index of the program points nowhere.
void check(const ProgramView& program);

struct Pool {
  CoreKind kind;
  uint32_t cores;
};
std::vector<Pool> pools(const Device& device);
inline size_t pool_of(const ProgramView& program, const Device& device, uint32_t op) {
  return device.unified ? 0 : program.ops[op].kind;
}

// Where and when each task runs, by its number in the program, and the launches.
struct Placement {
  std::vector<int64_t> start, end;
  std::vector<uint32_t> launch;
  std::vector<std::vector<uint32_t>> queues;  // pool by pool, core by core: tasks in queue order
  std::vector<LaunchRecord> launches;
  std::vector<uint32_t> dependencies;
};

Placement schedule_o0(const ProgramView&, const Device&, const Policy&);
Placement schedule_o1(const ProgramView&, const Device&, const Policy&);
Placement schedule_published(const ProgramView&, const Device&, const Policy&);

// ---- assemble.cpp
// -----------------------------------------------------------------------------------------------------

// The sections of a plan.
struct Plan {
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
};

Plan assemble(const ProgramView&, const Device&, const Policy&);

// ---- longest_path.cpp
// -------------------------------------------------------------------------------------------------

// The largest sum of node weights and edge latencies along any path. Throws Cycle where there is none.
int64_t longest_path(std::span<const int64_t> weights, std::span<const int64_t> sources,
                     std::span<const int64_t> targets, std::span<const int64_t> latencies);

}  // namespace hyper_mpmd::planner
