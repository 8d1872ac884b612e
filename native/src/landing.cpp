// Puts and where they land, pulls and what they wait for.
#include <algorithm>

#include "hyper_mpmd/planner.h"
#include "wide.h"

namespace hyper_mpmd::planner {

namespace {

// Rows of a tile of the first op that reads what the route brings row by row, 0 if none does.
int64_t reader_rows(const Descriptor& descriptor, std::span<const TileSize> tiles, const OpRow& route) {
  const int64_t received = descriptor.boxes(route)[1].tensor;
  for (size_t index = 0; index < descriptor.ops.size(); ++index) {
    for (const OperandRow& box : descriptor.boxes(descriptor.ops[index])) {
      if (!box.write && box.tensor == received && box.rows_axis == kRows) {
        return tiles[index].rows;
      }
    }
  }
  return 0;
}

}  // namespace

Landings::Landings(const Descriptor& descriptor, const Layout& layout, std::span<const TileSize> tiles,
                   const Policy& policy)
    : descriptor_(descriptor), layout_(layout), tiles_(tiles), rotation_(policy.rotation) {
  bool any = false;
  for (const OpRow& op : descriptor.ops) any |= descriptor.is_routed(op);
  bool puts = false;
  for (const OpRow& op : descriptor.ops) puts |= op.route != kNoRoute;
  if (!puts) return;
  const int64_t ranks = descriptor.ranks;
  landings_.resize(descriptor.ops.size());
  std::vector<int64_t> received(static_cast<size_t>(ranks), 0);
  for (size_t index = 0; index < landings_.size(); ++index) {
    const OpRow& op = descriptor.ops[index];
    if (op.route == kNoRoute) continue;
    const int64_t space = descriptor.received_space(op);
    Landing& landing = landings_[index];
    landing.groups = layout.groups(space);
    landing.burst = policy.bursts ? reader_rows(descriptor, tiles, op) / std::max<int64_t>(1, tiles[index].rows) : 1;
    landing.burst = std::max<int64_t>(1, landing.burst);
    landing.cuts.reserve(static_cast<size_t>(ranks * landing.groups));
    for (int64_t rank = 0; rank < ranks; ++rank) {
      for (int64_t group = 0; group < landing.groups; ++group) {
        const int64_t size = layout.size(space, rank, group);
        const int64_t height = even_cut(size, tiles[index].rows, kRowUnit);
        landing.cuts.push_back({height, received[rank]});
        if (size) received[rank] += (size + height - 1) / height;
      }
    }
    if (op.pull) {
      for (int64_t& words : received) landing.taken.push_back(words++);
    }
    landing.counts.assign(static_cast<size_t>(ranks * ranks), 0);
    for (int64_t source = 0; source < ranks; ++source) {
      for (int64_t peer = 0; peer < ranks; ++peer) {
        uint32_t& count = landing.counts[source * ranks + peer];
        layout.segments(op, source, peer, [&](const Segment& s) {
          const int64_t begin = layout.offset(space, peer, s.target_group);
          const int64_t height = cut(index, peer, s.target_group).height;
          count +=
              static_cast<uint32_t>((s.target_row + s.rows - 1 - begin) / height - (s.target_row - begin) / height + 1);
        });
      }
    }
  }
  for (int64_t rank = 0; rank < (any ? ranks : 0); ++rank) {
    const int64_t words = kWordsPerLine + received[rank];
    strides_.push_back((words + kWordsPerLine - 1) / kWordsPerLine * kWordsPerLine);
    const auto all = static_cast<u128>(strides_.back()) * static_cast<u128>(ranks);
    if (all > kMaxIndex) {
      throw PlanLimit("rank " + std::to_string(rank) + " would have " + decimal(all) + " event words; the limit is " +
                      std::to_string(kMaxIndex));
    }
  }
}

const Landings::Cut& Landings::cut(size_t op, int64_t rank, int64_t group) const {
  return landings_[op].cuts[rank * landings_[op].groups + group];
}

// Visit the put tiles from one rank to another, in order of the received row tiles.
template <class Visit>
void Landings::put_tiles(size_t index, int64_t source, int64_t peer, Visit&& visit) const {
  const OpRow& op = descriptor_.ops[index];
  const int64_t space = descriptor_.received_space(op);
  const int64_t first_word = strides_.empty() ? 0 : credit_slot(source, peer) + kWordsPerLine;
  layout_.segments(op, source, peer, [&](const Segment& s) {
    const int64_t group_begin = layout_.offset(space, peer, s.target_group);
    const Cut& cut = this->cut(index, peer, s.target_group);
    const int64_t end = s.target_row + s.rows;
    for (int64_t row = s.target_row; row < end;) {
      const int64_t tile = (row - group_begin) / cut.height;
      const int64_t next = std::min(end, group_begin + (tile + 1) * cut.height);
      visit(PutTile{peer, s.target_group, s.source_row + row - s.target_row, row, next - row,
                    static_cast<uint32_t>(first_word + cut.first + tile)});
      row = next;
    }
  });
}

int64_t Landings::count(size_t op, int64_t rank) const {
  const int64_t ranks = descriptor_.ranks;
  const bool pull = descriptor_.ops[op].pull;
  int64_t sum = 0;
  for (int64_t peer = 0; peer < ranks; ++peer) {
    sum += landings_[op].counts[pull ? peer * ranks + rank : rank * ranks + peer];
  }
  return sum;
}

std::vector<PutTile> Landings::travels(size_t op, int64_t source, int64_t peer) const {
  std::vector<PutTile> found;
  put_tiles(op, source, peer, [&](const PutTile& put) { found.push_back(put); });
  return found;
}

std::vector<PutTile> Landings::tiles(size_t op, int64_t rank) const {
  const int64_t ranks = descriptor_.ranks;
  const bool pull = descriptor_.ops[op].pull;
  std::vector<PutTile> all;
  all.reserve(static_cast<size_t>(count(op, rank)));
  std::vector<std::pair<size_t, size_t>> open;  // [next, end) in `all`, by the turn of the peer
  for (int64_t turn = 0; turn < ranks; ++turn) {
    const size_t begin = all.size();
    const int64_t peer = rotation_ ? (rank + turn) % ranks : turn;
    put_tiles(op, pull ? peer : rank, pull ? rank : peer, [&](const PutTile& put) {
      all.push_back(put);
      all.back().peer = peer;
    });
    if (all.size() > begin) open.emplace_back(begin, all.size());
  }
  if (open.size() < 2) return all;
  std::vector<PutTile> turns;
  turns.reserve(all.size());
  while (!open.empty()) {
    for (auto& [next, end] : open) {
      const size_t stop = std::min(end, next + static_cast<size_t>(landings_[op].burst));
      while (next < stop) turns.push_back(all[next++]);
    }
    std::erase_if(open, [](const auto& range) { return range.first == range.second; });
  }
  return turns;
}

std::vector<Landings::Made> Landings::made(size_t writer, int64_t storage, int64_t rank) const {
  const OpRow& op = descriptor_.ops[writer];
  bool by_row = false;
  for (const OperandRow& box : descriptor_.boxes(op)) {
    if (box.write && descriptor_.tensors[box.tensor].storage == storage) by_row = box.rows_axis == kRows;
  }
  const int64_t width = even_cut(op.cols_value, tiles_[writer].cols, kColUnit);
  const int64_t across = (op.cols_value + width - 1) / width;
  std::vector<Made> found;
  int64_t number = 0;
  for (const Slab& slab : slabs(layout_, op, rank)) {
    const int64_t height = even_cut(slab.rows, tiles_[writer].rows, kRowUnit);
    for (int64_t row = 0; row < slab.rows; row += height, number += across) {
      found.push_back({slab.begin + row, slab.begin + std::min(row + height, slab.rows), number, across});
    }
  }
  if (by_row || found.empty()) return found;
  return {{0, layout_.tensor_rows(descriptor_.tensors[storage], rank), 0, number}};
}

std::vector<Ghost> Landings::ghosts(size_t op, int64_t rank) const {
  return descriptor_.ops[op].pull ? pulled(op, rank) : landed(op, rank);
}

std::vector<Ghost> Landings::pulled(size_t index, int64_t rank) const {
  const int64_t ranks = descriptor_.ranks;
  const auto boxes = descriptor_.boxes(descriptor_.ops[index]);
  const int64_t sent = boxes[0].tensor, received = boxes[1].tensor, storage = descriptor_.tensors[sent].storage;
  size_t writer = index;
  const auto writes = [&](const OperandRow& box) {
    return box.write && descriptor_.tensors[box.tensor].storage == storage;
  };
  do {
    if (writer-- == 0) throw BadProgram("task '" + descriptor_.op_names[index] + "' pulls what no task writes");
  } while (std::ranges::none_of(descriptor_.boxes(descriptor_.ops[writer]), writes));
  std::vector<Ghost> found;
  for (int64_t source = 0; source < ranks; ++source) {
    if (source == rank || !landings_[index].counts[source * ranks + rank]) continue;
    const std::vector<Made> rows = made(writer, storage, source);
    put_tiles(index, source, rank, [&](const PutTile& tile) {
      const auto after = [](int64_t row, const Made& m) { return row < m.end; };
      int64_t threshold = 0, last = 0;
      for (auto m = std::upper_bound(rows.begin(), rows.end(), tile.source_row, after);
           m != rows.end() && m->begin < tile.source_row + tile.rows; ++m) {
        threshold += m->count;
        last = m->first + m->count - 1;
      }
      found.push_back({static_cast<uint32_t>(writer), static_cast<uint32_t>(source), static_cast<uint32_t>(last),
                       static_cast<uint32_t>(received), static_cast<uint32_t>(tile.target_row),
                       static_cast<uint32_t>(tile.rows), static_cast<uint32_t>(descriptor_.tensors[received].cols),
                       tile.slot, static_cast<uint32_t>(threshold)});
    });
  }
  for (int64_t reader = 0; reader < ranks; ++reader) {
    const uint32_t count = landings_[index].counts[rank * ranks + reader];
    if (reader == rank || !count) continue;
    found.push_back({static_cast<uint32_t>(index), static_cast<uint32_t>(reader), count - 1,
                     static_cast<uint32_t>(sent), 0,
                     static_cast<uint32_t>(layout_.tensor_rows(descriptor_.tensors[sent], rank)),
                     static_cast<uint32_t>(descriptor_.tensors[sent].cols),
                     static_cast<uint32_t>(taken_slot(index, reader, rank)), count});
  }
  for (const Ghost& ghost : found) {
    if (ghost.threshold > kMaxThreshold) {
      throw PlanLimit(std::to_string(ghost.threshold) + " tasks would signal one event; the limit is " +
                      std::to_string(kMaxThreshold));
    }
  }
  return found;
}

std::vector<Ghost> Landings::landed(size_t index, int64_t rank) const {
  const int64_t ranks = descriptor_.ranks;
  const int64_t tensor = descriptor_.boxes(descriptor_.ops[index])[1].tensor;
  std::vector<Ghost> found;
  const auto burst = static_cast<int64_t>(landings_[index].burst);
  std::vector<int64_t> before;  // by round: how many tiles of the source go before this rank's turn in it
  for (int64_t source = 0; source < ranks; ++source) {
    if (source == rank) continue;
    const uint32_t* counts = &landings_[index].counts[source * ranks];
    const int64_t mine = counts[rank], turn = this->turn(source, rank);
    if (!mine) continue;
    const int64_t rounds = (mine + burst - 1) / burst;
    before.assign(static_cast<size_t>(rounds), 0);
    for (int64_t peer = 0; peer < ranks; ++peer) {
      const int64_t nearer = peer != rank && this->turn(source, peer) < turn;
      for (int64_t round = 0; round < rounds; ++round) {
        before[round] += std::min<int64_t>(counts[peer], (round + nearer) * burst);
      }
    }
    int64_t place = 0;
    put_tiles(index, source, rank, [&](const PutTile& put) {
      const int64_t order = before[place / burst] + place % burst;
      ++place;
      found.push_back({static_cast<uint32_t>(index), static_cast<uint32_t>(source), static_cast<uint32_t>(order),
                       static_cast<uint32_t>(tensor), static_cast<uint32_t>(put.target_row),
                       static_cast<uint32_t>(put.rows), static_cast<uint32_t>(descriptor_.tensors[tensor].cols),
                       put.slot, 1});
    });
  }
  return found;
}

}  // namespace hyper_mpmd::planner
