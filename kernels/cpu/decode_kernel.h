// SPDX-License-Identifier: Apache-2.0
// Forward attention for few rows against many keys, where reading K and V once is what takes the
// time. A task streams an interval of keys of all key/value heads, a block of K and a block of V in
// turn, so that memory is read in order; every step of a sum asks for the cache line that the same
// step will want a few kilobytes later, because a burst of such requests would stall the loads that
// follow it. Head dimension in SIMD lanes, K and V in their natural layout, nothing is packed.
// Splits are merged by merge_splits.
#pragma once

#include "kernels/cpu/convert.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/product.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/score.h"

namespace attention::cpu::ATTENTION_CPU_ISA {

// Writes the sums over all lanes of four vectors.
ATTENTION_INLINE void store_sums(float* p, F a, F b, F c, F d) {
#if defined(__AVX2__)
  // Halves of 128 bits side by side: shuffles across them take three times as long.
#if defined(__AVX512F__)
  const auto pairs = [](F x, F y) {
    return (F)_mm512_unpacklo_ps((__m512)x, (__m512)y) +
           (F)_mm512_unpackhi_ps((__m512)x, (__m512)y);
  };
  const F ab = pairs(a, b), cd = pairs(c, d);
  const __m512 wide = (__m512)((F)_mm512_shuffle_ps((__m512)ab, (__m512)cd, 0x44) +
                               (F)_mm512_shuffle_ps((__m512)ab, (__m512)cd, 0xEE));
  const __m256 sums = _mm256_add_ps(_mm512_castps512_ps256(wide), _mm512_extractf32x8_ps(wide, 1));
#else
  const auto pairs = [](F x, F y) {
    return (F)_mm256_unpacklo_ps((__m256)x, (__m256)y) +
           (F)_mm256_unpackhi_ps((__m256)x, (__m256)y);
  };
  const F ab = pairs(a, b), cd = pairs(c, d);
  const __m256 sums = (__m256)((F)_mm256_shuffle_ps((__m256)ab, (__m256)cd, 0x44) +
                               (F)_mm256_shuffle_ps((__m256)ab, (__m256)cd, 0xEE));
#endif
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
#else
  const auto halves = [](F x, F y) {
    return __builtin_shufflevector(x, y, 0, 4, 1, 5) + __builtin_shufflevector(x, y, 2, 6, 3, 7);
  };
  store(p, halves(halves(a, c), halves(b, d)));
#endif
}

// Two vectors of consecutive elements: `first` and `second`. bfloat16 is widened where it lies, so
// that one load and two logical operations make both: then `first` holds the elements at even
// places and `second` those at odd ones. Sums over elements do not care; ordered() undoes it.
struct VectorPair {
  F first, second;
};
template <typename T>
ATTENTION_INLINE VectorPair load_pair(T tag, const typename T::Memory* p) {
  return {load_as(tag, p), load_as(tag, p + kLanes)};
}
ATTENTION_INLINE VectorPair load_pair(BFloat16, const u16* p) {
  I words;
  memcpy(&words, p, sizeof(words));
  return {bits_to_float(words << 16), bits_to_float(words & set(static_cast<i32>(0xFFFF0000u)))};
}
// The first n elements, the rest 0; nothing past element n is touched.
template <typename T>
ATTENTION_INLINE VectorPair load_pair_upto(T tag, const typename T::Memory* p, int n) {
  if (n >= 2 * kLanes) return load_pair(tag, p);
  typename T::Memory buffer[2 * kLanes] = {};
  for (int i = 0; i < n; ++i) buffer[i] = p[i];
  return load_pair(tag, buffer);
}
template <typename T>
ATTENTION_INLINE VectorPair ordered(T, VectorPair x) {
  return x;
}
ATTENTION_INLINE VectorPair ordered(BFloat16, VectorPair x) {
#if defined(__AVX512F__)
  return {__builtin_shufflevector(x.first, x.second, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6,
                                  22, 7, 23),
          __builtin_shufflevector(x.first, x.second, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29,
                                  14, 30, 15, 31)};
#elif defined(__AVX2__)
  return {__builtin_shufflevector(x.first, x.second, 0, 8, 1, 9, 2, 10, 3, 11),
          __builtin_shufflevector(x.first, x.second, 4, 12, 5, 13, 6, 14, 7, 15)};
#else
  return {__builtin_shufflevector(x.first, x.second, 0, 4, 1, 5),
          __builtin_shufflevector(x.first, x.second, 2, 6, 3, 7)};
#endif
}

// Vectors of sums that stay in registers beside their operands: as many as keep two multipliers
// busy in spite of their latency.
inline constexpr int kDecodeSums = kLanes == 16 ? 16 : 8;
// Elements of one step along a head dimension.
inline constexpr int kDecodeStep = 2 * kLanes;
// Keys of one visit to a head: few, so that all heads together read memory nearly in order, and
// enough that sums over them stay in registers for a while.
inline constexpr int kDecodeChunk = max_of(8, kLanes);
// Bytes between what is worked on and what is asked for.
inline constexpr i64 kDecodeAhead = 16 * 1024;

// Keys of one head in memory, and those that are read a little later.
template <typename Memory>
struct KeyRows {
  const Memory* rows;
  i64 stride;
  int count;
  const Memory* ahead;
  i64 ahead_stride;

