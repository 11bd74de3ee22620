// SPDX-License-Identifier: Apache-2.0
// dbias kernel: a block owns a tile of the bias gradient, in the bias operand's own shape, and sums
// dS over everything that shares it: batch entries, heads, and along an axis of size 1 all query or
// key tiles. The sums run in a fixed order, so there are no atomics; the price is that a bias
// shared by everybody is computed by few blocks. Runs only when the gradient is wanted.
#pragma once

#include "kernels/common/planner.h"
#include "kernels/cuda/backward_terms.h"
#include "kernels/cuda/product.h"

namespace attention {

template <typename T_, tile::F32Products kProducts, int D, int DV>
struct BackwardBias {
  using T = T_;
  using Params = BackwardParams;
  static constexpr BiasShape kShape = bias_shape(sizeof(T), D);
  static constexpr int kThreads = 32 * kShape.warps;
  static constexpr int kMinBlocks = 1;
  static constexpr int kRows = 16 * kShape.warps;
  static constexpr int kKeys = kShape.keys;

  using QTile = tile::SharedTile<T, kRows, D>;
  using OTile = tile::SharedTile<T, kRows, DV>;
  using KTile = tile::SharedTile<T, kKeys, D>;
  using VTile = tile::SharedTile<T, kKeys, DV>;
  using Scores = tile::Accumulator<16, kKeys>;

  static int smem_bytes(const Params&) {
    return static_cast<int>(bias_shared_bytes(kShape, sizeof(T), D, DV));
  }

  // How many blocks cover the gradient.
  struct Grid {
    i64 batch, heads, row_tiles, key_tiles;
    ATTENTION_HOST_DEVICE constexpr i64 blocks() const {
      return batch * heads * row_tiles * key_tiles;
    }
  };
  ATTENTION_HOST_DEVICE static constexpr Grid grid(const Problem& p) {
    return {p.bias.batch.mod, p.bias.head_stride != 0 ? p.hq : 1,
            p.bias.row_stride != 0 ? ceil_div<i64>(p.lq, kRows) : 1,
            p.bias.col_stride != 0 ? ceil_div<i64>(p.lkv, kKeys) : 1};
  }

  struct Tiles {
    QTile q;
    OTile o;
    KTile k;
    VTile v;
  };

  ATTENTION_DEVICE static void run(const Params& params, tile::Smem& smem) {
    const Problem& p = params.problem;
    const Tiles tiles{QTile::take(smem), OTile::take(smem), KTile::take(smem), VTile::take(smem)};
    const auto column_sums = smem.take<f32>(kShape.warps * kKeys);

    const Grid blocks = grid(p);
    i64 x = tile::block_index().x;
    const i32 key_tile = static_cast<i32>(x % blocks.key_tiles);
    x /= blocks.key_tiles;
    const i32 row_tile = static_cast<i32>(x % blocks.row_tiles);
    x /= blocks.row_tiles;
    const i32 bias_head = static_cast<i32>(x % blocks.heads);
    const i64 bias_batch = x / blocks.heads;
    const Range heads = share(p.bias.head_stride, bias_head, p.hq);
    const Range row_tiles = share(p.bias.row_stride, row_tile, ceil_div<i64>(p.lq, kRows));
    const Range key_tiles = share(p.bias.col_stride, key_tile, ceil_div<i64>(p.lkv, kKeys));

    Scores sum;
    sum.fill(0.f);
    for (i64 b = 0; b < p.batch; ++b) {
      if (p.bias.batch(b) != bias_batch) continue;
      for (i32 h = heads.begin; h < heads.end; ++h) {
        const ScoreContext<false> ctx = score_context<false>(p, b, h, 1);
        for (i32 r = row_tiles.begin; r < row_tiles.end; ++r) {
          for (i32 c = key_tiles.begin; c < key_tiles.end; ++c) {
            add_tile(params, ctx, tiles, r * kRows, c * kKeys, sum);
          }
        }
      }
    }

    f32* to = params.dbias + bias_batch * p.bias.batch_stride + bias_head * p.bias.head_stride;
    store(p, sum, column_sums, to, row_tile * kRows, key_tile * kKeys);
  }

 private:
  // The entries of an axis that one entry of the bias stands for: itself, or all.
  ATTENTION_DEVICE static Range share(i64 stride, i32 own, i64 all) {
    return stride != 0 ? Range{own, own + 1} : Range{0, static_cast<i32>(all)};
  }

