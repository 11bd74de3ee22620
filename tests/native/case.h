// SPDX-License-Identifier: Apache-2.0
// A random attention problem with any combination of options, and the accuracy rule. Shared by the
// native tests of every backend.
#pragma once

#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "kernels/common/problem.h"
#include "tests/native/number.h"
#include "tests/native/reference.h"

namespace attention::testing {

// How a [Bm, H, Lq, Lkv] operand is broadcast: true = the axis is there.
struct Axes {
  bool batch = true, head = true, query = true, key = true;
};

struct Options {
  DType dtype = DType::kFloat32;
  i64 batch = 2, lq = 64, lkv = 64, hkv = 1, group = 1, d = 16, dv = 16;
  bool causal = false, bottom_right = false;
  i64 window_left = -1, window_right = -1;
  bool q_lengths = false, kv_lengths = false, segments = false, prefix = false;
  bool mask = false, block_mask = false, bias = false, alibi = false, scale_array = false;
  Axes mask_axes, bias_axes;
  DType bias_dtype = DType::kFloat32;
  float soft_cap = 0, dropout = 0;
  bool dlse = true;
  bool shared_kv = false;  // one K and V for every batch entry
  float magnitude = 1;     // of q, k, v
  u32 seed = 1;
};

// Owns every array of a problem. Not copyable: the problem points into it.
class Case {
 public:
  explicit Case(const Options& options) : options_(options), random_(options.seed) {
    const Options& o = options_;
    Problem& p = problem;
    p.batch = o.batch;
    p.lq = o.lq;
    p.lkv = o.lkv;
    p.hkv = o.hkv;
    p.hq = o.hkv * o.group;
    p.d = o.d;
    p.dv = o.dv;
    p.dtype = o.dtype;
    p.q_batch = {1, o.batch};
    p.k_batch = p.v_batch = o.shared_kv ? BatchMap{1, 1} : BatchMap{1, o.batch};
    const i64 kv_batch = o.shared_kv ? 1 : o.batch;
    q = normal(o.batch * o.lq * p.hq * o.d, o.dtype, o.magnitude);
    k = normal(kv_batch * o.lkv * o.hkv * o.d, o.dtype, o.magnitude);
    v = normal(kv_batch * o.lkv * o.hkv * o.dv, o.dtype, o.magnitude);
    dout = normal(o.batch * o.lq * p.hq * o.dv, o.dtype, 1);
    dlse.resize(static_cast<size_t>(o.batch * o.lq * p.hq));
    for (float& x : dlse) x = static_cast<float>(gauss_(random_));
    p.q = q.data();
    p.k = k.data();
    p.v = v.data();
    p.scale = 1.f / std::sqrt(static_cast<float>(o.d));
    if (o.scale_array) {
      for (i64 b = 0; b < o.batch; ++b) scales_.push_back(p.scale * (1.f + 0.25f * b));
      p.scale_array = {scales_.data(), {1, o.batch}, 1};
    }
    p.soft_cap = o.soft_cap;
    p.causal = o.causal;
    p.bottom_right = o.bottom_right;
    p.window_left = o.window_left;
    p.window_right = o.window_right;
    if (o.bias) {
      p.bias_dtype = o.bias_dtype;
      bias_ = normal(shape(o.bias_axes, &p.bias), o.bias_dtype, 1);
      p.bias.data = bias_.data();
    }
    if (o.mask) {
      mask_.resize(static_cast<size_t>(shape(o.mask_axes, &p.mask)) + 1);
      for (u8& x : mask_) x = random_() % 4 != 0;
      p.mask.data = mask_.data();
    }
    if (o.alibi) {
      for (i64 h = 0; h < p.hq; ++h) slopes_.push_back(std::exp2(-static_cast<float>(h + 2)));
      p.alibi_slopes = {slopes_.data(), {1, 1}, p.hq};
    }
    if (o.q_lengths) {
      q_lengths_ = lengths(o.lq);
      p.q_lengths = {q_lengths_.data(), {1, o.batch}, 1};
    }
    if (o.kv_lengths) {
      kv_lengths_ = lengths(o.lkv);
      p.kv_lengths = {kv_lengths_.data(), {1, o.batch}, 1};
    }
    if (o.prefix) {
      prefix_ = lengths(o.lkv);
      p.prefix_lengths = {prefix_.data(), {1, o.batch}, 1};
    }
    if (o.segments) {
      q_segments_ = segments(o.lq);
      kv_segments_ = segments(o.lkv);
      p.q_segments = {q_segments_.data(), {1, o.batch}, o.lq};
      p.kv_segments = {kv_segments_.data(), {1, o.batch}, o.lkv};
    }
    if (o.block_mask) make_block_mask();
    if (o.dropout > 0) {
      p.dropout.threshold = static_cast<u32>(std::lround(o.dropout * 65536));
      p.dropout.keep_scale = o.dropout < 1 ? 1 / (1 - o.dropout) : 0;
      dropout_seed_ = {0x12345678u, 0x9ABCDEF0u};
      for (i64 b = 0; b < o.batch; ++b) dropout_batch_.push_back(static_cast<u32>(b + 5));
      for (i64 h = 0; h < p.hq; ++h) dropout_head_.push_back(static_cast<u32>(h + 11));
      p.dropout.seed = {dropout_seed_.data(), {1, 1}, 2};
      p.dropout.batch_index = {dropout_batch_.data(), {1, o.batch}, 1};
      p.dropout.head_index = dropout_head_.data();
    }
  }
  Case(const Case&) = delete;
  Case& operator=(const Case&) = delete;

