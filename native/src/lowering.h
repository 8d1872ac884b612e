// Lowering one rank, as it stands between its two halves: lower.cpp makes the tasks, lower_waits.cpp what orders them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "hyper_mpmd/overlap.h"
#include "hyper_mpmd/planner.h"

namespace hyper_mpmd::planner {

// While lowering, a wait for an event of another rank, or for a credit, carries its own number in `event` and one of
// these.
inline constexpr uint32_t kGhostMark = 0xffffffffu, kCreditMark = 0xfffffffeu, kLocalMark = 0;

// Who touched a storage since it was last written as a whole.
struct History {
  uint32_t serial = 0;  // events are shared between tasks that wait for the same tasks, within one history
  BoxIndex writers, readers;
  BoxIndex ghosts;  // rows that other ranks put there; its "tasks" are indices into all ghosts
  BoxIndex takers;  // rows that other ranks pull from there, likewise
};

// One storage that the tasks of an op touch: which of the op's boxes, and which cuts move them.
struct Touch {
  uint32_t storage;
  bool written;
  std::vector<size_t> boxes;
  std::vector<int64_t> spaces;  // of each box: where it waits for whole groups, the row space that has them, else -1
  bool by_slab = false, by_row = false, by_col = false;
  // Waits found for one row of tiles, or for each column where boxes do not move with the rows.
  struct Found {
    std::vector<WaitRecord> waits;
    int64_t slab = -2;  // the slab they hold for
  };
  std::vector<Found> found;
};

class Lowering {
 public:
  Lowering(const Descriptor& descriptor, const Layout& layout, const Landings& landings, const Device& device,
           std::span<const TileSize> tiles, const Policy& policy, int64_t rank)
      : d_(descriptor),
        layout_(layout),
        landings_(landings),
        device_(device),
        tiles_(tiles),
        policy_(policy),
        rank_(rank) {
    out_.rank = rank;
    out_.ranks = d_.ranks;
  }

  Program run();

 private:
  void find_uses();
  void count_tasks();
  void collect_ghosts();
  void grid(size_t index);
  void travels(size_t index);
  void tell_readers(size_t index);
  std::vector<Touch> touches(const OpRow& op) const;
  TaskRecord& add_task(size_t op, int64_t group, int64_t peer, int64_t cost);
  void add_access(const OperandRow& box, int64_t rank, const Box& where);
  void wait(const Touch& touch, const AccessRecord* accesses, std::vector<WaitRecord>& found);
  void enter(size_t index, size_t first);
  void close_events();
  void signals();
  void peers();

  const Descriptor& d_;
  const Layout& layout_;
  const Landings& landings_;
  const Device& device_;
  std::span<const TileSize> tiles_;
  const Policy& policy_;
  int64_t rank_;
  Program out_;

  std::vector<History> histories_;
  std::vector<size_t> last_use_, last_write_;  // by storage: the last op that touches, or writes, it; 0 counts as none
  uint32_t serials_ = 0;
  ListTable producers_;  // of each local event
  ListTable hits_;       // combinations of indexed boxes already looked up, where boxes stand for many readers
  std::vector<uint32_t> event_of_hits_;
  std::vector<Ghost> ghosts_;  // in order of their slots
  std::vector<std::pair<uint32_t, SignalRecord>> peer_signals_;
  std::vector<uint32_t> scratch_tasks_, scratch_hits_;
  std::vector<Box> scratch_boxes_;
};

}  // namespace hyper_mpmd::planner
