// SPDX-License-Identifier: Apache-2.0
// The planner: block sizes, splits and workspace from sizes alone.
#include "kernels/cpu/plan.h"

#include <algorithm>
#include <initializer_list>
#include <numeric>

namespace attention::cpu {
namespace {

// Rows (query, head) of one forward task. Packing K and V, which lie scattered in the third-level
// cache, is amortised over them. Their Q^T and O^T pass by once for each block of keys, in order,
// so they need not stay in the second-level cache; a call should have some tasks to share out.
constexpr i64 kForwardRows = 1024;
constexpr i64 kForwardRowFloats = 262144;  // rows * (D + Dv) of all heads of a task: 1 MB
constexpr i64 kFewForwardRows = 384;
constexpr i64 kForwardTasks = 32;
constexpr i64 kBlockKeys = 128;
// Backward, everything of a block of rows and of keys is read again and again: both stay in the
// second-level cache. 96 keys are whole register tiles of 6 and of 8 rows.
constexpr i64 kBackwardRows = 128;
constexpr i64 kBackwardBlockKeys = 96;
constexpr i64 kMaxBlockKeys = 512;
// More rows than this in one task would only cost memory.
constexpr i64 kMaxRows = 2048;
// A call with at most this many rows for each key/value head, and at least so many keys, streams K
// and V.
constexpr i64 kMaxDecodeRows = 16;
constexpr i64 kMinDecodeKeys = 128;
// Bytes of the weights of one block of keys in the streaming path: they stay in the nearest caches
// between K and V.
constexpr i64 kDecodeWeightBytes = 64 * 1024;
// Keys below which a further split costs more than it gains.
constexpr i64 kMinSplitKeys = 256;

constexpr i64 kFloat = sizeof(float);

// No array that a call decodes has more elements (kernels/ffi/decode.cc), and no address space more
// bytes than a workspace may ask for: below these, sizes are multiplied without a second thought.
constexpr i64 kMaxElements = i64{1} << 42;
constexpr i64 kMaxWorkspaceBytes = i64{1} << 47;

// Whether the product of sizes is larger than `limit`, which it need not fit into 64 bits for.
bool exceeds(std::initializer_list<i64> sizes, i64 limit) {
  i64 product = 1;
  bool larger = false;
  for (const i64 size : sizes) {
    if (size == 0) return false;
    larger = larger || product > limit / size;
    if (!larger) product *= size;
  }
  return larger;
}

class Layout {
 public:
  i64 add(i64 bytes) {
    const i64 at = bytes_;
    bytes_ += round_up(std::max<i64>(bytes, 0), kAlignment);
    return at;
  }
  i64 bytes() const { return bytes_; }

