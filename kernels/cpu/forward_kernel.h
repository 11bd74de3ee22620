// SPDX-License-Identifier: Apache-2.0
// Forward attention over tiles: for a block of rows, a loop over packed blocks of keys with online
// softmax (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022). Rows lie in SIMD lanes,
// so maxima and sums run down the tile and need no horizontal reduction.
#pragma once

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/pack.h"
#include "kernels/cpu/score.h"

namespace attention::cpu::ATTENTION_CPU_ISA {

// The rows of K and V that are packed next, asked for a few at a time between register tiles, so
// that memory works while the processor multiplies.
class NextRows {
 public:
  struct Operand {
    const char* rows;
    i64 stride;  // in bytes, as `bytes` of a row
    int bytes;
  };
  // `rows` rows of each operand, within `steps` steps.
  void begin(const Operand& k, const Operand& v, int rows, int steps) {
    operands_[0] = k;
    operands_[1] = v;
    row_ = 0;
    rows_ = rows;
    each_ = ceil_div(rows, max_of(steps, 1));
  }
  ATTENTION_INLINE void step() {
    for (const int end = min_of(row_ + each_, rows_); row_ < end; ++row_)
      for (const Operand& operand : operands_)
        for (int c = 0; c < operand.bytes; c += 64)
          __builtin_prefetch(operand.rows + row_ * operand.stride + c, 0, 2);
  }

 private:
  Operand operands_[2] = {};
  int row_ = 0, rows_ = 0, each_ = 0;
};

// Where the packed block and the row block of one task lie.
template <typename Format>
struct ForwardState {
  const Problem* problem;
  RowBlock block;
  Panel<Format> k, v;
  NextRows next;
  typename Format::Element* q_t;  // [tile][d / kDepth][lanes]
  float *o_t, *s;
  u8* allow;
  int block_k, d, dv;
  int dims_v;              // dv rounded up to kRowStep
  int stride_q, stride_o;  // elements of one row in lanes: padded head dimensions
};

// One tile of rows against keys [key0, key0 + keys) of the packed block. kAsks: asks for the rows
// of the next one meanwhile; it is not free, so only where packing takes a good part of the time.
template <typename Format, int kVectors, bool kAsks>
inline void forward_tile(ForwardState<Format>& state, int row, i32 key0, int keys) {
  constexpr int kLd = kVectors * kLanes;
  RowBlock& block = state.block;
  const TileRange range = range_of_rows(block, row, kLd);
  const i32 low = max_of(range.some.begin, key0), high = min_of(range.some.end, key0 + keys);
  if (low >= high) return;
  const int real_rows = min_of(kLd, block.rows - row);
  if (block_mask_hides(block, row, real_rows, {low, high})) return;
  const int first = (low - key0) / 8 * 8, last = round_up(high - key0, kRowStep);

  const auto ask = [&] {
    if constexpr (kAsks) state.next.step();
  };
  const typename Format::Element* q_t = state.q_t + i64{row} * state.stride_q;
  float* o_t = state.o_t + i64{row} * state.stride_o;
  const ScoreTile tile{&block, row,     key0,        key0 + keys,  first,
                       last,   state.s, state.allow, state.block_k};
  score_product<Format, kVectors>(state.k.by_d + first * Panel<Format>::kRowPitch, last - first,
                                  state.d, q_t, block.scale, state.s + first * kLd, ask);
  apply_options<kVectors>(tile, range.all, nullptr);

  // Online softmax, down the tile.
  F old_maximum[kVectors], maximum[kVectors], shift[kVectors], decay[kVectors], sum[kVectors];
  for (int n = 0; n < kVectors; ++n)
    old_maximum[n] = maximum[n] = load(block.maximum + row + n * kLanes);
  for (int j = first; j < last; ++j)
    for (int n = 0; n < kVectors; ++n)
      maximum[n] = max(load(state.s + j * kLd + n * kLanes), maximum[n]);
  for (int n = 0; n < kVectors; ++n) {
    // A row that has seen nothing yet has maximum -inf: any finite shift gives exp = 0.
    shift[n] = select(equal(maximum[n], minus_infinity()), zero(), maximum[n]);
    // Subtract before anything is multiplied by log2(e): finfo.min * log2(e) would overflow.
    decay[n] = exp(old_maximum[n] - shift[n]);
    sum[n] = zero();
  }
  constexpr int kKeys = 4 / kVectors;  // of four vectors of exponentials; divides kRowStep
  for (int j = first; j < last; j += kKeys) {
    float* s = state.s + j * kLd;
    F p[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) p[i] = load(s + i * kLanes) - shift[i % kVectors];
    exp(p);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      sum[i % kVectors] = sum[i % kVectors] + p[i];
      store(s + i * kLanes, p[i]);
    }
  }
  for (int n = 0; n < kVectors; ++n) {
    float* total = block.sum + row + n * kLanes;
    store(total, fma(load(total), decay[n], sum[n]));
    store(block.maximum + row + n * kLanes, maximum[n]);
  }
  if (state.problem->dropout.threshold != 0) apply_dropout<kVectors>(tile);
  const typename Format::Element* weights = weights_by_key<Format, kVectors>(state.s, first, last);
  value_product<Format, kVectors>(state.v.by_row + first / Format::kDepth * kPitch, last - first,
                                  state.dims_v, weights, decay, o_t, ask);
}

