// SPDX-License-Identifier: Apache-2.0
// Few rows against many keys: the streaming path, its options and its splits.
#include <string>

#include "tests/native/check/check.h"
#include "tests/native/cpu/run.h"

namespace attention::testing {
namespace {

void check_all(const Options& options, const Tuning& tuning) {
  const Case c(options);
  const Expected expected(c);
  const cpu::KernelList list = cpu::available_kernels();
  for (int n = 0; n < list.count; ++n) {
    Output output(c);
    std::string error = run_case(c, *list.entries[n], ShuffledExecutor(2), tuning, &output);
    if (error.empty()) error = compare(expected, &output);
    EXPECT_THAT(error.empty(), c.name() + " splits " + std::to_string(tuning.num_splits) + " [" +
                                   list.entries[n]->name + "]: " + error);
  }
}

Options decode_options(DType dtype, u32 seed) {
  Options o;
  o.dtype = dtype;
  o.causal = o.bottom_right = true;
  o.lkv = 333;
  o.hkv = 2;
  o.d = o.dv = 24;
  o.seed = seed;
  return o;
}

const DType kAll[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

}  // namespace

TEST(rows_and_groups) {
  u32 seed = 1;
  for (const DType dtype : kAll)
    for (const i64 lq : {1, 2, 4, 5})
      for (const i64 group : {1, 2, 3, 4}) {
        Options o = decode_options(dtype, ++seed);
        o.lq = lq;
        o.group = group;
        o.kv_lengths = lq % 2 == 0;
        check_all(o, {});
      }
}

// As many rows as the streaming path takes, of more heads than weights fit in the nearest cache
// for.
TEST(many_rows) {
  u32 seed = 50;
  for (const DType dtype : kAll)
    for (const i64 rows : {7, 16}) {
      Options o = decode_options(dtype, ++seed);
      o.lq = rows;
      o.hkv = 17;
      o.d = o.dv = 40;
      check_all(o, {});
      o.lq = 1;
      o.group = rows;
      check_all(o, {});
    }
}

TEST(options) {
  u32 seed = 100;
  for (const DType dtype : kAll)
    for (int option = 0; option < 6; ++option) {
      Options o = decode_options(dtype, ++seed);
      o.lq = 3;
      o.group = 2;
      if (option == 0) o.alibi = true;
      if (option == 1) o.soft_cap = 2;
      if (option == 2) o.window_left = 100;
      if (option == 3) o.q_lengths = o.kv_lengths = true;
      if (option == 4) o.scale_array = o.shared_kv = true;
      if (option == 5) o.prefix = true;
      check_all(o, {});
    }
}

TEST(head_dims) {
  u32 seed = 200;
  for (const DType dtype : kAll)
    for (const i64 d : {1, 7, 16, 64, 72, 128, 200, 256}) {
      Options o = decode_options(dtype, ++seed);
      o.lq = 1;
      o.group = 4;
      o.d = d;
      o.dv = 257 - d;
      check_all(o, {});
    }
}

TEST(split_counts) {
  u32 seed = 300;
  for (const i64 splits : {1, 2, 7, 64, 5000}) {
    for (const i64 lq : {1, 40}) {
      Options o = decode_options(DType::kFloat32, ++seed);
      o.lq = lq;
      o.group = 2;
      o.kv_lengths = true;
      check_all(o, {0, 0, splits});
    }
  }
}

TEST(block_sizes) {
  u32 seed = 400;
  for (const i64 block_k : {1, 32, 64, 1000})
    for (const i64 block_q : {1, 5, 64}) {
      Options o = decode_options(DType::kFloat32, ++seed);
      o.lq = 33;
      check_all(o, {block_q, block_k, 0});
    }
}

}  // namespace attention::testing

TEST_MAIN()
