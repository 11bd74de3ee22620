// SPDX-License-Identifier: Apache-2.0
// Forward attention for few rows against many keys, where reading K and V once is what takes the
// time. A task streams an interval of keys of all key/value heads, so that memory is read in order;
// the next block is prefetched while the present one is worked on. Head dimension in SIMD lanes, K
// and V in their natural layout, nothing is packed. Splits are merged by merge_splits.
#pragma once

#include "kernels/cpu/convert.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/product.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/score.h"

namespace attention::cpu::ATTENTION_CPU_ISA {

// Lane n of the result is the sum over all lanes of v[n]. Each step adds the halves of two vectors
// and interleaves them; after log2(kLanes) steps the sums lie in order.
ATTENTION_INLINE F add_halves(F a, F b) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23) +
         __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                 31);
#elif defined(__AVX2__)
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11) +
         __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  return __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}
ATTENTION_INLINE F sum_each(F (&v)[kLanes]) {
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int n = 0; n < half; ++n) v[n] = add_halves(v[n], v[n + half]);
  return v[0];
}

// Vectors of O that one pass over the values accumulates for each row.
inline constexpr int kDecodeStrip = kLanes == 16 ? 4 : 2;

// kRows rows of one key/value head against the keys of one block. Scores are kept as vectors of
// kLanes = kRows * kKeys entries: lane row * kKeys + key.
template <int kRows, typename T>
struct DecodeRows {
  using Memory = typename T::Memory;
  static constexpr int kKeys = kLanes / kRows;

  const RowBlock& block;
  int row;         // first row
  const float* q;  // [row][width_q], zero past D
  float* o;        // [row][width_o], unnormalised
  int width_q, width_o;
  float* weights;  // scratch: one vector for every kKeys keys

  // Scores, masks and online softmax for keys [key0, key0 + keys); k: their first row.
  ATTENTION_INLINE void score(const Memory* k, i64 stride, i32 key0, int keys,
                              float (&decay)[kRows]) const {
    const Problem& p = *block.problem;
    const int d = static_cast<int>(p.d), whole = d / kLanes * kLanes;
    i32 lane_key[kLanes], lane_begin[kLanes], lane_end[kLanes], lane_position[kLanes];
    float lane_slope[kLanes];
    i32 all_begin = 0, all_end = 0x7FFFFFFF;
    for (int lane = 0; lane < kLanes; ++lane) {
      const int r = row + lane / kKeys;
      lane_key[lane] = key0 + lane % kKeys;
      lane_begin[lane] = block.begin[r] - 1;
      lane_end[lane] = block.end[r];
      lane_position[lane] = block.position[r];
      lane_slope[lane] = -block.slope[r];
      all_begin = max_of(all_begin, block.begin[r]);
      all_end = min_of(all_end, block.end[r]);
    }
    const I below = load(lane_begin), end = load(lane_end), position = load(lane_position);
    const F slope = load(lane_slope), scale = set(block.scale);
    const F cap = set(p.soft_cap), inverse_cap = set(p.soft_cap != 0.f ? 1.f / p.soft_cap : 0.f);
    I key = load(lane_key);
    F maximum = minus_infinity();
    for (int j = 0; j < keys; j += kKeys, key += set(kKeys)) {
      const Memory* rows[kKeys];
      for (int n = 0; n < kKeys; ++n) rows[n] = k + min_of(j + n, keys - 1) * stride;
      F acc[kLanes] = {};
      for (int c = 0; c < whole; c += kLanes) {
#pragma GCC unroll 16
        for (int n = 0; n < kKeys; ++n) {
          const F x = load_as(T{}, rows[n] + c);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r)
            acc[r * kKeys + n] = fma(x, load(q + r * width_q + c), acc[r * kKeys + n]);
        }
      }
      if (whole < d) {
        for (int n = 0; n < kKeys; ++n) {
          const F x = load_first(T{}, rows[n] + whole, d - whole);
          for (int r = 0; r < kRows; ++r)
            acc[r * kKeys + n] = fma(x, load(q + r * width_q + whole), acc[r * kKeys + n]);
        }
      }
      F s = sum_each(acc) * scale;
      if (p.soft_cap != 0.f) s = tanh(s * inverse_cap) * cap;
      if (p.alibi_slopes.data) s = fma(slope, absolute(to_float(position - key)), s);
      if (key0 + j < all_begin || key0 + j + kKeys > all_end || j + kKeys > keys)
        s = select(both(both(less(below, key), less(key, end)), less(key, set(key0 + keys))), s,
                   minus_infinity());
      maximum = max(s, maximum);
      store(weights + j * kRows, s);
    }

