// Where the rows of each row space lie on each rank.
#include <algorithm>

#include "hyper_mpmd/planner.h"

namespace hyper_mpmd::planner {

Layout::Layout(const Descriptor& descriptor, std::span<const SpaceLoads> loads)
    : descriptor_(descriptor), spaces_(descriptor.spaces.size()) {
  for (size_t index = 0; index < spaces_.size(); ++index) {  // a derived space comes after its parent
    Space& space = spaces_[index];
    space.groups = descriptor.spaces[index].groups;
    if (descriptor.spaces[index].route == kNoRoute) {
      auto given = std::find_if(loads.begin(), loads.end(),
                                [&](const SpaceLoads& l) { return l.space == static_cast<int64_t>(index); });
      if (given == loads.end()) throw BadProgram("no loads for row space '" + descriptor.space_names[index] + "'");
      space.rank_stride = space.groups;
      space.sizes.assign(given->counts, given->counts + descriptor.ranks * space.groups);
    } else {
      derive(index);
    }
    int64_t rows = space.rank_stride ? descriptor.ranks : 1;
    space.offsets.reserve(static_cast<size_t>(rows * (space.groups + 1)));
    for (int64_t rank = 0; rank < rows; ++rank) {
      int64_t sum = 0;
      space.offsets.push_back(0);
      for (int64_t group = 0; group < space.groups; ++group) {
        space.offsets.push_back(sum += space.sizes[rank * space.groups + group]);
      }
      if (sum > static_cast<int64_t>(kMaxIndex)) {
        throw PlanLimit("row space '" + descriptor.space_names[index] + "' has " + std::to_string(sum) +
                        " rows on rank " + std::to_string(rank) + "; the limit is " + std::to_string(kMaxIndex));
      }
    }
    if (descriptor.spaces[index].route == kScatter) {
      const SpaceRow& row = descriptor.spaces[index];
      const Team team{row.team, row.stride};
      space.sources = team.ranks;
      space.arrivals.reserve(static_cast<size_t>(descriptor.ranks * space.groups * team.ranks));
      for (int64_t rank = 0; rank < descriptor.ranks; ++rank) {
        for (int64_t group = 0; group < space.groups; ++group) {
          int64_t place = space.offsets[rank * (space.groups + 1) + group];
          for (int64_t source = 0; source < team.ranks; ++source) {
            space.arrivals.push_back(place);
            place += size(row.parent, team.member(rank, source), team.place(rank) * space.groups + group);
          }
        }
      }
    }
  }
}

void Layout::derive(size_t index) {
  const SpaceRow& row = descriptor_.spaces[index];
  Space& space = spaces_[index];
  const int64_t ranks = descriptor_.ranks;
  const Team team{row.team, row.stride};
  if (row.route == kAllRanks) {  // the same on every rank of a team
    const bool uniform = team.ranks == ranks;
    space.rank_stride = uniform ? 0 : space.groups;
    for (int64_t rank = 0; rank < (uniform ? 1 : ranks); ++rank) {
      for (int64_t source = 0; source < team.ranks; ++source) {
        for (int64_t group = 0; group < groups(row.parent); ++group) {
          space.sizes.push_back(size(row.parent, team.member(rank, source), group));
        }
      }
    }
    return;
  }
  space.rank_stride = space.groups;
  space.sizes.assign(static_cast<size_t>(ranks * space.groups), 0);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    for (int64_t group = 0; group < space.groups; ++group) {
      int64_t& sum = space.sizes[rank * space.groups + group];
      if (row.route == kScatter) {
        for (int64_t source = 0; source < team.ranks; ++source) {
          sum += size(row.parent, team.member(rank, source), team.place(rank) * space.groups + group);
        }
      } else {
        const int64_t source = (team.place(rank) + team.ranks - row.shift) % team.ranks;
        sum = size(row.parent, team.member(rank, source), group);
      }
    }
  }
}

std::pair<int64_t, int64_t> Layout::whole_groups(int64_t space, int64_t rank, int64_t row, int64_t rows) const {
  if (rows == 0) return {row, rows};
  const Space& s = spaces_[space];
  const auto first = s.offsets.begin() + (s.rank_stride ? rank * (s.groups + 1) : 0), last = first + s.groups + 1;
  const int64_t begin = *(std::upper_bound(first, last, row) - 1);
  return {begin, *std::lower_bound(first, last, row + rows) - begin};
}

}  // namespace hyper_mpmd::planner
