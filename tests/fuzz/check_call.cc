// SPDX-License-Identifier: Apache-2.0
// What a decoded call promises: every address that a kernel can compute lies inside its buffer.
// Computed in 128 bits, where nothing overflows.
#include <cstring>

#include "kernels/ffi/frame.h"
#include "tests/fuzz/hostile_call.h"

extern "C" {
int attention_plan_cpu(const attention::PlanRequest*, attention::PlanResult*);
int attention_plan_emulated(const attention::PlanRequest*, attention::PlanResult*);
}

namespace attention::testing {
namespace {

using Wide = __int128;

Wide product(const std::vector<int64_t>& dims) {
  Wide n = 1;
  for (int64_t d : dims) n *= d;
  return n;
}

// Whether map(b) is inside an operand of `entries` for every b.
bool fits(const BatchMap& map, i64 batch, i64 entries) {
  if (map.div < 1 || map.mod < 1) return false;
  return batch == 0 || (map.mod <= entries && map(0) < entries && map(batch - 1) < entries);
}

template <typename T>
bool fits(const BatchVector<T>& x, i64 batch, i64 width, const HostileBuffer& buffer) {
  if (x.data == nullptr || batch == 0 || width == 0) return true;
  return fits(x.batch, batch, buffer.dims[0]) &&
         Wide{x.batch.mod - 1} * x.stride + width <= product(buffer.dims);
}

bool fits(const ScoreOperand& x, const Problem& p, const HostileBuffer& buffer) {
  if (x.data == nullptr || p.batch == 0 || p.lq == 0 || p.lkv == 0) return true;
  const Wide last = Wide{x.batch.mod - 1} * x.batch_stride + Wide{p.hq - 1} * x.head_stride +
                    Wide{p.lq - 1} * x.row_stride + Wide{p.lkv - 1} * x.col_stride;
  return fits(x.batch, p.batch, buffer.dims[0]) && last >= 0 && last < product(buffer.dims);
}

std::string check_problem(const Problem& p, const std::vector<HostileBuffer>& operands) {
  using ffi::k_alibi_slopes, ffi::k_bias, ffi::k_block_index, ffi::k_dropout_batch,
      ffi::k_dropout_head, ffi::k_dropout_seed, ffi::k_key, ffi::k_kv_lengths, ffi::k_kv_segments,
      ffi::k_mask, ffi::k_prefix_lengths, ffi::k_query, ffi::k_query_lengths, ffi::k_query_segments,
      ffi::k_scale, ffi::k_value;
  const auto dense = [&](int number, const BatchMap& map, Wide entry) {
    const HostileBuffer& buffer = operands[number];
    if (p.batch == 0 || entry == 0) return true;
    return fits(map, p.batch, buffer.dims[0]) && map.mod * entry <= product(buffer.dims);
  };
  if (p.hkv < 1 || p.hq % p.hkv != 0) return "heads";
  if (!dense(k_query, p.q_batch, Wide{p.lq} * p.hq * p.d)) return "query";
  if (!dense(k_key, p.k_batch, Wide{p.lkv} * p.hkv * p.d)) return "key";
  if (!dense(k_value, p.v_batch, Wide{p.lkv} * p.hkv * p.dv)) return "value";
  if (!fits(p.bias, p, operands[k_bias])) return "bias";
  if (!fits(p.mask, p, operands[k_mask])) return "mask";
  const auto vector = [&](const auto& x, int number, i64 width) {
    return fits(x, p.batch, width, operands[number]);
  };
  if (!vector(p.q_lengths, k_query_lengths, 1)) return "query_lengths";
  if (!vector(p.kv_lengths, k_kv_lengths, 1)) return "kv_lengths";
  if (!vector(p.q_segments, k_query_segments, p.lq)) return "query_segments";
  if (!vector(p.kv_segments, k_kv_segments, p.lkv)) return "kv_segments";
  if (!vector(p.alibi_slopes, k_alibi_slopes, p.hq)) return "alibi_slopes";
  if (!vector(p.prefix_lengths, k_prefix_lengths, 1)) return "prefix_lengths";
  if (!vector(p.scale_array, k_scale, 1)) return "scale";
  if (!vector(p.dropout.seed, k_dropout_seed, 2)) return "dropout_seed";
  if (!vector(p.dropout.batch_index, k_dropout_batch, 1)) return "dropout_batch";
  if (p.dropout.head_index != nullptr && product(operands[k_dropout_head].dims) < p.hq) {
    return "dropout_head";
  }
  if (p.block_mask.index != nullptr && p.batch > 0 && p.lq > 0 && p.lkv > 0) {
    const auto& m = p.block_mask;
    const Wide last = Wide{m.batch.mod - 1} * m.batch_stride + Wide{p.hq - 1} * m.head_stride +
                      Wide{ceil_div<i64>(p.lq, kMaskTile) - 1} * m.row_stride +
                      (ceil_div<i64>(p.lkv, kMaskTile) - 1);
    if (last < 0 || last >= product(operands[k_block_index].dims)) return "block_index";
  }
  return "";
}

}  // namespace

std::string HostileCall::check_decoded() const {
  // Any address that is not null will do: decoding reads no data.
  static char somewhere alignas(64)[64];
  std::vector<ffi::Buffer> buffers[2];
  const std::vector<HostileBuffer>* const lists[] = {&operands_, &results_};
  for (int side = 0; side < 2; ++side) {
    for (const HostileBuffer& b : *lists[side]) {
      buffers[side].push_back({ffi::to_element(static_cast<xla::ffi::DataType>(b.dtype)),
                               reinterpret_cast<const i64*>(b.dims.data()),
                               static_cast<int>(b.dims.size()),
                               b.null ? nullptr : somewhere + b.misaligned});
    }
  }
  ffi::Attributes attributes;
  for (const HostileAttribute& a : attributes_) {
#define ATTENTION_TAKE(field, cpp_type, type) \
  if (a.name == #field) std::memcpy(&attributes.field, a.data.data(), sizeof(attributes.field));
    ATTENTION_ATTRIBUTES(ATTENTION_TAKE)
#undef ATTENTION_TAKE
    if (a.name == ATTENTION_BATCH_DIV) {
      attributes.batch_div = reinterpret_cast<const i64*>(a.data.data());
      attributes.batch_div_size = static_cast<int>(a.data.size() / 8);
    }
  }
  const ffi::BufferList operands = {buffers[0].data(), static_cast<int>(buffers[0].size())};
  const ffi::BufferList results = {buffers[1].data(), static_cast<int>(buffers[1].size())};
  ForwardArgs forward;
  BackwardArgs backward;
  const Status status = backward_ ? ffi::decode_backward(operands, results, attributes, &backward)
                                  : ffi::decode_forward(operands, results, attributes, &forward);
  if (!status.ok()) return "";
  const Problem& p = backward_ ? backward.problem : forward.problem;
  if (std::string wrong = check_problem(p, operands_); !wrong.empty()) {
    return wrong + " can be read beyond its end";
  }
  const PlanRequest request =
      ffi::plan_request(p, attributes, backward_ ? Operation::kBackward : Operation::kForward,
                        backward_ ? ffi::dbias_elements(backward, results) : 0);
  for (PlanFunction* const planner : {attention_plan_cpu, attention_plan_emulated}) {
    PlanResult plan = {};
    const bool refused = planner(&request, &plan) != 0;
    if (refused ? plan.message[0] == '\0' : plan.workspace_bytes < 0) return "the plan is wrong";
  }
  return "";
}

}  // namespace attention::testing
