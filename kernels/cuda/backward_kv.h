// SPDX-License-Identifier: Apache-2.0
// dK/dV kernel: a block owns a tile of keys of one kv head and streams all query rows of its group
// of heads past it, so that the group is summed in registers and no atomics are needed.
//
// Scores are computed transposed (keys are the rows of the accumulator): P^T and dS^T are then
// already in the layout of the left operand of dV += P^T dO and dK += dS^T Q, and never pass
// through shared memory.
//   kWantDk, kWantDv: both at head dims up to 128; above, the two accumulators do not fit into the
//   registers together, and each gets a launch of its own.
//   kWantDq: with both, the one-kernel form (backward_dq.h): dS^T goes through shared memory for
//   dQ += dS K alone, whose rows are queries.
#pragma once

#include "kernels/common/planner.h"
#include "kernels/cuda/backward_dq.h"
#include "kernels/cuda/backward_terms.h"
#include "kernels/cuda/product.h"
#include "kernels/cuda/scan.h"
#include "kernels/cuda/stream.h"

namespace attention {

// Walks over (head of the group, tile of query rows).
template <bool kGeneral>
class GroupWalk {
 public:
  ATTENTION_DEVICE GroupWalk(const ScoreContext<false>& first_head, Range tiles, i32 size,
                             Range keys)
      : scan_(first_head, tiles, size, keys),
        heads_end_(first_head.head0 + static_cast<i32>(first_head.problem->group())) {}

  // The next tile that has to be visited; none after the last one of the last head.
  ATTENTION_DEVICE Visit next() {
    ATTENTION_NO_UNROLL
    for (;;) {
      const Visit visit = scan_.next();
      if (visit.tile >= 0 || visit.head + 1 >= heads_end_) return visit;
      scan_.restart(visit.head + 1);
    }
  }

 private:
  TileScan<kGeneral, false, false> scan_;
  i32 heads_end_;
};

template <typename T_, tile::F32Products kProducts, int D, int DV, bool kGeneral, bool kWantDk,
          bool kWantDv, bool kWantDq>
struct BackwardKv {
  static_assert(!kWantDq || (kWantDk && kWantDv && !kGeneral && sizeof(T_) == 2),
                "dQ needs dS of a lean kernel that computes everything");
  using T = T_;
  using Params = BackwardParams;
  static constexpr BackwardShape kShape = backward_shape(sizeof(T), D);
  static constexpr int kThreads = 32 * kShape.warps;
  static constexpr int kMinBlocks = 1;
  static constexpr int kKeys = 16 * kShape.warps;
  // The general variant keeps the raw products of the tile beside the two accumulators.
  static constexpr int kQueries = kGeneral ? min_of(kShape.step, D >= 128 ? 16 : 32) : kShape.step;

  using KTile = tile::SharedTile<T, kKeys, D>;
  using VTile = tile::SharedTile<T, kKeys, DV>;
  using QTile = tile::SharedTile<T, kQueries, D>;
  using OTile = tile::SharedTile<T, kQueries, DV>;
  using Scores = tile::Accumulator<16, kQueries>;
  using DsTile = tile::SharedTile<T, kKeys, kQueries>;
  static constexpr bool kDsInStage = backward_ds_in_stage(kShape, DV);
  static constexpr BackwardForm kForm =
      kWantDq ? BackwardForm::kOneKernel : BackwardForm::kTwoKernels;

  static int smem_bytes(const Params& params) {
    return static_cast<int>(backward_shared_bytes(kShape, kForm, sizeof(T), D, DV, params.stages));
  }

