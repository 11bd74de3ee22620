// SPDX-License-Identifier: Apache-2.0
// What must not change a result by a bit: NaN where nobody may look, another order of warps and
// blocks, a second run.
#include "tests/native/cuda/run.h"

namespace attention::testing {
namespace {

Options base() {
  Options o;
  o.dtype = DType::kBFloat16;
  o.batch = 2;
  o.lq = 90;
  o.lkv = 150;
  o.hkv = 2;
  o.group = 2;
  o.d = o.dv = 64;
  return o;
}

// Fills the keys and values that no query of their (batch, kv head) may attend to, and the query
// rows past their length (q and dO), with x. Returns how many keys those are.
i64 paint(Case& c, double x) {
  const Problem& p = c.problem;
  const DType dtype = p.dtype;
  i64 unseen = 0;
  const auto fill = [&](std::vector<u8>& data, i64 row, i64 width) {
    for (i64 n = 0; n < width; ++n) write(data.data(), dtype, row * width + n, x);
  };
  for (i64 b = 0; b < p.batch; ++b) {
    const Positions at = positions_of(p, b);
    for (i64 hk = 0; hk < p.hkv; ++hk) {
      for (i64 j = 0; j < p.lkv; ++j) {
        bool seen = false;
        for (i64 g = 0; g < p.group() && !seen; ++g) {
          const i64 h = hk * p.group() + g;
          for (i64 i = 0; i < p.lq && !seen; ++i) seen = reference_allows(p, at, b, h, i, j);
        }
        if (seen) continue;
        ++unseen;
        fill(c.k, (b * p.lkv + j) * p.hkv + hk, p.d);
        fill(c.v, (b * p.lkv + j) * p.hkv + hk, p.dv);
      }
    }
    for (i64 i = at.q_len; i < p.lq; ++i) {
      for (i64 h = 0; h < p.hq; ++h) {
        fill(c.q, (b * p.lq + i) * p.hq + h, p.d);
        fill(c.dout, (b * p.lq + i) * p.hq + h, p.dv);
      }
    }
  }
  return unseen;
}

void expect_poison_is_invisible(const Options& o, const RunOptions& options = {}) {
  Case c(o);
  const i64 unseen = paint(c, 0);
  const Run clean = run(c, options);
  EXPECT_THAT(unseen > 0 || o.q_lengths, c.name() + ": nothing to poison");
  for (const double x : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    paint(c, x);
    const Run poisoned_run = run(c, options);
    EXPECT_THAT(clean.error.empty() && poisoned_run.error.empty(), clean.error);
    EXPECT_THAT(clean == poisoned_run, c.name() + ": poison shows");
  }
}

TEST(poison_past_lengths) {
  Options o = base();
  o.q_lengths = o.kv_lengths = true;
  expect_poison_is_invisible(o);
  o.causal = o.bottom_right = true;
  expect_poison_is_invisible(o);
  RunOptions options;
  options.tuning = {16, 32, 2};
  expect_poison_is_invisible(o, options);
}

TEST(poison_outside_causal_and_window) {
  Options o = base();
  o.causal = true;
  expect_poison_is_invisible(o);
  o.window_left = 20;
  o.bottom_right = true;
  expect_poison_is_invisible(o);
}

TEST(poison_under_scattered_masks) {
  Options o = base();
  o.segments = true;
  expect_poison_is_invisible(o);
  o = base();
  o.block_mask = true;
  o.kv_lengths = true;
  o.seed = 3;
  expect_poison_is_invisible(o);
}

// A key that every query's mask forbids lies among keys that are seen.
TEST(poison_under_a_dense_mask) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    Options o = base();
    o.dtype = dtype;
    Case c(o);
    std::vector<u8> mask(static_cast<size_t>(o.lkv), 1);
    mask[5] = mask[70] = 0;
    c.problem.mask = {mask.data(), {1, 1}, o.lkv, 0, 0, 1};
    EXPECT(paint(c, 0) == 2 * o.hkv * o.batch);
    const Run clean = run(c);
    paint(c, NAN);
    const Run poisoned_run = run(c);
    EXPECT_THAT(clean.error.empty(), clean.error);
    EXPECT(clean == poisoned_run);
  }
}