  ATTENTION_INLINE const Memory* row(int n) const { return rows + n * stride; }
  ATTENTION_INLINE void prefetch(int n, int column) const {
    __builtin_prefetch(ahead + n * ahead_stride + column, 0, 2);
  }
};

// kRows rows (1, 2 or 4) of one key/value head.
template <int kRows, typename T>
struct DecodeRows {
  using Memory = typename T::Memory;
  static constexpr int kKeys = kLanes / kRows;       // of one vector of weights
  static constexpr int kPass = kDecodeSums / kRows;  // keys whose scores are summed at a time
  static constexpr int kStrip = kPass / 2;           // steps of columns that are summed at a time

  const float* q;  // [row][width_q], zero past D
  float* o;        // [row][width_o], unnormalised
  float* o_block;  // the same over the present block of keys
  int width_q, width_o;
  float* weights;  // [key of the block][row]
  float* decay;    // [row]

  // Dot products with keys [j, j + count) of the block.
  ATTENTION_INLINE void score(const KeyRows<Memory>& k, int d, int j) const {
    const int whole = d / kDecodeStep * kDecodeStep;
    for (int i = 0; i < k.count; i += kPass) {
      const Memory* rows[kPass];
#pragma GCC unroll 16
      for (int n = 0; n < kPass; ++n) rows[n] = k.row(min_of(i + n, k.count - 1));
      F acc[kDecodeSums];
#pragma GCC unroll 16
      for (int n = 0; n < kDecodeSums; ++n) acc[n] = zero();
      const auto add = [&](int c, auto load_keys) {
#pragma GCC unroll 16
        for (int n = 0; n < kPass; ++n) {
          const VectorPair x = load_keys(rows[n] + c);
          k.prefetch(i + n, c);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const float* y = q + r * width_q + c;
            F& sum = acc[n * kRows + r];
            sum = fma(x.second, load(y + kLanes), fma(x.first, load(y), sum));
          }
        }
      };
      for (int c = 0; c < whole; c += kDecodeStep)
        add(c, [](const Memory* p) { return load_pair(T{}, p); });
      if (whole < d) add(whole, [&](const Memory* p) { return load_pair_upto(T{}, p, d - whole); });
      float* sums = weights + (j + i) * kRows;
#pragma GCC unroll 4
      for (int n = 0; n < kDecodeSums; n += 4)
        store_sums(sums + n, acc[n], acc[n + 1], acc[n + 2], acc[n + 3]);
    }
  }

  // Turns the dot products of keys [key0, key0 + keys) into weights: options, masks and online
  // softmax.
  ATTENTION_INLINE void weigh(const RowBlock& block, int row, i32 key0, int keys) const {
    const Problem& p = *block.problem;
    i32 lane_key[kLanes], lane_begin[kLanes], lane_end[kLanes], lane_position[kLanes];
    float lane_slope[kLanes];
    i32 all_begin = 0, all_end = 0x7FFFFFFF;
    for (int lane = 0; lane < kLanes; ++lane) {
      const int r = row + lane % kRows;
      lane_key[lane] = key0 + lane / kRows;
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
      F s = load(weights + j * kRows) * scale;
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
      for (int n = 0; n < kKeys; ++n) m = max_of(m, lanes[n * kRows + r]);
      const float shift = m == -__builtin_inff() ? 0.f : m;
      decay[r] = old == m ? 1.f : __builtin_expf(old - shift);
      block.maximum[row + r] = m;
      for (int n = 0; n < kKeys; ++n) shifts[n * kRows + r] = shift;
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
      for (int n = 0; n < kKeys; ++n) total += lanes[n * kRows + r];
      block.sum[row + r] = block.sum[row + r] * decay[r] + total;
    }
  }

