// Puts and where they land.
#include <algorithm>

#include "hyper_mpmd/planner.h"
#include "wide.h"

namespace hyper_mpmd::planner {

Landings::Landings(const Descriptor& descriptor, const Layout& layout, std::span<const TileSize> tiles)
    : descriptor_(descriptor), layout_(layout) {
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
    landing.cuts.reserve(static_cast<size_t>(ranks * landing.groups));
    for (int64_t rank = 0; rank < ranks; ++rank) {
      for (int64_t group = 0; group < landing.groups; ++group) {
        const int64_t size = layout.size(space, rank, group);
        const int64_t height = even_cut(size, tiles[index].rows, kRowUnit);
        landing.cuts.push_back({height, received[rank]});
        if (size) received[rank] += (size + height - 1) / height;
      }
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

int64_t Landings::count(size_t op, int64_t source) const {
  int64_t sum = 0;
  for (int64_t peer = 0; peer < descriptor_.ranks; ++peer) {
    sum += landings_[op].counts[source * descriptor_.ranks + peer];
  }
  return sum;
}

std::vector<PutTile> Landings::puts(size_t op, int64_t source) const {
  const int64_t ranks = descriptor_.ranks;
  std::vector<PutTile> all;
  all.reserve(static_cast<size_t>(count(op, source)));
  std::vector<std::pair<size_t, size_t>> open;  // [next, end) in `all`, by distance of the peer
  for (int64_t distance = 0; distance < ranks; ++distance) {
    size_t begin = all.size();
    put_tiles(op, source, (source + distance) % ranks, [&](const PutTile& put) { all.push_back(put); });
    if (all.size() > begin) open.emplace_back(begin, all.size());
  }
  if (open.size() < 2) return all;
  std::vector<PutTile> turns;
  turns.reserve(all.size());
  while (!open.empty()) {
    for (auto& [next, end] : open) turns.push_back(all[next++]);
    std::erase_if(open, [](const auto& range) { return range.first == range.second; });
  }
  return turns;
}

std::vector<Ghost> Landings::ghosts(size_t index, int64_t rank) const {
  const int64_t ranks = descriptor_.ranks;
  const int64_t tensor = descriptor_.boxes(descriptor_.ops[index])[1].tensor;
  std::vector<Ghost> found;
  std::vector<int64_t> all, nearer;
  for (int64_t source = 0; source < ranks; ++source) {
    if (source == rank) continue;
    const uint32_t* counts = &landings_[index].counts[source * ranks];
    const int64_t mine = counts[rank], distance = (rank + ranks - source) % ranks;
    if (!mine) continue;
    // all[k], nearer[k]: how many peers (that come before this rank in a round) get more than k puts, for k < mine.
    all.assign(static_cast<size_t>(mine) + 1, 0);
    nearer.assign(static_cast<size_t>(mine) + 1, 0);
    for (int64_t peer = 0; peer < ranks; ++peer) {
      const int64_t count = std::min<int64_t>(counts[peer], mine);
      ++all[count];
      if ((peer + ranks - source) % ranks < distance) ++nearer[count];
    }
    for (int64_t k = mine - 1; k >= 0; --k) {
      all[k] += all[k + 1];
      nearer[k] += nearer[k + 1];
    }
    int64_t round = 0, earlier_rounds = 0;
    put_tiles(index, source, rank, [&](const PutTile& put) {
      const int64_t order = earlier_rounds + nearer[round + 1];
      earlier_rounds += all[round + 1];
      ++round;
      found.push_back({static_cast<uint32_t>(index), static_cast<uint32_t>(source), static_cast<uint32_t>(order),
                       static_cast<uint32_t>(tensor), static_cast<uint32_t>(put.target_row),
                       static_cast<uint32_t>(put.rows), static_cast<uint32_t>(descriptor_.tensors[tensor].cols),
                       put.slot});
    });
  }
  return found;
}

}  // namespace hyper_mpmd::planner