  i64 dbias_size() const {
    const Problem& p = problem;
    if (!p.bias.data) return 0;
    return p.bias.batch.mod * (p.bias.head_stride ? p.hq : 1) * (p.bias.row_stride ? p.lq : 1) *
           (p.bias.col_stride ? p.lkv : 1);
  }

  size_t block_bits_size() const { return block_bits_.size(); }

  std::string name() const {
    const Options& o = options_;
    char text[256];
    std::snprintf(
        text, sizeof(text),
        "dtype %d B %lld Lq %lld Lkv %lld Hkv %lld G %lld D %lld Dv %lld%s%s%s%s%s%s%s%s%s%s"
        "%s window (%lld, %lld) cap %g dropout %g",
        static_cast<int>(o.dtype), o.batch, o.lq, o.lkv, o.hkv, o.group, o.d, o.dv,
        o.causal ? " causal" : "", o.bottom_right ? " bottom_right" : "",
        o.q_lengths ? " q_lengths" : "", o.kv_lengths ? " kv_lengths" : "",
        o.segments ? " segments" : "", o.prefix ? " prefix" : "", o.mask ? " mask" : "",
        o.block_mask ? " block_mask" : "", o.bias ? " bias" : "", o.alibi ? " alibi" : "",
        o.scale_array ? " scale_array" : "", o.window_left, o.window_right, o.soft_cap, o.dropout);
    return text;
  }

  const Options& options() const { return options_; }

  Problem problem;
  std::vector<u8> q, k, v, dout;
  std::vector<float> dlse;

 private:
  std::vector<u8> normal(i64 count, DType dtype, float magnitude) {
    std::vector<u8> data(static_cast<size_t>(count * size_of(dtype)));
    for (i64 n = 0; n < count; ++n) write(data.data(), dtype, n, magnitude * gauss_(random_));
    return data;
  }

  // Strides of a broadcast operand; returns its size.
  i64 shape(const Axes& axes, ScoreOperand* operand) const {
    const i64 keys = axes.key ? problem.lkv : 1, queries = axes.query ? problem.lq : 1;
    const i64 heads = axes.head ? problem.hq : 1;
    operand->col_stride = axes.key ? 1 : 0;
    operand->row_stride = axes.query ? keys : 0;
    operand->head_stride = axes.head ? keys * queries : 0;
    operand->batch_stride = keys * queries * heads;
    operand->batch = axes.batch ? BatchMap{1, problem.batch} : BatchMap{1, 1};
    return operand->batch.mod * operand->batch_stride;
  }

  std::vector<i32> lengths(i64 limit) {
    std::vector<i32> result;
    for (i64 b = 0; b < problem.batch; ++b)
      result.push_back(static_cast<i32>(b == 1 ? limit / 2 : limit - limit / 5));
    return result;
  }

  std::vector<i32> segments(i64 length) {
    std::vector<i32> ids;
    for (i64 b = 0; b < problem.batch; ++b)
      for (i64 i = 0; i < length; ++i)
        ids.push_back(i % 11 == 7 ? -1 : static_cast<i32>(3 * i / std::max<i64>(length, 1)));
    return ids;
  }

  void make_block_mask() {
    Problem& p = problem;
    const i64 rows = ceil_div<i64>(p.lq, 64), cols = ceil_div<i64>(p.lkv, 64);
    i32 tiles = 0;
    for (i64 n = 0; n < p.hq * rows * cols; ++n) {
      const u32 kind = random_() % 3;
      block_index_.push_back(kind == 0 ? kEmptyTile : kind == 1 ? kFullTile : tiles);
      if (kind != 2) continue;
      ++tiles;
      for (int w = 0; w < 128; ++w) block_bits_.push_back(random_() | random_());
    }
    p.block_mask.index = block_index_.data();
    p.block_mask.bits = block_bits_.data();
    p.block_mask.batch = {1, 1};
    p.block_mask.batch_stride = p.hq * rows * cols;
    p.block_mask.head_stride = rows * cols;
    p.block_mask.row_stride = cols;
  }

