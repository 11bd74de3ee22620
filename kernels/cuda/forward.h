// SPDX-License-Identifier: Apache-2.0
// Forward kernel: out and lse of one tile of query rows, over all keys or one split of them.
//
// One template serves prefill (128 rows), packed rows (64) and decode (16 rows, four warps taking
// turns at the keys): see ForwardShape. K and V stream through a ring of stages in shared memory;
// Q stays. Picture: docs/kernels.md.
#pragma once

#include "kernels/common/planner.h"
#include "kernels/cuda/forward_params.h"
#include "kernels/cuda/product.h"
#include "kernels/cuda/scan.h"
#include "kernels/cuda/softmax.h"
#include "kernels/cuda/stream.h"

namespace attention {

template <typename T_, tile::F32Products kProducts, int D, int DV, int kRows, bool kGeneral>
struct Forward {
  using T = T_;
  using Params = ForwardParams;
  static constexpr ForwardShape kShape = forward_shape(kRows, sizeof(T), D);
  static constexpr int kThreads = kShape.threads();
  static constexpr int kMinBlocks = 1;
  static constexpr int kWarpRows = 16 * kShape.row_blocks;
  static constexpr bool kPacked = kShape.packed;
  static constexpr int kKeys = kShape.keys;

  using Context = ScoreContext<kPacked>;
  using QTile = tile::SharedTile<T, kRows, D>;
  using KTile = tile::SharedTile<T, kKeys, D>;
  using VTile = tile::SharedTile<T, kKeys, DV>;
  using Scores = tile::Accumulator<kWarpRows, kKeys>;
  using Out = tile::Accumulator<kWarpRows, DV>;
  using Softmax = OnlineSoftmax<Scores::kRowSlots>;

  static int smem_bytes(const Params& params) {
    return static_cast<int>(
        forward_shared_bytes(kShape, sizeof(T), D, DV, params.block_k, params.stages));
  }

  // Where this block's rows and keys lie.
  struct Work {
    i64 batch;
    i32 head0;
    i32 row0;      // first packed row
    i32 rows_end;  // packed rows that exist
    i32 split;
  };

  ATTENTION_DEVICE static Work work_of_block(const Params& params) {
    const Problem& p = params.problem;
    u32 x = tile::block_index().x;
    const u32 row_blocks = params.row_blocks;
    // Neighbouring blocks share K and V (same head), and the longest rows of a causal mask start
    // first, so that the last wave is made of short ones.
    const i32 row_block = static_cast<i32>(row_blocks - 1 - x % row_blocks);
    x /= row_blocks;
    const i32 split = static_cast<i32>(x % static_cast<u32>(params.splits));
    x /= static_cast<u32>(params.splits);
    const u32 head_blocks = static_cast<u32>(p.hq) / static_cast<u32>(params.pack);
    const i32 head0 = static_cast<i32>(x % head_blocks) * params.pack;
    return {x / head_blocks, head0, row_block * kRows, static_cast<i32>(p.lq) * params.pack, split};
  }

