// SPDX-License-Identifier: Apache-2.0
// Forward attention on matrix tiles: all rows of a task against one packed block of keys. Products
// run on a unit of their own, and what a tile register stores can be loaded again only once it has
// reached the cache. So three row tiles are under way at a time, the scores of one, the
// exponentials of the one before and the sums over the values of the one before that, in turns of
// 32 keys.
#pragma once

#include "kernels/cpu/forward_state.h"

namespace attention::cpu::ATTENTION_CPU_ISA {

// One row tile of the block.
template <int kVectors>
struct RowTileWork {
  ScoreTile tile;  // scores; from their beginning on, weights as pairs of keys
  Range all;       // keys that all of its rows see
  F shift[kVectors], sum[kVectors], decay[kVectors];
};

template <typename Format, int kVectors>
class RowTiles {
 public:
  static constexpr int kLd = kVectors * kLanes;

  RowTiles(ForwardState<Format>& state, i32 key0, int keys)
      : state_(state), block_(state.block), key0_(key0), keys_(keys) {}

  // Rows [row, row + tiles * lanes).
  void run(int row, int tiles) {
    const int end = row + tiles * kLd;
    RowTileWork<kVectors> works[3];
    RowTileWork<kVectors>*scored = nullptr, *weighed = nullptr, *summed = nullptr;
    for (int turn = 0; row < end || scored || weighed; ++turn) {
      summed = weighed;
      weighed = scored;
      scored = nullptr;
      RowTileWork<kVectors>& next = works[turn % 3];
      float* s = state_.s + turn % 3 * state_.block_k * kLd;
      for (; row < end && !scored; row += kLd) {
        next.tile = {&block_, row, key0_, key0_ + keys_, 0, 0, s, state_.allow, state_.block_k};
        if (find_keys<Format, kVectors>(&next.tile, &next.all)) scored = &next;
      }
      if (weighed) begin_weights(*weighed);
      const int steps = max_of(max_of(scored ? chunks(*scored) : 0, weighed ? chunks(*weighed) : 0),
                               summed ? ceil_div(state_.dims_v, kTileBlock) : 0);
      for (int step = 0; step < steps; ++step) {
        state_.next.step();
        if (scored && step < chunks(*scored)) score(*scored, step);
        if (weighed && state_.plain && step < chunks(*weighed)) weigh(*weighed, step);
        if (summed && step * kTileBlock < state_.dims_v) sum_values(*summed, step);
      }
      if (weighed) end_weights(*weighed);
    }
  }

 private:
  using Work = RowTileWork<kVectors>;

  static int chunks(const Work& work) { return (work.tile.last - work.tile.first) / kTileBlock; }

  void score(const Work& work, int chunk) const {
    constexpr int kRowPitch = Panel<Format>::kRowPitch;
    const int key = work.tile.first + chunk * kTileBlock;
    score_tiles<kVectors>(state_.k.by_d + key * kRowPitch, kRowPitch, state_.d,
                          state_.q_t + i64{work.tile.row} * state_.stride_q,
                          work.tile.s + key * kLd);
  }

  // Masks the scores and finds their maximum; with options, does all the rest too.
  void begin_weights(Work& work) const {
    const ScoreTile& tile = work.tile;
    if (!state_.plain) {
      for (int at = tile.first * kLd; at < tile.last * kLd; at += kLanes)
        store(tile.s + at, load(tile.s + at) * set(block_.scale));
    }
    apply_options<kVectors>(tile, work.all, nullptr);
    hide_padding<kVectors>(tile);
    if (!state_.plain) {
      online_softmax<kVectors>(tile, work.decay);
      weights_by_key<Format, kVectors>(tile.s, tile.first, tile.last);
      return;
    }
    F maximum[kVectors];
    for (int n = 0; n < kVectors; ++n) maximum[n] = minus_infinity();
    for (int j = tile.first; j < tile.last; ++j)
      for (int n = 0; n < kVectors; ++n)
        maximum[n] = max(load(tile.s + j * kLd + n * kLanes), maximum[n]);
    // Maxima are of unscaled scores: the largest one's exponent is exactly 0. A row's follows only
    // when its weights would grow by a factor of e^8, so that the sums so far seldom have to be
    // multiplied.
    for (int n = 0; n < kVectors; ++n) {
      float* of_row = block_.maximum + tile.row + n * kLanes;
      const F old = load(of_row), scale = set(block_.scale);
      const M grows = less(set(8.f), (maximum[n] - old) * scale);
      maximum[n] = select(grows, maximum[n], old);
      store(of_row, maximum[n]);
      // A row that has seen nothing yet has maximum -inf: any finite shift gives exp = 0.
      work.shift[n] = select(equal(maximum[n], minus_infinity()), zero(), maximum[n]);
      work.decay[n] = select(grows, exp((old - work.shift[n]) * scale), set(1.f));
      work.sum[n] = zero();
    }
  }

