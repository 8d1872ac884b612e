// What one launch leaves to the next: memory that peers write, and what the host hands to the caller.
#include <algorithm>

#include "prove_run.h"

namespace hyper_mpmd::prove {

// Whether the task at `first` in launch n has ended before `second` starts in launch n + 1: some rank's launch n ended
// in between.
bool Proof::ordered_across(Place first, const Touch& second) const {
  for (size_t rank = 0; rank < scene_.plans.size(); ++rank) {
    const bool ended = ended_[second.ended + rank / 64] >> rank % 64 & 1;
    if (ended && static_cast<uint32_t>(ends_[rank][first.chain]) >= first.position) return true;
  }
  return false;
}

// Launch n + 1 against launch n. A rank's own tasks are in order; what is left is memory that peers write.
bool Proof::between_launches() {
  for (size_t number = 0; number < memories_.size(); ++number) {
    const auto& touches = touches_[number];
    struct Piece {
      const Touch* touch;
      const AccessRecord* box;
      Rect rect;
      bool written;
    };
    const auto pieces_of = [&](const Touch& touch, std::vector<Piece>& into) {
      const PlanView& plan = scene_.plan(scene_.chains[touch.chain].rank);
      const TaskRecord& task = plan.tasks[scene_.task_at({touch.chain, touch.position})];
      each_rect(plan, task, [&](uint32_t memory, const AccessRecord& box, bool written, const Rect& rect) {
        if (memory == number) into.push_back({&touch, &box, rect, written});
        return true;
      });
    };
    // Puts that wait for the owner's credit, and end before the owner does, are in order with all that the owner does.
    std::vector<Piece> puts, loose, all;
    for (const Touch& touch : touches) {
      std::vector<Piece> found;
      pieces_of(touch, found);
      for (const Piece& piece : found) {
        const uint32_t owner = piece.box->rank;
        if (scene_.chains[touch.chain].rank == owner) continue;
        puts.push_back(piece);
        ++verdict_.pairs;
        const bool after = ended_[touch.ended + owner / 64] >> owner % 64 & 1;
        const bool before = static_cast<uint32_t>(ends_[owner][touch.chain]) >= touch.position;
        if (!after || !before) loose.push_back(piece);
      }
    }
    const auto check = [&](const Piece& first, const Piece& second) {
      if (!first.rect.meets(second.rect) || !(first.written || second.written)) return true;
      ++verdict_.pairs;
      const Place place{first.touch->chain, first.touch->position};
      if (ordered_across(place, *second.touch)) return true;
      race(*second.touch, place, *second.box, second.written, second.rect, true);
      return false;
    };
    const auto by_row = [](const Piece& a, const Piece& b) { return a.rect.row < b.rect.row; };
    if (!loose.empty()) {
      for (const Touch& touch : touches) pieces_of(touch, all);
      std::sort(all.begin(), all.end(), by_row);
      std::vector<uint64_t> reach;  // the furthest row of all pieces so far
      for (const Piece& piece : all) reach.push_back(std::max(reach.empty() ? 0 : reach.back(), piece.rect.row_end));
      for (const Piece& piece : loose) {
        auto i = static_cast<size_t>(std::upper_bound(reach.begin(), reach.end(), piece.rect.row) - reach.begin());
        for (; i < all.size() && all[i].rect.row < piece.rect.row_end; ++i) {
          if (!check(piece, all[i]) || !check(all[i], piece)) return false;
        }
      }
    }
    // Puts of several ranks into the same rows.
    std::sort(puts.begin(), puts.end(), by_row);
    for (size_t i = 0; i < puts.size(); ++i) {
      for (size_t j = i + 1; j < puts.size() && puts[j].rect.row < puts[i].rect.row_end; ++j) {
        if (!check(puts[i], puts[j]) || !check(puts[j], puts[i])) return false;
      }
    }
  }
  return true;
}

// What peers put for the caller is there when the host reads it, and they put no more before it has.
bool Proof::host_reads() {
  for (const PlanView& owner : scene_.plans) {
    const MemoryMap& map = maps_[owner.rank];
    for (const uint32_t tensor : owner.outputs) {
      const uint32_t memory = map.of(tensor);
      if (memory == kNone) continue;
      const auto rows = static_cast<uint32_t>(owner.tensors[tensor].rows);
      const AccessRecord all{tensor, owner.rank, 0, rows, 0, static_cast<uint32_t>(owner.tensors[tensor].cols)};
      for (const Touch& touch : touches_[memory]) {
        const uint32_t rank = scene_.chains[touch.chain].rank;
        if (rank == owner.rank) continue;
        const bool before = static_cast<uint32_t>(ends_[owner.rank][touch.chain]) >= touch.position;
        const bool after = ended_[touch.ended + owner.rank / 64] >> owner.rank % 64 & 1;
        if (before && after) continue;
        const PlanView& plan = scene_.plan(rank);
        const uint32_t number = scene_.task_at({touch.chain, touch.position});
        const auto apart = [&](uint32_t put, const AccessRecord& box, bool written, const Rect& rect) {
          ++verdict_.pairs;
          if (put != memory || !written) return true;
          return map.rects(all, [&](const Rect& read) {
            if (!read.meets(rect)) return true;
            RaceFault& fault = verdict_.race;
            verdict_.unsafe = Unsafe::kRace;
            fault.first = {rank, number, box.tensor, true};
            fault.second = {owner.rank, kNone, tensor, false};
            fault.next_launch = before;
            if (before) std::swap(fault.first, fault.second);
            fault.memory_rank = owner.rank;
            fault.row = box.row;
            fault.rows = box.rows;
            fault.col = box.col;
            fault.cols = box.cols;
            return false;
          });
        };
        if (!each_rect(plan, plan.tasks[number], apart)) return false;
      }
    }
  }
  return true;
}

}  // namespace hyper_mpmd::prove
