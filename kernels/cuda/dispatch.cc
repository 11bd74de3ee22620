// SPDX-License-Identifier: Apache-2.0
// The launchers: check the arguments, choose the translation unit and the variant, launch.
#include "kernels/cuda/attention.h"
#include "kernels/cuda/units.h"

namespace attention::cuda {
namespace {

using ForwardUnit = Status (*)(const ForwardLaunch&);
using BackwardUnit = Status (*)(const BackwardLaunch&);

struct Unit {
  DType dtype;
  HeadBucket bucket;
  ForwardUnit forward;
  BackwardUnit backward;
};

constexpr DType dtype_f32 = DType::kFloat32;
constexpr DType dtype_bf16 = DType::kBFloat16;
constexpr DType dtype_f16 = DType::kFloat16;

#define ATTENTION_UNIT_ENTRY(dtype, d, dv) \
  {dtype_##dtype, {d, dv}, forward_##dtype##_##d##_##dv, backward_##dtype##_##d##_##dv},

const Unit kUnits[] = {ATTENTION_FOR_EACH_BUCKET(ATTENTION_UNIT_ENTRY, f32)
                           ATTENTION_FOR_EACH_BUCKET(ATTENTION_UNIT_ENTRY, bf16)
                               ATTENTION_FOR_EACH_BUCKET(ATTENTION_UNIT_ENTRY, f16)};

const Unit* find_unit(DType dtype, HeadBucket bucket) {
  for (const Unit& unit : kUnits) {
    if (unit.dtype == dtype && unit.bucket == bucket) return &unit;
  }
  return nullptr;
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
  }
  return "unknown dtype";
}

// The lean kernels: positions alone decide about the mask, the scale is folded into the exponent
// (which needs scale > 0) and rows move in 16-byte pieces.
bool is_lean(const Problem& p) {
  const i64 size = size_of(p.dtype);
  const bool plain = !p.scale_array.data && p.scale > 0.f && p.soft_cap == 0.f && !p.bias.data &&
                     !p.alibi_slopes.data && !p.q_segments.data && !p.prefix_lengths.data &&
                     !p.mask.data && !p.block_mask.index && p.dropout.threshold == 0;
  return plain && p.d * size % 16 == 0 && p.dv * size % 16 == 0;
}

Status missing_unit(const char* operation, const Problem& p) {
  return Status::error("attention %s: no kernel for %s with head dims %lld and %lld in this build",
                       operation, name_of(p.dtype), static_cast<long long>(p.d),
                       static_cast<long long>(p.dv));
}

Status check_sizes(const char* operation, const Problem& p) {
  // Positions, head numbers and tile counts are 32-bit inside the kernels; products of them are
  // not.
  constexpr i64 kLargest = i64{1} << 30;
  if (p.lq >= kLargest || p.lkv >= kLargest || p.lq * p.group() >= kLargest ||
      p.batch >= kLargest || p.hq >= kLargest) {
    return Status::error("attention %s: batch, heads, Lq * group and Lkv must be below 2^30",
                         operation);
  }
  // The combine and row-terms kernels have a block for 4 rows, and a grid up to 2^31 - 1 blocks.
  constexpr i64 kMostRows = i64{1} << 32;
  if (p.batch * p.lq > kMostRows / max_of<i64>(p.hq, 1)) {
    return Status::error("attention %s: B * Lq * Hq must be at most 2^32", operation);
  }
  return Status();
}

}  // namespace

Status forward(const ForwardArgs& args, Stream stream) {
  const Problem& p = args.problem;
  if (p.batch == 0 || p.lq == 0 || p.hq == 0) return Status();
  if (Status status = check_sizes("forward", p); !status.ok()) return status;
  const HeadBucket bucket = head_bucket(p.d, p.dv);
  const Unit* unit = find_unit(p.dtype, bucket);
  if (unit == nullptr || unit->forward == nullptr) return missing_unit("forward", p);
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;

  const int size = size_of(p.dtype);
  ForwardLaunch call{};
  call.lean = is_lean(p);
  call.stream = stream;
  call.rows = static_cast<int>(args.tuning.block_q);
  // The planner does not see the sign of the scale: a scale <= 0 needs the general variant, which
  // has no 128-row kernel.
  if (call.rows == 128 && !call.lean) call.rows = 64;
  if (call.rows != 16 && call.rows != 64 &&
      !(call.rows == 128 && forward_has_128_rows(size, bucket.d))) {
    return Status::error("attention forward: block_q got %lld; allowed: 16, 64, 128 as planned",
                         static_cast<long long>(args.tuning.block_q));
  }
  const ForwardShape shape = forward_shape(call.rows, size, bucket.d);
  const i64 block_k = args.tuning.block_k;
  const i64 splits = args.tuning.num_splits;
  const int stages = block_k > 0 && block_k % shape.keys == 0
                         ? forward_stages(call.rows, size, bucket, block_k, device.shared_memory)
                         : 0;
  if (stages == 0) {
    return Status::error("attention forward: block_k got %lld, which this kernel cannot run with",
                         static_cast<long long>(block_k));
  }
  const i64 rows = p.batch * p.lq * p.hq;
  const i64 needed = forward_workspace_bytes(splits, rows, p.dv);
  if (splits < 1 || splits > (i64{1} << 20) || args.workspace_bytes < needed) {
    return Status::error(
        "attention forward: num_splits %lld needs %lld bytes of workspace, got %lld",
        static_cast<long long>(splits), static_cast<long long>(needed),
        static_cast<long long>(args.workspace_bytes));
  }

  ForwardParams& params = call.params;
  params.problem = p;
  params.out = args.out;
  params.lse = args.lse;
  params.partial_out = static_cast<float*>(args.workspace);
  params.partial_lse = splits > 1 ? params.partial_out + splits * rows * p.dv : nullptr;
  params.pack = shape.packed ? static_cast<i32>(p.group()) : 1;
  params.row_blocks = static_cast<i32>(forward_row_blocks(shape, p.lq, p.group()));
  params.splits = static_cast<i32>(splits);
  params.block_k = static_cast<i32>(block_k);
  params.stages = stages;
  return unit->forward(call);
}

Status backward(const BackwardArgs& args, Stream stream) {
  const Problem& p = args.problem;
  // Without batch entries the gradient of a bias that they share is still there, and zero: the
  // dbias kernel writes it.
  if (p.hq == 0 || (p.batch == 0 && !args.dbias)) return Status();
  if (Status status = check_sizes("backward", p); !status.ok()) return status;
  const HeadBucket bucket = head_bucket(p.d, p.dv);
  const Unit* unit = find_unit(p.dtype, bucket);
  if (unit == nullptr || unit->backward == nullptr) return missing_unit("backward", p);
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  const int size = size_of(p.dtype);
  BackwardLaunch call{};
  call.lean = is_lean(p) && !args.dslopes_rows && !args.dscale_rows;
  call.stream = stream;
  const i64 block_q = args.tuning.block_q;
  const bool has_one_kernel = backward_has_one_kernel(size, bucket.d);
  if (has_one_kernel && block_q == backward_block_q(BackwardForm::kOneKernel, size, bucket)) {
    call.form = BackwardForm::kOneKernel;
  } else if (block_q == backward_block_q(BackwardForm::kTwoKernels, size, bucket)) {
    call.form = BackwardForm::kTwoKernels;
  } else {
    return Status::error("attention backward: block_q got %lld; allowed: what was planned",
                         static_cast<long long>(block_q));
  }
  // The planner does not see the sign of the scale, of which the lean variant alone asks. Without
  // rows or keys nothing would set the counters, or write dq.
  if (!call.lean || p.lq == 0 || p.lkv == 0) call.form = BackwardForm::kTwoKernels;
  const BackwardWorkspace workspace =
      backward_workspace(call.form, p.batch, p.lq, p.lkv, p.hq, size, bucket);
  if (args.workspace_bytes < workspace.bytes) {
    return Status::error("attention backward: needs %lld bytes of workspace, got %lld",
                         static_cast<long long>(workspace.bytes),
                         static_cast<long long>(args.workspace_bytes));
  }
  BackwardParams& params = call.params;
  params.problem = p;
  params.out = args.out;
  params.lse = args.lse;
  params.dout = args.dout;
  params.dlse = args.dlse;
  params.dq = args.dq;
  params.dk = args.dk;
  params.dv = args.dv;
  params.dbias = p.bias.data ? args.dbias : nullptr;
  params.dslopes_rows = args.dslopes_rows;
  params.dscale_rows = args.dscale_rows;
  char* start = static_cast<char*>(args.workspace);
  params.row_terms = reinterpret_cast<float*>(start + workspace.row_terms);
  if (call.form == BackwardForm::kOneKernel) {
    params.dq_sums = reinterpret_cast<float*>(start + workspace.dq_sums);
    params.turns = reinterpret_cast<u32*>(start + workspace.turns);
    params.ticket = reinterpret_cast<u32*>(start + workspace.ticket);
    params.tile_rows = static_cast<i32>(block_q);
    params.turns_per_tile = backward_shape(size, bucket.d).warps;
  }
  params.stages = backward_stages(call.form, size, bucket, device.shared_memory);
  if (params.stages == 0) {
    return Status::error(
        "attention backward: the device offers a block only %lld bytes of shared "
        "memory",
        static_cast<long long>(device.shared_memory));
  }
  return unit->backward(call);
}

}  // namespace attention::cuda
