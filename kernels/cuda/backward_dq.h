// SPDX-License-Identifier: Apache-2.0
// dQ in the one-kernel form: a block that owns a tile of keys adds its share of dQ = dS K to sums
// in global memory, one query tile after another.
//
// Order: of the key tiles that a query tile sees, the first one writes its share, each further one
// adds to what its predecessor left, and the last one writes the gradient instead. So a gradient is
// the same from run to run, without atomic additions. Whose turn it is stands in a counter, one for
// each warp of a block: warp w reads only what warp w of the predecessor wrote, and so hands over
// without a barrier of the block.
//
// No deadlock: a block waits only for blocks of smaller key tiles of its kv head. Blocks number
// themselves with a ticket, key tiles in rising order, so those have started, and of all blocks
// that have started and not finished the one with the smallest number waits for nobody. A block
// signals a turn before it waits for the next one.
//
// Query tiles come last first. Under a causal mask the first of them that a block sees is then the
// end of the sequence, which all blocks before it see as well: blocks follow each other one tile
// apart and nobody waits for long. In rising order a block would begin at the tile that it is the
// last to see, after all others.
#pragma once

#include "kernels/common/planner.h"
#include "kernels/cuda/backward_params.h"
#include "kernels/cuda/rows.h"
#include "kernels/cuda/tile/tile.h"

namespace attention {

template <typename T, int D, int kKeys, int kQueries>
class OrderedDq {
 public:
  static constexpr int kColumns = backward_dq_columns(D);
  static constexpr int kColumnParts = D / kColumns;
  static constexpr int kWarps = kKeys / 16;

  // dS^T of the block: [key][query].
  using DsTile = tile::SharedTile<T, kKeys, kQueries>;
  using KTile = tile::SharedTile<T, kKeys, D>;

  ATTENTION_DEVICE explicit OrderedDq(const BackwardParams& params) : params_(params) {}

  // Begins with a query tile of one (batch, head), numbered through, whose rows see the keys
  // `visible`, some of them in this block's tile: waits until all key tiles before it have been
  // added.
  ATTENTION_DEVICE void take_turn(i64 batch_head, i32 query_tile, i32 key_tile, Range visible) {
    static_assert(kQueries / 16 * kColumnParts == kWarps && D % kColumns == 0,
                  "16 rows x kColumns of the tile for each warp");
    hand_over();
    // B * Hq * Lq is at most 2^32 (dispatch.cc).
    const i64 tiles = ceil_div<i64>(params_.problem.lq, kQueries);
    index_ = static_cast<u32>(batch_head * tiles + query_tile);
    const i32 turn = key_tile - visible.begin / kKeys;
    if (turn > 0) tile::wait_turn(turn_counter(), static_cast<u32>(turn));
  }

  // What the predecessors have summed up.
  ATTENTION_DEVICE void load_sum(i32 key_tile, Range visible) {
    if (key_tile == visible.begin / kKeys) {
      sum_.fill(0.f);
      return;
    }
    const f32* from = sum_of_lane();
    ATTENTION_UNROLL
    for (int n = 0; n < Sum::kColBlocks; ++n) {
      const auto c = tile::global_load<4>(from + n * kLaneStride);
      ATTENTION_UNROLL
      for (int i = 0; i < 4; ++i) sum_.block[0][n].c[i] = c[i];
    }
  }

  // Adds dS K over the rows of `ds` that belong to keys [begin, end) of the block; the others have
  // not been written.
  ATTENTION_DEVICE void multiply(const DsTile& ds, const KTile& k_tile, int begin, int end) {
    if (begin == 0 && end == kKeys) {
      ATTENTION_UNROLL
      for (int k = 0; k < kKeys; k += 16) multiply_step(ds, k_tile, k);
    } else {
      ATTENTION_NO_UNROLL
      for (int k = begin; k < end; k += 16) multiply_step(ds, k_tile, k);
    }
  }

  // Leaves the sum to the successor, or writes the gradient: rows of `dq` from position q0 on.
  ATTENTION_DEVICE void store(const Rows<T>& dq, i32 head, i32 q0, i32 lq, f32 scale, i32 key_tile,
                              Range visible) {
    if (key_tile == (visible.end - 1) / kKeys) {
      const int col = column();
      store_rows<T>(
          sum_, q0 + row(), dq.width - col,
          [&](i32 i) { return i < lq ? dq.row(i, head) + col : nullptr; },
          [&](int) { return scale; });
      return;
    }
    f32* to = sum_of_lane();
    ATTENTION_UNROLL
    for (int n = 0; n < Sum::kColBlocks; ++n) {
      const f32(&c)[4] = sum_.block[0][n].c;
      tile::global_store(to + n * kLaneStride, tile::Vec<f32, 4>{{c[0], c[1], c[2], c[3]}});
    }
    next_ = key_tile - visible.begin / kKeys + 1;
  }

  // Tells the successor that the sum is there. Not done at once: the stores have landed by the time
  // that the next tile's scores are computed, and waiting for them costs nothing then.
  ATTENTION_DEVICE void hand_over() {
    if (next_ == 0) return;
    tile::signal_turn(turn_counter(), static_cast<u32>(next_));
    next_ = 0;
  }

 private:
  using Sum = tile::Accumulator<16, kColumns>;
  // A tile of sums keeps the order of the fragments: a lane's four values of a 16 x 8 block side by
  // side, then the lanes, so that a warp moves 512 bytes at once.
  static constexpr int kLaneStride = 4 * tile::kWarpSize;

  ATTENTION_DEVICE static int row() { return tile::warp_index() / kColumnParts * 16; }
  ATTENTION_DEVICE static int column() { return tile::warp_index() % kColumnParts * kColumns; }
  ATTENTION_DEVICE u32* turn_counter() const {
    return params_.turns + i64{index_} * kWarps + tile::warp_index();
  }
  ATTENTION_DEVICE f32* sum_of_lane() const {
    return params_.dq_sums + i64{index_} * (kQueries * D) + tile::warp_index() * (16 * kColumns) +
           tile::lane_index() * 4;
  }

  ATTENTION_DEVICE void multiply_step(const DsTile& ds, const KTile& k_tile, int k) {
    const auto left = tile::load_a_transposed(ds, k, row());
    ATTENTION_UNROLL
    for (int n = 0; n < kColumns; n += 16) {
      tile::BFragment<T, tile::kPackedOrder<T>> right[2];
      tile::load_b_transposed(right, k_tile, k, column() + n);
      tile::mma(&sum_.block[0][n / 8], left, right);
    }
  }

  const BackwardParams& params_;
  // No more than this lives from one tile to the next: registers are short.
  u32 index_ = 0;  // of the query tile
  i32 next_ = 0;   // the turn to signal; 0: none
  Sum sum_;
};

}  // namespace attention
