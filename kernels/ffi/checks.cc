// SPDX-License-Identifier: Apache-2.0
// What handlers ask about a decoded call.
#include <initializer_list>

#include "kernels/ffi/call.h"
#include "kernels/ffi/schema.h"

namespace attention::ffi {

PlanRequest plan_request(const Problem& p, const Attributes& a, Operation operation,
                         i64 dbias_elements) {
  PlanRequest request = {};
  request.batch = p.batch;
  request.lq = p.lq;
  request.lkv = p.lkv;
  request.hq = p.hq;
  request.hkv = p.hkv;
  request.d = p.d;
  request.dv = p.dv;
  request.features = a.features;
  request.block_q = a.block_q;
  request.block_k = a.block_k;
  request.num_splits = a.num_splits;
  request.window_left = p.window_left;
  request.window_right = p.window_right;
  request.dbias_elements = dbias_elements;
  request.operation = static_cast<i32>(operation);
  request.dtype = static_cast<i32>(p.dtype);
  request.precision = static_cast<i32>(p.precision);
  request.threads = static_cast<i32>(a.threads);
  return request;
}

i64 dbias_elements(const BackwardArgs& args, BufferList results) {
  if (args.dbias == nullptr) return 0;
  const Buffer& dbias = results.data[kBackwardResult_dbias];
  i64 count = 1;
  for (int i = 0; i < dbias.rank; ++i) count *= dbias.dims[i];
  return count;
}

Status check_alignment(BufferList operands, BufferList results) {
  for (const BufferList& buffers : {operands, results}) {
    for (int n = 0; n < buffers.size; ++n) {
      if (const i64 odd = bytes_past(buffers.data[n].data, kBufferAlignment); odd != 0) {
        return Status::error("%s %d: got an address %lld bytes past a multiple of %lld",
                             buffers.data == operands.data ? "operand" : "result", n, odd,
                             kBufferAlignment);
      }
    }
  }
  return Status();
}

Status check_block_index(const Problem& p, BufferList operands) {
  if (p.block_mask.index == nullptr) return Status();
  const Buffer& index = operands.data[k_block_index];
  const i64 tiles = operands.data[k_block_bits].dims[0];
  i64 count = 1;
  for (int i = 0; i < index.rank; ++i) count *= index.dims[i];
  for (i64 i = 0; i < count; ++i) {
    const i32 tile = p.block_mask.index[i];
    if (tile >= tiles || tile < kFullTile) {
      return Status::error("block_index: got tile %d; wanted -2 to %lld", tile, tiles - 1);
    }
  }
  return Status();
}

}  // namespace attention::ffi
