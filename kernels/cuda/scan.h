// SPDX-License-Identifier: Apache-2.0
// Which tiles a block has to visit: empty ones are skipped, full ones take no mask work.
//
// The affine terms (causal, window, lengths, prefix) give a contiguous range of tiles, which the
// caller passes as `tiles`. Inside it the general variant asks about segments and block masks: each
// lane of a warp classifies one tile, so that 32 tiles cost one round of memory latency.
#pragma once

#include "kernels/cuda/score.h"
#include "kernels/cuda/stream.h"

namespace attention {

// Smallest and largest segment id of a range of positions; negative ids (padding) count apart.
struct SegmentSpan {
  i32 low = 2147483647;
  i32 high = -1;  // < low: no id at all
  bool padding = false;

  ATTENTION_DEVICE void add(i32 id) {
    if (id < 0) {
      padding = true;
    } else {
      low = min_of(low, id);
      high = max_of(high, id);
    }
  }
};

ATTENTION_DEVICE SegmentSpan segment_span(const i32* ids, Range range) {
  SegmentSpan span;
  ATTENTION_NO_UNROLL
  for (i32 i = range.begin; i < range.end; ++i) span.add(tile::global_load_constant(ids + i)[0]);
  return span;
}

enum class TileKind { kEmpty, kMasked, kFull };

// What the scattered terms say about queries x keys (both inside the lengths, both non-empty).
// With packed rows the heads of the group share the tile, from head0 on.
template <bool kPacked>
ATTENTION_DEVICE TileKind classify(const ScoreContext<kPacked>& ctx, i32 head0, Range queries,
                                   Range keys, const SegmentSpan& q_span,
                                   const SegmentSpan& kv_span) {
  const Problem& p = *ctx.problem;
  TileKind kind = p.mask.data ? TileKind::kMasked : TileKind::kFull;
  if (p.q_segments.data) {
    if (q_span.high < kv_span.low || kv_span.high < q_span.low) return TileKind::kEmpty;
    const bool one_id = q_span.low == q_span.high && kv_span.low == kv_span.high &&
                        q_span.low == kv_span.low && !q_span.padding && !kv_span.padding;
    if (!one_id) kind = TileKind::kMasked;
  }
  const BlockMaskOperand& m = p.block_mask;
  if (m.index) {
    const i32* index = m.index + operand_batch(m.batch, ctx.batch) * m.batch_stride;
    const i32 heads = kPacked && m.head_stride != 0 ? ctx.pack : 1;
    bool all_empty = true;
    bool all_full = true;
    ATTENTION_NO_UNROLL
    for (i32 h = 0; h < heads; ++h) {
      ATTENTION_NO_UNROLL
      for (i32 i = queries.begin / kMaskTile; i <= (queries.end - 1) / kMaskTile; ++i) {
        ATTENTION_NO_UNROLL
        for (i32 j = keys.begin / kMaskTile; j <= (keys.end - 1) / kMaskTile; ++j) {
          const i32 state = tile::global_load_constant(index + (head0 + h) * m.head_stride +
                                                       i * m.row_stride + j)[0];
          all_empty = all_empty && state == kEmptyTile;
          all_full = all_full && state == kFullTile;
        }
      }
    }
    if (all_empty) return TileKind::kEmpty;
    if (!all_full) kind = TileKind::kMasked;
  }
  return kind;
}

// Walks over the tiles of one axis while the range on the other axis stays fixed.
//   kKeys: the walk is over tiles of keys, the fixed side are queries; else the other way round.
template <bool kGeneral, bool kKeys, bool kPacked>
class TileScan {
 public:
  // tiles: tile numbers, `size` positions each. fixed: positions of the other side.
  ATTENTION_DEVICE TileScan(const ScoreContext<kPacked>& ctx, Range tiles, i32 size, Range fixed)
      : ctx_(ctx), tiles_(tiles), size_(size), fixed_(clip(fixed, !kKeys)) {
    restart(ctx.head0);
    if constexpr (kGeneral) {
      scattered_ =
          ctx.problem->mask.data || ctx.problem->block_mask.index || ctx.problem->q_segments.data;
      if (ctx.problem->q_segments.data) fixed_span_ = segment_span(ids(!kKeys), fixed_);
    }
  }

  // The next tile that has to be visited. All lanes of a warp call it together.
  ATTENTION_DEVICE Visit next() {
    ++tile_;
    bool full = true;
    if constexpr (kGeneral) {
      if (scattered_) {
        ATTENTION_NO_UNROLL
        for (; tile_ < tiles_.end; ++tile_) {
          if (tile_ >= base_ + tile::kWarpSize) refill(tile_);
          if (needed_ >> (tile_ - base_) & 1u) break;
        }
        full = full_ >> ((tile_ - base_) & 31) & 1u;
      }
    }
    return {tile_ < tiles_.end ? tile_ : -1, head0_, full};
  }

  // Begins again, for another head.
  ATTENTION_DEVICE void restart(i32 head0) {
    head0_ = head0;
    tile_ = tiles_.begin - 1;
    base_ = tiles_.begin - tile::kWarpSize;
  }

 private:
  ATTENTION_DEVICE void refill(i32 t) {
    base_ = t;
    const i32 mine = t + tile::lane_index();
    TileKind kind = TileKind::kEmpty;
    const Range range = clip(Range{mine * size_, (mine + 1) * size_}, kKeys);
    if (mine < tiles_.end && !range.empty() && !fixed_.empty()) {
      const SegmentSpan span =
          ctx_.problem->q_segments.data ? segment_span(ids(kKeys), range) : SegmentSpan{};
      kind = kKeys ? classify(ctx_, head0_, fixed_, range, fixed_span_, span)
                   : classify(ctx_, head0_, range, fixed_, span, fixed_span_);
    }
    needed_ = tile::ballot(kind != TileKind::kEmpty);
    full_ = tile::ballot(kind == TileKind::kFull);
  }

  ATTENTION_DEVICE Range clip(Range range, bool keys) const {
    return {range.begin, min_of(range.end, keys ? ctx_.mask.kv_len : ctx_.mask.q_len)};
  }
  ATTENTION_DEVICE const i32* ids(bool keys) const {
    return keys ? ctx_.problem->kv_segments.row(ctx_.batch)
                : ctx_.problem->q_segments.row(ctx_.batch);
  }

  const ScoreContext<kPacked>& ctx_;
  Range tiles_;
  i32 size_;
  Range fixed_;
  SegmentSpan fixed_span_;
  bool scattered_ = false;
  i32 head0_ = 0;
  i32 tile_ = 0;
  i32 base_ = 0;
  u32 needed_ = 0;
  u32 full_ = 0;
};

}  // namespace attention
