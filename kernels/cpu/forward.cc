// SPDX-License-Identifier: Apache-2.0
// The forward launcher: plan, cut into tasks, run, merge.
#include "kernels/cpu/attention.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/plan.h"

namespace attention::cpu {
namespace {

// Merging so many floats takes the caller less time than it takes to wake a second thread.
constexpr i64 kFewPartialFloats = 128 * 1024;

}  // namespace

Status workers_for(const Plan& plan, i64 workspace_bytes, int threads, int* workers) {
  const i64 fixed = plan.partial_floats * static_cast<i64>(sizeof(float));
  const i64 room = (workspace_bytes - fixed) / max_of<i64>(plan.scratch.bytes, 1);
  if (workspace_bytes < fixed || room < 1)
    return Status::error("workspace of %lld bytes is too small: this call needs at least %lld",
                         workspace_bytes, fixed + plan.scratch.bytes);
  *workers = static_cast<int>(min_of<i64>(room, min_of(threads, plan.workers)));
  return {};
}

Status forward_with(const Kernels& kernels, const ForwardArgs& args, const Executor& executor) {
  const Problem& p = args.problem;
  Plan plan;
  Status status = plan_forward(shape_of(p), args.tuning, executor.threads(), &plan);
  if (!status.ok() || plan.path == Path::kEmpty) return status;
  int workers = 0;
  status = workers_for(plan, args.workspace_bytes, executor.threads(), &workers);
  if (!status.ok()) return status;

  char* workspace = static_cast<char*>(args.workspace);
  float* partials = reinterpret_cast<float*>(workspace + workers * plan.scratch.bytes);
  const i64 pairs = p.batch * p.hkv;
  if (plan.path == Path::kDecode) {
    executor.run(p.batch * plan.num_splits, workers, [&](i64 task, int worker) {
      ForwardTask t{};
      t.args = &args;
      t.plan = &plan;
      t.b = task / plan.num_splits;
      t.split = static_cast<i32>(task % plan.num_splits);
      t.scratch = workspace + worker * plan.scratch.bytes;
      t.partials = partials;
      kernels.forward_decode(t);
    });
  } else {
    // Later query blocks first: with a causal mask they are the long ones, and a long last task
    // would leave the other threads idle.
    const i64 groups = p.hkv / plan.heads;  // of key/value heads
    executor.run(p.batch * groups * plan.q_blocks * plan.num_splits, workers,
                 [&](i64 task, int worker) {
                   ForwardTask t;
                   t.args = &args;
                   t.plan = &plan;
                   t.split = static_cast<i32>(task % plan.num_splits);
                   const i64 outer = task / plan.num_splits, pair = outer % (p.batch * groups);
                   t.b = pair / groups;
                   t.kv_head = pair % groups * plan.heads;
                   t.q_block = plan.q_blocks - 1 - static_cast<i32>(outer / (p.batch * groups));
                   t.scratch = workspace + worker * plan.scratch.bytes;
                   t.partials = partials;
                   kernels.forward_tiled(t);
                 });
  }
  if (plan.num_splits > 1) {
    const int mergers = plan.partial_floats <= kFewPartialFloats ? 1 : workers;
    executor.run(pairs * plan.q_blocks, mergers, [&](i64 task, int) {
      const i64 pair = task / plan.q_blocks;
      kernels.merge_splits(args, plan, partials, pair / p.hkv, pair % p.hkv,
                           static_cast<i32>(task % plan.q_blocks));
    });
  }
  return {};
}

}  // namespace attention::cpu
