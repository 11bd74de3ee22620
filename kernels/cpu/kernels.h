// SPDX-License-Identifier: Apache-2.0
// The boundary between launchers and kernels: one table of functions for each instruction set.
#pragma once

#include "kernels/common/problem.h"
#include "kernels/cpu/plan.h"

namespace attention::cpu {

// One forward task: a block of queries of one (batch, key/value head) against one split of the
// keys.
struct ForwardTask {
  const ForwardArgs* args;
  const Plan* plan;
  i64 b, kv_head;
  i32 q_block, split;
  char* scratch;    // this worker's, plan->scratch.bytes
  float* partials;  // shared; used when plan->num_splits > 1
};

// One backward task: one split of the query blocks of one (batch, key/value head).
struct BackwardTask {
  const BackwardArgs* args;
  const Plan* plan;
  i64 b, kv_head;
  i32 split;
  char* scratch;
  float* dk;  // this task's float32 accumulators, padded_keys(Lkv) rows of padded D and Dv
  float* dv;
};

struct Kernels {
  const char* name;
  void (*forward_tiled)(const ForwardTask&);
  void (*forward_decode)(const ForwardTask&);
  // Merges the partial results of all splits for rows [first, last) of the B * Hkv * block rows.
  void (*merge_splits)(const ForwardArgs&, const Plan&, const float* partials, i64 b, i64 kv_head,
                       i32 q_block);
  void (*backward)(const BackwardTask&);
  // dk and dv rows [first, last) of one (batch, key/value head): the sum over splits, in order.
  void (*reduce_splits)(const BackwardArgs&, const Plan&, const float* partials, i64 b, i64 kv_head,
                        i32 first, i32 last);
  // One block of dbias: everything that is added to it, in a fixed order.
  void (*bias_gradient)(const BackwardArgs&, const Plan&, i64 block, char* scratch);
};

const Kernels& portable_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512_bf16_kernels();
const Kernels& amx_kernels();
#endif

}  // namespace attention::cpu