    float lanes[kLanes], shifts[kLanes];
    store(lanes, maximum);
    for (int r = 0; r < kRows; ++r) {
      float m = block.maximum[row + r];
      const float old = m;
      for (int n = 0; n < kKeys; ++n) m = max_of(m, lanes[r * kKeys + n]);
      const float shift = m == -__builtin_inff() ? 0.f : m;
      decay[r] = old == m ? 1.f : __builtin_expf(old - shift);
      block.maximum[row + r] = m;
      for (int n = 0; n < kKeys; ++n) shifts[r * kKeys + n] = shift;
    }
    const F shift = load(shifts);
    F sum = zero();
    for (int j = 0; j < keys; j += kKeys) {
      const F w = exp(load(weights + j * kRows) - shift);
      store(weights + j * kRows, w);
      sum = sum + w;
    }
    store(lanes, sum);
    for (int r = 0; r < kRows; ++r) {
      float total = 0.f;
      for (int n = 0; n < kKeys; ++n) total += lanes[r * kKeys + n];
      block.sum[row + r] = block.sum[row + r] * decay[r] + total;
    }
  }

  template <int kVectors>
  ATTENTION_INLINE void value_strip(const Memory* v, i64 stride, int keys, int column,
                                    const float (&decay)[kRows]) const {
    // A sum of its own for each block of keys: one running sum over all keys would round more.
    F acc[kRows][kVectors] = {};
    const int left = static_cast<int>(block.problem->dv) - column;
    const bool whole = left >= kVectors * kLanes;
    for (int j = 0; j < keys; ++j, v += stride) {
      const float* w = weights + j / kKeys * kLanes + j % kKeys;
      F x[kVectors];
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n)
        x[n] = whole ? load_as(T{}, v + column + n * kLanes)
                     : load_upto(T{}, v + column + n * kLanes, max_of(left - n * kLanes, 0));
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < kVectors; ++n) acc[r][n] = fma(set(w[r * kKeys]), x[n], acc[r][n]);
    }
    for (int r = 0; r < kRows; ++r)
      for (int n = 0; n < kVectors; ++n) {
        float* sum = o + r * width_o + column + n * kLanes;
        store(sum, fma(load(sum), set(decay[r]), acc[r][n]));
      }
  }

  // O += P V over the keys that score() weighed.
  ATTENTION_INLINE void add_values(const Memory* v, i64 stride, int keys,
                                   const float (&decay)[kRows]) const {
    const int dv = static_cast<int>(block.problem->dv);
    int column = 0;
    for (; column + kDecodeStrip * kLanes <= round_up(dv, kLanes); column += kDecodeStrip * kLanes)
      value_strip<kDecodeStrip>(v, stride, keys, column, decay);
    for (; column < dv; column += kLanes) value_strip<1>(v, stride, keys, column, decay);
  }
};

