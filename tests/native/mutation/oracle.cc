// SPDX-License-Identifier: Apache-2.0
// What decides whether a mutant of a kernel is noticed: a small selection of cases that reaches
// every branch of the kernels of one dtype and bucket. Run under several schedules, in checked
// mode, against the float64 reference.
#include "kernels/common/planner.h"
#include "tests/native/cuda/run.h"

namespace attention::testing {
namespace {

Options base() {
  Options o;
  o.dtype = DType::kBFloat16;
  o.d = o.dv = 32;
  o.hkv = 2;
  o.group = 2;
  return o;
}

RunOptions scheduled(emulator::Schedule schedule, bool backward) {
  RunOptions r;
  r.backward = backward;
  r.emulator.schedule = schedule;
  r.emulator.reverse_blocks = schedule == emulator::Schedule::kReverse;
  r.emulator.seed = 5;
  return r;
}

// Lengths on, just below and just above a tile; the last keys of a ragged row must not leak.
TEST(lean) {
  Options o = base();
  o.lq = 65;
  o.lkv = 129;
  expect_accurate(o, scheduled(emulator::Schedule::kForward, true));
  o.causal = true;
  o.lq = o.lkv = 128;
  expect_accurate(o, scheduled(emulator::Schedule::kReverse, true));
  o.bottom_right = o.q_lengths = o.kv_lengths = true;
  o.lq = 100;
  o.lkv = 190;
  expect_accurate(o, scheduled(emulator::Schedule::kRandom, true));
  o = base();
  o.window_left = 20;
  o.window_right = 3;
  o.lq = 191;
  o.lkv = 150;
  expect_accurate(o, scheduled(emulator::Schedule::kReverse, true));
}

// Both forms of the backward pass, over three tiles of keys: the first writes the sums of dQ, the
// second adds to them, the third writes dq. With a window, query tiles begin at a later one.
TEST(backward_forms) {
  for (const BackwardForm form : {BackwardForm::kTwoKernels, BackwardForm::kOneKernel}) {
    for (int mask = 0; mask < 3; ++mask) {
      Options o = base();
      o.lq = 130;
      o.lkv = 300;
      o.q_lengths = true;
      o.causal = o.bottom_right = mask > 0;
      if (mask == 2) o.window_left = 40;
      RunOptions r =
          scheduled(mask == 1 ? emulator::Schedule::kReverse : emulator::Schedule::kRandom, true);
      r.backward_block_q = backward_block_q(form, 2, head_bucket(o.d, o.dv));
      expect_accurate(o, r);
    }
  }
}

// Every optional term, alone and together; ragged head dims.
TEST(general) {
  Options o = base();
  o.lq = 70;
  o.lkv = 140;
  o.d = 24;
  o.dv = 20;
  o.bias = o.alibi = o.scale_array = true;
  o.soft_cap = 2;
  expect_accurate(o, scheduled(emulator::Schedule::kForward, true));
  o = base();
  o.lq = 140;
  o.lkv = 130;
  o.causal = o.prefix = o.segments = o.mask = true;
  expect_accurate(o, scheduled(emulator::Schedule::kReverse, true));
  o = base();
  o.lq = 193;  // one row and one key past tiles of the block mask
  o.lkv = 257;
  o.block_mask = true;
  o.dropout = 0.3f;
  o.bias = true;
  o.bias_axes = {false, true, false, true};
  expect_accurate(o, scheduled(emulator::Schedule::kRandom, true));
  // Full tiles before masked ones, and the other way round.
  o = base();
  o.group = 1;
  o.lq = o.lkv = 193;
  o.block_mask = true;
  o.seed = 2;
  expect_accurate(o, scheduled(emulator::Schedule::kForward, true));
  // Odd rows start at odd elements: no pair of 16-bit values is aligned.
  o = base();
  o.lkv = 70;
  o.d = 23;
  o.dv = 17;
  expect_accurate(o, scheduled(emulator::Schedule::kForward, true));
  o = base();
  o.bias = true;
  o.bias_axes = {true, false, true, false};
  o.lkv = 70;
  o.shared_kv = true;
  expect_accurate(o, scheduled(emulator::Schedule::kForward, true));
}

// Operands with fewer batch entries than the call, as vmap over some of them gives.
TEST(batch_maps) {
  Options o = base();
  o.batch = 4;
  o.lq = 20;
  o.lkv = 40;
  Case c(o);
  c.problem.k_batch = {1, 2};
  c.problem.v_batch = {2, 2};
  const RunOptions r = scheduled(emulator::Schedule::kForward, true);
  const std::string wrong = compare(c, run(c, r), r);
  EXPECT_THAT(wrong.empty(), wrong);
}

// A few queries against a cache, in one piece and split, with the combine step.
TEST(decode) {
  Options o = base();
  o.lq = 1;
  o.lkv = 500;
  o.group = 4;
  o.kv_lengths = true;
  o.causal = o.bottom_right = true;
  RunOptions r = scheduled(emulator::Schedule::kForward, false);
  for (i64 splits : {1, 3, 5}) {
    for (i64 block_k : {32, 64}) {
      r.tuning.num_splits = splits;
      r.tuning.block_k = block_k;
      expect_accurate(o, r);
    }
  }
  o.lq = 3;  // 12 rows: the lower half of the tile's rows too
  expect_accurate(o, r);
  o.batch = o.hkv = 1;
  o.group = 3;  // 9 rows: the last block of the combine kernel has one
  expect_accurate(o, r);
  o.batch = o.hkv = 2;
  o.group = 4;
  o.lq = 5;
  o.window_left = 130;
  r = scheduled(emulator::Schedule::kRandom, false);
  r.tuning.num_splits = 4;
  expect_accurate(o, r);
  o.bias = o.segments = true;
  expect_accurate(o, r);
}

// Poison: what is past a length must not reach any result, not even as 0 * NaN.
TEST(poison) {
  for (bool segments : {false, true}) {
    Options o = base();
    o.lq = 90;
    o.lkv = 150;
    o.kv_lengths = !segments;
    o.segments = segments;
    o.soft_cap = segments ? 2.f : 0.f;  // its slope is of a raw product, which may be NaN
    Case clean(o), poisoned(o);
    const Problem& p = clean.problem;
    for (std::vector<u8>* x : {&poisoned.k, &poisoned.v}) {
      const i64 row = p.hkv * p.d;
      for (i64 b = 0; b < p.batch; ++b) {
        for (i64 j = 0; j < p.lkv; ++j) {
          const bool hidden = segments ? p.kv_segments.row(b)[j] < 0 : j >= p.kv_lengths.row(b)[0];
          if (!hidden) continue;
          for (i64 c = 0; c < row; ++c) write(x->data(), p.dtype, (b * p.lkv + j) * row + c, NAN);
        }
      }
    }
    const RunOptions r = scheduled(emulator::Schedule::kForward, true);
    EXPECT(run(clean, r).error.empty());
    EXPECT(run(clean, r) == run(poisoned, r));
  }
}

// No swizzle got lost.
TEST(no_bank_conflicts) {
  Options o = base();
  o.lq = o.lkv = 128;
  emulator::reset_counters();
  EXPECT(run(Case(o), scheduled(emulator::Schedule::kForward, false)).error.empty());
  EXPECT(emulator::counters().ldmatrix > 0);
  EXPECT(emulator::counters().ldmatrix_conflicts == 0);
}

}  // namespace
}  // namespace attention::testing

TEST_MAIN()