// A bias of -inf is a mask, for this rule too.
TEST(poison_under_a_bias_of_minus_infinity) {
  Options o = base();
  Case c(o);
  std::vector<float> bias(static_cast<size_t>(o.lkv), 0.5f);
  bias[9] = -INFINITY;
  c.problem.bias = {bias.data(), {1, 1}, o.lkv, 0, 0, 1};
  const auto paint_key = [&](double x) {
    for (i64 b = 0; b < o.batch; ++b) {
      for (i64 n = 0; n < o.hkv * o.d; ++n) {
        write(c.k.data(), o.dtype, (b * o.lkv + 9) * o.hkv * o.d + n, x);
        write(c.v.data(), o.dtype, (b * o.lkv + 9) * o.hkv * o.d + n, x);
      }
    }
  };
  paint_key(0);
  const Run clean = run(c);
  paint_key(NAN);
  const Run poisoned_run = run(c);
  EXPECT_THAT(clean.error.empty(), clean.error);
  EXPECT(clean == poisoned_run);
}

TEST(rows_of_the_smallest_bias_stay_finite) {
  Options o = base();
  Case c(o);
  std::vector<float> bias(static_cast<size_t>(o.lkv), -3.4028235e38f);
  c.problem.bias = {bias.data(), {1, 1}, o.lkv, 0, 0, 1};
  const Run r = run(c);
  EXPECT_THAT(r.error.empty(), r.error);
  for (const std::vector<u8>* x : {&r.out, &r.dq, &r.dk, &r.dv}) {
    for (const double value : values(*x, o.dtype)) EXPECT(std::isfinite(value));
  }
}

TEST(schedules_give_the_same_bits) {
  for (int variant = 0; variant < 3; ++variant) {
    Options o = base();
    o.causal = true;
    o.alibi = variant == 1;
    o.bias = variant == 1;
    o.lq = variant == 2 ? 2 : o.lq;
    const Case c(o);
    RunOptions options;
    options.tuning.num_splits = variant == 2 ? 3 : 0;
    const Run first = run(c, options);
    EXPECT_THAT(first.error.empty(), first.error);
    EXPECT(first == run(c, options));
    options.emulator.schedule = emulator::Schedule::kReverse;
    options.emulator.reverse_blocks = true;
    EXPECT(first == run(c, options));
    options.emulator.schedule = emulator::Schedule::kRandom;
    options.emulator.seed = 7;
    options.emulator.host_threads = 2;
    EXPECT(first == run(c, options));
  }
}

TEST(no_bank_conflicts_in_ldmatrix) {
  for (const i64 d : {32, 64, 96, 128, 192, 256}) {
    Options o = base();
    o.d = o.dv = d;
    o.batch = 1;
    const Case c(o);
    emulator::reset_counters();
    const Run r = run(c);
    EXPECT_THAT(r.error.empty(), r.error);
    EXPECT(emulator::counters().ldmatrix > 0);
    EXPECT(emulator::counters().ldmatrix_conflicts == 0);
  }
}

// Full tiles take no mask work and empty ones are not visited: counted in products.
TEST(empty_tiles_are_not_visited) {
  Options o = base();
  o.batch = 1;
  o.lq = o.lkv = 512;
  RunOptions options;
  options.tuning = {64, 32, 1};
  options.backward_block_q = 128;  // two kernels, the form that all of these cases have
  const auto products = [&](const Case& c) {
    emulator::reset_counters();
    const Run r = run(c, options);
    EXPECT_THAT(r.error.empty(), r.error);
    return emulator::counters().mma;
  };
  const auto all = products(Case(o));
  o.causal = true;
  const auto causal = products(Case(o));
  o.causal = false;
  o.window_left = o.window_right = 16;
  const auto window = products(Case(o));
  EXPECT(causal < 0.6 * all);
  EXPECT(window < 0.25 * all);
  // Four documents of 128 tokens.
  o.window_left = o.window_right = -1;
  Case packed(o);
  std::vector<i32> ids(512);
  for (int n = 0; n < 512; ++n) ids[n] = n / 128;
  packed.problem.q_segments = packed.problem.kv_segments = {ids.data(), {1, 1}, 512};
  EXPECT(products(packed) < 0.3 * all);
}

}  // namespace
}  // namespace attention::testing

TEST_MAIN()