// Normalises a tile and writes it: to out and lse, or to this split's partial result.
template <typename Format, int kVectors>
inline void finish_tile(ForwardState<Format>& state, const ForwardTask& task, int row) {
  constexpr int kLd = kVectors * kLanes;
  const RowBlock& block = state.block;
  const float* o_t = state.o_t + i64{row} * state.stride_o;
  if (task.plan->num_splits == 1) {
    F inverse[kVectors];
    for (int n = 0; n < kVectors; ++n) {
      const F sum = load(block.sum + row + n * kLanes);
      inverse[n] = select(equal(sum, zero()), zero(), set(1.f) / sum);
    }
    unpack_lanes<kVectors>(block, o_t, inverse, state.dv, row, task.args->out);
    for (int r = row; r < min_of(row + kLd, block.rows); ++r)
      task.args->lse[block.index_of(r)] =
          block.sum[r] == 0.f ? -__builtin_inff() : block.maximum[r] + __builtin_logf(block.sum[r]);
    return;
  }
  // Partial layout: [rows][padded Dv] of unnormalised O, then maxima, then sums.
  const int width = state.stride_o;
  float* partial =
      task.partials + task.split * task.plan->partial_stride +
      ((task.b * state.problem->hkv + block.kv_head) * task.plan->q_blocks + task.q_block) *
          i64{block.padded} * (width + 2);
  for (int n = 0; n < kVectors; ++n)
    for (int c = 0; c < width; c += kLanes) {
      F x[kLanes];
      for (int i = 0; i < kLanes; ++i) x[i] = load(o_t + (c + i) * kLd + n * kLanes);
      transpose(x);
      for (int lane = 0; lane < kLanes; ++lane)
        store(partial + i64{row + n * kLanes + lane} * width + c, x[lane]);
    }
  for (int r = row; r < row + kLd; ++r) {
    partial[i64{block.padded} * width + r] = block.maximum[r];
    partial[i64{block.padded} * (width + 1) + r] = block.sum[r];
  }
}

template <typename Format>
inline void forward_blocks(const ForwardTask& task) {
  const Problem& p = task.args->problem;
  const Plan& plan = *task.plan;
  const Scratch& at = plan.scratch;
  ForwardState<Format> state;
  state.problem = &p;
  state.block_k = plan.block_k;
  state.d = static_cast<int>(p.d);
  state.dv = static_cast<int>(p.dv);
  state.dims_v = round_up(state.dv, kRowStep);
  state.stride_q = lane_stride<Format>(state.d);
  state.stride_o = round_up(state.dv, 16);
  state.k = {task.scratch + at.k, plan.block_k};
  state.v = {task.scratch + at.v, plan.block_k};
  state.s = reinterpret_cast<float*>(task.scratch + at.s);
  state.allow = reinterpret_cast<u8*>(task.scratch + at.allow);

  const i32 group = static_cast<i32>(p.group());
  const i32 q0 = task.q_block * plan.block_q;
  const i32 queries = min_of(plan.block_q, static_cast<i32>(p.lq) - q0);
  RowBlock& block = state.block;
  // Turns to one of the task's key/value heads, whose rows stay in scratch.
  const auto enter = [&](i32 n) {
    const i64 head = task.kv_head + n, rows = i64{n} * plan.padded_rows;
    block = view_rows(p, task.b, head, static_cast<i32>(head) * group, group, q0, queries,
                      task.scratch + at.rows + rows * kRowArrays * i64{sizeof(float)},
                      plan.padded_rows);
    state.q_t =
        reinterpret_cast<typename Format::Element*>(task.scratch + at.q_t) + rows * state.stride_q;
    state.o_t = reinterpret_cast<float*>(task.scratch + at.o_t) + rows * state.stride_o;
  };
  for (i32 n = 0; n < plan.heads; ++n) {
    enter(n);
    fill_rows(block);
    for (int r = 0; r < block.padded; ++r) {
      block.maximum[r] = -__builtin_inff();
      block.sum[r] = 0.f;
    }
    for_each_row_tile(block.rows, [&](int row, auto vectors) {
      pack_lanes<Format, vectors.value>(block, p.q, p.q_batch(task.b), state.d, row,
                                        state.q_t + i64{row} * state.stride_q);
      memset(state.o_t + i64{row} * state.stride_o, 0,
             sizeof(float) * static_cast<size_t>(state.stride_o * vectors.value * kLanes));
    });
  }

  const auto key_rows = [&](const void* operand, BatchMap batch, int d, i32 key, i32 n) {
    const i64 row = (batch(task.b) * p.lkv + key) * p.hkv + task.kv_head + n;
    return NextRows::Operand{static_cast<const char*>(element(operand, p.dtype, row * d)),
                             p.hkv * d * size_of(p.dtype), d * size_of(p.dtype)};
  };
  // A split is a fixed interval of keys, whatever the rows of this block can see of it.
  Range keys = keys_of_rows(block.mask, {q0, q0 + queries});
  keys.begin = max_of(keys.begin, task.split * plan.split_size);
  keys.end = static_cast<i32>(min_of<i64>(keys.end, (i64{task.split} + 1) * plan.split_size));
  // Blocks start at multiples of the block size, so that a row's result does not depend on where
  // the other rows' windows begin.
  // A split beyond the last key has nothing to do.
  if (keys.empty()) keys = {0, 0};
  for (i32 key0 = keys.begin / plan.block_k * plan.block_k; key0 < keys.end; key0 += plan.block_k) {
    const i32 begin = max_of(key0, keys.begin / 8 * 8);
    const i32 count = min_of(key0 + plan.block_k, keys.end) - begin;
    for (i32 n = 0; n < plan.heads; ++n) {
      enter(n);
      if (block_mask_hides(block, 0, block.rows, {begin, begin + count})) continue;
      const i32 padded = round_up(count, 8);
      pack_keys(block, p.k, p.k_batch, state.d, begin, count, padded, state.k);
      pack_keys(block, p.v, p.v_batch, state.dv, begin, count, padded, state.v);
      pack_by_row(state.v, padded, state.dv);
      if (plan.heads == 1) {
        for_each_row_tile(block.rows, [&](int row, auto vectors) {
          forward_tile<Format, vectors.value, false>(state, row, begin, count);
        });
        continue;
      }
      // The same keys of the next head, or the next keys of the first one.
      const bool same_keys = n + 1 < plan.heads;
      const i32 next_key = same_keys ? begin : key0 + plan.block_k;
      state.next.begin(key_rows(p.k, p.k_batch, state.d, next_key, same_keys ? n + 1 : 0),
                       key_rows(p.v, p.v_batch, state.dv, next_key, same_keys ? n + 1 : 0),
                       clamp_to(keys.end - next_key, 0, plan.block_k),
                       ceil_div(block.rows, kRowTile) * (padded + state.dv) / kTileRows);
      for_each_row_tile(block.rows, [&](int row, auto vectors) {
        forward_tile<Format, vectors.value, true>(state, row, begin, count);
      });
    }
  }
  for (i32 n = 0; n < plan.heads; ++n) {
    enter(n);
    for_each_row_tile(block.rows, [&](int row, auto vectors) {
      finish_tile<Format, vectors.value>(state, task, row);
    });
  }
}

