// SPDX-License-Identifier: Apache-2.0
// The full grid: lengths x options x element types x group sizes, forward and backward, on every
// instruction set of this machine, by the accuracy rule.
#include <string>
#include <vector>

#include "tests/native/check/check.h"
#include "tests/native/cpu/run.h"

namespace attention::testing {
namespace {

const i64 kLengths[] = {1, 2, 7, 63, 64, 65, 127, 129, 192};

void check_all(const Options& options, const Tuning& tuning = {}) {
  const Case c(options);
  const Expected expected(c);
  const cpu::KernelList list = cpu::available_kernels();
  const ShuffledExecutor executor(3);
  for (int n = 0; n < list.count; ++n) {
    Output output(c);
    std::string error = run_case(c, *list.entries[n], executor, tuning, &output);
    if (error.empty()) error = compare(expected, &output);
    EXPECT_THAT(error.empty(), c.name() + " [" + list.entries[n]->name + "]: " + error);
  }
}

using Change = void (*)(Options&);

void sweep(const std::vector<Change>& changes, const std::vector<DType>& dtypes, size_t stride) {
  u32 seed = 1;
  for (const Change change : changes)
    for (const DType dtype : dtypes)
      for (const i64 group : {1, 3})
        for (const i64 lq : kLengths)
          for (const i64 lkv : kLengths) {
            ++seed;
            if (seed % stride != 0) continue;
            Options o;
            o.dtype = dtype;
            o.group = group;
            o.lq = lq;
            o.lkv = lkv;
            o.batch = group == 1 ? 2 : 1;
            o.d = 8;
            o.dv = 8;
            o.seed = seed;
            change(o);
            check_all(o);
          }
}

const std::vector<Change> kCommon = {
    [](Options&) {},
    [](Options& o) { o.causal = true; },
    [](Options& o) { o.causal = o.bottom_right = true; },
    [](Options& o) { o.window_left = 20, o.window_right = 5; },
    [](Options& o) { o.causal = o.alibi = true; },
    [](Options& o) { o.bias = true; },
    [](Options& o) { o.kv_lengths = o.q_lengths = o.bottom_right = o.causal = true; },
};

const std::vector<Change> kRarer = {
    [](Options& o) { o.segments = true; },
    [](Options& o) { o.causal = o.prefix = true; },
    [](Options& o) { o.mask = true; },
    [](Options& o) { o.block_mask = true; },
    [](Options& o) { o.soft_cap = 2.5f, o.magnitude = 2; },
    [](Options& o) { o.dropout = 0.3f; },
    [](Options& o) {
      o.scale_array = o.causal = o.bottom_right = o.kv_lengths = o.alibi = o.mask = o.bias = true;
      o.soft_cap = 2;
      o.dropout = 0.2f;
      o.window_left = 40;
    },
};

const std::vector<DType> kAll = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

}  // namespace

TEST(common_float32) { sweep(kCommon, {DType::kFloat32}, 1); }
TEST(rarer_float32) { sweep(kRarer, {DType::kFloat32}, 2); }
TEST(common_16_bit) { sweep(kCommon, {DType::kBFloat16, DType::kFloat16}, 4); }
TEST(rarer_16_bit) { sweep(kRarer, {DType::kBFloat16, DType::kFloat16}, 5); }

TEST(head_dims) {
  u32 seed = 100;
  for (const DType dtype : kAll)
    for (const i64 d : {1, 3, 8, 31, 64, 72, 80, 96, 112, 128, 200, 256})
      for (const i64 dv : {i64{1}, d, i64{256}}) {
        Options o;
        o.dtype = dtype;
        o.batch = 1;
        o.lq = 33;
        o.lkv = 70;
        o.group = 2;
        o.d = d;
        o.dv = dv;
        o.causal = o.bottom_right = true;
        o.seed = ++seed;
        check_all(o);
      }
}

TEST(broadcast_axes) {
  u32 seed = 500;
  for (int bits = 0; bits < 16; ++bits)
    for (const DType bias_dtype : kAll) {
      Options o;
      o.lq = 70;
      o.lkv = 131;
      o.hkv = 2;
      o.group = 2;
      o.bias = o.mask = true;
      o.bias_dtype = bias_dtype;
      o.bias_axes = {(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0};
      o.mask_axes = {(bits & 8) != 0, (bits & 4) != 0, (bits & 2) != 0, (bits & 1) != 0};
      o.seed = ++seed;
      check_all(o);
    }
}

TEST(longer) {
  u32 seed = 900;
  for (const DType dtype : kAll)
    for (const i64 lq : {300, 1025}) {
      Options o;
      o.dtype = dtype;
      o.batch = 1;
      o.lq = lq;
      o.lkv = 1025;
      o.d = 24;
      o.causal = true;
      o.shared_kv = true;
      o.seed = ++seed;
      check_all(o);
    }
}

// Few rows of many sequences: a task takes two of four key/value heads, or all of them.
TEST(heads_of_one_task) {
  u32 seed = 1200;
  for (const std::vector<Change>& changes : {kCommon, kRarer})
    for (const Change change : changes)
      for (const i64 batch : {16, 32}) {
        Options o;
        o.dtype = ++seed % 3 == 0 ? DType::kBFloat16 : DType::kFloat32;
        o.batch = batch;
        o.lq = 19;
        o.lkv = 200;
        o.hkv = 4;
        o.group = 2;
        o.d = 8;
        o.dv = 16;
        o.seed = seed;
        change(o);
        check_all(o, {0, 0, seed % 2 == 0 ? 1 : 3});
      }
}

}  // namespace attention::testing

TEST_MAIN()
