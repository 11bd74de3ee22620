// SPDX-License-Identifier: Apache-2.0
// FFI targets of the CUDA library and, with ATTENTION_EMULATED, of the emulated one: the same
// decoding and launchers, without a stream and with a look at the data that a host can take.
#include "kernels/cuda/attention.h"
#include "kernels/ffi/frame.h"

#ifdef ATTENTION_EMULATED
#define ATTENTION_CUDA_TARGET(operation) ATTENTION_TARGET(operation, emulated)
#else
#define ATTENTION_CUDA_TARGET(operation) ATTENTION_TARGET(operation, cuda)
#endif

namespace attention::ffi {
namespace {

constexpr const char* kForwardName = ATTENTION_TARGET_TEXT(ATTENTION_CUDA_TARGET(fwd));
constexpr const char* kBackwardName = ATTENTION_TARGET_TEXT(ATTENTION_CUDA_TARGET(bwd));

Status check_data([[maybe_unused]] const Problem& problem, const Frame& frame) {
  const Status status = check_alignment(frame.operands(), frame.results());
  if (!status.ok()) return status;
#ifdef ATTENTION_EMULATED
  return check_block_index(problem, frame.operands());
#else
  return Status();  // tile numbers are in device memory; jax_ops clamps them
#endif
}

xla::ffi::Error forward(cuda::Stream stream, xla::ffi::RemainingArgs operands,
                        xla::ffi::RemainingRets results, xla::ffi::Dictionary attributes) {
  return answer(kForwardName, [&] {
    const Frame frame(operands, results, attributes);
    if (!frame.ok()) return Status::error("%s", frame.error().c_str());
    ForwardArgs args;
    Status status = decode_forward(frame.operands(), frame.results(), frame.attributes(), &args);
    if (status.ok()) status = check_data(args.problem, frame);
    return status.ok() ? cuda::forward(args, stream) : status;
  });
}

xla::ffi::Error backward(cuda::Stream stream, xla::ffi::RemainingArgs operands,
                         xla::ffi::RemainingRets results, xla::ffi::Dictionary attributes) {
  return answer(kBackwardName, [&] {
    const Frame frame(operands, results, attributes);
    if (!frame.ok()) return Status::error("%s", frame.error().c_str());
    BackwardArgs args;
    Status status = decode_backward(frame.operands(), frame.results(), frame.attributes(), &args);
    if (status.ok()) status = check_data(args.problem, frame);
    return status.ok() ? cuda::backward(args, stream) : status;
  });
}

#ifdef ATTENTION_EMULATED

xla::ffi::Error forward_emulated(xla::ffi::RemainingArgs operands, xla::ffi::RemainingRets results,
                                 xla::ffi::Dictionary attributes) {
  return forward(nullptr, operands, results, attributes);
}

xla::ffi::Error backward_emulated(xla::ffi::RemainingArgs operands, xla::ffi::RemainingRets results,
                                  xla::ffi::Dictionary attributes) {
  return backward(nullptr, operands, results, attributes);
}

#endif

}  // namespace
}  // namespace attention::ffi

#ifdef ATTENTION_EMULATED

#define ATTENTION_EMULATED_BINDING xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs()

XLA_FFI_DEFINE_HANDLER_SYMBOL(ATTENTION_CUDA_TARGET(fwd), attention::ffi::forward_emulated,
                              ATTENTION_EMULATED_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(ATTENTION_CUDA_TARGET(bwd), attention::ffi::backward_emulated,
                              ATTENTION_EMULATED_BINDING);

#else

#define ATTENTION_CUDA_BINDING                                  \
  xla::ffi::Ffi::Bind()                                         \
      .Ctx<xla::ffi::PlatformStream<attention::cuda::Stream>>() \
      .RemainingArgs()                                          \
      .RemainingRets()                                          \
      .Attrs()

// Launches depend on shapes and attributes alone, so XLA may record them once and replay them.
XLA_FFI_DEFINE_HANDLER_SYMBOL(ATTENTION_CUDA_TARGET(fwd), attention::ffi::forward,
                              ATTENTION_CUDA_BINDING, {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(ATTENTION_CUDA_TARGET(bwd), attention::ffi::backward,
                              ATTENTION_CUDA_BINDING, {xla::ffi::Traits::kCmdBufferCompatible});

#endif
