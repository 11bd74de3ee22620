// SPDX-License-Identifier: Apache-2.0
// The planner's C ABI: what the JAX lowering asks before it emits a call, and what it sends along
// as attributes. Each library exports one function of this type (attention_plan_cpu,
// attention_plan_cuda, attention_plan_emulated). Pure: it allocates nothing and reads no device.
#pragma once

#include "kernels/common/problem.h"

namespace attention {

// Bits of PlanRequest::features and of the FFI attribute of the same name. Names are the schema's
// (kernels/ffi/schema.h).
enum Feature : i64 {
  kFeatureCausal = 1 << 0,
  kFeatureBottomRight = 1 << 1,
  kFeatureWindow = 1 << 2,
  kFeatureSoftCap = 1 << 3,
  kFeatureDropout = 1 << 4,
  kFeatureBias = 1 << 5,
  kFeatureMask = 1 << 6,
  kFeatureQLengths = 1 << 7,
  kFeatureKvLengths = 1 << 8,
  kFeatureSegments = 1 << 9,
  kFeatureAlibi = 1 << 10,
  kFeaturePrefix = 1 << 11,
  kFeatureScaleArray = 1 << 12,
  kFeatureBlockMask = 1 << 13,
  kFeatureWantDbias = 1 << 14,
  kFeatureWantDslopes = 1 << 15,
  kFeatureWantDscale = 1 << 16,
};

enum class Operation : i32 { kForward = 0, kBackward = 1 };

struct PlanRequest {
  i64 batch, lq, lkv, hq, hkv, d, dv;
  i64 features;
  // Asked-for sizes; 0: the planner chooses.
  i64 block_q, block_k, num_splits;
  i64 window_left, window_right;  // -1: unbounded
  i64 dbias_elements;             // size of the dbias result, 0 when not wanted
  i32 operation;                  // Operation
  i32 dtype;                      // DType
  i32 precision;                  // Precision
  // Device: CPU threads, or a GPU's multiprocessor count and compute capability (major * 10 +
  // minor).
  i32 threads;
  i32 sm_count;
  i32 compute_capability;
};

struct PlanResult {
  i64 block_q, block_k, num_splits;  // what the kernel will use
  i64 workspace_bytes;
  char
      message[256];  // when the function returns non-zero: why this call is not supported, in words
};

using PlanFunction = int(const PlanRequest*, PlanResult*);

}  // namespace attention
