// SPDX-License-Identifier: Apache-2.0
// FFI targets of the CPU library: decode, check, launch.
#include "kernels/cpu/attention.h"
#include "kernels/ffi/frame.h"
#include "kernels/ffi/huge_pages.h"
#include "kernels/ffi/pool_executor.h"

namespace attention::ffi {
namespace {

constexpr const char* kForwardName = ATTENTION_TARGET_TEXT(ATTENTION_TARGET(fwd, cpu));
constexpr const char* kBackwardName = ATTENTION_TARGET_TEXT(ATTENTION_TARGET(bwd, cpu));

// A call is made for one plan; a library whose planner wants more memory must not run it.
Status check_workspace(const PlanRequest& request, i64 bytes) {
  PlanResult plan = {};
  if (attention_plan_cpu(&request, &plan) != 0) return Status::error("%s", plan.message);
  if (bytes < plan.workspace_bytes) {
    return Status::error("workspace: got %lld bytes; wanted %lld", bytes, plan.workspace_bytes);
  }
  return Status();
}

xla::ffi::Error forward(xla::ffi::ThreadPool pool, xla::ffi::RemainingArgs operands,
                        xla::ffi::RemainingRets results, xla::ffi::Dictionary attributes) {
  return answer(kForwardName, [&] {
    const Frame frame(operands, results, attributes);
    if (!frame.ok()) return Status::error("%s", frame.error().c_str());
    ForwardArgs args;
    Status status = decode_forward(frame.operands(), frame.results(), frame.attributes(), &args);
    if (status.ok()) status = check_block_index(args.problem, frame.operands());
    if (status.ok()) {
      status =
          check_workspace(plan_request(args.problem, frame.attributes(), Operation::kForward, 0),
                          args.workspace_bytes);
    }
    if (!status.ok()) return status;
    ask_for_huge_pages(frame.results());
    return cpu::forward(args, PoolExecutor(pool, frame.attributes().threads));
  });
}

xla::ffi::Error backward(xla::ffi::ThreadPool pool, xla::ffi::RemainingArgs operands,
                         xla::ffi::RemainingRets results, xla::ffi::Dictionary attributes) {
  return answer(kBackwardName, [&] {
    const Frame frame(operands, results, attributes);
    if (!frame.ok()) return Status::error("%s", frame.error().c_str());
    BackwardArgs args;
    Status status = decode_backward(frame.operands(), frame.results(), frame.attributes(), &args);
    if (status.ok()) status = check_block_index(args.problem, frame.operands());
    if (status.ok()) {
      status = check_workspace(plan_request(args.problem, frame.attributes(), Operation::kBackward,
                                            dbias_elements(args, frame.results())),
                               args.workspace_bytes);
    }
    if (!status.ok()) return status;
    ask_for_huge_pages(frame.results());
    return cpu::backward(args, PoolExecutor(pool, frame.attributes().threads));
  });
}

}  // namespace
}  // namespace attention::ffi

#define ATTENTION_CPU_BINDING \
  xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs()

XLA_FFI_DEFINE_HANDLER_SYMBOL(ATTENTION_TARGET(fwd, cpu), attention::ffi::forward,
                              ATTENTION_CPU_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(ATTENTION_TARGET(bwd, cpu), attention::ffi::backward,
                              ATTENTION_CPU_BINDING);
