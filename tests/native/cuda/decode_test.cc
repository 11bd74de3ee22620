// SPDX-License-Identifier: Apache-2.0
// Split-KV and packed rows: few queries against many keys.
#include "tests/native/cuda/run.h"

namespace attention::testing {
namespace {

Options decode(i64 lq, i64 lkv, i64 group, i64 d = 64) {
  Options o;
  o.dtype = DType::kBFloat16;
  o.batch = 2;
  o.hkv = 2;
  o.lq = lq;
  o.lkv = lkv;
  o.group = group;
  o.d = o.dv = d;
  o.causal = o.bottom_right = o.kv_lengths = true;
  return o;
}

RunOptions forward_only(i64 block_q = 0, i64 block_k = 0, i64 splits = 0) {
  RunOptions options;
  options.backward = false;
  options.tuning = {block_q, block_k, splits};
  return options;
}

TEST(queries_and_groups) {
  for (const i64 lq : {1, 4, 16, 64}) {
    for (const i64 group : {1, 3, 8}) expect_accurate(decode(lq, 300, group), forward_only());
  }
}

TEST(every_block_k) {
  for (const i64 block_q : {16, 64}) {
    for (const i64 block_k : {32, 64, 128}) {
      for (const i64 splits : {1, 3}) {
        expect_accurate(decode(2, 500, 4), forward_only(block_q, block_k, splits));
      }
    }
  }
}

TEST(split_counts) {
  for (const i64 splits : {0, 1, 2, 7, 64, 5000}) {
    expect_accurate(decode(1, 400, 2), forward_only(0, 32, splits));
  }
  // Tiles of 128 rows can be split as well.
  Options o = decode(130, 300, 1);
  for (const i64 splits : {1, 2, 5}) expect_accurate(o, forward_only(128, 64, splits));
}

TEST(splits_with_general_options) {
  for (int option = 0; option < 5; ++option) {
    Options o = decode(3, 260, 3);
    o.mask = option == 0;
    o.block_mask = option == 1;
    o.bias = option == 2;
    o.segments = option == 3;
    o.dropout = option == 4 ? 0.4f : 0;
    expect_accurate(o, forward_only(16, 64, 3));
    expect_accurate(o, forward_only(64, 32, 2));
  }
}

TEST(windows_and_head_dims) {
  for (const i64 d : {32, 80, 128, 256}) {
    Options o = decode(2, 260, 4, d);
    o.window_left = 70;
    o.window_right = 0;
    expect_accurate(o, forward_only());
  }
}

TEST(f32) {
  for (const i64 d : {64, 128}) {
    Options o = decode(1, 200, 4, d);
    o.dtype = DType::kFloat32;
    expect_accurate(o, forward_only());
  }
}

// A split that sees no key is the neutral element; rows of such splits alone are (0, -inf).
TEST(empty_rows) {
  Options o = decode(4, 100, 2);
  Case c(o);
  const i32 lengths[] = {0, 1};
  c.problem.kv_lengths = {lengths, {1, 2}, 1};
  const RunOptions options = forward_only(16, 32, 3);
  const Run r = run(c, options);
  const std::string wrong = compare(c, r, options);
  EXPECT_THAT(wrong.empty(), wrong);
  EXPECT(values(r.lse, DType::kFloat32)[0] == -INFINITY);
  EXPECT(values(r.out, o.dtype)[0] == 0);
}

// At fixed shapes a row does not depend by a bit on what other rows hold, and with an explicit
// split count not on the batch size.
TEST(rows_do_not_depend_on_each_other) {
  const Options o = decode(1, 300, 4);
  const RunOptions options = forward_only(0, 0, 3);
  Case c(o);
  const i32 lengths[] = {300, 40};
  c.problem.kv_lengths = {lengths, {1, 2}, 1};
  const Run both = run(c, options);
  const i32 other_lengths[] = {300, 299};
  c.problem.kv_lengths = {other_lengths, {1, 2}, 1};
  const Run changed = run(c, options);
  Case one(o);
  one.problem.batch = 1;
  one.problem.q_batch = one.problem.k_batch = one.problem.v_batch = {1, 1};
  one.problem.kv_lengths = {lengths, {1, 1}, 1};
  const Run alone = run(one, options);
  EXPECT_THAT(alone.error.empty() && both.error.empty(), alone.error + both.error);
  EXPECT(alone.planned.num_splits == 3);
  const size_t row_bytes = alone.out.size();
  EXPECT(std::memcmp(both.out.data(), changed.out.data(), row_bytes) == 0);
  EXPECT(std::memcmp(both.out.data(), alone.out.data(), row_bytes) == 0);
  EXPECT(std::memcmp(both.lse.data(), alone.lse.data(), alone.lse.size()) == 0);
}

}  // namespace
}  // namespace attention::testing

TEST_MAIN()