  // Exponentials of 32 keys, as pairs of keys.
  void weigh(Work& work, int chunk) const {
    constexpr int kKeys = 4 / kVectors;  // of four vectors of exponentials
    const F factor = set(block_.scale * kLog2E);
    F sum[kVectors], shift[kVectors];
    for (int n = 0; n < kVectors; ++n) {
      sum[n] = work.sum[n];
      shift[n] = work.shift[n];
    }
    const int begin = work.tile.first + chunk * kTileBlock;
    u32* pairs = reinterpret_cast<u32*>(work.tile.s) + begin / 2 * kLd;
    const float* s = work.tile.s + begin * kLd;
    for (int j = 0; j < kTileBlock; j += kKeys, s += 4 * kLanes, pairs += 2 * kLanes) {
      F p[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) p[i] = (load(s + i * kLanes) - shift[i % kVectors]) * factor;
      exp2(p);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sum[i % kVectors] = sum[i % kVectors] + p[i];
      store(pairs, Format::zip(p[0], p[kVectors]));
      store(pairs + kLanes, Format::zip(p[3 - kVectors], p[3]));
    }
    for (int n = 0; n < kVectors; ++n) work.sum[n] = sum[n];
  }

  void end_weights(const Work& work) const {
    if (!state_.plain) return;
    for (int n = 0; n < kVectors; ++n) {
      float* total = block_.sum + work.tile.row + n * kLanes;
      store(total, fma(load(total), work.decay[n], work.sum[n]));
    }
  }

  // 32 rows of O^T.
  void sum_values(const Work& work, int step) const {
    const int m = step * kTileBlock, dims = min_of(kTileBlock, state_.dims_v - m);
    const ScoreTile& tile = work.tile;
    float* o_t = state_.o_t + i64{tile.row} * state_.stride_o + m * kLd;
    bool decays = false;
    for (int n = 0; n < kVectors; ++n) decays |= any(less(work.decay[n], set(1.f)));
    if (decays)
      for (int i = 0; i < dims; ++i)
        for (int n = 0; n < kVectors; ++n) {
          float* c = o_t + i * kLd + n * kLanes;
          store(c, load(c) * work.decay[n]);
        }
    value_tiles<kVectors>(state_.v.rows_from(tile.first, state_.dv) + m * kTileSide,
                          tile_step(state_.dv), tile.last - tile.first, round_up(dims, kTileSide),
                          reinterpret_cast<const u32*>(tile.s) + tile.first / 2 * kLd, o_t);
  }

  ForwardState<Format>& state_;
  const RowBlock& block_;
  i32 key0_;
  int keys_;
};

// All rows of the block against keys [key0, key0 + keys), which are packed.
template <typename Format>
inline void forward_tiles(ForwardState<Format>& state, i32 key0, int keys) {
  const int rows = state.block.rows, last = rows % kRowTile;
  const int whole = last > kLanes || last == 0 ? ceil_div(rows, kRowTile) : rows / kRowTile;
  RowTiles<Format, 2>(state, key0, keys).run(0, whole);
  if (whole * kRowTile < rows) RowTiles<Format, 1>(state, key0, keys).run(whole * kRowTile, 1);
}

}  // namespace attention::cpu::ATTENTION_CPU_ISA
