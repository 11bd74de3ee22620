// SPDX-License-Identifier: Apache-2.0
// The plan function of the CUDA and the emulated library (kernels/common/plan.h): which kernel
// shape a call will run with, or in words why there is none. ATTENTION_PLAN_FUNCTION is the
// exported name.
#include <cstdarg>
#include <cstdio>

#include "kernels/common/planner.h"
#include "kernels/cuda/attention.h"

namespace attention::cuda {
namespace {

// Terms that the lean kernels know.
constexpr i64 kLeanFeatures =
    kFeatureCausal | kFeatureBottomRight | kFeatureWindow | kFeatureQLengths | kFeatureKvLengths;

// Multiprocessors assumed when the caller names none (emulator, export without a device): the count
// of a mid-size GPU.
constexpr i64 kUnknownMultiprocessors = 64;

__attribute__((format(printf, 2, 3))) int refuse(PlanResult* result, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(result->message, sizeof(result->message), format, arguments);
  va_end(arguments);
  return 1;
}

// Blocks of a kernel that one multiprocessor runs at a time, by shared memory and by registers (all
// kernels use 128 to 255 a thread).
i64 blocks_per_multiprocessor(i64 shared_bytes, i64 shared_limit, i64 threads) {
  // A multiprocessor has 1 KiB more than its largest block may use, and each block costs 1 KiB.
  const i64 by_memory = (shared_limit + kKib) / (shared_bytes + kKib);
  const i64 by_registers = 65536 / (threads * 255);
  return max_of<i64>(1, min_of(by_memory, by_registers));
}

int plan_forward(const PlanRequest& r, HeadBucket bucket, int size, PlanResult* result) {
  const i64 group = r.hq / r.hkv;
  const bool aligned = r.d * size % 16 == 0 && r.dv * size % 16 == 0;
  const bool lean = (r.features & ~kLeanFeatures) == 0 && aligned;
  const i64 limit = shared_memory_limit(r.compute_capability);

  const bool has_128 = lean && forward_has_128_rows(size, bucket.d);
  i64 rows = r.block_q;
  if (rows == 0) rows = forward_block_q(r.lq, group, size, bucket.d, lean);
  if (rows != 16 && rows != 64 && !(rows == 128 && has_128)) {
    return refuse(result, "block_q: got %lld; allowed: %s", static_cast<long long>(rows),
                  has_128 ? "16, 64, 128"
                          : "16, 64 (128 exists for causal, window and lengths alone, with rows of "
                            "at most 256 bytes)");
  }
  const ForwardShape shape = forward_shape(static_cast<int>(rows), size, bucket.d);

  i64 block_k = r.block_k;
  if (block_k == 0) block_k = forward_block_k(static_cast<int>(rows), size, bucket, limit);
  const bool known = block_k == 16 || block_k == 32 || block_k == 64 || block_k == 128;
  if (!known || block_k % shape.keys != 0) {
    return refuse(result,
                  "block_k: got %lld; allowed with block_q %lld: powers of two from %d to 128",
                  static_cast<long long>(block_k), static_cast<long long>(rows), shape.keys);
  }
  const int stages = forward_stages(static_cast<int>(rows), size, bucket, block_k, limit);
  if (stages == 0) {
    return refuse(result,
                  "block_k: got %lld; with block_q %lld and head dims %lld and %lld it needs more "
                  "than the %lld KiB of shared memory of a block; use a smaller one",
                  static_cast<long long>(block_k), static_cast<long long>(rows),
                  static_cast<long long>(r.d), static_cast<long long>(r.dv),
                  static_cast<long long>(limit / kKib));
  }

  const i64 key_tiles = max_of<i64>(1, ceil_div(r.lkv, block_k));
  i64 splits = r.num_splits;
  if (splits == 0) {
    const i64 bytes = forward_shared_bytes(shape, size, bucket.d, bucket.dv, block_k, stages);
    const i64 multiprocessors = r.sm_count > 0 ? r.sm_count : kUnknownMultiprocessors;
    const i64 slots = multiprocessors * blocks_per_multiprocessor(bytes, limit, shape.threads());
    const i64 row_tiles =
        r.batch * (r.hq / (shape.packed ? group : 1)) * forward_row_blocks(shape, r.lq, group);
    splits = forward_splits(max_of<i64>(1, row_tiles), key_tiles, slots);
  }
  // More splits than key tiles only add empty ones: the others stay as they are.
  splits = min_of(splits, key_tiles);

  result->block_q = rows;
  result->block_k = block_k;
  result->num_splits = splits;
  result->workspace_bytes = forward_workspace_bytes(splits, r.batch * r.lq * r.hq, r.dv);
  return 0;
}

int plan_backward(const PlanRequest& r, HeadBucket bucket, int size, PlanResult* result) {
  const BackwardShape shape = backward_shape(size, bucket.d);
  const bool aligned = r.d * size % 16 == 0 && r.dv * size % 16 == 0;
  const bool lean = (r.features & ~kLeanFeatures) == 0 && aligned;
  const i64 two = backward_block_q(BackwardForm::kTwoKernels, size, bucket);
  const i64 one = backward_block_q(BackwardForm::kOneKernel, size, bucket);
  const bool has_one = lean && backward_has_one_kernel(size, bucket.d);
  BackwardForm form = BackwardForm::kTwoKernels;
  if (r.block_q == 0) {
    const i64 multiprocessors = r.sm_count > 0 ? r.sm_count : kUnknownMultiprocessors;
    if (has_one) {
      form = backward_form(r.lq, r.lkv, r.hq / r.hkv, size, bucket, multiprocessors);
    }
  } else if (has_one && r.block_q == one) {
    form = BackwardForm::kOneKernel;
  } else if (r.block_q != two) {
    return has_one ? refuse(result, "block_q of a gradient: got %lld; allowed: %lld, %lld",
                            static_cast<long long>(r.block_q), static_cast<long long>(one),
                            static_cast<long long>(two))
                   : refuse(result, "block_q of a gradient: got %lld; allowed: %lld",
                            static_cast<long long>(r.block_q), static_cast<long long>(two));
  }
  result->block_q = backward_block_q(form, size, bucket);
  result->block_k = 16 * shape.warps;
  result->num_splits = 1;
  result->workspace_bytes =
      backward_workspace(form, r.batch, r.lq, r.lkv, r.hq, size, bucket).bytes;
  return 0;
}

int plan(const PlanRequest& r, PlanResult* result) {
  *result = PlanResult{};
  if (r.dtype < 0 || r.dtype > 2)
    return refuse(result, "dtype: got code %d; allowed: 0, 1, 2", r.dtype);
  if (r.d < 1 || r.dv < 1) {
    return refuse(result, "head dims: got %lld and %lld; allowed: 1 to 256",
                  static_cast<long long>(r.d), static_cast<long long>(r.dv));
  }
  const HeadBucket bucket = head_bucket(r.d, r.dv);
  if (bucket.d == 0) {
    return refuse(result, "head dims: got %lld and %lld; allowed: 1 to 256",
                  static_cast<long long>(r.d), static_cast<long long>(r.dv));
  }
  if (r.hkv < 1 || r.hq % r.hkv != 0) {
    return refuse(result, "heads: got %lld query and %lld key heads; the first must be a multiple",
                  static_cast<long long>(r.hq), static_cast<long long>(r.hkv));
  }
  if (r.num_splits < 0) {
    return refuse(result, "num_splits: got %lld; allowed: 0 (automatic) or more",
                  static_cast<long long>(r.num_splits));
  }
  const int size = size_of(static_cast<DType>(r.dtype));
  return static_cast<Operation>(r.operation) == Operation::kForward
             ? plan_forward(r, bucket, size, result)
             : plan_backward(r, bucket, size, result);
}

}  // namespace
}  // namespace attention::cuda

extern "C" __attribute__((visibility("default"))) int ATTENTION_PLAN_FUNCTION(
    const attention::PlanRequest* request, attention::PlanResult* result) {
  return attention::cuda::plan(*request, result);
}