  ATTENTION_DEVICE static void run(const Params& params, tile::Smem& smem) {
    const Problem& p = params.problem;
    const KTile k_tile = KTile::take(smem);
    const VTile v_tile = VTile::take(smem);
    const auto q_ring = tile::Ring<T>::take(smem, params.stages, QTile::kSize);
    const auto o_ring = tile::Ring<T>::take(smem, params.stages, OTile::kSize);
    const auto terms_ring = tile::Ring<f32>::take(smem, params.stages, 2 * kQueries);
    const auto visits = VisitRing::take(smem, params.stages);

    const i32 lkv = static_cast<i32>(p.lkv);
    const u32 key_blocks = static_cast<u32>(ceil_div(lkv, kKeys));
    u32 x = tile::block_index().x;
    [[maybe_unused]] DsTile own_ds{};
    if constexpr (kWantDq) {
      if constexpr (!kDsInStage) own_ds = DsTile::take(smem);
      x = tile::take_ticket(params.ticket, smem.take<u32>(1));
    }
    const i32 key_tile = static_cast<i32>(x % key_blocks);
    const i32 key0 = key_tile * kKeys;
    x /= key_blocks;
    const i32 kv_head = static_cast<i32>(x % static_cast<u32>(p.hkv));
    const i64 batch = x / static_cast<u32>(p.hkv);
    const i32 group = static_cast<i32>(p.group());
    const ScoreContext<false> ctx = score_context<false>(p, batch, kv_head * group, 1);
    const i32 q_len = ctx.mask.q_len;

    // Keys of the block that somebody may see: the others could be NaN and are not read.
    const Range keys{key0, min_of(key0 + kKeys, lkv)};
    const Range seen = keys_of_rows(ctx.mask, Range{0, q_len});
    const auto k_rows = operand_rows<T>(p.k, p.k_batch, batch, p.lkv, p.hkv, p.d);
    const auto v_rows = operand_rows<T>(p.v, p.v_batch, batch, p.lkv, p.hkv, p.dv);
    copy_positions<kThreads, !kGeneral>(k_tile, kKeys, k_rows, kv_head, key0, seen);
    if constexpr (kWantDk) {
      copy_positions<kThreads, !kGeneral>(v_tile, kKeys, v_rows, kv_head, key0, seen);
    }

    const auto q_rows = operand_rows<T>(p.q, p.q_batch, batch, p.lq, p.hq, p.d);
    const auto o_rows = result_rows(static_cast<const T*>(params.dout), batch, p.lq, p.hq, p.dv);
    const Range rows = rows_of_keys(ctx.mask, keys);
    const Range tiles{rows.begin / kQueries, ceil_div(rows.end, kQueries)};

    const i32 warp_key = key0 + 16 * tile::warp_index();
    const int warp_row = 16 * tile::warp_index();
    const Range warp_keys{warp_key, warp_key + 16};

    tile::Accumulator<16, D> dk;
    tile::Accumulator<16, DV> dv;
    if constexpr (kWantDk) dk.fill(0.f);
    if constexpr (kWantDv) dv.fill(0.f);
    const f32 keep_scale = p.dropout.threshold > 0 ? p.dropout.keep_scale : 1.f;

    GroupWalk<kGeneral> walk(ctx, tiles, kQueries, keys);
    const auto find = [&]() {
      Visit visit = walk.next();
      // The last tile first.
      if (kWantDq && visit.tile >= 0) visit.tile = tiles.begin + tiles.end - 1 - visit.tile;
      return visit;
    };
    const auto load = [&](const Visit& visit, i32 stage) {
      const i32 q0 = visit.tile * kQueries;
      const i32 head = visit.head;
      copy_positions<kThreads, !kGeneral>(QTile{q_ring[stage]}, kQueries, q_rows, head, q0,
                                          Range{0, q_len});
      copy_positions<kThreads, !kGeneral>(OTile{o_ring[stage]}, kQueries, o_rows, head, q0,
                                          Range{0, q_len});
      // Rows past the end: zeros, which is harmless, because their q and dO are zeros as well. With
      // dQ, rows past q_len have their own terms, which make their dS zero whatever V is.
      const int r = tile::thread_index();
      if (r < kQueries) {
        const bool valid = q0 + r < (kWantDq ? static_cast<i32>(p.lq) : q_len);
        const f32* from = row_terms(params, batch, head) + 2 * (valid ? q0 + r : 0);
        tile::async_copy_or_zero<8>(terms_ring[stage] + 2 * r, from, valid);
      }
    };
    [[maybe_unused]] OrderedDq<T, D, kKeys, kQueries> dq(params);
    [[maybe_unused]] const auto dq_rows =
        result_rows(static_cast<T*>(params.dq), batch, p.lq, p.hq, p.d);
    const auto compute = [&](const Visit& visit, i32 stage) {
      const i32 q0 = visit.tile * kQueries;
      const Range queries{q0, min_of(q0 + kQueries, q_len)};
      const Range visible = keys_of_rows(ctx.mask, queries);
      const bool warp_sees = visible.begin < warp_keys.end && visible.end > warp_keys.begin;
      if constexpr (kWantDq) {
        if (visible.begin >= keys.end || visible.end <= keys.begin) return;
      } else {
        if (!warp_sees) return;
      }
      const bool full = visit.full && tile_is_full(ctx.mask, Range{q0, q0 + kQueries}, warp_keys);
      const QTile q_tile{q_ring[stage]};
      const OTile o_tile{o_ring[stage]};
      [[maybe_unused]] const DsTile ds_tile = kDsInStage ? DsTile{o_ring[stage]} : own_ds;
      [[maybe_unused]] ScoreContext<false> of_head = ctx;
      of_head.head0 = visit.head;

      // With dQ, all warps stay together: they share barriers and the product that makes dQ.
      const bool computes = !kWantDq || warp_sees;
      Scores s;
      if (computes) {
        s.fill(0.f);
        multiply<kProducts, true>(s, k_tile, warp_row, q_tile, 0);
        [[maybe_unused]] Scores raw;
        if constexpr (kGeneral) {
          if (p.soft_cap > 0.f) raw = s;
          apply_score<true>(s, of_head, q0, warp_key, !full);
        } else if (!full) {
          mask_positions<true>(s, ctx, q0, warp_key);
        }
        // Terms of the columns 2c and 2c + 1 lie side by side: (lse, delta, lse, delta).
        const auto terms_of = [&](int c) {
          return tile::shared_load<4>(terms_ring[stage] + 2 * Scores::slot_col(c));
        };
        ATTENTION_UNROLL
        for (int c = 0; c < Scores::kColSlots; c += 2) {
          const auto terms = terms_of(c);
          ATTENTION_UNROLL
          for (int r = 0; r < Scores::kRowSlots; ++r) {
            s.at(r, c) = probability<!kGeneral>(s.at(r, c), terms[0], ctx.scale);
            s.at(r, c + 1) = probability<!kGeneral>(s.at(r, c + 1), terms[2], ctx.scale);
          }
        }
        [[maybe_unused]] KeepBits<Scores> keep;
        if constexpr (kGeneral) keep = dropout_keep<true, Scores>(of_head, q0, warp_key);
        if constexpr (kWantDv) {
          if constexpr (kGeneral) {
            Scores dropped = s;
            if (p.dropout.threshold > 0) apply_dropout(dropped, keep);
            multiply_packed<kProducts, false>(dv, dropped, o_tile, 0);
          } else {
            multiply_packed<kProducts, false>(dv, s, o_tile, 0);
          }
        }
        if constexpr (kWantDk) {
          Scores dp;
          dp.fill(0.f);
          multiply<kProducts>(dp, v_tile, warp_row, o_tile, 0);
          if constexpr (kGeneral) {
            if (p.dropout.threshold > 0) {
              apply_dropout(dp, keep);
              transform(dp, [&](f32& y) { y *= keep_scale; });
            }
          }
          ATTENTION_UNROLL
          for (int c = 0; c < Scores::kColSlots; c += 2) {
            const auto terms = terms_of(c);
            ATTENTION_UNROLL
            for (int r = 0; r < Scores::kRowSlots; ++r) {
              s.at(r, c) = score_gradient(s.at(r, c), dp.at(r, c), terms[1]);
              s.at(r, c + 1) = score_gradient(s.at(r, c + 1), dp.at(r, c + 1), terms[3]);
            }
          }
          if constexpr (kGeneral) {
            if (p.soft_cap > 0.f) {
              ATTENTION_UNROLL
              for (int r = 0; r < Scores::kRowSlots; ++r) {
                ATTENTION_UNROLL
                for (int c = 0; c < Scores::kColSlots; ++c) {
                  // A masked entry may have a NaN product.
                  if (s.at(r, c) != 0.f)
                    s.at(r, c) *= cap_slope(raw.at(r, c), ctx.scale, p.soft_cap);
                }
              }
            }
          }
        }
      }
      if constexpr (kWantDq) {
        // Warps come here at different times: one waits for its turn while another computes.
        dq.take_turn(batch * p.hq + visit.head, visit.tile, key_tile, visible);
        if constexpr (kDsInStage) tile::sync_block();  // all are done with dO
        if (computes) tile::store_accumulator(ds_tile, warp_row, 0, s);
        // On its way while dK is computed.
        dq.load_sum(key_tile, visible);
      }
      if constexpr (kWantDk) {
        if (computes) multiply_packed<kProducts, false>(dk, s, q_tile, 0);
      }
      if constexpr (kWantDq) {
        tile::sync_block();  // dS of all warps is there
        dq.multiply(ds_tile, k_tile, max_of(visible.begin - key0, 0) / 16 * 16,
                    round_up(min_of(visible.end - key0, kKeys), 16));
        dq.store(dq_rows, visit.head, q0, static_cast<i32>(p.lq), ctx.scale, key_tile, visible);
      }
    };
    stream_tiles(params.stages, visits, find, load, compute);
    if constexpr (kWantDq) dq.hand_over();

    const auto store = [&](const auto& gradient, void* to, i64 width, f32 factor) {
      const auto result = result_rows(static_cast<T*>(to), batch, p.lkv, p.hkv, width);
      store_rows<T>(
          gradient, warp_key, result.width,
          [&](i32 j) { return j < lkv ? result.row(j, kv_head) : nullptr; },
          [&](int) { return factor; });
    };
    if constexpr (kWantDk) store(dk, params.dk, p.d, ctx.scale);
    if constexpr (kWantDv) store(dv, params.dv, p.dv, keep_scale);
  }
};

}  // namespace attention
