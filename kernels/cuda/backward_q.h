// SPDX-License-Identifier: Apache-2.0
// dQ kernel: a block owns a tile of query rows of one head and streams the keys past it. Also sums
// the rows' shares of the gradients of ALiBi slopes and of an array scale.
#pragma once

#include "kernels/common/planner.h"
#include "kernels/cuda/backward_terms.h"
#include "kernels/cuda/product.h"
#include "kernels/cuda/scan.h"
#include "kernels/cuda/stream.h"

namespace attention {

template <typename T_, tile::F32Products kProducts, int D, int DV, bool kGeneral>
struct BackwardQ {
  using T = T_;
  using Params = BackwardParams;
  static constexpr BackwardShape kShape = backward_shape(sizeof(T), D);
  static constexpr int kThreads = 32 * kShape.warps;
  static constexpr int kMinBlocks = 1;
  static constexpr int kRows = 16 * kShape.warps;
  static constexpr int kKeys = kShape.step;

  using QTile = tile::SharedTile<T, kRows, D>;
  using OTile = tile::SharedTile<T, kRows, DV>;
  using KTile = tile::SharedTile<T, kKeys, D>;
  using VTile = tile::SharedTile<T, kKeys, DV>;
  using Scores = tile::Accumulator<16, kKeys>;
  static constexpr int kSlots = Scores::kRowSlots;

  static int smem_bytes(const Params& params) {
    return static_cast<int>(
        backward_shared_bytes(kShape, BackwardForm::kTwoKernels, sizeof(T), D, DV, params.stages));
  }

  ATTENTION_DEVICE static void run(const Params& params, tile::Smem& smem) {
    const Problem& p = params.problem;
    const QTile q_tile = QTile::take(smem);
    const OTile o_tile = OTile::take(smem);
    const auto k_ring = tile::Ring<T>::take(smem, params.stages, KTile::kSize);
    const auto v_ring = tile::Ring<T>::take(smem, params.stages, VTile::kSize);
    const auto visits = VisitRing::take(smem, params.stages);

    const i32 lq = static_cast<i32>(p.lq);
    const u32 row_blocks = static_cast<u32>(ceil_div(lq, kRows));
    u32 x = tile::block_index().x;
    // The longest rows of a causal mask first, as in the forward kernel.
    const i32 row0 = static_cast<i32>(row_blocks - 1 - x % row_blocks) * kRows;
    x /= row_blocks;
    const i32 head = static_cast<i32>(x % static_cast<u32>(p.hq));
    const i64 batch = x / static_cast<u32>(p.hq);
    const i32 kv_head = head / static_cast<i32>(p.group());
    const ScoreContext<false> ctx = score_context<false>(p, batch, head, 1);
    const i32 q_len = ctx.mask.q_len;

    const Range rows{row0, min_of(row0 + kRows, lq)};
    const Range keys = keys_of_rows(ctx.mask, rows);
    const Range tiles{keys.begin / kKeys, ceil_div(keys.end, kKeys)};
    const auto q_rows = operand_rows<T>(p.q, p.q_batch, batch, p.lq, p.hq, p.d);
    const auto o_rows = result_rows(static_cast<const T*>(params.dout), batch, p.lq, p.hq, p.dv);
    copy_positions<kThreads, !kGeneral>(q_tile, kRows, q_rows, head, row0, Range{0, q_len});
    copy_positions<kThreads, !kGeneral>(o_tile, kRows, o_rows, head, row0, Range{0, q_len});

    const int warp_row = 16 * tile::warp_index();
    const i32 q0 = row0 + warp_row;
    const Range visible = keys_of_rows(ctx.mask, Range{q0, q0 + 16});
    f32 lse[kSlots];
    f32 delta[kSlots];
    ATTENTION_UNROLL
    for (int r = 0; r < kSlots; ++r) {
      const i32 i = q0 + Scores::slot_row(r);
      const f32* from = row_terms(params, batch, head) + 2 * min_of(i, lq - 1);
      const auto terms = tile::global_load_constant<2>(from);
      lse[r] = i < lq ? terms[0] : tile::infinity();
      delta[r] = i < lq ? terms[1] : 0.f;
    }

    const auto k_rows = operand_rows<T>(p.k, p.k_batch, batch, p.lkv, p.hkv, p.d);
    const auto v_rows = operand_rows<T>(p.v, p.v_batch, batch, p.lkv, p.hkv, p.dv);
    tile::Accumulator<16, D> dq;
    dq.fill(0.f);
    [[maybe_unused]] f32 dslope[kSlots] = {};
    [[maybe_unused]] f32 dscale[kSlots] = {};

    TileScan<kGeneral, true, false> scan(ctx, tiles, kKeys, rows);
    const auto find = [&]() { return scan.next(); };
    const auto load = [&](const Visit& visit, i32 stage) {
      const i32 key0 = visit.tile * kKeys;
      copy_positions<kThreads, !kGeneral>(KTile{k_ring[stage]}, kKeys, k_rows, kv_head, key0, keys);
      copy_positions<kThreads, !kGeneral>(VTile{v_ring[stage]}, kKeys, v_rows, kv_head, key0, keys);
    };
    const auto compute = [&](const Visit& visit, i32 stage) {
      const i32 key0 = visit.tile * kKeys;
      const Range tile_keys{key0, key0 + kKeys};
      if (visible.begin >= tile_keys.end || visible.end <= tile_keys.begin) return;
      const bool full = visit.full && tile_is_full(ctx.mask, Range{q0, q0 + 16}, tile_keys);
      const KTile k_tile{k_ring[stage]};
      const VTile v_tile{v_ring[stage]};

      Scores s;
      s.fill(0.f);
      multiply<kProducts>(s, q_tile, warp_row, k_tile, 0);
      [[maybe_unused]] Scores raw;
      if constexpr (kGeneral) {
        raw = s;
        apply_score<false>(s, ctx, q0, key0, !full);
      } else if (!full) {
        mask_positions<false>(s, ctx, q0, key0);
      }
      Scores dp;
      dp.fill(0.f);
      multiply<kProducts>(dp, o_tile, warp_row, v_tile, 0);
      if constexpr (kGeneral) {
        if (p.dropout.threshold > 0) {
          apply_dropout(dp, dropout_keep<false, Scores>(ctx, q0, key0));
          transform(dp, [&](f32& y) { y *= p.dropout.keep_scale; });
        }
      }
      ATTENTION_UNROLL
      for (int r = 0; r < kSlots; ++r) {
        ATTENTION_UNROLL
        for (int c = 0; c < Scores::kColSlots; ++c) {
          const f32 probability_of_key = probability<!kGeneral>(s.at(r, c), lse[r], ctx.scale);
          s.at(r, c) = score_gradient(probability_of_key, dp.at(r, c), delta[r]);
        }
      }
      if constexpr (kGeneral) {
        row_gradients(params, ctx, s, raw, q0, key0, dslope, dscale);
        if (has_scattered_mask(p)) {
          multiply_packed<kProducts, true>(dq, s, k_tile, 0);
          return;
        }
      }
      multiply_packed<kProducts, false>(dq, s, k_tile, 0);
    };
    stream_tiles(params.stages, visits, find, load, compute);

    const auto result = result_rows(static_cast<T*>(params.dq), batch, p.lq, p.hq, p.d);
    store_rows<T>(
        dq, q0, result.width, [&](i32 i) { return i < lq ? result.row(i, head) : nullptr; },
        [&](int) { return ctx.scale; });
    if constexpr (kGeneral) {
      const bool writes = tile::lane_index() % 4 == 0;
      ATTENTION_UNROLL
      for (int r = 0; r < kSlots; ++r) {
        const i32 i = q0 + Scores::slot_row(r);
        const i64 flat = (batch * p.lq + i) * p.hq + head;
        const f32 of_slope = tile::quad_sum(dslope[r]);
        const f32 of_scale = tile::quad_sum(dscale[r]);
        if (!writes || i >= lq) continue;
        if (params.dslopes_rows) tile::global_store(params.dslopes_rows + flat, of_slope);
        if (params.dscale_rows) tile::global_store(params.dscale_rows + flat, of_scale);
      }
    }
  }