  ATTENTION_DEVICE static void run(const Params& params, tile::Smem& smem) {
    const Problem& p = params.problem;
    const QTile q_tile = QTile::take(smem);
    const auto k_ring = tile::Ring<T>::take(smem, params.stages, params.block_k * D);
    const auto v_ring = tile::Ring<T>::take(smem, params.stages, params.block_k * DV);
    const auto visits = VisitRing::take(smem, params.stages);

    const Work work = work_of_block(params);
    const Context ctx = score_context<kPacked>(p, work.batch, work.head0, params.pack);
    const i32 kv_head = work.head0 / static_cast<i32>(p.group());

    // Keys that some row of the block may see, then this split's share of their tiles.
    const Range rows{work.row0, min_of(work.row0 + kRows, work.rows_end)};
    const Range positions = ctx.positions(rows);
    const Range keys = keys_of_rows(ctx.mask, positions);
    Range tiles{keys.begin / params.block_k, ceil_div(keys.end, params.block_k)};
    if (params.splits > 1) {
      const i32 share = ceil_div(tiles.end - tiles.begin, params.splits);
      const i32 begin = min_of(tiles.begin + work.split * share, tiles.end);
      tiles = {begin, min_of(begin + share, tiles.end)};
    }

    const auto q_rows = operand_rows<T>(p.q, p.q_batch, work.batch, p.lq, p.hq, p.d);
    copy_rows<kThreads, !kGeneral>(q_tile, kRows, q_rows.width, [&](int r) -> const T* {
      const i32 row = work.row0 + r;
      const i32 i = ctx.position(row);
      if (row >= work.rows_end || i >= ctx.mask.q_len) return nullptr;
      return q_rows.row(i, ctx.head(row));
    });

    const auto k_rows = operand_rows<T>(p.k, p.k_batch, work.batch, p.lkv, p.hkv, p.d);
    const auto v_rows = operand_rows<T>(p.v, p.v_batch, work.batch, p.lkv, p.hkv, p.dv);
    const i32 warp = tile::warp_index();
    const i32 warp_m = warp / kShape.warps_n;
    const i32 warp_n = warp % kShape.warps_n;
    const i32 warp_row = warp_m * kWarpRows;
    const Range warp_rows{work.row0 + warp_row,
                          min_of(work.row0 + warp_row + kWarpRows, work.rows_end)};
    const Range warp_positions = warp_rows.empty() ? Range{} : ctx.positions(warp_rows);

    const Range visible = keys_of_rows(ctx.mask, warp_positions);

    Out out;
    out.fill(0.f);
    Softmax softmax(kGeneral ? tile::kLog2E : ctx.scale * tile::kLog2E);

    TileScan<kGeneral, true, kPacked> scan(ctx, tiles, params.block_k, positions);
    const auto find = [&]() { return scan.next(); };
    const auto load = [&](const Visit& visit, i32 stage) {
      // Only keys of `keys` are read: what nobody may see could be NaN.
      const i32 key0 = visit.tile * params.block_k;
      copy_positions<kThreads, !kGeneral>(KTile{k_ring[stage]}, params.block_k, k_rows, kv_head,
                                          key0, keys);
      copy_positions<kThreads, !kGeneral>(VTile{v_ring[stage]}, params.block_k, v_rows, kv_head,
                                          key0, keys);
    };
    const auto compute = [&](const Visit& visit, i32 stage) {
      for (i32 part = warp_n; part * kKeys < params.block_k; part += kShape.warps_n) {
        const i32 key0 = visit.tile * params.block_k + part * kKeys;
        const Range part_keys{key0, key0 + kKeys};
        // What the block visits for other rows may be empty for this warp's.
        if (visible.begin >= part_keys.end || visible.end <= part_keys.begin) continue;
        const bool full = visit.full && warp_rows.end - warp_rows.begin == kWarpRows &&
                          tile_is_full(ctx.mask, warp_positions, part_keys);
        const KTile k_tile{k_ring[stage] + part * kKeys * D};
        const VTile v_tile{v_ring[stage] + part * kKeys * DV};
        Scores s;
        s.fill(0.f);
        multiply<kProducts>(s, q_tile, warp_row, k_tile, 0);
        if constexpr (kGeneral) {
          apply_score<false>(s, ctx, warp_rows.begin, key0, !full);
        } else if (!full) {
          mask_positions<false>(s, ctx, warp_rows.begin, key0);
        }
        softmax.update(s, out);
        if constexpr (kGeneral) {
          if (p.dropout.threshold > 0) {
            apply_dropout(s, dropout_keep<false, Scores>(ctx, warp_rows.begin, key0));
          }
          if (has_scattered_mask(p)) {
            multiply_packed<kProducts, true>(out, s, v_tile, 0);
            continue;
          }
        }
        multiply_packed<kProducts, false>(out, s, v_tile, 0);
      }
    };
    stream_tiles(params.stages, visits, find, load, compute);

    softmax.finish();
    const f32 keep_scale = p.dropout.threshold > 0 ? p.dropout.keep_scale : 1.f;
    const f32 score_scale = kGeneral ? 1.f : ctx.scale;
    const Output output{params, work, ctx, keep_scale, score_scale};
    if constexpr (kShape.warps_n == 1) {
      output.store(out, softmax, warp_row);
    } else {
      merge_warps(output, smem, softmax, out, warp_n);
    }
  }

  // Where results go: to out and lse, or with splits to the partial results that combine.h merges.
  struct Output {
    const Params& params;
    const Work& work;
    const Context& ctx;
    f32 keep_scale;
    f32 score_scale;

