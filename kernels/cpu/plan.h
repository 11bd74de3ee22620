// SPDX-License-Identifier: Apache-2.0
// What a call will do: path, block sizes, splits, and where everything lies in the workspace. Pure
// functions of sizes; the lowering (attention_plan_cpu) and the launchers compute the same plan.
#pragma once

#include "kernels/common/plan.h"
#include "kernels/common/problem.h"
#include "kernels/common/status.h"

namespace attention::cpu {

enum class Path {
  kEmpty,   // nothing to compute: some axis that carries the result has size 0
  kTiled,   // (query, head) rows in SIMD lanes, K and V packed block by block
  kDecode,  // few rows: K and V are streamed once in their natural layout
};

// The sizes and options that decide, from either a PlanRequest or a Problem.
struct Shape {
  i64 batch = 0, lq = 0, lkv = 0, hq = 0, hkv = 0, d = 0, dv = 0;
  DType dtype = DType::kFloat32;
  bool streams_simply = true;  // no option that needs rows in lanes: decode may stream
  bool causal = false;
  bool soft_cap = false;
  bool wants_dbias = false;
};

// Offsets in bytes into one worker's scratch.
struct Scratch {
  i64 k = 0, v = 0;       // packed block of keys
  i64 q_t = 0, do_t = 0;  // rows in lanes: [tile][D][lanes]
  i64 q = 0, d_out = 0;   // rows as rows (backward)
  i64 o_t = 0;            // O^T (decode: O), or dQ^T in the backward pass
  i64 o_block = 0;        // O over the present block of keys (decode)
  i64 decay = 0;          // per row: what that block multiplies O by (decode)
  i64 s = 0, ds = 0;      // S^T and dS^T
  i64 cap = 0;            // tanh of the capped scores (backward with soft cap)
  i64 dbias = 0;          // dbias of one block
  i64 allow = 0;          // allow bits of one tile
  i64 rows = 0;           // per-row values
  i64 accumulators = 0;   // dK and dV of the whole key axis, where no split shares them
  i64 bytes = 0;
};

struct Plan {
  Path path = Path::kEmpty;
  i32 block_q = 0;     // queries of one task
  i32 block_k = 0;     // keys of one packed block, a multiple of 8
  i32 num_splits = 1;  // parts of the key axis (forward), of the query axis (backward)
  i32 split_size = 0;  // keys (forward) or query blocks (backward) of one split
  i32 q_blocks = 0;
  i32 heads = 1;          // key/value heads of one forward task
  bool own_sums = false;  // the backward pass makes its own lse and delta: the forward streamed
  i32 padded_rows = 0;    // rows of one head of a task; not for decode: rounded up to whole tiles
  Scratch scratch;
  i64 partial_floats = 0;  // of all partial results together
  i64 partial_stride = 0;  // floats of one split's
  int workers = 1;         // that the workspace is sized for
  i64 workspace_bytes = 0;
};

inline constexpr i32 kMaxRowTile = 32;  // the widest row tile of any instruction set
inline constexpr i32 kPackPitch = 272;  // the widest kPitch of any instruction set (product.h)
inline constexpr i32 kKeyPad = 32;      // keys of a block are padded to at most this many
inline constexpr i64 kAlignment = 64;   // of every region of the workspace
inline constexpr i32 kDecodePad = 32;   // rows of decode's scratch: two of the widest vectors
inline constexpr i32 kRowArrays = 16;   // arrays of one value a row: see rows.h

// How dbias is cut into tasks: blocks of block_q x block_k entries of one batch entry and head.
struct BiasBlocks {
  bool sums_heads, sums_queries, sums_keys;  // broadcast axes, along which dbias is a sum
  i32 block_q;
  i64 batches, heads;
  i32 q_blocks, k_blocks;
  i64 count;
};

ATTENTION_HOST_DEVICE BiasBlocks bias_blocks(const Problem& p, const Plan& plan) {
  BiasBlocks blocks{};
  blocks.sums_heads = p.bias.head_stride == 0;
  blocks.sums_queries = p.bias.row_stride == 0;
  blocks.sums_keys = p.bias.col_stride == 0;
  blocks.block_q = static_cast<i32>(min_of<i64>(plan.padded_rows, p.lq));
  blocks.batches = p.bias.batch.mod;
  blocks.heads = blocks.sums_heads ? 1 : p.hq;
  blocks.q_blocks = blocks.sums_queries ? 1 : static_cast<i32>(ceil_div<i64>(p.lq, blocks.block_q));
  blocks.k_blocks = blocks.sums_keys ? 1 : static_cast<i32>(ceil_div<i64>(p.lkv, plan.block_k));
  blocks.count = blocks.batches * blocks.heads * blocks.q_blocks * blocks.k_blocks;
  return blocks;
}

// Rows of the accumulators of dK and dV: a padded block of keys that begins at a multiple of 8.
ATTENTION_HOST_DEVICE i64 padded_keys(i64 lkv) { return round_up<i64>(lkv, 8) + kKeyPad - 8; }

Shape shape_of(const Problem& problem);
Status plan_forward(const Shape& shape, const Tuning& tuning, int threads, Plan* plan);
Status plan_backward(const Shape& shape, const Tuning& tuning, int threads, Plan* plan);

}  // namespace attention::cpu
