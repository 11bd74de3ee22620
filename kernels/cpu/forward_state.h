// SPDX-License-Identifier: Apache-2.0
// What a forward task works on, and the step that its forms share.
#pragma once

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/pack.h"
#include "kernels/cpu/score.h"

namespace attention::cpu::ATTENTION_CPU_ISA {

// The rows of K and V that are packed next, asked for a few at a time between register tiles, so
// that memory works while the processor multiplies.
class NextRows {
 public:
  struct Operand {
    const char* rows;
    i64 stride;  // in bytes, as `bytes` of a row
    int bytes;
  };
  // `rows` rows of each operand, within `steps` steps.
  void begin(const Operand& k, const Operand& v, int rows, int steps) {
    operands_[0] = k;
    operands_[1] = v;
    row_ = 0;
    rows_ = rows;
    each_ = ceil_div(rows, max_of(steps, 1));
  }
  ATTENTION_INLINE void step() {
    for (const int end = min_of(row_ + each_, rows_); row_ < end; ++row_)
      for (const Operand& operand : operands_)
        for (int c = 0; c < operand.bytes; c += 64)
          __builtin_prefetch(operand.rows + row_ * operand.stride + c, 0, 2);
  }

 private:
  Operand operands_[2] = {};
  int row_ = 0, rows_ = 0, each_ = 0;
};

// Where the packed block and the row block of one task lie.
template <typename Format>
struct ForwardState {
  const Problem* problem;
  RowBlock block;
  Panel<Format> k, v;
  NextRows next;
  typename Format::Element* q_t;  // [tile][d / kDepth][lanes]
  float *o_t, *s;
  u8* allow;
  int block_k, d, dv;
  bool plain;              // matrix tiles; weights are exponentials of scaled products, or masked
  float unit;              // of the maxima: `scale` where they are of unscaled products, or 1
  int dims_v;              // dv rounded up to kRowStep
  int stride_q, stride_o;  // elements of one row in lanes: padded head dimensions
};

// Online softmax down a tile of scores, which become weights. `decay`: what the sums so far are
// multiplied by.
template <int kVectors>
inline void online_softmax(const ScoreTile& tile, F (&decay)[kVectors]) {
  constexpr int kLd = kVectors * kLanes;
  const RowBlock& block = *tile.block;
  F old_maximum[kVectors], maximum[kVectors], shift[kVectors], sum[kVectors];
  for (int n = 0; n < kVectors; ++n)
    old_maximum[n] = maximum[n] = load(block.maximum + tile.row + n * kLanes);
  for (int j = tile.first; j < tile.last; ++j)
    for (int n = 0; n < kVectors; ++n)
      maximum[n] = max(load(tile.s + j * kLd + n * kLanes), maximum[n]);
  for (int n = 0; n < kVectors; ++n) {
    // A row that has seen nothing yet has maximum -inf: any finite shift gives exp = 0.
    shift[n] = select(equal(maximum[n], minus_infinity()), zero(), maximum[n]);
    // Subtract before anything is multiplied by log2(e): finfo.min * log2(e) would overflow.
    decay[n] = exp(old_maximum[n] - shift[n]);
    sum[n] = zero();
  }
  constexpr int kKeys = 4 / kVectors;  // of four vectors of exponentials; divides kRowStep
  for (int j = tile.first; j < tile.last; j += kKeys) {
    float* s = tile.s + j * kLd;
    F p[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) p[i] = load(s + i * kLanes) - shift[i % kVectors];
    exp(p);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      sum[i % kVectors] = sum[i % kVectors] + p[i];
      store(s + i * kLanes, p[i]);
    }
  }
  for (int n = 0; n < kVectors; ++n) {
    float* total = block.sum + tile.row + n * kLanes;
    store(total, fma(load(total), decay[n], sum[n]));
    store(block.maximum + tile.row + n * kLanes, maximum[n]);
  }
  if (block.problem->dropout.threshold != 0) apply_dropout<kVectors>(tile);
}

}  // namespace attention::cpu::ATTENTION_CPU_ISA