    // Flat index (b * Lq + i) * Hq + h of a tile row, -1 for a row that does not exist.
    ATTENTION_DEVICE i64 flat_row(i32 tile_row) const {
      const Problem& p = params.problem;
      const i32 row = work.row0 + tile_row;
      if (row >= work.rows_end) return -1;
      return (work.batch * p.lq + ctx.position(row)) * p.hq + ctx.head(row);
    }
    ATTENTION_DEVICE i64 split_row(i64 flat) const {
      const Problem& p = params.problem;
      return work.split * (p.batch * p.lq * p.hq) + flat;
    }
    ATTENTION_DEVICE void store_lse(i64 flat, f32 maximum, f32 sum) const {
      const f32 value = logsumexp(maximum, sum, score_scale);
      if (params.splits > 1) {
        tile::global_store(params.partial_lse + split_row(flat), value);
      } else {
        tile::global_store(params.lse + flat, value);
      }
    }
    // What turns the accumulated sum into the output row; an empty row is 0, not 0 / 0.
    ATTENTION_DEVICE f32 factor(f32 sum) const { return sum == 0.f ? 0.f : keep_scale / sum; }

    ATTENTION_DEVICE void store(const Out& out, const Softmax& softmax, i32 warp_row) const {
      const i32 width = static_cast<i32>(params.problem.dv);
      const auto factor_of = [&](int r) { return factor(softmax.sum[r]); };
      if (params.splits > 1) {
        store_rows<f32>(
            out, warp_row, width,
            [&](i32 tile_row) -> f32* {
              const i64 flat = flat_row(tile_row);
              return flat < 0 ? nullptr : params.partial_out + split_row(flat) * width;
            },
            factor_of);
      } else {
        store_rows<T>(
            out, warp_row, width,
            [&](i32 tile_row) -> T* {
              const i64 flat = flat_row(tile_row);
              return flat < 0 ? nullptr : static_cast<T*>(params.out) + flat * width;
            },
            factor_of);
      }
      if (tile::lane_index() % 4 != 0) return;
      ATTENTION_UNROLL
      for (int r = 0; r < Out::kRowSlots; ++r) {
        const i64 flat = flat_row(warp_row + Out::slot_row(r));
        if (flat >= 0) store_lse(flat, softmax.maximum[r], softmax.sum[r]);
      }
    }
  };

  // Several warps hold partial results of the same rows: brings them to a common maximum, then adds
  // them in the order of the warps.
  ATTENTION_DEVICE static void merge_warps(const Output& output, tile::Smem& smem, Softmax& softmax,
                                           Out& out, i32 warp_n) {
    const auto sums = smem.take<f32>(kRows * DV);
    const auto stats = smem.take<f32>(2 * kShape.warps_n * kRows);
    const bool first_lane = tile::lane_index() % 4 == 0;
    ATTENTION_UNROLL
    for (int r = 0; r < Out::kRowSlots; ++r) {
      const auto slot = stats + 2 * (warp_n * kRows + Out::slot_row(r));
      if (first_lane) {
        tile::shared_store(slot, tile::Vec<f32, 2>{{softmax.maximum[r], softmax.sum[r]}});
      }
    }
    tile::sync_block();
    ATTENTION_UNROLL
    for (int r = 0; r < Out::kRowSlots; ++r) {
      f32 maximum = -tile::infinity();
      for (int w = 0; w < kShape.warps_n; ++w) {
        const auto slot = stats + 2 * (w * kRows + Out::slot_row(r));
        maximum = tile::max_f32(maximum, tile::shared_load<2>(slot)[0]);
      }
      const f32 base = finite_base(maximum);
      f32 total = 0.f;
      for (int w = 0; w < kShape.warps_n; ++w) {
        const auto stat = tile::shared_load<2>(stats + 2 * (w * kRows + Out::slot_row(r)));
        total += stat[1] * exponential(stat[0], base, softmax.unit);
      }
      const f32 rescale = exponential(softmax.maximum[r], base, softmax.unit);
      ATTENTION_UNROLL
      for (int c = 0; c < Out::kColSlots; ++c) out.at(r, c) *= rescale;
      softmax.maximum[r] = maximum;
      softmax.sum[r] = total;
    }
    for (int w = 0; w < kShape.warps_n; ++w) {
      if (warp_n == w) {
        ATTENTION_UNROLL
        for (int r = 0; r < Out::kRowSlots; ++r) {
          ATTENTION_UNROLL
          for (int c = 0; c < Out::kColSlots; c += 2) {
            const auto slot = sums + (Out::slot_row(r) * DV + Out::slot_col(c));
            if (w > 0) {
              const auto before = tile::shared_load<2>(slot);
              out.at(r, c) += before[0];
              out.at(r, c + 1) += before[1];
            }
            if (w + 1 < kShape.warps_n) {
              tile::shared_store(slot, tile::Vec<f32, 2>{{out.at(r, c), out.at(r, c + 1)}});
            }
          }
        }
      }
      tile::sync_block();
    }
    if (warp_n == kShape.warps_n - 1) output.store(out, softmax, 0);
  }
};

}  // namespace attention