  // Takes dS on from the score to the product: through bias and ALiBi (whose slope gradient is
  // collected here), then through the soft cap, then the scale's share.
  ATTENTION_DEVICE static void row_gradients(const Params& params, const ScoreContext<false>& ctx,
                                             Scores& ds, const Scores& raw, i32 q0, i32 key0,
                                             f32 (&dslope)[kSlots], f32 (&dscale)[kSlots]) {
    const Problem& p = params.problem;
    if (params.dslopes_rows) {
      ATTENTION_UNROLL
      for (int r = 0; r < kSlots; ++r) {
        const i32 position = q0 + Scores::slot_row(r) + ctx.mask.shift;
        ATTENTION_UNROLL
        for (int c = 0; c < Scores::kColSlots; ++c) {
          const i32 distance = position - (key0 + Scores::slot_col(c));
          dslope[r] -= ds.at(r, c) * tile::abs_f32(static_cast<f32>(distance));
        }
      }
    }
    if (p.soft_cap <= 0.f && !params.dscale_rows) return;
    ATTENTION_UNROLL
    for (int r = 0; r < kSlots; ++r) {
      ATTENTION_UNROLL
      for (int c = 0; c < Scores::kColSlots; ++c) {
        // A masked entry may have a NaN product.
        if (ds.at(r, c) == 0.f) continue;
        if (p.soft_cap > 0.f) ds.at(r, c) *= cap_slope(raw.at(r, c), ctx.scale, p.soft_cap);
        if (params.dscale_rows) dscale[r] += ds.at(r, c) * raw.at(r, c);
      }
    }
  }
};

}  // namespace attention