 private:
  i64 bytes_ = 0;
};

Status check(const Shape& s) {
  if (std::min({s.batch, s.lq, s.lkv, s.hq}) < 0)
    return Status::error("batch %lld, lengths %lld and %lld, %lld query heads: each must be >= 0",
                         s.batch, s.lq, s.lkv, s.hq);
  if (s.d < 1 || s.d > 256)
    return Status::error("head dim of query and key is %lld; the cpu kernels take 1 to 256", s.d);
  if (s.dv < 1 || s.dv > 256)
    return Status::error("head dim of value is %lld; the cpu kernels take 1 to 256", s.dv);
  if (s.hkv < 1 || s.hq % s.hkv != 0)
    return Status::error("%lld query heads are not a multiple of %lld key/value heads", s.hq,
                         s.hkv);
  constexpr i64 kMaxLength = (i64{1} << 31) - 1 - kMaxRows;
  if (s.lq > kMaxLength || s.lkv > kMaxLength)
    return Status::error("sequence lengths %lld and %lld; the cpu kernels take up to %lld", s.lq,
                         s.lkv, kMaxLength);
  constexpr i64 kMaxGroup = i64{1} << 24;
  if (s.hq > kMaxLength || s.hq / s.hkv > kMaxGroup)
    return Status::error(
        "%lld query heads, %lld for each key/value head; the cpu kernels take up to %lld and %lld",
        s.hq, s.hq / s.hkv, kMaxLength, kMaxGroup);
  if (exceeds({s.batch, s.lq, s.hq}, kMaxElements) ||
      exceeds({s.batch, s.lkv, s.hkv}, kMaxElements))
    return Status::error(
        "batch %lld, lengths %lld and %lld, heads %lld and %lld: more rows than any array holds",
        s.batch, s.lq, s.lkv, s.hq, s.hkv);
  return {};
}

Status check(const Tuning& t) {
  if (t.block_q < 0 || t.block_k < 0 || t.num_splits < 0)
    return Status::error(
        "block_q %lld, block_k %lld, num_splits %lld: each must be positive, or 0 for the "
        "planner's "
        "choice",
        t.block_q, t.block_k, t.num_splits);
  return {};
}

// Queries of one task: about `rows` rows, evenly cut, in whole row tiles.
i64 balanced_block_q(const Shape& s, i64 rows) {
  const i64 group = s.hq / s.hkv;
  const i64 blocks = std::max<i64>(1, ceil_div(s.lq * group, rows));
  const i64 step = kMaxRowTile / std::gcd<i64>(kMaxRowTile, group);
  return std::min(round_up(ceil_div(s.lq, blocks), step), s.lq);
}

void choose_blocks(const Shape& s, const Tuning& t, i64 rows, i64 keys, Plan* plan) {
  const i64 group = s.hq / s.hkv;
  const i64 widest = std::max<i64>(1, kMaxRows / group);
  plan->block_q = static_cast<i32>(t.block_q > 0 ? std::min({t.block_q, s.lq, widest})
                                                 : balanced_block_q(s, rows));
  const i64 asked_k = t.block_k > 0 ? std::min(t.block_k, kMaxBlockKeys) : keys;
  plan->block_k = static_cast<i32>(round_up(std::min(asked_k, std::max<i64>(s.lkv, 1)), i64{8}));
  plan->q_blocks = static_cast<i32>(ceil_div(s.lq, i64{plan->block_q}));
  plan->padded_rows = static_cast<i32>(round_up(plan->block_q * group, i64{kMaxRowTile}));
}

// Rows of one forward task. A function of sizes alone, not of threads: a workspace that was made
// for some number of threads serves any smaller one.
i64 forward_rows(const Shape& s) {
  const i64 most = clamp_to<i64>(kForwardRowFloats / (s.d + s.dv), 128, kForwardRows);
  return clamp_to<i64>(s.batch * s.lq * s.hq / kForwardTasks, std::min(kFewForwardRows, most),
                       most);
}

// Key/value heads that one forward task may take: their rows fit.
i64 most_heads(const Shape& s, const Plan& plan) {
  return clamp_to<i64>(kForwardRowFloats / (plan.padded_rows * (s.d + s.dv)), 1, s.hkv);
}

// Those that it takes: as many as leave some tasks to share out. Rows of one head lie scattered in
// memory; a task that takes the heads of a block in turn reads its pages in order.
i64 forward_heads(const Shape& s, const Plan& plan) {
  const i64 tasks_of_a_head = std::min(s.batch * plan.q_blocks, kForwardTasks) *
                              clamp_to<i64>(s.lkv / kMinSplitKeys, 1, kForwardTasks);
  i64 heads = most_heads(s, plan);
  while (heads > 1 && (s.hkv % heads != 0 || tasks_of_a_head * (s.hkv / heads) < kForwardTasks))
    --heads;
  return heads;
}

// Whether the forward pass streams K and V.
bool streams(const Shape& s) {
  return s.streams_simply && s.lkv >= kMinDecodeKeys && s.lq * (s.hq / s.hkv) <= kMaxDecodeRows;
}

void choose_decode_blocks(const Shape& s, const Tuning& t, Plan* plan) {
  plan->block_q = static_cast<i32>(s.lq);
  plan->q_blocks = 1;
  // No row is padded: the unused ones of partial results would be further pages of memory.
  plan->padded_rows = static_cast<i32>(s.lq * (s.hq / s.hkv));
  if (t.block_k == 0) {
    const i64 key_bytes = s.hq * s.lq * kFloat;
    const i64 keys = clamp_to<i64>(kDecodeWeightBytes / key_bytes / 16 * 16, 16, kBlockKeys);
    plan->block_k = static_cast<i32>(round_up(std::min(keys, std::max<i64>(s.lkv, 1)), i64{8}));
  }
}

// Sizes the workspace for `outer` tasks in each split and `partials` partial results.
Status finish(Plan* plan, int threads, i64 outer, i64 partials) {
  plan->scratch.bytes = round_up(plan->scratch.bytes, kAlignment);
  const i64 tasks =
      exceeds({outer, plan->num_splits}, threads) ? threads : outer * plan->num_splits;
  plan->workers = static_cast<int>(clamp_to<i64>(tasks, 1, threads));
  if (exceeds({plan->workers, plan->scratch.bytes}, kMaxWorkspaceBytes) ||
      exceeds({partials, plan->num_splits, plan->partial_stride, kFloat}, kMaxWorkspaceBytes))
    return Status::error("the workspace of %d splits would be larger than any memory",
                         plan->num_splits);
  plan->partial_floats = partials * plan->num_splits * plan->partial_stride;
  plan->workspace_bytes = plan->workers * plan->scratch.bytes + plan->partial_floats * kFloat;
  return {};
}

}  // namespace

Shape shape_of(const Problem& p) {
  Shape s;
  s.batch = p.batch;
  s.lq = p.lq;
  s.lkv = p.lkv;
  s.hq = p.hq;
  s.hkv = p.hkv;
  s.d = p.d;
  s.dv = p.dv;
  s.dtype = p.dtype;
  s.streams_simply = !p.bias.data && !p.mask.data && !p.block_mask.index && !p.q_segments.data &&
                     p.dropout.threshold == 0;
  s.causal = p.causal;
  s.soft_cap = p.soft_cap != 0.f;
  return s;
}

Status plan_forward(const Shape& s, const Tuning& tuning, int threads, Plan* plan) {
  *plan = {};
  if (Status status = check(s); !status.ok()) return status;
  if (Status status = check(tuning); !status.ok()) return status;
  if (s.batch == 0 || s.lq == 0 || s.hq == 0) return {};
  const bool decode = streams(s);
  plan->path = decode ? Path::kDecode : Path::kTiled;
  choose_blocks(s, tuning, forward_rows(s), kBlockKeys, plan);
  if (decode) choose_decode_blocks(s, tuning, plan);

  plan->heads = static_cast<i32>(decode ? s.hkv : forward_heads(s, *plan));
  const i64 tasks = s.batch * (s.hkv / plan->heads) * plan->q_blocks;
  i64 splits = tuning.num_splits;
  if (splits == 0)
    splits = clamp_to<i64>(ceil_div<i64>(i64{4} * threads, tasks), 1,
                           std::max<i64>(1, s.lkv / kMinSplitKeys));
  if (threads == 1 && tuning.num_splits == 0) splits = 1;
  // A split is a whole number of 8-key groups; more splits than there are groups would be empty.
  const i64 lkv = std::max<i64>(s.lkv, 1);
  splits = std::min(splits, lkv);
  plan->split_size = static_cast<i32>(round_up(ceil_div(lkv, splits), i64{8}));
  plan->num_splits = static_cast<i32>(ceil_div<i64>(lkv, plan->split_size));

  const i64 rows = plan->padded_rows, keys = round_up<i64>(plan->block_k, kKeyPad);
  const i64 d = round_up<i64>(s.d, 16), dv = round_up<i64>(s.dv, 16);
  // Room for the same heads at any batch size, as for the same tasks: a line above the workspaces
  // of some batch sizes is above those of all (jax_ops/_plan.py).
  const i64 heads = decode ? s.hkv : most_heads(s, *plan);
  Layout layout;
  if (!decode) {
    plan->scratch.k = layout.add(keys * kPackPitch * kFloat);
    plan->scratch.v = layout.add(keys * kPackPitch * kFloat);
    plan->scratch.allow = layout.add(keys * kMaxRowTile / 8);
  }
  if (decode) {
    const i64 all = s.hq * s.lq, wide_v = round_up<i64>(s.dv, kDecodePad);
    plan->scratch.q_t = layout.add(all * round_up<i64>(s.d, kDecodePad) * kFloat);
    plan->scratch.o_t = layout.add(all * wide_v * kFloat);
    plan->scratch.o_block = layout.add(all * wide_v * kFloat);
    plan->scratch.s = layout.add(all * (keys + kDecodePad) * kFloat);
    plan->scratch.decay = layout.add(all * kFloat);
  } else {
    plan->scratch.q_t = layout.add(heads * rows * d * kFloat);
    plan->scratch.o_t = layout.add(heads * rows * dv * kFloat);
    // Matrix tiles work on three row tiles at a time.
    const i64 row_tiles = s.dtype == DType::kBFloat16 ? 3 : 1;
    plan->scratch.s = layout.add(row_tiles * (keys + kMaxRowTile) * kMaxRowTile * kFloat);
  }
  plan->scratch.rows = layout.add(heads * rows * kRowArrays * kFloat);
  plan->scratch.bytes = layout.bytes();
  if (plan->num_splits > 1)
    plan->partial_stride = s.batch * s.hkv * plan->q_blocks * rows * (dv + 2);
  return finish(plan, threads, s.batch * (decode ? 1 : s.hkv) * plan->q_blocks,
                plan->num_splits > 1 ? 1 : 0);
}

Status plan_backward(const Shape& s, const Tuning& tuning, int threads, Plan* plan) {
  *plan = {};
  if (Status status = check(s); !status.ok()) return status;
  if (Status status = check(tuning); !status.ok()) return status;
  if (s.batch == 0 || s.hq == 0 || (s.lq == 0 && s.lkv == 0)) return {};
  plan->path = Path::kTiled;
  if (s.lq == 0) {
    // No rows: dk and dv are zeros.
    plan->path = Path::kEmpty;
    return {};
  }
  choose_blocks(s, tuning, kBackwardRows, kBackwardBlockKeys, plan);
  plan->own_sums = streams(s);

  // Each split covers every num_splits-th block of queries (so that causal work is even) and owns
  // accumulators for all of dK and dV: no more of them than keep the threads busy.
  const i64 pairs = s.batch * s.hkv;
  i64 splits = tuning.num_splits;
  if (splits == 0) splits = threads == 1 ? 1 : ceil_div<i64>(i64{2} * threads, pairs);
  plan->num_splits = static_cast<i32>(clamp_to<i64>(splits, 1, plan->q_blocks));

  const i64 rows = plan->padded_rows, keys = round_up<i64>(plan->block_k, kKeyPad);
  const i64 d = round_up<i64>(s.d, 16), dv = round_up<i64>(s.dv, 16);
  Layout layout;
  plan->scratch.k = layout.add(keys * kPackPitch * kFloat);
  plan->scratch.v = layout.add(keys * kPackPitch * kFloat);
  plan->scratch.q_t = layout.add(rows * d * kFloat);
  plan->scratch.do_t = layout.add(rows * dv * kFloat);
  plan->scratch.o_t = layout.add(rows * d * kFloat);
  plan->scratch.q = layout.add(rows * kPackPitch * kFloat);
  plan->scratch.d_out = layout.add(rows * kPackPitch * kFloat);
  plan->scratch.s = layout.add(rows * keys * kFloat);
  plan->scratch.ds = layout.add(rows * keys * kFloat);
  if (s.soft_cap) plan->scratch.cap = layout.add(keys * kMaxRowTile * kFloat);
  if (s.wants_dbias) plan->scratch.dbias = layout.add(rows * keys * kFloat);
  plan->scratch.allow = layout.add(keys * kMaxRowTile / 8);
  plan->scratch.rows = layout.add(rows * kRowArrays * kFloat);
  plan->scratch.bytes = layout.bytes();

  plan->partial_stride = padded_keys(s.lkv) * (d + dv);
  if (plan->num_splits == 1) {
    // One task finishes what it accumulates, so a worker's accumulators serve its next task.
    plan->scratch.accumulators = plan->scratch.bytes;
    plan->scratch.bytes += round_up(plan->partial_stride * kFloat, kAlignment);
  }
  return finish(plan, threads, pairs, plan->num_splits > 1 ? pairs : 0);
}

}  // namespace attention::cpu

