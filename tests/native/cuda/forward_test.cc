// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels on the emulator against the float64 reference: every option, forward and
// backward, at lengths around the tile sizes.
#include "tests/native/cuda/run.h"

namespace attention::testing {
namespace {

Options small(DType dtype, i64 lq, i64 lkv, i64 group, i64 d) {
  Options o;
  o.dtype = dtype;
  o.batch = 1;
  o.lq = lq;
  o.lkv = lkv;
  o.group = group;
  o.d = o.dv = d;
  return o;
}

constexpr DType kBf16 = DType::kBFloat16;

TEST(lengths_around_the_tiles) {
  for (const i64 lq : {1, 63, 64, 65, 127, 129}) {
    for (const i64 lkv : {1, 31, 33, 64, 65, 129}) {
      Options o = small(kBf16, lq, lkv, 1, 64);
      o.causal = (lq + lkv) % 2 != 0;
      o.bottom_right = lq % 4 == 1;
      expect_accurate(o);
    }
  }
}

TEST(causal_offsets_around_the_tiles) {
  for (const i64 offset : {-65, -64, -63, -1, 0, 1, 31, 32, 33, 63, 64, 65}) {
    Options o = small(kBf16, 96, 96 + offset, 2, 32);
    o.causal = o.bottom_right = true;
    expect_accurate(o);
  }
}

TEST(windows) {
  for (const i64 left : {-1, 0, 1, 37, 500}) {
    for (const i64 right : {-1, 0, 5, 500}) {
      Options o = small(kBf16, 100, 140, 1, 32);
      o.window_left = left;
      o.window_right = right;
      o.bottom_right = left == 37;
      o.causal = right == 5;
      expect_accurate(o);
    }
  }
}

TEST(head_dims) {
  for (const DType dtype : {kBf16, DType::kFloat32}) {
    for (const i64 d : {8, 40, 72, 80, 128, 160, 256}) {
      Options o = small(dtype, 70, 65, 3, d);
      o.causal = true;
      expect_accurate(o);
    }
  }
}

TEST(unequal_head_dims_and_odd_ones) {
  const i64 dims[][2] = {{192, 128}, {160, 96}, {64, 128}, {63, 64}, {17, 33}, {1, 1}, {3, 250}};
  for (const DType dtype : {kBf16, DType::kFloat32}) {
    for (const auto& d : dims) {
      Options o = small(dtype, 66, 40, 2, d[0]);
      o.dv = d[1];
      expect_accurate(o);
    }
  }
}

TEST(f16) {
  for (const i64 d : {64, 128}) {
    Options o = small(DType::kFloat16, 130, 100, 2, d);
    o.causal = true;
    expect_accurate(o);
    o.mask = true;
    expect_accurate(o);
  }
}

TEST(highest_precision) {
  RunOptions options;
  options.precision = Precision::kHighest;
  for (const i64 d : {40, 64, 128, 256}) {
    Options o = small(DType::kFloat32, 70, 100, 2, d);
    o.causal = true;
    expect_accurate(o, options);
    o.alibi = true;
    expect_accurate(o, options);
  }
}

TEST(lengths_of_each_row) {
  for (int which = 1; which < 4; ++which) {
    Options o = small(kBf16, 90, 150, 3, 64);
    o.batch = 3;
    o.q_lengths = which & 1;
    o.kv_lengths = which & 2;
    expect_accurate(o);
    o.causal = o.bottom_right = true;
    expect_accurate(o);
  }
}

// Each option of the general variant, alone.
TEST(general_options) {
  for (const DType dtype : {kBf16, DType::kFloat32}) {
    for (int option = 0; option < 9; ++option) {
      Options o = small(dtype, 100, 135, 3, 40);
      o.batch = 2;
      o.segments = option == 0;
      o.prefix = o.causal = option == 1;
      o.mask = option == 2;
      o.block_mask = option == 3;
      o.bias = option == 4;
      o.alibi = option == 5;
      o.scale_array = option == 6;
      o.soft_cap = option == 7 ? 2.f : 0.f;
      o.dropout = option == 8 ? 0.3f : 0.f;
      expect_accurate(o);
    }
  }
}

TEST(general_options_together) {
  for (u32 seed = 1; seed <= 12; ++seed) {
    std::mt19937 random(seed);
    const auto coin = [&] { return random() % 2 == 0; };
    Options o = small(coin() ? kBf16 : DType::kFloat32, 30 + random() % 90, 30 + random() % 120,
                      1 + random() % 3, coin() ? 64 : 24);
    o.seed = seed;
    o.batch = 2;
    o.hkv = 1 + random() % 2;
    o.causal = coin();
    o.bottom_right = coin();
    o.q_lengths = coin();
    o.kv_lengths = coin();
    o.segments = coin();
    o.prefix = o.causal && coin();
    o.mask = coin();
    o.block_mask = coin();
    o.bias = coin();
    o.alibi = coin();
    o.scale_array = coin();
    o.soft_cap = coin() ? 3.f : 0.f;
    o.dropout = coin() ? 0.25f : 0.f;
    o.shared_kv = coin();
    o.dlse = coin();
    expect_accurate(o);
  }
}

TEST(bias_of_every_shape_and_dtype) {
  for (int shape = 0; shape < 16; ++shape) {
    Options o = small(kBf16, 70, 75, 2, 16);
    o.batch = 2;
    o.bias = true;
    o.bias_axes = {(shape & 1) != 0, (shape & 2) != 0, (shape & 4) != 0, (shape & 8) != 0};
    o.bias_dtype = static_cast<DType>(shape % 3);
    expect_accurate(o);
  }
}

TEST(mask_of_every_shape) {
  for (int shape = 0; shape < 16; ++shape) {
    Options o = small(kBf16, 70, 75, 2, 16);
    o.batch = 2;
    o.mask = true;
    o.mask_axes = {(shape & 1) != 0, (shape & 2) != 0, (shape & 4) != 0, (shape & 8) != 0};
    expect_accurate(o);
  }
}

// Scores of hundreds to 1e4, where many rows have one key only: its weight must be 1, forward and
// backward, as it is in the baseline.
TEST(large_logits) {
  for (const i64 d : {16, 64}) {
    for (const float magnitude : {12.f, 30.f, 60.f}) {
      for (const u32 seed : {1, 2, 3}) {
        for (const DType dtype : {kBf16, DType::kFloat16, DType::kFloat32}) {
          Options o = small(dtype, 33, 40, 2, d);
          o.batch = o.hkv = 2;
          o.magnitude = magnitude;
          o.dlse = seed != 1;
          o.seed = seed;
          RunOptions options;
          options.precision = Precision::kHighest;
          expect_accurate(o, options);
        }
      }
    }
  }
}

TEST(zero_sizes) {
  for (int which = 0; which < 6; ++which) {
    Options o = small(kBf16, which % 3 == 1 ? 0 : 5, which % 3 == 2 ? 0 : 7, 2, 16);
    if (which % 3 == 0) o.batch = 0;
    // A bias whose gradient has entries although nothing adds to them.
    o.bias = which >= 3;
    o.bias_axes = {false, true, which % 3 != 1, which % 3 != 2};
    const Case c(o);
    const Run r = run(c);
    EXPECT_THAT(r.error.empty(), c.name() + ": " + r.error);
    for (const double x : values(r.out, o.dtype)) EXPECT(x == 0);
    for (const double x : values(r.lse, DType::kFloat32)) EXPECT(x == -INFINITY);
    for (const std::vector<u8>* g : {&r.dq, &r.dk, &r.dv}) {
      for (const double x : values(*g, o.dtype)) EXPECT(x == 0);
    }
    EXPECT(r.dbias.empty() != o.bias);
    for (const double x : values(r.dbias, DType::kFloat32)) EXPECT(x == 0);
  }
}

// A scale that is not positive cannot be folded into the exponent: it takes the general variant.
TEST(scales_that_are_not_positive) {
  for (const float scale : {0.f, -0.3f}) {
    Case c(small(kBf16, 130, 70, 1, 64));
    c.problem.scale = scale;
    RunOptions options;
    const std::string wrong = compare(c, run(c, options), options);
    EXPECT_THAT(wrong.empty(), c.name() + ": " + wrong);
  }
}

}  // namespace
}  // namespace attention::testing

TEST_MAIN()
