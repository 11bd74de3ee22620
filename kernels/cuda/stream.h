// SPDX-License-Identifier: Apache-2.0
// The pipeline of a block: tiles stream through a ring of stages in shared memory while earlier
// ones are computed.
#pragma once

#include "kernels/cuda/tile/tile.h"

namespace attention {

ATTENTION_DEVICE i32 next_stage(i32 stage, i32 stages) {
  return stage + 1 == stages ? 0 : stage + 1;
}

// Which tile a stage holds: found by the threads that load it, kept beside the data, so that
// finding it (segments, block masks) is done once.
struct Visit {
  i32 tile = -1;  // -1: there was none left
  i32 head = 0;   // of the group, where the walk goes over heads as well
  bool full = true;
};

// The visits of a ring of stages, in shared memory.
class VisitRing {
 public:
  ATTENTION_DEVICE static VisitRing take(tile::Smem& smem, i32 stages) {
    return VisitRing(tile::Ring<i32>::take(smem, stages, 4));
  }
  // All threads call it with the same visit.
  ATTENTION_DEVICE void set(i32 stage, const Visit& visit) const {
    if (tile::thread_index() != 0) return;
    tile::shared_store(ring_[stage], tile::Vec<i32, 4>{{visit.tile, visit.head, visit.full, 0}});
  }
  ATTENTION_DEVICE Visit get(i32 stage) const {
    const auto words = tile::shared_load<4>(ring_[stage]);
    return {words[0], words[1], words[2] != 0};
  }

 private:
  ATTENTION_DEVICE explicit VisitRing(tile::Ring<i32> ring) : ring_(ring) {}
  tile::Ring<i32> ring_;
};

// Finds a tile with find(), starts its copies with load(visit, stage), and when they have landed
// calls compute(visit, stage), until find() returns a visit of no tile.
//   1 to 3 stages: `stages - 1` tiles are in flight while one is computed. Each turn closes one
// group of copies, an empty one at the end, so that waiting for all but `stages - 2` groups always
// means "this tile has landed". The first turns only start copies. A barrier of
// the block inside compute() has to be reached by all its threads.
template <typename Find, typename Load, typename Compute>
ATTENTION_DEVICE void stream_tiles(i32 stages, const VisitRing& visits, Find find, Load load,
                                   Compute compute) {
  const i32 ahead = stages - 1;
  i32 stage = 0;
  i32 load_stage = 0;
  for (i32 turn = -ahead;; ++turn) {
    if (turn >= 0) {
      if (ahead > 1) {
        tile::async_wait<1>();
      } else if (ahead > 0) {
        tile::async_wait<0>();
      }
      // The tile of this turn is there for all threads, and all are done with the stage that is
      // filled next.
      tile::sync_block();
    }
    const Visit found = find();
    visits.set(load_stage, found);
    if (found.tile >= 0) load(found, load_stage);
    tile::async_commit();
    load_stage = next_stage(load_stage, stages);
    if (turn < 0) continue;
    if (ahead == 0) {
      tile::async_wait<0>();
      tile::sync_block();
    }
    const Visit visit = visits.get(stage);
    if (visit.tile < 0) break;
    compute(visit, stage);
    stage = next_stage(stage, stages);
  }
  // What was started before the ring (the tile that stays) may still be on its way.
  tile::async_wait<0>();
}

}  // namespace attention