extern "C" int attention_plan_cpu(const attention::PlanRequest* request,
                                  attention::PlanResult* result) {
  using namespace attention;       // NOLINT: a C entry point has no namespace of its own
  using namespace attention::cpu;  // NOLINT
  const PlanRequest& r = *request;
  *result = {};
  Shape shape;
  shape.batch = r.batch;
  shape.lq = r.lq;
  shape.lkv = r.lkv;
  shape.hq = r.hq;
  shape.hkv = r.hkv;
  shape.d = r.d;
  shape.dv = r.dv;
  shape.dtype = static_cast<DType>(r.dtype);
  shape.streams_simply = (r.features & (kFeatureBias | kFeatureMask | kFeatureBlockMask |
                                        kFeatureSegments | kFeatureDropout)) == 0;
  shape.causal = (r.features & kFeatureCausal) != 0;
  shape.soft_cap = (r.features & kFeatureSoftCap) != 0;
  shape.wants_dbias = (r.features & kFeatureWantDbias) != 0;
  const Tuning tuning{r.block_q, r.block_k, r.num_splits};
  const int threads = std::max<i32>(1, r.threads);
  Plan plan;
  const Status status = r.operation == static_cast<i32>(Operation::kForward)
                            ? plan_forward(shape, tuning, threads, &plan)
                            : plan_backward(shape, tuning, threads, &plan);
  if (!status.ok()) {
    std::snprintf(result->message, sizeof(result->message), "%s", status.message());
    return 1;
  }
  result->block_q = plan.block_q;
  result->block_k = plan.block_k;
  result->num_splits = plan.num_splits;
  result->workspace_bytes = plan.workspace_bytes;
  return 0;
}
