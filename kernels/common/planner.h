// SPDX-License-Identifier: Apache-2.0
// Tile sizes, pipeline depth, split counts and workspace of the CUDA kernels, as pure functions of
// the shape. Kernels take their compile-time constants from here and launchers their run-time ones,
// so that the two cannot disagree.
#pragma once

#include "kernels/common/plan.h"

namespace attention {

// ---- head-dim buckets ---------------------------------------------------------------------------

// The compiled head dims that serve (d, dv): columns past d and dv are zeros in shared memory.
struct HeadBucket {
  int d = 0;  // 0: no bucket is large enough
  int dv = 0;
  ATTENTION_HOST_DEVICE constexpr bool operator==(const HeadBucket& other) const {
    return d == other.d && dv == other.dv;
  }
};

// 192/128 is the shape of multi-head latent attention; serving it from 192/192 would waste a third
// of the P.V work.
inline constexpr HeadBucket kHeadBuckets[] = {{32, 32},   {64, 64},   {96, 96},  {128, 128},
                                              {192, 128}, {192, 192}, {256, 256}};

constexpr HeadBucket head_bucket(i64 d, i64 dv) {
  for (const HeadBucket& bucket : kHeadBuckets) {
    if (d <= bucket.d && dv <= bucket.dv) return bucket;
  }
  return HeadBucket{};
}

// ---- shared memory ------------------------------------------------------------------------------

inline constexpr i64 kKib = 1024;

// Largest dynamic shared memory of one block (CUDA programming guide, "Technical specifications per
// compute capability"). An unknown device gets the smallest value of all, which always works.
constexpr i64 shared_memory_limit(i32 compute_capability) {
  switch (compute_capability) {
    case 80:
    case 87:
      return 163 * kKib;
    case 90:
    case 100:
    case 101:
    case 103:
    case 110:
      return 227 * kKib;
    default:
      return 99 * kKib;  // 86, 89, 120, 121
  }
}

// Bytes that Smem::take uses for n elements: each take is aligned to 128 bytes.
ATTENTION_HOST_DEVICE constexpr i64 taken_bytes(i64 n, i64 element_size) {
  return round_up<i64>(n * element_size, 128);
}

// What a block keeps of each stage beside the data: which tile it holds (kernels/cuda/stream.h).
inline constexpr i64 kVisitBytes = 128;

// ---- forward ------------------------------------------------------------------------------------

// A block computes `rows()` query rows. warps_m warps stand below each other, 16 * row_blocks rows
// each; warps_n warps share the rows and take turns at the keys of a stage, `keys` at a time.
struct ForwardShape {
  int warps_m, row_blocks, warps_n, keys;
  bool packed;  // rows are (position, head of the group): K and V are read once for the whole group
  ATTENTION_HOST_DEVICE constexpr int rows() const { return 16 * warps_m * row_blocks; }
  ATTENTION_HOST_DEVICE constexpr int threads() const { return 32 * warps_m * warps_n; }
};

// Row counts of the compiled forward kernels (block_q).
//   128: training and prefill. Present where the Q tile takes at most 32 KiB (row_bytes <= 256), so
//        that Q and two stages of K and V fit into 99 KiB.
//    64: longer rows, block masks, and decode with more than 16 rows in the group's tile.
//    16: decode; one row block, four warps share the keys, so that little tensor work is spent on
//        rows that do not exist.
ATTENTION_HOST_DEVICE constexpr bool forward_has_128_rows(int element_size, int d) {
  return d * element_size <= 256;
}

ATTENTION_HOST_DEVICE constexpr ForwardShape forward_shape(int rows, int element_size, int d) {
  const int row_bytes = d * element_size;
  // Rows of up to 64 16-bit columns: two row blocks a warp halve the shared-memory reads of K and V
  // for each product; 32 keys a step, because 64 would spill beside the doubled output (64
  // registers). Longer rows: one row block, and 64 keys a step, which halves the number of row
  // reductions.
  if (rows == 128 && row_bytes <= 128) return {4, 2, 1, 32, false};
  if (rows == 128) return {8, 1, 1, 64, false};
  // 32: block_k = 32 has to be possible. 16 for f32 rows over 512 bytes, where a stage of 32 keys
  // and 64 rows of Q pass 99 KiB.
  if (rows == 64) return {4, 1, 1, row_bytes > 512 ? 16 : 32, true};
  return {1, 1, 4, 16, true};
}

// Q, the ring of K and V stages, and where several warps share a row the two buffers of their
// merge.
ATTENTION_HOST_DEVICE constexpr i64 forward_shared_bytes(const ForwardShape& shape,
                                                         int element_size, int d, int dv,
                                                         i64 block_k, i64 stages) {
  i64 bytes = taken_bytes(i64{shape.rows()} * d, element_size) +
              taken_bytes(stages * block_k * d, element_size) +
              taken_bytes(stages * block_k * dv, element_size) + stages * kVisitBytes;
  if (shape.warps_n > 1) {
    bytes +=
        taken_bytes(i64{shape.rows()} * dv, 4) + taken_bytes(2 * shape.warps_n * shape.rows(), 4);
  }
  return bytes;
}

// Depth of the K/V ring: as deep as the block's shared memory allows, up to what helps. Two stages
// hide the copy behind arithmetic; the 16-row decode kernel has little arithmetic and wants a third
// one in flight. 0: not even one stage fits.
constexpr int forward_stages(int rows, int element_size, HeadBucket bucket, i64 block_k,
                             i64 shared_limit) {
  const ForwardShape shape = forward_shape(rows, element_size, bucket.d);
  for (int stages = rows == 16 ? 3 : 2; stages > 0; --stages) {
    if (forward_shared_bytes(shape, element_size, bucket.d, bucket.dv, block_k, stages) <=
        shared_limit) {
      return stages;
    }
  }
  return 0;
}

// Keys a stage that the planner chooses: 64 where at least two stages fit, else the largest that
// has two, else what fits at all.
constexpr i64 forward_block_k(int rows, int element_size, HeadBucket bucket, i64 shared_limit) {
  const int step = forward_shape(rows, element_size, bucket.d).keys;
  for (int wanted = 2; wanted > 0; --wanted) {
    for (i64 block_k = 64; block_k >= step; block_k /= 2) {
      if (forward_stages(rows, element_size, bucket, block_k, shared_limit) >= wanted) {
        return block_k;
      }
    }
  }
  return 0;
}

// Query rows of a block. Up to 16 rows of the packed group: the decode kernel. Up to 64, or where
// 128 rows do not exist (row length) or are not built (general variant): 64.
constexpr i64 forward_block_q(i64 lq, i64 group, int element_size, int d, bool lean) {
  const i64 packed_rows = lq * group;
  if (packed_rows <= 16) return 16;
  if (!lean || lq <= 64 || !forward_has_128_rows(element_size, d)) return 64;
  return 128;
}

constexpr i64 forward_row_blocks(const ForwardShape& shape, i64 lq, i64 group) {
  return ceil_div<i64>(lq * (shape.packed ? group : 1), shape.rows());
}

// Split count: how many blocks share the keys of one row tile, so that a short query still fills
// the device. `slots` is how many blocks run at once (multiprocessors x blocks each).
//   - full enough (>= 80 % of one wave) or <= 4 key tiles: no split; a split costs an extra pass.
//   - else the smallest count whose last wave is filled to within 85 % of the best count's (the
//     rule of flash-attention 2): a smaller count means less to combine.
// When only a handful of blocks exist (multi-query attention with a small batch), 4 tiles are worth
// splitting too.
constexpr i64 forward_splits(i64 row_tiles, i64 key_tiles, i64 slots) {
  if (row_tiles * 10 >= slots * 8) return 1;
  const bool starving = row_tiles * 8 < slots;
  if (key_tiles <= (starving ? 1 : 4)) return 1;
  // Combining reads every partial result once more; past 128 it would dominate.
  const i64 most = min_of<i64>(min_of<i64>(key_tiles, 128), max_of<i64>(slots, 1));
  i64 best_millis = 0;
  for (int pass = 0; pass < 2; ++pass) {
    for (i64 splits = 1; splits <= most; ++splits) {
      // A count that leaves the largest share of a split unchanged only adds empty splits.
      if (splits > 1 && ceil_div(key_tiles, splits) == ceil_div(key_tiles, splits - 1)) continue;
      const i64 blocks = row_tiles * splits;
      const i64 efficiency = blocks * 1000 / (ceil_div(blocks, slots) * slots);
      if (pass == 0) {
        best_millis = max_of(best_millis, efficiency);
      } else if (efficiency * 100 >= best_millis * 85) {
        return splits;
      }
    }
  }
  return 1;
}

// f32 partial results of each split: out [splits, B, Lq, Hq, Dv], then lse [splits, B, Lq, Hq].
constexpr i64 forward_workspace_bytes(i64 splits, i64 rows, i64 dv) {
  return splits > 1 ? splits * rows * (dv + 1) * 4 : 0;
}

// ---- backward -----------------------------------------------------------------------------------

// dK/dV kernel: `warps` warps with 16 keys each own their rows of dK and dV; query rows come
// `queries` at a time. dQ kernel: `warps` warps with 16 query rows each; keys come `queries` at a
// time.
struct BackwardShape {
  int warps;
  int step;    // rows of the streamed side in a stage
  bool joint;  // dK and dV in one kernel; false: one launch each, S computed twice
};

// Row length decides: two owned tiles (K and V, or Q and dO) plus a stage of the other two must fit
// into 99 KiB, and the accumulators (d / 2 + dv / 2 registers when joint) into 255 registers.
ATTENTION_HOST_DEVICE constexpr BackwardShape backward_shape(int element_size, int d) {
  const int row_bytes = d * element_size;
  const bool joint = d <= 128;
  if (row_bytes <= 128) return {8, 64, joint};
  if (row_bytes <= 256) return {8, 32, joint};
  if (row_bytes <= 384) return {4, 32, joint};
  if (row_bytes <= 512) return {4, element_size == 4 ? 16 : 32, joint};
  return {2, 16, joint};
}

// The gradients of q, k and v are computed in one of two forms.
//   two kernels: dK/dV over key tiles and dQ over query tiles, 7 products of a tile (8 where dK and
//     dV are not joint). Needs nothing from other blocks.
//   one kernel: over key tiles, which also adds its share of dQ to a sum in global memory, 5
//     products. Blocks add to a query tile in the order of their keys, so each waits for the one
//     before it.
enum class BackwardForm { kTwoKernels, kOneKernel };

// One kernel: dK, dV and the share of dQ must fit into 255 registers beside each other, and dS of
// all keys of the block into shared memory beside K, V and two stages: 16-bit types up to 128
// columns. Not 96: a warp's share of dQ would be 24 columns, and operands come 16 at a time; with
// 32 two of eight warps would rest, and it spills.
ATTENTION_HOST_DEVICE constexpr bool backward_has_one_kernel(int element_size, int d) {
  return element_size == 2 && (d == 32 || d == 64 || d == 128);
}

// Columns of dQ that a warp computes for 16 rows, one kernel: each of the 8 warps has such a part.
ATTENTION_HOST_DEVICE constexpr int backward_dq_columns(int d) { return d >= 64 ? 32 : 16; }

// One kernel: dS takes the place of dO in its stage where it fits. That costs a barrier a step;
// without it the ring of head dim 128 would have a single stage in 99 KiB.
ATTENTION_HOST_DEVICE constexpr bool backward_ds_in_stage(const BackwardShape& shape, int dv) {
  return 16 * shape.warps <= dv;
}

ATTENTION_HOST_DEVICE constexpr i64 backward_shared_bytes(const BackwardShape& shape,
                                                          BackwardForm form, int element_size,
                                                          int d, int dv, i64 stages) {
  i64 bytes = taken_bytes(i64{16} * shape.warps * d, element_size) +
              taken_bytes(i64{16} * shape.warps * dv, element_size) +
              taken_bytes(stages * shape.step * d, element_size) +
              taken_bytes(stages * shape.step * dv, element_size) +
              taken_bytes(stages * shape.step * 2, 4) + stages * kVisitBytes;
  if (form == BackwardForm::kOneKernel) {
    bytes += taken_bytes(1, 4);  // the block's ticket
    if (!backward_ds_in_stage(shape, dv)) {
      bytes += taken_bytes(i64{16} * shape.warps * shape.step, element_size);
    }
  }
  return bytes;
}

constexpr int backward_stages(BackwardForm form, int element_size, HeadBucket bucket,
                              i64 shared_limit) {
  const BackwardShape shape = backward_shape(element_size, bucket.d);
  for (int stages = 2; stages > 0; --stages) {
    if (backward_shared_bytes(shape, form, element_size, bucket.d, bucket.dv, stages) <=
        shared_limit) {
      return stages;
    }
  }
  return 0;
}

// Query rows of a tile that a block computes dQ of at a time, which tells the forms apart: the rows
// that a block of the dQ kernel owns, or those of a step of the one kernel.
constexpr i64 backward_block_q(BackwardForm form, int element_size, HeadBucket bucket) {
  const BackwardShape shape = backward_shape(element_size, bucket.d);
  return form == BackwardForm::kOneKernel ? shape.step : 16 * shape.warps;
}

// Which form runs by itself, of a call that could run in both: one kernel, unless its blocks would
// spend their time waiting. A block adds to the query tiles of its group one after another and its
// successor follows one tile behind: a chain of more blocks than a block has tiles leaves
// multiprocessors idle. That happens with few queries and many keys, never in self-attention.
constexpr BackwardForm backward_form(i64 lq, i64 lkv, i64 group, int element_size,
                                     HeadBucket bucket, i64 multiprocessors) {
  const BackwardShape shape = backward_shape(element_size, bucket.d);
  const i64 tiles = group * ceil_div<i64>(lq, shape.step);
  const i64 chain = min_of(ceil_div<i64>(lkv, 16 * shape.warps), multiprocessors);
  return tiles > 0 && chain > 0 && tiles >= chain ? BackwardForm::kOneKernel
                                                  : BackwardForm::kTwoKernels;
}

// Where things lie in the workspace, in bytes from its start. All parts grow linearly with the
// batch, so that an export with a symbolic batch can state the size.
struct BackwardWorkspace {
  i64 row_terms = 0;  // two floats a row, [B, Hq, Lq]: the logsumexp and sum(dO * O) - dlse
  // One kernel; [B, Hq, query tiles] of:
  i64 dq_sums = 0;  // f32 tiles, none if one block sees all keys
  i64 turns = 0;    // a counter a warp
  i64 ticket = 0;   // one counter
  i64 bytes = 0;
};

constexpr BackwardWorkspace backward_workspace(BackwardForm form, i64 batch, i64 lq, i64 lkv,
                                               i64 hq, int element_size, HeadBucket bucket) {
  BackwardWorkspace w;
  const i64 terms = batch * hq * lq * 8;
  w.bytes = terms;
  if (form == BackwardForm::kTwoKernels) return w;
  const BackwardShape shape = backward_shape(element_size, bucket.d);
  const i64 tiles = batch * hq * ceil_div<i64>(lq, shape.step);
  // The sums come first: they are loaded 16 bytes at a time.
  w.row_terms = lkv > 16 * shape.warps ? tiles * shape.step * bucket.d * 4 : 0;
  w.turns = w.row_terms + terms;
  w.ticket = w.turns + tiles * shape.warps * 4;
  w.bytes = w.ticket + 4;
  return w;
}

// dbias kernel: a block owns `16 * warps` x `keys` entries of dS.
struct BiasShape {
  int warps;
  int keys;
};

ATTENTION_HOST_DEVICE constexpr BiasShape bias_shape(int element_size, int d) {
  const int row_bytes = d * element_size;
  if (row_bytes <= 256) return {4, 64};
  if (row_bytes <= 512) return {4, 32};
  return {2, 16};
}

ATTENTION_HOST_DEVICE constexpr i64 bias_shared_bytes(const BiasShape& shape, int element_size,
                                                      int d, int dv) {
  const i64 rows = 16 * shape.warps;
  return taken_bytes(rows * d, element_size) + taken_bytes(rows * dv, element_size) +
         taken_bytes(i64{shape.keys} * d, element_size) +
         taken_bytes(i64{shape.keys} * dv, element_size) + taken_bytes(shape.warps * shape.keys, 4);
}

}  // namespace attention
