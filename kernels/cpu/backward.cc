// SPDX-License-Identifier: Apache-2.0
// The backward launcher: plan, cut into tasks, run, reduce.
#include <cstring>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/plan.h"

namespace attention::cpu {
namespace {

void fill_zero(void* data, i64 bytes) {
  if (data && bytes > 0) std::memset(data, 0, static_cast<size_t>(bytes));
}

// Without queries every gradient is a sum over nothing.
void write_zeros(const BackwardArgs& args) {
  const Problem& p = args.problem;
  const i64 size = size_of(p.dtype);
  fill_zero(args.dk, p.batch * p.lkv * p.hkv * p.d * size);
  fill_zero(args.dv, p.batch * p.lkv * p.hkv * p.dv * size);
  if (!args.dbias) return;
  const i64 heads = p.bias.head_stride == 0 ? 1 : p.hq;
  const i64 queries = p.bias.row_stride == 0 ? 1 : p.lq;
  const i64 keys = p.bias.col_stride == 0 ? 1 : p.lkv;
  fill_zero(args.dbias,
            p.bias.batch.mod * heads * queries * keys * static_cast<i64>(sizeof(float)));
}

}  // namespace

Status backward_with(const Kernels& kernels, const BackwardArgs& args, const Executor& executor) {
  const Problem& p = args.problem;
  Shape shape = shape_of(p);
  shape.wants_dbias = args.dbias != nullptr;
  Plan plan;
  Status status = plan_backward(shape, args.tuning, executor.threads(), &plan);
  if (!status.ok()) return status;
  if (plan.path == Path::kEmpty) {
    write_zeros(args);
    return {};
  }
  int workers = 0;
  status = workers_for(plan, args.workspace_bytes, executor.threads(), &workers);
  if (!status.ok()) return status;

  char* workspace = static_cast<char*>(args.workspace);
  float* partials = reinterpret_cast<float*>(workspace + workers * plan.scratch.bytes);
  const i64 keys_floats = padded_keys(p.lkv) * round_up<i64>(p.d, 16);
  const i64 pairs = p.batch * p.hkv;
  executor.run(pairs * plan.num_splits, workers, [&](i64 task, int worker) {
    BackwardTask t;
    t.args = &args;
    t.plan = &plan;
    t.b = task / plan.num_splits / p.hkv;
    t.kv_head = task / plan.num_splits % p.hkv;
    t.split = static_cast<i32>(task % plan.num_splits);
    t.scratch = workspace + worker * plan.scratch.bytes;
    t.dk = plan.num_splits > 1 ? partials + task * plan.partial_stride
                               : reinterpret_cast<float*>(t.scratch + plan.scratch.accumulators);
    t.dv = t.dk + keys_floats;
    kernels.backward(t);
  });
  if (plan.num_splits > 1) {
    constexpr i64 kKeys = 256;  // of one reduction task
    const i64 parts = ceil_div(p.lkv, kKeys);
    executor.run(pairs * parts, workers, [&](i64 task, int) {
      const i64 pair = task / parts, first = task % parts * kKeys;
      kernels.reduce_splits(args, plan, partials, pair / p.hkv, pair % p.hkv,
                            static_cast<i32>(first),
                            static_cast<i32>(min_of(first + kKeys, p.lkv)));
    });
  }
  if (args.dbias) {
    const BiasBlocks blocks = bias_blocks(p, plan);
    executor.run(blocks.count, workers, [&](i64 task, int worker) {
      kernels.bias_gradient(args, plan, task, workspace + worker * plan.scratch.bytes);
    });
  }
  return {};
}

}  // namespace attention::cpu
