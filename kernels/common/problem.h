// SPDX-License-Identifier: Apache-2.0
// The attention problem: the one description of a call that every backend reads. Plain data, no
// allocation.
//
// Shapes (B = product of all batch-like axes):
//   q, dq, [B, Lq, Hq, D]   k, dk [B, Lkv, Hkv, D]   v, dv [B, Lkv, Hkv, Dv]
//   out, dout [B, Lq, Hq, Dv]   lse, dlse [B, Lq, Hq] float32
// All arrays are dense and row-major, except that an operand may have fewer batch entries than B:
// see BatchMap. Query head h reads key/value head h / (Hq / Hkv).
//
// Order of operations: s = scale * (q . k) -> soft cap -> + bias, + ALiBi -> mask -> softmax ->
// dropout -> . v
#pragma once

#include "kernels/common/types.h"

namespace attention {

enum class DType : i32 { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

ATTENTION_HOST_DEVICE constexpr int size_of(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : 2;
}

// How float32 products are formed. 16-bit inputs ignore it: they always accumulate in float32.
enum class Precision : i32 {
  kDefault = 0,  // tf32 tensor cores on CUDA, true float32 on the CPU
  kHighest = 1,  // float32 accuracy everywhere (3xTF32 on CUDA)
};

// Which batch entry of an operand serves batch index b: (b / div) % mod. An operand that is full
// has {1, B}; one that is shared by everybody {1, 1}; vmap over a subset of operands gives the
// other cases, without copying anything.
struct BatchMap {
  i64 div = 1;
  i64 mod = 1;
  ATTENTION_HOST_DEVICE constexpr i64 operator()(i64 b) const { return (b / div) % mod; }
};

// A [Bm, H or 1, Lq or 1, Lkv or 1] operand (mask, bias). A stride of 0 repeats the only entry.
// Strides in elements.
struct ScoreOperand {
  const void* data = nullptr;  // null: absent
  BatchMap batch;
  i64 batch_stride = 0;
  i64 head_stride = 0;
  i64 row_stride = 0;
  i64 col_stride = 0;
  ATTENTION_HOST_DEVICE constexpr i64 offset(i64 b, i64 h) const {
    return batch(b) * batch_stride + h * head_stride;
  }
};

// A small per-batch vector operand: data[batch(b) * stride + i]. `stride` is the length of its
// trailing axis.
template <typename T>
struct BatchVector {
  const T* data = nullptr;  // null: absent
  BatchMap batch;
  i64 stride = 1;
  ATTENTION_HOST_DEVICE constexpr const T* row(i64 b) const { return data + batch(b) * stride; }
};

// A block-sparse mask in tiles of kMaskTile x kMaskTile (query x key) positions.
//   index [Bm, H or 1, ceil(Lq / 64), ceil(Lkv / 64)] int32: kEmptyTile, kFullTile, or the number
//   of a bit tile. bits  [n, 64, 2] uint32: row r of bit tile t is bits[t][r], bit j % 32 of word j
//   / 32 set = attend.
// Positions past Lq and Lkv are ignored.
inline constexpr int kMaskTile = 64;
inline constexpr i32 kEmptyTile = -1;
inline constexpr i32 kFullTile = -2;
struct BlockMaskOperand {
  const i32* index = nullptr;  // null: absent
  const u32* bits = nullptr;
  BatchMap batch;
  i64 batch_stride = 0;  // in tiles
  i64 head_stride = 0;   // in tiles; 0: one head for all
  i64 row_stride = 0;    // in tiles: ceil(Lkv / 64)
};

// Counter dropout: an entry (b, h, i, j) is dropped when its 16-bit uniform value is < threshold.
// See dropout.h.
struct Dropout {
  u32 threshold = 0;                // round(rate * 65536), in 0 .. 65536; 0: no dropout
  float keep_scale = 1.f;           // 1 / (1 - rate); 0 when rate = 1
  BatchVector<u32> seed;            // [Bm, 2]: the two key words
  BatchVector<u32> batch_index;     // [Bm]: the global batch index that the counter uses
  const u32* head_index = nullptr;  // [Hq]: the global query-head index that the counter uses
};

struct Problem {
  // Sizes.
  i64 batch = 0, lq = 0, lkv = 0, hq = 0, hkv = 0, d = 0, dv = 0;
  DType dtype = DType::kFloat32;
  Precision precision = Precision::kDefault;

  // Operands.
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  BatchMap q_batch, k_batch, v_batch;

  // Score.
  float scale = 1.f;
  BatchVector<float> scale_array;  // [Bm]: replaces `scale` when present
  float soft_cap = 0.f;            // 0: none
  ScoreOperand bias;
  DType bias_dtype = DType::kFloat32;
  BatchVector<float> alibi_slopes;  // [Bm, Hq]: adds -slope * |i' - j|

  // Mask terms; an entry is allowed when every term allows it.
  bool causal = false;
  bool bottom_right = false;        // alignment of causal, window and ALiBi
  i64 window_left = -1;             // -1: unbounded; else i' - window_left <= j
  i64 window_right = -1;            // -1: unbounded; else j <= i' + window_right
  BatchVector<i32> q_lengths;       // [Bm]; clamped to [0, Lq]
  BatchVector<i32> kv_lengths;      // [Bm]; clamped to [0, Lkv]
  BatchVector<i32> q_segments;      // [Bm, Lq]; negative: padding
  BatchVector<i32> kv_segments;     // [Bm, Lkv]
  BatchVector<i32> prefix_lengths;  // [Bm]: keys j < prefix are allowed in spite of `causal`
  ScoreOperand mask;                // u8, 0 = masked
  BlockMaskOperand block_mask;

  Dropout dropout;

  ATTENTION_HOST_DEVICE constexpr i64 group() const { return hq / hkv; }
};

// Sizes that were asked for; 0 means that the planner chooses.
struct Tuning {
  i64 block_q = 0;
  i64 block_k = 0;
  i64 num_splits = 0;
};

struct ForwardArgs {
  Problem problem;
  Tuning tuning;
  void* out = nullptr;   // [B, Lq, Hq, Dv], dtype
  float* lse = nullptr;  // [B, Lq, Hq], natural logarithm; -inf for rows with no allowed key
  void* workspace = nullptr;
  i64 workspace_bytes = 0;
};

struct BackwardArgs {
  Problem problem;
  Tuning tuning;
  const void* out = nullptr;
  const float* lse = nullptr;
  const void* dout = nullptr;   // [B, Lq, Hq, Dv], dtype, always full batch
  const float* dlse = nullptr;  // [B, Lq, Hq] float32; may be null (= 0)
  // Gradients are per batch index b (full B), whatever the batch maps say; the caller sums shared
  // operands.
  void* dq = nullptr;
  void* dk = nullptr;
  void* dv = nullptr;
  // Optional results; null when not wanted.
  // dbias: the bias operand's own [Bm, H|1, Lq|1, Lkv|1] shape, float32, summed over its size-1
  // axes and over the batch entries that share it, in a fixed order.
  float* dbias = nullptr;
  float* dslopes_rows = nullptr;  // [B, Lq, Hq]: sum over keys of dS * -|i' - j|
  float* dscale_rows =
      nullptr;  // [B, Lq, Hq]: sum over keys of d(capped score) * (1 - tanh^2) * (q . k)
  void* workspace = nullptr;
  i64 workspace_bytes = 0;
};

}  // namespace attention
