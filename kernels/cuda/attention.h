// SPDX-License-Identifier: Apache-2.0
// CUDA attention: the launchers. The same interface is compiled for the GPU (by nvcc) and for the
// emulator (by the host compiler, into a library of its own); there the stream is ignored and the
// work is done when the call returns.
#pragma once

#include "kernels/common/plan.h"
#include "kernels/common/problem.h"
#include "kernels/common/status.h"

namespace attention::cuda {

// A cudaStream_t.
using Stream = void*;

// out and lse of `args.problem`. `args.tuning` and the size of `args.workspace` are what the plan
// function returned for this problem. Only launches kernels: no allocation, no synchronisation, so
// it can be captured into a command buffer.
Status forward(const ForwardArgs& args, Stream stream);

// Gradients, from out and lse of the forward pass. Deterministic: no atomics.
Status backward(const BackwardArgs& args, Stream stream);

// What launchers need to know of the current device.
struct Device {
  i64 shared_memory = 0;  // bytes that one block may use
};

// The current device, or why it cannot run these kernels: no GPU, a driver that is too old, or an
// architecture that this library was not built for (the message names both).
Status current_device(Device* device);

}  // namespace attention::cuda

// PlanFunctions (kernels/common/plan.h). Each library has one of the two.
extern "C" int attention_plan_cuda(const attention::PlanRequest* request,
                                   attention::PlanResult* result);
extern "C" int attention_plan_emulated(const attention::PlanRequest* request,
                                       attention::PlanResult* result);