  // O += P V over keys [j, j + count) of the block, for kSteps steps of columns. A sum of its own
  // for each block of keys: one running sum over all keys would round more.
  template <int kSteps>
  ATTENTION_INLINE void value_strip(const KeyRows<Memory>& v, int j, int column, int left,
                                    bool first, bool last) const {
    constexpr int kVectors = 2 * kSteps;
    F acc[kRows][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; ++n)
        acc[r][n] = first ? zero() : load(o_block + r * width_o + column + n * kLanes);
    const auto add = [&](auto load_values) {
      const float* w = weights + j * kRows;
#pragma GCC unroll 2
      for (int i = 0; i < v.count; ++i, w += kRows) {
        const Memory* row = v.row(i) + column;
#pragma GCC unroll 16
        for (int n = 0; n < kSteps; ++n) {
          const VectorPair x = load_values(row + n * kDecodeStep, n);
          v.prefetch(i, column + n * kDecodeStep);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const F weight = set(w[r]);
            acc[r][2 * n] = fma(x.first, weight, acc[r][2 * n]);
            acc[r][2 * n + 1] = fma(x.second, weight, acc[r][2 * n + 1]);
          }
        }
      }
    };
    if (left >= kSteps * kDecodeStep) {
      add([](const Memory* p, int) { return load_pair(T{}, p); });
    } else {
      add([&](const Memory* p, int n) { return load_pair_upto(T{}, p, left - n * kDecodeStep); });
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; ++n) {
        const int at = r * width_o + column + n * kLanes;
        if (last) {
          store(o + at, fma(load(o + at), set(decay[r]), acc[r][n]));
        } else {
          store(o_block + at, acc[r][n]);
        }
      }
  }

  // The same for all columns.
  ATTENTION_INLINE void add_values(const KeyRows<Memory>& v, int dv, int j, bool first,
                                   bool last) const {
    int column = 0;
    for (; column + kStrip * kDecodeStep <= dv; column += kStrip * kDecodeStep)
      value_strip<kStrip>(v, j, column, dv - column, first, last);
    for (; column < dv; column += kDecodeStep)
      value_strip<1>(v, j, column, dv - column, first, last);
  }
};

// Calls function(first row, integral constant number of rows) for the row tiles of one head.
template <typename Function>
ATTENTION_INLINE void for_each_decode_tile(int rows, const Function& function) {
  int row = 0;
  for (; row + 4 <= rows; row += 4) function(row, Constant<4>{});
  for (; row + 2 <= rows; row += 2) function(row, Constant<2>{});
  if (row < rows) function(row, Constant<1>{});
}