inline void forward_tiled(const ForwardTask& task) {
#if defined(__AVX512BF16__)
  if (task.args->problem.dtype == DType::kBFloat16) return forward_blocks<Pairs>(task);
#endif
  forward_blocks<Singles>(task);
}

// out and lse of one block of rows from the partial results of its splits, in the order of splits.
inline void merge_splits(const ForwardArgs& args, const Plan& plan, const float* partials, i64 b,
                         i64 kv_head, i32 q_block) {
  const Problem& p = args.problem;
  const i32 group = static_cast<i32>(p.group());
  const i32 q0 = q_block * plan.block_q;
  const i32 rows = min_of(plan.block_q, static_cast<i32>(p.lq) - q0) * group;
  const int dv = static_cast<int>(p.dv), width = round_up(dv, 16);
  const i64 padded = plan.padded_rows;
  const float* first =
      partials + ((b * p.hkv + kv_head) * plan.q_blocks + q_block) * padded * (width + 2);
  for (i32 r = 0; r < rows; ++r) {
    float maximum = -__builtin_inff();
    for (i32 split = 0; split < plan.num_splits; ++split)
      maximum = max_of(maximum, first[split * plan.partial_stride + padded * width + r]);
    const float shift = maximum == -__builtin_inff() ? 0.f : maximum;
    float sum = 0.f;
    F acc[kMaxHeadDim / kLanes] = {};
    for (i32 split = 0; split < plan.num_splits; ++split) {
      const float* partial = first + split * plan.partial_stride;
      const float split_sum = partial[padded * (width + 1) + r];
      if (split_sum == 0.f) continue;
      const float weight = __builtin_expf(partial[padded * width + r] - shift);
      sum += weight * split_sum;
      for (int c = 0; c < width; c += kLanes)
        acc[c / kLanes] = fma(set(weight), load(partial + r * width + c), acc[c / kLanes]);
    }
    const float inverse = sum == 0.f ? 0.f : 1.f / sum;
    const i64 index = (b * p.lq + q0 + r / group) * p.hq + kv_head * group + r % group;
    args.lse[index] = sum == 0.f ? -__builtin_inff() : maximum + __builtin_logf(sum);
    with_type(p.dtype, [&](auto tag) {
      using Memory = typename decltype(tag)::Memory;
      Memory* out = static_cast<Memory*>(args.out) + index * p.dv;
      for (int c = 0; c < dv; c += kLanes)
        store_upto(tag, out + c, acc[c / kLanes] * set(inverse), dv - c);
    });
  }
}

}  // namespace attention::cpu::ATTENTION_CPU_ISA
