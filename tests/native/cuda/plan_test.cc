// SPDX-License-Identifier: Apache-2.0
// The planner: pure functions, so every rule of theirs is checked on numbers.
#include "kernels/common/planner.h"

#include <random>

#include "kernels/common/mask.h"
#include "kernels/cuda/attention.h"
#include "tests/native/check/check.h"

namespace attention {
namespace {

PlanRequest request_of(i64 lq, i64 lkv, i64 hq, i64 hkv, i64 d) {
  PlanRequest r{};
  r.batch = 1;
  r.lq = lq;
  r.lkv = lkv;
  r.hq = hq;
  r.hkv = hkv;
  r.d = r.dv = d;
  r.dtype = static_cast<i32>(DType::kBFloat16);
  r.sm_count = 82;
  r.compute_capability = 86;
  r.window_left = r.window_right = -1;
  return r;
}

PlanResult planned(const PlanRequest& r) {
  PlanResult result;
  EXPECT_THAT(attention_plan_emulated(&r, &result) == 0, result.message);
  return result;
}

std::string refusal(const PlanRequest& r) {
  PlanResult result;
  EXPECT(attention_plan_emulated(&r, &result) != 0);
  return result.message;
}

TEST(buckets_are_the_smallest_that_fit) {
  EXPECT(head_bucket(1, 1) == (HeadBucket{32, 32}));
  EXPECT(head_bucket(32, 33) == (HeadBucket{64, 64}));
  EXPECT(head_bucket(72, 72) == (HeadBucket{96, 96}));
  EXPECT(head_bucket(192, 128) == (HeadBucket{192, 128}));
  EXPECT(head_bucket(128, 192) == (HeadBucket{192, 192}));
  EXPECT(head_bucket(256, 256) == (HeadBucket{256, 256}));
  EXPECT(head_bucket(257, 8).d == 0);
}

// Every kernel has to run on every supported device, whatever was built.
TEST(every_kernel_fits_the_smallest_shared_memory) {
  const i64 limit = shared_memory_limit(86);
  EXPECT(limit == 99 * 1024);
  for (const HeadBucket& bucket : kHeadBuckets) {
    for (const int size : {2, 4}) {
      EXPECT(backward_stages(BackwardForm::kTwoKernels, size, bucket, limit) >= 1);
      if (backward_has_one_kernel(size, bucket.d)) {
        // Two: its barriers leave no other work to hide a copy behind.
        EXPECT(backward_stages(BackwardForm::kOneKernel, size, bucket, limit) == 2);
      }
      EXPECT(bias_shared_bytes(bias_shape(size, bucket.d), size, bucket.d, bucket.dv) <= limit);
      for (const int rows : {16, 64, 128}) {
        if (rows == 128 && !forward_has_128_rows(size, bucket.d)) continue;
        const i64 block_k = forward_block_k(rows, size, bucket, limit);
        EXPECT(block_k >= forward_shape(rows, size, bucket.d).keys);
        EXPECT(forward_stages(rows, size, bucket, block_k, limit) >= 1);
      }
    }
  }
}

TEST(deeper_rings_where_there_is_room) {
  const HeadBucket bucket{128, 128};
  EXPECT(forward_stages(128, 2, bucket, 64, shared_memory_limit(86)) == 2);
  EXPECT(forward_stages(16, 2, bucket, 64, shared_memory_limit(86)) == 2);
  EXPECT(forward_stages(16, 2, bucket, 64, shared_memory_limit(90)) == 3);
  EXPECT(forward_stages(64, 2, HeadBucket{256, 256}, 128, shared_memory_limit(86)) == 0);
}

TEST(block_q_follows_the_rows) {
  EXPECT(planned(request_of(1, 4096, 32, 8, 128)).block_q == 16);
  EXPECT(planned(request_of(16, 4096, 32, 8, 128)).block_q == 64);
  EXPECT(planned(request_of(4096, 4096, 32, 8, 128)).block_q == 128);
  EXPECT(planned(request_of(4096, 4096, 32, 8, 256)).block_q == 64);
  PlanRequest r = request_of(4096, 4096, 32, 8, 128);
  r.features = kFeatureBias;
  EXPECT(planned(r).block_q == 64);
}

TEST(splits_fill_the_device_and_no_more) {
  // 8 row tiles on 164 slots: far from full, so the keys are split.
  EXPECT(planned(request_of(1, 65536, 32, 8, 128)).num_splits > 8);
  // Enough row tiles: no split.
  PlanRequest r = request_of(1, 65536, 32, 8, 128);
  r.batch = 64;
  EXPECT(planned(r).num_splits == 1);
  // Too few keys to be worth a second pass.
  EXPECT(planned(request_of(1, 64, 32, 8, 128)).num_splits == 1);
  for (i64 tiles = 1; tiles < 200; ++tiles) {
    for (const i64 rows : {1, 3, 8, 40, 100, 200}) {
      const i64 splits = forward_splits(rows, tiles, 164);
      EXPECT(splits >= 1 && splits <= tiles);
      if (rows * 10 >= 164 * 8) EXPECT(splits == 1);
    }
  }
}

TEST(explicit_splits_are_kept_up_to_the_number_of_tiles) {
  PlanRequest r = request_of(1, 1000, 8, 2, 64);
  r.block_k = 64;
  for (const i64 splits : {1, 2, 7, 16, 5000}) {
    r.num_splits = splits;
    const PlanResult result = planned(r);
    EXPECT(result.num_splits == min_of<i64>(splits, 16));
    EXPECT(result.workspace_bytes == (splits == 1 ? 0 : result.num_splits * 8 * (64 + 1) * 4));
  }
}

PlanRequest backward_request(i64 lq, i64 lkv, i64 hq, i64 hkv, i64 d) {
  PlanRequest r = request_of(lq, lkv, hq, hkv, d);
  r.operation = static_cast<i32>(Operation::kBackward);
  return r;
}

TEST(backward_workspace_of_two_kernels_is_two_floats_a_row) {
  PlanRequest r = backward_request(100, 200, 8, 2, 64);
  r.block_q = 128;
  EXPECT(planned(r).workspace_bytes == 100 * 8 * 8);
}

// Beside the row terms: sums of dQ in whole tiles, a counter a warp and tile, and the ticket.
TEST(backward_workspace_of_one_kernel) {
  PlanRequest r = backward_request(100, 200, 8, 2, 64);
  r.block_q = 64;
  const i64 sums = 8 * 128 * 64 * 4;
  const i64 rest = 100 * 8 * 8 + 8 * 2 * 8 * 4 + 4;
  EXPECT(planned(r).workspace_bytes == sums + rest);
  // One block that sees all keys adds to nothing.
  r.lkv = 128;
  EXPECT(planned(r).workspace_bytes == rest);
  // Linear in the batch, which an export with a symbolic one relies on.
  r.lkv = 200;
  const i64 one = planned(r).workspace_bytes;
  r.batch = 2;
  const i64 two = planned(r).workspace_bytes;
  r.batch = 1000;
  EXPECT(planned(r).workspace_bytes == one + 999 * (two - one));
}

TEST(one_kernel_runs_where_it_exists_and_nobody_waits_long) {
  const auto rows = [](const PlanRequest& r) { return planned(r).block_q; };
  for (const i64 length : {1, 100, 128, 1000, 4096, 100000}) {
    EXPECT(rows(backward_request(length, length, 8, 2, 64)) == 64);
    EXPECT(rows(backward_request(length, length, 8, 8, 128)) == 32);
  }
  EXPECT(planned(backward_request(100, 100, 8, 2, 64)).block_k == 128);
  // A few queries and many keys: every block would wait for all before it.
  EXPECT(rows(backward_request(64, 65536, 8, 8, 64)) == 128);
  EXPECT(rows(backward_request(64, 64, 8, 8, 64)) == 64);
  // No row, no key: nobody would write dq.
  EXPECT(rows(backward_request(0, 64, 8, 8, 64)) == 128);
  EXPECT(rows(backward_request(64, 0, 8, 8, 64)) == 128);
  // Not in this variant, type, head dim, row length.
  PlanRequest r = backward_request(1000, 1000, 8, 2, 64);
  r.features =
      kFeatureCausal | kFeatureBottomRight | kFeatureWindow | kFeatureQLengths | kFeatureKvLengths;
  EXPECT(rows(r) == 64);
  r.features = kFeatureSegments;
  EXPECT(rows(r) == 128);
  r.block_q = 64;
  EXPECT_CONTAINS(refusal(r), "block_q of a gradient: got 64; allowed: 128");
  r = backward_request(1000, 1000, 8, 2, 64);
  r.block_q = 48;
  EXPECT_CONTAINS(refusal(r), "block_q of a gradient: got 48; allowed: 64, 128");
  r.block_q = 0;
  r.dtype = static_cast<i32>(DType::kFloat32);
  EXPECT(rows(r) == 128);
  EXPECT(rows(backward_request(1000, 1000, 8, 2, 192)) == 64);
  EXPECT(rows(backward_request(1000, 1000, 8, 2, 60)) == 128);
  EXPECT(rows(backward_request(1000, 1000, 8, 2, 96)) == 128);
}

// The one kernel's blocks count on it: a key tile visits every query tile that says it sees the
// tile. If one did not, its successor would wait for ever.
TEST(key_tiles_visit_all_query_tiles_that_count_on_them) {
  std::mt19937 random(1);
  const auto up_to = [&](i32 n) { return static_cast<i32>(random() % static_cast<u32>(n + 1)); };
  constexpr i32 kRows = 4, kKeys = 8;
  for (int trial = 0; trial < 20000; ++trial) {
    RowMask m;
    const i32 lq = 1 + up_to(40);
    const i32 lkv = 1 + up_to(40);
    m.q_len = up_to(lq);
    m.kv_len = up_to(lkv);
    m.shift = random() % 2 ? m.kv_len - m.q_len : 0;
    m.causal = random() % 2;
    m.window_left = up_to(12) - 1;
    m.window_right = up_to(12) - 1;
    for (i32 key0 = 0; key0 < lkv; key0 += kKeys) {
      const Range keys{key0, min_of(key0 + kKeys, lkv)};
      const Range rows = rows_of_keys(m, keys);
      for (i32 row0 = 0; row0 < lq; row0 += kRows) {
        const Range visible = keys_of_rows(m, Range{row0, min_of(row0 + kRows, m.q_len)});
        const bool counts = !visible.empty() && visible.begin / kKeys <= key0 / kKeys &&
                            key0 / kKeys <= (visible.end - 1) / kKeys;
        const bool visits = rows.begin / kRows <= row0 / kRows &&
                            row0 / kRows < ceil_div(rows.end, kRows) && visible.begin < keys.end &&
                            visible.end > keys.begin;
        EXPECT(counts == visits);
      }
    }
  }
}

TEST(refusals_name_the_argument) {
  PlanRequest r = request_of(100, 100, 8, 2, 257);
  EXPECT_CONTAINS(refusal(r), "head dims: got 257 and 257");
  r = request_of(100, 100, 8, 2, 64);
  r.block_q = 48;
  EXPECT_CONTAINS(refusal(r), "block_q: got 48; allowed: 16, 64, 128");
  r.block_q = 128;
  r.features = kFeatureMask;
  EXPECT_CONTAINS(refusal(r), "block_q: got 128");
  r = request_of(100, 100, 8, 2, 64);
  r.block_k = 48;
  EXPECT_CONTAINS(refusal(r), "block_k: got 48");
  r = request_of(100, 100, 8, 2, 256);
  r.block_k = 128;
  EXPECT_CONTAINS(refusal(r), "shared memory");
  r = request_of(100, 100, 8, 3, 64);
  EXPECT_CONTAINS(refusal(r), "heads: got 8 query and 3 key heads");
  r = request_of(100, 100, 8, 2, 64);
  r.num_splits = -1;
  EXPECT_CONTAINS(refusal(r), "num_splits: got -1");
}

TEST(launchers_refuse_what_was_not_planned) {
  ForwardArgs f;
  f.problem.batch = f.problem.lq = f.problem.lkv = f.problem.hq = f.problem.hkv = 1;
  f.problem.d = f.problem.dv = 64;
  f.tuning = {16, 64, 2};
  EXPECT_CONTAINS(cuda::forward(f, nullptr).message(), "bytes of workspace");
  f.tuning = {16, 40, 1};
  EXPECT_CONTAINS(cuda::forward(f, nullptr).message(), "block_k got 40");
  f.tuning = {17, 64, 1};
  EXPECT_CONTAINS(cuda::forward(f, nullptr).message(), "block_q got 17");
  f.problem.d = 300;
  EXPECT_CONTAINS(cuda::forward(f, nullptr).message(), "no kernel for float32");
  f.problem.d = 64;
  f.problem.lkv = i64{1} << 31;
  EXPECT_CONTAINS(cuda::forward(f, nullptr).message(), "2^30");
  f.problem.lkv = 1;
  f.problem.batch = f.problem.lq = i64{1} << 17;
  EXPECT_CONTAINS(cuda::forward(f, nullptr).message(), "at most 2^32");
  BackwardArgs b;
  b.problem = f.problem;
  b.problem.batch = b.problem.lq = 1;
  b.tuning.block_q = 128;
  EXPECT_CONTAINS(cuda::backward(b, nullptr).message(), "bytes of workspace");
  b.tuning.block_q = 64;  // float32 has no one-kernel form
  EXPECT_CONTAINS(cuda::backward(b, nullptr).message(), "block_q got 64");
}

}  // namespace
}  // namespace attention

TEST_MAIN()