inline void forward_decode(const ForwardTask& task) {
  const Problem& p = task.args->problem;
  const Plan& plan = *task.plan;
  const Scratch& at = plan.scratch;
  const i32 group = static_cast<i32>(p.group()), lq = static_cast<i32>(p.lq);
  const i32 head_rows = lq * group;
  const int d = static_cast<int>(p.d), dv = static_cast<int>(p.dv);
  const int width_q = round_up(d, kDecodePad), width_o = round_up(dv, kDecodePad);
  const int width_s = plan.block_k + kDecodePad;
  const int width_p = round_up(dv, 16);  // of partial results
  const auto floats = [&](i64 offset) { return reinterpret_cast<float*>(task.scratch + offset); };
  float* q = floats(at.q_t);
  float* o = floats(at.o_t);

  // One row block a key/value head; all of them stay in scratch while the keys stream by.
  const auto arrays_of = [&](i64 head) {
    return task.scratch + at.rows + head * plan.padded_rows * kRowArrays * i64{sizeof(float)};
  };
  const auto rows_of = [&](i64 head) {
    RowBlock view;
    view_rows(view, p, task.b, head, static_cast<i32>(head) * group, group, 0, lq, arrays_of(head),
              plan.padded_rows);
    return view;
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
        for (int c = 0; c < width_q; c += kDecodeStep) {
          const VectorPair x = load_pair_upto(tag, source + c, used ? max_of(d - c, 0) : 0);
          store(row + c, x.first);
          store(row + c + kLanes, x.second);
        }
      }
    }
    memset(o, 0, sizeof(float) * static_cast<size_t>(p.hkv * head_rows * width_o));

    Range keys = keys_of_rows(row_mask(p, task.b), {0, lq});
    keys.begin = max_of(keys.begin, task.split * plan.split_size);
    keys.end = static_cast<i32>(min_of<i64>(keys.end, (i64{task.split} + 1) * plan.split_size));
    const i64 stride_k = p.hkv * p.d, stride_v = p.hkv * p.dv;
    const Memory* k = static_cast<const Memory*>(p.k) + p.k_batch(task.b) * p.lkv * stride_k;
    const Memory* v = static_cast<const Memory*>(p.v) + p.v_batch(task.b) * p.lkv * stride_v;

    // Calls function(tile, its first row) for every row tile of a head.
    const auto for_each_tile_of = [&](i64 head, const auto& function) {
      for_each_decode_tile(head_rows, [&](int row, auto rows) {
        const i64 first = head * head_rows + row;
        function(DecodeRows<decltype(rows)::value, T>{q + first * width_q, o + first * width_o,
                                                      floats(at.o_block) + first * width_o, width_q,
                                                      width_o, floats(at.s) + first * width_s,
                                                      floats(at.decay) + first},
                 row);
      });
    };
    // Calls function(head, j, keys [j, ..) of that head) for the keys of a block, in chunks. What
    // follows the block in time lies at `next`.
    struct Operand {
      const Memory* rows;
      i64 stride;
      int count;
    };
    const auto stream = [&](const Operand& now, const Operand& next, const auto& function) {
      const i64 row_bytes = now.stride * i64{sizeof(Memory)};
      const int ahead = round_up(
          static_cast<int>(clamp_to<i64>(kDecodeAhead / row_bytes, 1, plan.block_k)), kDecodeChunk);
      for (int j = 0; j < now.count; j += kDecodeChunk) {
        const bool here = j + ahead + kDecodeChunk <= now.count;
        const Operand& later = here ? now : next;
        const int first = here ? j + ahead : max_of(j + ahead - now.count, 0);
        // The last chunks of all have nothing to ask for: what they read themselves costs nothing.
        const bool any = first + kDecodeChunk <= later.count;
        KeyRows<Memory> part{
            now.rows + j * now.stride, now.stride, min_of(kDecodeChunk, now.count - j),
            any ? later.rows + first * later.stride : now.rows, any ? later.stride : 0};
        for (i64 head = 0; head < p.hkv; ++head) {
          function(head, j, part);
          part.rows += now.stride / p.hkv;
          part.ahead += part.ahead_stride / p.hkv;
        }
      }
    };
    for (i32 key0 = keys.begin; key0 < keys.end; key0 += plan.block_k) {
      const int count = min_of(plan.block_k, keys.end - key0);
      const int next_count = min_of(plan.block_k, keys.end - key0 - count);
      const Operand k_block{k + key0 * stride_k, stride_k, count};
      const Operand v_block{v + key0 * stride_v, stride_v, count};
      const Operand next_k{k_block.rows + count * stride_k, stride_k, next_count};
      stream(k_block, v_block, [&](i64 head, int j, const KeyRows<Memory>& part) {
        for_each_tile_of(head, [&](const auto& tile, int) { tile.score(part, d, j); });
      });
      for (i64 head = 0; head < p.hkv; ++head) {
        const RowBlock block = rows_of(head);
        for_each_tile_of(head,
                         [&](const auto& tile, int row) { tile.weigh(block, row, key0, count); });
      }
      stream(v_block, next_k, [&](i64 head, int j, const KeyRows<Memory>& part) {
        for_each_tile_of(head, [&](const auto& tile, int) {
          tile.add_values(part, dv, j, j == 0, j + part.count == count);
        });
      });
    }

    for (i64 head = 0; head < p.hkv; ++head) {
      const RowBlock block = rows_of(head);
      float* partial = task.partials + task.split * plan.partial_stride +
                       (task.b * p.hkv + head) * plan.padded_rows * (width_p + 2);
      for (int r = 0; r < head_rows; ++r) {
        float* row = o + (head * head_rows + r) * width_o;
        for (int c = 0; c < dv; c += kDecodeStep) {
          const VectorPair x = ordered(tag, {load(row + c), load(row + c + kLanes)});
          store(row + c, x.first);
          store(row + c + kLanes, x.second);
        }
        if (plan.num_splits > 1) {
          memcpy(partial + i64{r} * width_p, row, sizeof(float) * static_cast<size_t>(width_p));
          partial[i64{plan.padded_rows} * width_p + r] = block.maximum[r];
          partial[i64{plan.padded_rows} * (width_p + 1) + r] = block.sum[r];
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
