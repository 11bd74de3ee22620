// SPDX-License-Identifier: Apache-2.0
// One FFI call as plain data, and its checked translation into a launcher's arguments. Nothing
// here knows XLA: the handlers copy pointers and sizes out of XLA's frame, and native tests build
// calls by hand.
//
// Everything is checked, because a call can come from a file: an exported program that was changed,
// or made for another library. After a successful decode every address that a kernel can compute
// from shapes and attributes lies inside its buffer.
#pragma once

#include "kernels/common/plan.h"
#include "kernels/common/problem.h"
#include "kernels/common/status.h"

namespace attention::ffi {

enum class Element { kFloat32, kBFloat16, kFloat16, kBool, kInt32, kUInt32, kUInt8, kOther };

struct Buffer {
  Element element = Element::kOther;
  const i64* dims = nullptr;
  int rank = 0;
  void* data = nullptr;  // may be null when a dim is 0
};

struct BufferList {
  const Buffer* data = nullptr;
  int size = 0;
};

struct Attributes {
  i64 features = 0;
  float scale = 1.f;
  float soft_cap = 0.f;
  i64 window_left = -1;
  i64 window_right = -1;
  i64 dropout_threshold = 0;
  float dropout_keep_scale = 1.f;
  i32 precision = 0;
  i64 block_q = 0;
  i64 block_k = 0;
  i64 num_splits = 0;
  i64 threads = 1;
  const i64* batch_div = nullptr;
  int batch_div_size = 0;
};

// Decodes a forward call: the operands of schema.h; out, lse, workspace.
Status decode_forward(BufferList operands, BufferList results, const Attributes& attributes,
                      ForwardArgs* args);

// Decodes a backward call: the operands, out, lse, dout, dlse; seven results.
Status decode_backward(BufferList operands, BufferList results, const Attributes& attributes,
                       BackwardArgs* args);

// The question to the planner whose answer a decoded call was made with.
PlanRequest plan_request(const Problem& problem, const Attributes& attributes, Operation operation,
                         i64 dbias_elements);

// Number of elements of the dbias result of a decoded call; 0 when it is not wanted.
i64 dbias_elements(const BackwardArgs& args, BufferList results);

// XLA's own promise for every buffer, on every platform, in bytes.
inline constexpr i64 kBufferAlignment = 16;

// How far an address lies past a multiple of `alignment`, a power of two.
inline i64 bytes_past(const void* data, i64 alignment) {
  return static_cast<i64>(reinterpret_cast<unsigned long long>(data) &
                          static_cast<unsigned long long>(alignment - 1));
}

// Whether every buffer is aligned as XLA promises: for kernels that load vectors.
Status check_alignment(BufferList operands, BufferList results);

// Whether every tile number of a block mask in host memory names a tile of `block_bits`.
Status check_block_index(const Problem& problem, BufferList operands);

}  // namespace attention::ffi
