// SPDX-License-Identifier: Apache-2.0
// The two forms of the backward pass, each asked for by its block_q: both against the reference at
// lengths around their tiles, and the order in which the one kernel's blocks add up dQ.
#include "kernels/common/planner.h"
#include "tests/native/cuda/run.h"

namespace attention::testing {
namespace {

constexpr DType kBf16 = DType::kBFloat16;
constexpr BackwardForm kForms[] = {BackwardForm::kTwoKernels, BackwardForm::kOneKernel};

Options lean(i64 lq, i64 lkv, i64 group, i64 d, DType dtype = kBf16) {
  Options o;
  o.dtype = dtype;
  o.batch = 1;
  o.lq = lq;
  o.lkv = lkv;
  o.group = group;
  o.d = o.dv = d;
  return o;
}

RunOptions form_of(const Options& o, BackwardForm form) {
  RunOptions r;
  r.backward_block_q = backward_block_q(form, 2, head_bucket(o.d, o.dv));
  return r;
}

void expect_both_accurate(const Options& o) {
  for (const BackwardForm form : kForms) expect_accurate(o, form_of(o, form));
}

// Tiles of 128 keys; of 64 query rows up to head dim 64, of 32 above.
TEST(lengths_around_the_tiles) {
  for (const i64 lq : {1, 63, 64, 65, 129}) {
    for (const i64 lkv : {1, 127, 128, 129, 257}) {
      Options o = lean(lq, lkv, 1, 64);
      o.causal = (lq + lkv) % 2 != 0;
      o.bottom_right = lq % 4 == 1;
      expect_both_accurate(o);
    }
  }
  for (const i64 lq : {31, 32, 33}) {
    Options o = lean(lq, 129, 1, 128);
    o.causal = o.bottom_right = lq != 32;
    expect_both_accurate(o);
  }
}

TEST(head_dims_and_types) {
  for (const DType dtype : {kBf16, DType::kFloat16}) {
    for (const i64 d : {8, 32, 40, 64, 104, 128}) {
      Options o = lean(70, 140, 3, d, dtype);
      o.causal = o.bottom_right = true;
      expect_both_accurate(o);
    }
  }
  Options o = lean(70, 140, 2, 64);
  o.dv = 128;
  expect_both_accurate(o);
}

TEST(causal_offsets_around_the_tiles) {
  for (const i64 offset : {-129, -128, -127, -65, -64, -63, -1, 0, 1, 127, 128, 129}) {
    Options o = lean(160, 160 + offset, 2, 32);
    o.causal = o.bottom_right = true;
    expect_both_accurate(o);
  }
}

TEST(windows) {
  for (const i64 left : {-1, 0, 37, 500}) {
    for (const i64 right : {-1, 0, 5, 500}) {
      Options o = lean(200, 300, 1, 32);
      o.window_left = left;
      o.window_right = right;
      o.bottom_right = left == 37;
      o.causal = right == 5;
      expect_both_accurate(o);
    }
  }
}

// Rows that see nothing, alone in their tile and beside others, and rows past their length.
TEST(lengths_and_empty_rows) {
  for (int which = 1; which < 4; ++which) {
    Options o = lean(150, 300, 3, 64);
    o.batch = 3;
    o.q_lengths = which & 1;
    o.kv_lengths = which & 2;
    o.dlse = true;
    expect_both_accurate(o);
    o.causal = o.bottom_right = true;
    expect_both_accurate(o);
  }
  Case c(lean(150, 300, 1, 64));
  const i32 lengths[] = {0};
  for (const bool of_keys : {false, true}) {
    (of_keys ? c.problem.kv_lengths : c.problem.q_lengths) = {lengths, {1, 1}, 1};
    const RunOptions options = form_of(c.options(), BackwardForm::kOneKernel);
    const Run r = run(c, options);
    const std::string wrong = compare(c, r, options);
    EXPECT_THAT(wrong.empty(), wrong);
    for (const double x : values(r.dq, kBf16)) EXPECT(x == 0);
  }
}

// Blocks that start in another order, are interleaved in another way or run on two host threads
// still add in the same order.
TEST(one_kernel_gives_the_same_bits_whatever_the_schedule) {
  for (const bool causal : {false, true}) {
    Options o = lean(130, 520, 2, 64);
    o.causal = o.bottom_right = causal;
    const Case c(o);
    RunOptions options = form_of(o, BackwardForm::kOneKernel);
    const Run first = run(c, options);
    EXPECT_THAT(first.error.empty(), first.error);
    for (const auto schedule : {emulator::Schedule::kReverse, emulator::Schedule::kRandom}) {
      for (const int host_threads : {1, 2}) {
        options.emulator.schedule = schedule;
        options.emulator.seed = 11;
        options.emulator.reverse_blocks = host_threads == 1;
        options.emulator.host_threads = host_threads;
        const Run again = run(c, options);
        EXPECT_THAT(again.error.empty(), again.error);
        EXPECT(first == again);
      }
    }
  }
}

// A block waits only for those that took their ticket before it, so one at a time is enough.
TEST(one_kernel_runs_however_few_blocks_are_resident) {
  const Options o = lean(130, 1000, 1, 32);
  RunOptions options = form_of(o, BackwardForm::kOneKernel);
  options.emulator.max_waiting_blocks = 1;
  options.emulator.schedule = emulator::Schedule::kReverse;
  options.emulator.reverse_blocks = true;
  expect_accurate(o, options);
}

// Each form does the products that it promises: counted in 16 x 8 blocks.
TEST(five_products_instead_of_seven) {
  for (const i64 d : {64, 128}) {
    const Options o = lean(256, 256, 1, d);
    const Case c(o);
    u64 products[2];
    for (const BackwardForm form : kForms) {
      RunOptions options = form_of(o, form);
      options.backward = false;
      emulator::reset_counters();
      EXPECT(run(c, options).error.empty());
      const u64 forward = emulator::counters().mma;
      options.backward = true;
      emulator::reset_counters();
      EXPECT(run(c, options).error.empty());
      products[static_cast<int>(form)] = emulator::counters().mma - forward;
      EXPECT(emulator::counters().ldmatrix_conflicts == 0);
    }
    const u64 one_product = u64{256 / 16} * (256 / 8) * static_cast<u64>(d / 16);
    EXPECT(products[0] == 7 * one_product);
    EXPECT(products[1] == 5 * one_product);
  }
}

}  // namespace
}  // namespace attention::testing

TEST_MAIN()
