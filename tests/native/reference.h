// SPDX-License-Identifier: Apache-2.0
// Attention and its gradients entry by entry, from the definition: every query against every key,
// the whole score matrix of a head in memory, no tile, no online softmax. Written apart from the
// kernels: of kernels/common it reads the description of the problem only.
//
// With Real = double it is the reference; with Real = float and the operands of products rounded as
// the hardware takes them it is the unfused baseline that the accuracy rule compares with.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/common/problem.h"
#include "tests/native/number.h"

namespace attention::testing {

struct Gradients {
  std::vector<double> dq, dk, dv, dbias, dslopes_rows, dscale_rows;
  // What dbias is the sum of: dS [B, Hq, Lq, Lkv], or with one bias for all keys its sums over keys
  // [B, Hq, Lq, 1]. What the other two are, one number a row, the sums of over keys: [B, Lq, Hq,
  // Lkv].
  std::vector<double> dbias_terms, dslopes_terms, dscale_terms;
};

struct Result {
  std::vector<double> out, lse;
  Gradients grad;
};

// What one batch entry needs to know about positions.
struct Positions {
  i64 q_len, kv_len, shift, prefix;
};

inline i64 clamp_length(i64 x, i64 limit) { return x < 0 ? 0 : x > limit ? limit : x; }

inline Positions positions_of(const Problem& p, i64 b) {
  Positions at{p.lq, p.lkv, 0, 0};
  if (p.q_lengths.data) at.q_len = clamp_length(*p.q_lengths.row(b), p.lq);
  if (p.kv_lengths.data) at.kv_len = clamp_length(*p.kv_lengths.row(b), p.lkv);
  if (p.bottom_right) at.shift = at.kv_len - at.q_len;
  if (p.prefix_lengths.data) at.prefix = *p.prefix_lengths.row(b);
  return at;
}

inline bool reference_allows(const Problem& p, const Positions& at, i64 b, i64 h, i64 i, i64 j) {
  if (i >= at.q_len || j >= at.kv_len) return false;
  const i64 ii = i + at.shift;
  if (p.causal && j > ii && j >= at.prefix) return false;
  if (p.window_left >= 0 && j < ii - p.window_left) return false;
  if (p.window_right >= 0 && j > ii + p.window_right) return false;
  if (p.q_segments.data) {
    const i32 q = p.q_segments.row(b)[i], k = p.kv_segments.row(b)[j];
    if (q < 0 || k < 0 || q != k) return false;
  }
  if (p.mask.data) {
    const u8* mask = static_cast<const u8*>(p.mask.data);
    if (mask[p.mask.offset(b, h) + i * p.mask.row_stride + j * p.mask.col_stride] == 0)
      return false;
  }
  if (p.block_mask.index) {
    const BlockMaskOperand& m = p.block_mask;
    const i32 state =
        m.index[m.batch(b) * m.batch_stride + h * m.head_stride + i / 64 * m.row_stride + j / 64];
    if (state == -1) return false;
    if (state >= 0 && (m.bits[state * 128 + i % 64 * 2 + j % 64 / 32] >> (j % 32) & 1) == 0)
      return false;
  }
  return true;
}

// Philox-4x32-10 in plain 64-bit arithmetic; the keep decision of one entry.
inline bool reference_keeps(const Problem& p, i64 b, i64 h, i64 i, i64 j) {
  if (p.dropout.threshold == 0) return true;
  uint64_t c[4] = {static_cast<uint64_t>(j / 8), static_cast<uint64_t>(i), p.dropout.head_index[h],
                   *p.dropout.batch_index.row(b)};
  uint64_t k[2] = {p.dropout.seed.row(b)[0], p.dropout.seed.row(b)[1]};
  constexpr uint64_t kLow = 0xFFFFFFFFu;
  for (int round = 0; round < 10; ++round) {
    const uint64_t x = 0xD2511F53u * c[0], y = 0xCD9E8D57u * c[2];
    const uint64_t next[4] = {(y >> 32) ^ c[1] ^ k[0], y & kLow, (x >> 32) ^ c[3] ^ k[1], x & kLow};
    for (int n = 0; n < 4; ++n) c[n] = next[n];
    k[0] = (k[0] + 0x9E3779B9u) & kLow;
    k[1] = (k[1] + 0xBB67AE85u) & kLow;
  }
  const uint64_t value = (c[j % 8 / 2] >> (j % 2 ? 16 : 0)) & 0xFFFF;
  return value >= p.dropout.threshold;
}

// The order in which sums run (0: forwards, 1: backwards, 2: even indices first, 3: odd ones
// first), and where the backward pass takes P and delta = sum_j P dP from: from_results: from the
// rounded lse and output, which is all that a backward pass without the matrix P has. The baseline
// of the accuracy rule is taken over several of these, because the error of one float32 sum in one
// order may happen to be 0.
struct Order {
  int keys = 0, dims = 0, rows = 0;
  bool from_results = false;
};

inline std::vector<i64> indices(i64 count, int order) {
  std::vector<i64> result;
  if (order < 2) {
    for (i64 n = 0; n < count; ++n) result.push_back(order == 1 ? count - 1 - n : n);
  } else {
    for (const i64 first : {order - 2, 3 - order})
      for (i64 n = first; n < count; n += 2) result.push_back(n);
  }
  return result;
}

// How operands of matrix products are rounded, P and dS too: not at all, to the input type, or to
// the 10 mantissa bits of tf32.
enum class Products { kExact, kInputType, kTf32 };

// dout [B, Lq, Hq, Dv] in p.dtype and dlse [B, Lq, Hq]; null: no gradients / no cotangent of lse.
template <typename Real>
Result unfused_attention(const Problem& p, Products products, const void* dout, const float* dlse,
                         Order order = {}) {
  const i64 rows = p.batch * p.lq * p.hq;
  Result r;
  r.out.assign(static_cast<size_t>(rows * p.dv), 0);
  r.lse.assign(static_cast<size_t>(rows), -std::numeric_limits<double>::infinity());
  std::vector<Real> dk(static_cast<size_t>(p.batch * p.lkv * p.hkv * p.d), 0),
      dv(static_cast<size_t>(p.batch * p.lkv * p.hkv * p.dv), 0);
  std::vector<Real> dbias;
  if (dout) {
    r.grad.dq.assign(static_cast<size_t>(rows * p.d), 0);
    r.grad.dslopes_rows.assign(static_cast<size_t>(rows), 0);
    r.grad.dscale_rows.assign(static_cast<size_t>(rows), 0);
    r.grad.dslopes_terms.assign(static_cast<size_t>(rows * p.lkv), 0);
    r.grad.dscale_terms.assign(static_cast<size_t>(rows * p.lkv), 0);
    if (p.bias.data)
      dbias.assign(
          static_cast<size_t>(p.bias.batch.mod * (p.bias.head_stride ? p.hq : 1) *
                              (p.bias.row_stride ? p.lq : 1) * (p.bias.col_stride ? p.lkv : 1)),
          0);
    if (p.bias.data)
      r.grad.dbias_terms.assign(static_cast<size_t>(rows * (p.bias.col_stride ? p.lkv : 1)), 0);
  }
  std::vector<Real> s(static_cast<size_t>(p.lkv)), raw(s), tanh_s(s), weight(s), dropped(s);
  std::vector<char> allowed(static_cast<size_t>(p.lkv));
  std::vector<Real> q_row(static_cast<size_t>(p.d)), do_row(static_cast<size_t>(p.dv));
  std::vector<Real> do_operand(do_row);
  std::vector<Real> k_all(static_cast<size_t>(p.lkv * p.d)),
      v_all(static_cast<size_t>(p.lkv * p.dv));
  const std::vector<i64> keys = indices(p.lkv, order.keys), queries = indices(p.lq, order.rows),
                         dims = indices(p.d, order.dims), dims_v = indices(p.dv, order.dims);
  const auto operand = [&](double x) {
    if (products == Products::kExact) return static_cast<Real>(x);
    return static_cast<Real>(products == Products::kTf32 ? round_to(x, 10, -126, 3.4e38)
                                                         : round_to(x, p.dtype));
  };
  // Of q, k, v and dout, which are of the input type already.
  const auto input = [&](double x) {
    return products == Products::kTf32 ? operand(x) : static_cast<Real>(x);
  };
  for (i64 b = 0; b < p.batch; ++b) {
    const Positions at = positions_of(p, b);
    const Real scale = static_cast<Real>(p.scale_array.data ? *p.scale_array.row(b) : p.scale);
    for (i64 h = 0; h < p.hq; ++h) {
      const i64 hk = h / (p.hq / p.hkv);
      for (i64 j : keys) {
        for (i64 c = 0; c < p.d; ++c)
          k_all[j * p.d + c] =
              input(read(p.k, p.dtype, ((p.k_batch(b) * p.lkv + j) * p.hkv + hk) * p.d + c));
        for (i64 c = 0; c < p.dv; ++c)
          v_all[j * p.dv + c] =
              input(read(p.v, p.dtype, ((p.v_batch(b) * p.lkv + j) * p.hkv + hk) * p.dv + c));
      }
      for (i64 i : queries) {
        const i64 row = (b * p.lq + i) * p.hq + h;
        for (i64 c = 0; c < p.d; ++c)
          q_row[c] = input(read(p.q, p.dtype, ((p.q_batch(b) * p.lq + i) * p.hq + h) * p.d + c));
        Real maximum = -std::numeric_limits<Real>::infinity();
        for (i64 j : keys) {
          allowed[j] = reference_allows(p, at, b, h, i, j);
          if (!allowed[j]) continue;
          Real dot = 0;
          for (i64 c : dims) dot += q_row[c] * k_all[j * p.d + c];
          raw[j] = dot;
          Real x = dot * scale;
          if (p.soft_cap != 0) {
            const Real cap = static_cast<Real>(p.soft_cap);
            tanh_s[j] = std::tanh(x / cap);
            x = cap * tanh_s[j];
          }
          if (p.bias.data)
            x += static_cast<Real>(
                read(p.bias.data, p.bias_dtype,
                     p.bias.offset(b, h) + i * p.bias.row_stride + j * p.bias.col_stride));
          if (p.alibi_slopes.data)
            x -= static_cast<Real>(p.alibi_slopes.row(b)[h]) *
                 static_cast<Real>(std::llabs(i + at.shift - j));
          if (std::isinf(x) && x < 0) allowed[j] = false;
          s[j] = x;
          if (allowed[j] && x > maximum) maximum = x;
        }
        if (std::isinf(maximum) && maximum < 0) continue;
        Real sum = 0;
        for (i64 j : keys) {
          weight[j] = allowed[j] ? std::exp(s[j] - maximum) : Real(0);
          sum += weight[j];
        }
        r.lse[row] = static_cast<double>(maximum + std::log(sum));
        const Real keep_scale = static_cast<Real>(p.dropout.keep_scale);
        const auto drop = [&](i64 j) {
          if (p.dropout.threshold == 0) return operand(weight[j]);
          return reference_keeps(p, b, h, i, j) ? operand(weight[j] * keep_scale) : Real(0);
        };
        for (i64 j : keys) {
          weight[j] /= sum;
          dropped[j] = drop(j);
          if (!allowed[j]) continue;
          for (i64 c = 0; c < p.dv; ++c) {
            // The accumulator of the baseline is a Real, not a double.
            double& out = r.out[row * p.dv + c];
            out = static_cast<Real>(static_cast<Real>(out) + dropped[j] * v_all[j * p.dv + c]);
          }
        }
        if (!dout) continue;

        for (i64 c = 0; c < p.dv; ++c) {
          do_row[c] = static_cast<Real>(read(dout, p.dtype, row * p.dv + c));
          do_operand[c] = input(do_row[c]);
        }
        if (order.from_results) {
          const Real lse = static_cast<float>(r.lse[row]);
          for (i64 j : keys) {
            weight[j] = allowed[j] ? std::exp(s[j] - lse) : Real(0);
            dropped[j] = drop(j);
          }
        }
        std::vector<Real>& dp = s;  // the scores are not needed any more
        Real delta = 0;
        for (i64 j : keys) {
          if (!allowed[j]) continue;
          Real dot = 0;
          for (i64 c : dims_v) dot += do_operand[c] * v_all[j * p.dv + c];
          if (p.dropout.threshold != 0)
            dot = reference_keeps(p, b, h, i, j) ? dot * keep_scale : Real(0);
          // Where P is rounded to the input type, its cotangent is of that type as well.
          if (!order.from_results && products == Products::kInputType) dot = operand(dot);
          dp[j] = dot;
          delta += weight[j] * dot;
          for (i64 c = 0; c < p.dv; ++c)
            dv[((b * p.lkv + j) * p.hkv + hk) * p.dv + c] += dropped[j] * do_operand[c];
        }
        if (order.from_results) {
          // Last column first: where one key has all the weight, dP sums the same products, and in
          // the same order the two would cancel without a rounding error, which no kernel that
          // forms them in different places can do.
          delta = 0;
          for (auto c = dims_v.rbegin(); c != dims_v.rend(); ++c)
            delta += do_row[*c] * static_cast<Real>(round_to(r.out[row * p.dv + *c], p.dtype));
        }
        if (dlse) delta -= static_cast<Real>(dlse[row]);
        std::vector<Real> dq(static_cast<size_t>(p.d), 0);
        Real dslope = 0, dscale = 0, sum_of_row = 0;
        for (i64 j : keys) {
          if (!allowed[j]) continue;
          Real ds = weight[j] * (dp[j] - delta);
          if (p.bias.data) {
            const i64 head = p.bias.head_stride ? p.bias.head_stride * h : 0;
            dbias[p.bias.batch(b) * p.bias.batch_stride + head + i * p.bias.row_stride +
                  j * p.bias.col_stride] += ds;
            const i64 term = (b * p.hq + h) * p.lq + i;
            if (p.bias.col_stride) {
              r.grad.dbias_terms[term * p.lkv + j] = static_cast<double>(ds);
            } else {
              sum_of_row += ds;
              r.grad.dbias_terms[term] = static_cast<double>(sum_of_row);
            }
          }
          const Real of_slope = -ds * static_cast<Real>(std::llabs(i + at.shift - j));
          dslope += of_slope;
          r.grad.dslopes_terms[row * p.lkv + j] = static_cast<double>(of_slope);
          if (p.soft_cap != 0) ds *= 1 - tanh_s[j] * tanh_s[j];
          dscale += ds * raw[j];
          r.grad.dscale_terms[row * p.lkv + j] = static_cast<double>(ds * raw[j]);
          ds = operand(ds);
          for (i64 c = 0; c < p.d; ++c) {
            dq[c] += ds * k_all[j * p.d + c];
            dk[((b * p.lkv + j) * p.hkv + hk) * p.d + c] += ds * scale * q_row[c];
          }
        }
        for (i64 c = 0; c < p.d; ++c) r.grad.dq[row * p.d + c] = static_cast<double>(dq[c] * scale);
        r.grad.dslopes_rows[row] = static_cast<double>(dslope);
        r.grad.dscale_rows[row] = static_cast<double>(dscale);
      }
    }
  }
  if (dout) {
    r.grad.dk.assign(dk.begin(), dk.end());
    r.grad.dv.assign(dv.begin(), dv.end());
    r.grad.dbias.assign(dbias.begin(), dbias.end());
  }
  if (products != Products::kExact) {
    for (double& x : r.out) x = round_to(x, p.dtype);
    for (std::vector<double>* g : {&r.grad.dq, &r.grad.dk, &r.grad.dv})
      for (double& x : *g) x = round_to(x, p.dtype);
  }
  return r;
}

}  // namespace attention::testing