inline void forward_decode(const ForwardTask& task) {
  const Problem& p = task.args->problem;
  const Plan& plan = *task.plan;
  const Scratch& at = plan.scratch;
  const i32 group = static_cast<i32>(p.group()), lq = static_cast<i32>(p.lq);
  const i32 head_rows = lq * group;
  const int width_q = round_up(static_cast<int>(p.d), 16);
  const int width_o = round_up(static_cast<int>(p.dv), 16);
  float* q = reinterpret_cast<float*>(task.scratch + at.q_t);
  float* o = reinterpret_cast<float*>(task.scratch + at.o_t);
  float* weights = reinterpret_cast<float*>(task.scratch + at.s);

  // One row block a key/value head; all of them stay in scratch while the keys stream by.
  const auto arrays_of = [&](i64 head) {
    return task.scratch + at.rows + head * plan.padded_rows * kRowArrays * i64{sizeof(float)};
  };
  const auto rows_of = [&](i64 head) {
    return view_rows(p, task.b, head, static_cast<i32>(head) * group, group, 0, lq, arrays_of(head),
                     plan.padded_rows);
  };
  with_type(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    using Memory = typename T::Memory;
    for (i64 head = 0; head < p.hkv; ++head) {
      RowBlock block = rows_of(head);
      fill_rows(block);
      for (int r = 0; r < head_rows; ++r) {
        block.maximum[r] = -__builtin_inff();
        block.sum[r] = 0.f;
        const bool used = block.query[r] < block.mask.q_len;
        const Memory* source =
            static_cast<const Memory*>(p.q) +
            ((p.q_batch(task.b) * p.lq + block.query[r]) * p.hq + block.head[r]) * p.d;
        float* row = q + (head * head_rows + r) * width_q;
        for (int c = 0; c < width_q; c += kLanes)
          store(row + c, used && c < p.d ? load_upto(tag, source + c, p.d - c) : zero());
      }
    }
    memset(o, 0, sizeof(float) * static_cast<size_t>(p.hkv * head_rows * width_o));

    Range keys = keys_of_rows(row_mask(p, task.b), {0, lq});
    keys.begin = max_of(keys.begin, task.split * plan.split_size);
    keys.end = static_cast<i32>(min_of<i64>(keys.end, (i64{task.split} + 1) * plan.split_size));
    const i64 stride_k = p.hkv * p.d, stride_v = p.hkv * p.dv;
    const Memory* k = static_cast<const Memory*>(p.k) + p.k_batch(task.b) * p.lkv * stride_k;
    const Memory* v = static_cast<const Memory*>(p.v) + p.v_batch(task.b) * p.lkv * stride_v;
    for (i32 key0 = keys.begin; key0 < keys.end; key0 += plan.block_k) {
      const int count = min_of(plan.block_k, keys.end - key0);
      const i64 ahead = min_of<i64>(plan.block_k, keys.end - key0 - count);
      const char* next_k = reinterpret_cast<const char*>(k + (key0 + count) * stride_k);
      const char* next_v = reinterpret_cast<const char*>(v + (key0 + count) * stride_v);
      // Each head prefetches its share of the next block's bytes, in memory order.
      const i64 share_k = ahead * p.d * i64{sizeof(Memory)};
      const i64 share_v = ahead * p.dv * i64{sizeof(Memory)};
      for (i64 head = 0; head < p.hkv; ++head) {
        const RowBlock block = rows_of(head);
        for (i64 byte = 0; byte < share_k; byte += 64)
          __builtin_prefetch(next_k + head * share_k + byte, 0, 2);
        for (i64 byte = 0; byte < share_v; byte += 64)
          __builtin_prefetch(next_v + head * share_v + byte, 0, 2);
        const Memory* k_head = k + key0 * stride_k + head * p.d;
        const Memory* v_head = v + key0 * stride_v + head * p.dv;
        const auto run = [&](int row, auto rows) {
          constexpr int kRows = decltype(rows)::value;
          const i64 first = head * head_rows + row;
          const DecodeRows<kRows, T> part{
              block, row, q + first * width_q, o + first * width_o, width_q, width_o, weights};
          float decay[kRows];
          part.score(k_head, stride_k, key0, count, decay);
          part.add_values(v_head, stride_v, count, decay);
        };
        int row = 0;
        for (; row + 4 <= head_rows; row += 4) run(row, Constant<4>{});
        for (; row + 2 <= head_rows; row += 2) run(row, Constant<2>{});
        if (row < head_rows) run(row, Constant<1>{});
      }
    }

    for (i64 head = 0; head < p.hkv; ++head) {
      const RowBlock block = rows_of(head);
      float* partial = task.partials + task.split * plan.partial_stride +
                       (task.b * p.hkv + head) * plan.padded_rows * (width_o + 2);
      for (int r = 0; r < head_rows; ++r) {
        const float* row = o + (head * head_rows + r) * width_o;
        if (plan.num_splits > 1) {
          memcpy(partial + i64{r} * width_o, row, sizeof(float) * static_cast<size_t>(width_o));
          partial[i64{plan.padded_rows} * width_o + r] = block.maximum[r];
          partial[i64{plan.padded_rows} * (width_o + 1) + r] = block.sum[r];
          continue;
        }
        const float sum = block.sum[r];
        const F inverse = set(sum == 0.f ? 0.f : 1.f / sum);
        const i64 index = block.index_of(r);
        Memory* out = static_cast<Memory*>(task.args->out) + index * p.dv;
        for (int c = 0; c < p.dv; c += kLanes)
          store_upto(tag, out + c, load(row + c) * inverse, p.dv - c);
        task.args->lse[index] =
            sum == 0.f ? -__builtin_inff() : block.maximum[r] + __builtin_logf(sum);
      }
    }
  });
}

}  // namespace attention::cpu::ATTENTION_CPU_ISA