  // sum += dS of the tile at (row0, key0).
  ATTENTION_DEVICE static void add_tile(const Params& params, const ScoreContext<false>& ctx,
                                        const Tiles& tiles, i32 row0, i32 key0, Scores& sum) {
    const Problem& p = params.problem;
    const i32 q_len = ctx.mask.q_len;
    const Range keys = keys_of_rows(ctx.mask, Range{row0, row0 + kRows});
    if (keys.begin >= key0 + kKeys || keys.end <= key0) return;
    const i32 head = ctx.head0;
    const i32 kv_head = head / static_cast<i32>(p.group());

    tile::sync_block();  // all are done with the tile before
    copy_positions<kThreads, false>(tiles.q, kRows,
                                    operand_rows<T>(p.q, p.q_batch, ctx.batch, p.lq, p.hq, p.d),
                                    head, row0, Range{0, q_len});
    copy_positions<kThreads, false>(
        tiles.o, kRows,
        result_rows(static_cast<const T*>(params.dout), ctx.batch, p.lq, p.hq, p.dv), head, row0,
        Range{0, q_len});
    copy_positions<kThreads, false>(tiles.k, kKeys,
                                    operand_rows<T>(p.k, p.k_batch, ctx.batch, p.lkv, p.hkv, p.d),
                                    kv_head, key0, keys);
    copy_positions<kThreads, false>(tiles.v, kKeys,
                                    operand_rows<T>(p.v, p.v_batch, ctx.batch, p.lkv, p.hkv, p.dv),
                                    kv_head, key0, keys);
    tile::async_commit();
    tile::async_wait<0>();
    tile::sync_block();

    const int warp_row = 16 * tile::warp_index();
    const i32 q0 = row0 + warp_row;
    Scores s;
    s.fill(0.f);
    multiply<kProducts>(s, tiles.q, warp_row, tiles.k, 0);
    apply_score<false>(s, ctx, q0, key0, true);
    Scores dp;
    dp.fill(0.f);
    multiply<kProducts>(dp, tiles.o, warp_row, tiles.v, 0);
    if (p.dropout.threshold > 0) {
      apply_dropout(dp, dropout_keep<false, Scores>(ctx, q0, key0));
      transform(dp, [&](f32& y) { y *= p.dropout.keep_scale; });
    }
    ATTENTION_UNROLL
    for (int r = 0; r < Scores::kRowSlots; ++r) {
      const i32 i = q0 + Scores::slot_row(r);
      const i32 last = static_cast<i32>(p.lq) - 1;
      const auto terms =
          tile::global_load_constant<2>(row_terms(params, ctx.batch, head) + 2 * min_of(i, last));
      const f32 lse = i <= last ? terms[0] : tile::infinity();
      ATTENTION_UNROLL
      for (int c = 0; c < Scores::kColSlots; ++c) {
        const f32 probability_of_key = probability<false>(s.at(r, c), lse, 0.f);
        sum.at(r, c) += score_gradient(probability_of_key, dp.at(r, c), terms[1]);
      }
    }
  }

  // Writes the block's entries, summed over the axes on which the bias has size 1.
  ATTENTION_DEVICE static void store(const Problem& p, Scores& sum, tile::Shared<f32> column_sums,
                                     f32* to, i32 row0, i32 key0) {
    const bool has_rows = p.bias.row_stride != 0;
    const bool has_cols = p.bias.col_stride != 0;
    const i32 warp = tile::warp_index();
    const i32 q0 = row0 + 16 * warp;
    if (!has_cols) {
      // Each row's sum, in all lanes of its quad and in column slot 0.
      ATTENTION_UNROLL
      for (int r = 0; r < Scores::kRowSlots; ++r) {
        f32 total = 0.f;
        ATTENTION_UNROLL
        for (int c = 0; c < Scores::kColSlots; ++c) total += sum.at(r, c);
        sum.at(r, 0) = tile::quad_sum(total);
      }
    }
    if (has_rows) {
      ATTENTION_UNROLL
      for (int r = 0; r < Scores::kRowSlots; ++r) {
        const i32 i = q0 + Scores::slot_row(r);
        if (i >= p.lq) continue;
        f32* row = to + i * p.bias.row_stride;
        if (!has_cols) {
          if (tile::lane_index() % 4 == 0) tile::global_store(row, sum.at(r, 0));
          continue;
        }
        ATTENTION_UNROLL
        for (int c = 0; c < Scores::kColSlots; ++c) {
          const i32 j = key0 + Scores::slot_col(c);
          if (j < p.lkv) tile::global_store(row + j * p.bias.col_stride, sum.at(r, c));
        }
      }
      return;
    }
    // Each column's sum over the warp's rows, then over the warps.
    ATTENTION_UNROLL
    for (int c = 0; c < Scores::kColSlots; ++c) {
      f32 total = 0.f;
      ATTENTION_UNROLL
      for (int r = 0; r < Scores::kRowSlots; ++r) total += sum.at(r, c);
      total = tile::column_sum(total);
      if (tile::lane_index() < 4) {
        tile::shared_store(column_sums + (warp * kKeys + Scores::slot_col(c)), total);
      }
    }
    tile::sync_block();
    const int col = tile::thread_index();
    if (col >= (has_cols ? kKeys : 1) || (has_cols && key0 + col >= p.lkv)) return;
    f32 total = 0.f;
    for (int w = 0; w < kShape.warps; ++w) {
      total += tile::shared_load(column_sums + (w * kKeys + col))[0];
    }
    tile::global_store(to + (key0 + col) * p.bias.col_stride, total);
  }
};

}  // namespace attention