  Options options_;
  std::mt19937 random_;
  std::normal_distribution<double> gauss_;
  std::vector<u8> bias_, mask_;
  std::vector<float> scales_, slopes_;
  std::vector<i32> q_lengths_, kv_lengths_, prefix_, q_segments_, kv_segments_, block_index_;
  std::vector<u32> block_bits_, dropout_seed_, dropout_batch_, dropout_head_;
};

// The reference of a case and its baselines: the same computation in float32 with the operands of
// products rounded to the input type, or to tf32, over several orders of summation.
struct Expected {
  explicit Expected(const Case& c, bool tf32 = false)
      : dtype(c.problem.dtype), soft_cap(c.problem.soft_cap != 0) {
    const float* dlse = c.options().dlse ? c.dlse.data() : nullptr;
    reference = unfused_attention<double>(c.problem, Products::kExact, c.dout.data(), dlse);
    const Products products = tf32 ? Products::kTf32 : Products::kInputType;
    for (const Order order : {Order{0, 0, 0, false}, Order{1, 0, 1, true}, Order{2, 1, 2, false},
                              Order{3, 2, 3, true}, Order{0, 3, 1, true}, Order{1, 1, 0, false}})
      baselines.push_back(
          unfused_attention<float>(c.problem, products, c.dout.data(), dlse, order));
    find_deviations(c.problem);
  }
  DType dtype;
  bool soft_cap;
  Result reference;
  std::vector<Result> baselines;
  // Largest standard deviations of the baselines' sums, if the errors of their terms, which are
  // known, are independent; 0 where nothing is summed.
  double dbias_deviation = 0, dslopes_deviation = 0, dscale_deviation = 0;

 private:
  void find_deviations(const Problem& p) {
    const Gradients& exact = reference.grad;
    if (exact.dbias.size() != exact.dbias_terms.size()) {
      const i64 keys = p.bias.col_stride ? p.lkv : 1;
      dbias_deviation = deviation(&Gradients::dbias_terms, exact.dbias.size(), [&](i64 n) {
        const i64 row = n / keys, h = row / p.lq % p.hq;
        return p.bias.offset(row / p.lq / p.hq, h) + row % p.lq * p.bias.row_stride +
               n % keys * p.bias.col_stride;
      });
    }
    const auto row_of = [&](i64 n) { return n / p.lkv; };
    dslopes_deviation = deviation(&Gradients::dslopes_terms, exact.dslopes_rows.size(), row_of);
    dscale_deviation = deviation(&Gradients::dscale_terms, exact.dscale_rows.size(), row_of);
  }

  // entry_of: the entry that a term belongs to.
  template <typename EntryOf>
  double deviation(std::vector<double> Gradients::* terms, size_t entries, EntryOf entry_of) const {
    double largest = 0;
    const std::vector<double>& exact = reference.grad.*terms;
    for (const Result& baseline : baselines) {
      std::vector<double> variance(entries, 0);
      for (size_t n = 0; n < exact.size(); ++n) {
        const double error = (baseline.grad.*terms)[n] - exact[n];
        variance[static_cast<size_t>(entry_of(static_cast<i64>(n)))] += error * error;
      }
      for (const double x : variance) largest = std::fmax(largest, std::sqrt(x));
    }
    return largest;
  }
};

// The accuracy rule: max |x - reference| <= 2 max |baseline - reference| + atol, where atol is what
// adding and subtracting 0.3 in `dtype`, the result's, does to the reference, twice (three times
// with soft cap); to shrunken copies too in float32, where a result may be a few numbers that lose
// nothing by luck. The rule compares maxima over many entries; over fewer than 4096 the baseline's
// maximum of float32 results is sometimes small by luck, and its factor is 4. dbias, dslopes and
// dscale are sums, of which there may be few, and their errors say even less: 4 times `deviation`
// are added (0 for other results), as in tests/cases/accuracy.py. Infinities must agree exactly.
// `field` picks the array that x is compared with. Returns "" or what is wrong.
template <typename Field>
std::string check_accuracy(const char* what, const std::vector<double>& x, DType dtype,
                           const Expected& expected, const Field& field, double deviation = 0) {
  const std::vector<double>& reference = field(expected.reference);
  double error = 0, allowed = 0, atol = 0;
  size_t worst = 0;
  char text[256];
  if (x.size() != reference.size()) return std::string(what) + ": wrong size";
  for (size_t n = 0; n < x.size(); ++n) {
    if (std::isinf(reference[n]) || std::isnan(x[n])) {
      if (x[n] == reference[n]) continue;
      std::snprintf(text, sizeof(text), "%s[%zu] is %g, expected %g", what, n, x[n], reference[n]);
      return text;
    }
    const double distance = std::fabs(x[n] - reference[n]);
    if (distance > error) {
      error = distance;
      worst = n;
    }
    for (const Result& baseline : expected.baselines)
      allowed = std::fmax(allowed, std::fabs(field(baseline)[n] - reference[n]));
    for (const double shrunken : {1.0, 0.92, 0.83, 0.75}) {
      const double at = shrunken * reference[n];
      const double there = round_to(at + 0.3, dtype);
      const double back = round_to(there - round_to(0.3, dtype), dtype);
      atol = std::fmax(atol, std::fabs(back - at));
      if (dtype != DType::kFloat32) break;
    }
  }
  const bool lucky = dtype == DType::kFloat32 && x.size() < 4096;
  const double limit =
      (lucky ? 4 : 2) * allowed + (expected.soft_cap ? 3 : 2) * atol + 4 * deviation;
  if (error <= limit) return "";
  std::snprintf(text, sizeof(text), "%s[%zu] is %.9g, reference %.9g: error %.3g > limit %.3g",
                what, worst, x[worst], reference[worst], error, limit);
  return text;
}

}  // namespace attention::testing
