// SPDX-License-Identifier: Apache-2.0
// The interface of the FFI targets: operands, results, attributes and feature bits in their order,
// and its number. jax_ops/_schema.py is the other side and compares itself with attention_schema()
// when it loads a library. Raise ATTENTION_ABI there and here for every change: the targets' names
// carry it.
#pragma once

#include "kernels/common/plan.h"

#define ATTENTION_ABI 1

// X(name). B-like axes of an operand have their own size Bm; see batch_div.
#define ATTENTION_OPERANDS(X)                                       \
  X(query)          /* [Bm, Lq, Hq, D] f32, bf16 or f16 */          \
  X(key)            /* [Bm, Lkv, Hkv, D], query's type */           \
  X(value)          /* [Bm, Lkv, Hkv, Dv], query's type */          \
  X(bias)           /* [Bm, Hq|1, Lq|1, Lkv|1] f32, bf16 or f16 */  \
  X(mask)           /* [Bm, Hq|1, Lq|1, Lkv|1] pred */              \
  X(query_lengths)  /* [Bm] s32 */                                  \
  X(kv_lengths)     /* [Bm] s32 */                                  \
  X(query_segments) /* [Bm, Lq] s32 */                              \
  X(kv_segments)    /* [Bm, Lkv] s32 */                             \
  X(alibi_slopes)   /* [Bm, Hq] f32 */                              \
  X(prefix_lengths) /* [Bm] s32 */                                  \
  X(scale)          /* [Bm] f32 */                                  \
  X(dropout_seed)   /* [Bm, 2] u32 */                               \
  X(dropout_batch)  /* [Bm] u32 */                                  \
  X(dropout_head)   /* [Hq] u32 */                                  \
  X(block_index)    /* [Bm, Hq|1, ceil(Lq/64), ceil(Lkv/64)] s32 */ \
  X(block_bits)     /* [n, 64, 2] u32 */

// Behind the operands of a backward call.
#define ATTENTION_BACKWARD_OPERANDS(X) \
  X(out)  /* [B, Lq, Hq, Dv] */        \
  X(lse)  /* [B, Lq, Hq] f32 */        \
  X(dout) /* [B, Lq, Hq, Dv] */        \
  X(dlse) /* [B, Lq, Hq] f32 */

#define ATTENTION_FORWARD_RESULTS(X)              \
  X(out)       /* [B, Lq, Hq, Dv] query's type */ \
  X(lse)       /* [B, Lq, Hq] f32 */              \
  X(workspace) /* [n] u8 */

// Optional ones are [0] when not wanted.
#define ATTENTION_BACKWARD_RESULTS(X)               \
  X(dq)           /* [B, Lq, Hq, D] query's type */ \
  X(dk)           /* [B, Lkv, Hkv, D] */            \
  X(dv)           /* [B, Lkv, Hkv, Dv] */           \
  X(dbias)        /* bias's shape f32, optional */  \
  X(dslopes_rows) /* [B, Lq, Hq] f32, optional */   \
  X(dscale_rows)  /* [B, Lq, Hq] f32, optional */   \
  X(workspace)    /* [n] u8 */

// X(name, C++ type, name of the type in the schema).
#define ATTENTION_ATTRIBUTES(X)                       \
  X(features, int64_t, "i64") /* enum Feature */      \
  X(scale, float, "f32")                              \
  X(soft_cap, float, "f32")       /* 0: none */       \
  X(window_left, int64_t, "i64")  /* -1: unbounded */ \
  X(window_right, int64_t, "i64") /* -1: unbounded */ \
  X(dropout_threshold, int64_t, "i64")                \
  X(dropout_keep_scale, float, "f32")                 \
  X(precision, int32_t, "i32") /* enum Precision */   \
  X(block_q, int64_t, "i64")                          \
  X(block_k, int64_t, "i64")                          \
  X(num_splits, int64_t, "i64")                       \
  X(threads, int64_t, "i64") /* that the workspace was planned for */

// One more attribute, an array: entry (b / batch_div[operand]) % Bm of an operand serves batch b.
#define ATTENTION_BATCH_DIV "batch_div"

// X(name, bit of enum Feature), in the order of bits.
#define ATTENTION_FEATURES(X)          \
  X(causal, kFeatureCausal)            \
  X(bottom_right, kFeatureBottomRight) \
  X(window, kFeatureWindow)            \
  X(soft_cap, kFeatureSoftCap)         \
  X(dropout, kFeatureDropout)          \
  X(bias, kFeatureBias)                \
  X(mask, kFeatureMask)                \
  X(q_lengths, kFeatureQLengths)       \
  X(kv_lengths, kFeatureKvLengths)     \
  X(segments, kFeatureSegments)        \
  X(alibi, kFeatureAlibi)              \
  X(prefix, kFeaturePrefix)            \
  X(scale_array, kFeatureScaleArray)   \
  X(block_mask, kFeatureBlockMask)     \
  X(want_dbias, kFeatureWantDbias)     \
  X(want_dslopes, kFeatureWantDslopes) \
  X(want_dscale, kFeatureWantDscale)

namespace attention::ffi {

#define ATTENTION_ENUMERATE(name) k_##name,
enum OperandNumber { ATTENTION_OPERANDS(ATTENTION_ENUMERATE) kOperandCount };
enum BackwardOperandNumber {
  ATTENTION_BACKWARD_OPERANDS(ATTENTION_ENUMERATE) kBackwardOperandCount
};
#undef ATTENTION_ENUMERATE
#define ATTENTION_ENUMERATE(name) kForwardResult_##name,
enum ForwardResultNumber { ATTENTION_FORWARD_RESULTS(ATTENTION_ENUMERATE) kForwardResultCount };
#undef ATTENTION_ENUMERATE
#define ATTENTION_ENUMERATE(name) kBackwardResult_##name,
enum BackwardResultNumber { ATTENTION_BACKWARD_RESULTS(ATTENTION_ENUMERATE) kBackwardResultCount };
#undef ATTENTION_ENUMERATE

}  // namespace attention::ffi

// The interface as text: one list a line.
extern "C" const char* attention_schema();
