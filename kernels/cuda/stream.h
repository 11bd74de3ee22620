// SPDX-License-Identifier: Apache-2.0
// The pipeline of a block: tiles stream through a ring of stages in shared memory while earlier
// ones are computed.
#pragma once

#include "kernels/cuda/tile/tile.h"

namespace attention {

ATTENTION_DEVICE i32 next_stage(i32 stage, i32 stages) {
  return stage + 1 == stages ? 0 : stage + 1;
}

// Calls compute(stage) for each tile that next() finds, with the tile's data in place.
//   load(stage)     starts the copies of the next tile into a stage; nothing when there is none
//   left next()          goes to the next tile to compute; false when there is none compute(stage)
//   uses it; may not contain a barrier of the block
// 1 to 3 stages: `stages - 1` tiles are in flight while one is computed. Each turn closes one group
// of copies, an empty one at the end, so that waiting for all but `stages - 2` groups always means
// "this tile has landed". The first turns only start copies.
template <typename Load, typename Next, typename Compute>
ATTENTION_DEVICE void stream_tiles(i32 stages, Load load, Next next, Compute compute) {
  const i32 ahead = stages - 1;
  i32 stage = stages - 1;
  i32 load_stage = 0;
  for (i32 turn = -ahead;; ++turn) {
    if (turn >= 0) {
      if (!next()) break;
      stage = next_stage(stage, stages);
      if (ahead > 1) {
        tile::async_wait<1>();
      } else if (ahead > 0) {
        tile::async_wait<0>();
      }
      // This tile is there for all threads, and all are done with the stage that is filled next.
      tile::sync_block();
    }
    load(load_stage);
    tile::async_commit();
    load_stage = next_stage(load_stage, stages);
    if (turn < 0) continue;
    if (ahead == 0) {
      tile::async_wait<0>();
      tile::sync_block();
    }
    compute(stage);
  }
  // What was started before the ring (the tile that stays) may still be on its way.
  tile::async_wait<0>();
}

}  // namespace attention
