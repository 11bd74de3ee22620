// SPDX-License-Identifier: Apache-2.0
// Making hostile calls.
#include "tests/fuzz/hostile_call.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>

#include "kernels/ffi/schema.h"

extern "C" {
int attention_plan_cpu(const attention::PlanRequest*, attention::PlanResult*);
int attention_plan_emulated(const attention::PlanRequest*, attention::PlanResult*);
}

namespace attention::testing {
namespace {

constexpr int kMaxChanges = 12;
constexpr int kMaxDtype = 63;  // what XLA_FFI_DataType can hold

using Wide = __int128;

constexpr int64_t kInteresting[] = {-1,
                                    0,
                                    1,
                                    2,
                                    3,
                                    4,
                                    5,
                                    8,
                                    15,
                                    16,
                                    17,
                                    63,
                                    64,
                                    65,
                                    127,
                                    128,
                                    129,
                                    255,
                                    256,
                                    257,
                                    1024,
                                    65535,
                                    -2,
                                    65536,
                                    65537,
                                    int64_t{1} << 31,
                                    (int64_t{1} << 31) - 1,
                                    -(int64_t{1} << 31),
                                    int64_t{1} << 32,
                                    (int64_t{1} << 32) + 4,
                                    int64_t{1} << 40,
                                    int64_t{1} << 62,
                                    std::numeric_limits<int64_t>::max(),
                                    std::numeric_limits<int64_t>::min()};

// Of attributes: XLA's own code knows no others when it writes a message about them.
constexpr int kAttributeDtypes[] = {
    XLA_FFI_DataType_S64, XLA_FFI_DataType_F32, XLA_FFI_DataType_S32,    XLA_FFI_DataType_U32,
    XLA_FFI_DataType_U64, XLA_FFI_DataType_F64, XLA_FFI_DataType_PRED,   XLA_FFI_DataType_C128,
    XLA_FFI_DataType_S8,  XLA_FFI_DataType_F16, XLA_FFI_DataType_INVALID};

constexpr float kFloats[] = {0.f,
                             -0.f,
                             1.f,
                             -1.f,
                             1e38f,
                             1e-40f,
                             2.f,
                             std::numeric_limits<float>::quiet_NaN(),
                             std::numeric_limits<float>::infinity()};

}  // namespace

int64_t Bytes::number() {
  const int kind = byte();
  if (kind < 200) return kInteresting[kind % std::size(kInteresting)];
  uint64_t value = 0;
  for (int i = 0; i < 8; ++i) value = value << 8 | static_cast<uint64_t>(byte());
  return static_cast<int64_t>(value);
}

int64_t HostileBuffer::elements(int64_t limit) const {
  Wide n = 1;
  for (int64_t d : dims) {
    if (d < 0) return -1;
    n *= d;
    // Not left early on large values: a later dim may be 0.
    if (n > (Wide{1} << 62)) n = Wide{1} << 62;
  }
  return n > limit ? -1 : static_cast<int64_t>(n);
}

HostileCall::HostileCall(Bytes bytes) {
  make_problem(&bytes);
  while (!bytes.empty() && changes_ < kMaxChanges) change(&bytes);
}

void HostileCall::add(std::vector<HostileBuffer>* list, const char* name, int dtype,
                      std::vector<int64_t> dims) {
  HostileBuffer buffer;
  buffer.name = name;
  buffer.dtype = dtype;
  buffer.dims = std::move(dims);
  list->push_back(std::move(buffer));
}

template <typename T>
void HostileCall::attribute(const char* name, int dtype, T value) {
  HostileAttribute a;
  a.name = name;
  a.dtype = dtype;
  a.data.resize(8);
  std::memcpy(a.data.data(), &value, sizeof(value));
  attributes_.push_back(std::move(a));
}

// A correct call: its sizes and features come from the first bytes.
void HostileCall::make_problem(Bytes* bytes) {
  const int kind = bytes->byte();
  backward_ = kind & 1;
  // An emulated call takes hundreds of times longer.
  library_ = kind % 32 < 30 ? Library::kCpu : Library::kEmulated;
  late_ = kind & 64;
  pool_threads_ = 1 + kind / 128 * 3;
  const int dtypes[] = {XLA_FFI_DataType_F32, XLA_FFI_DataType_BF16, XLA_FFI_DataType_F16};
  const int dtype = dtypes[bytes->below(3)];
  const int64_t b = bytes->below(4), lq = bytes->below(6), lkv = bytes->below(80);
  const int64_t hkv = 1 + bytes->below(2), hq = hkv * (1 + bytes->below(3));
  const int64_t d = 1 + bytes->below(20), dv = 1 + bytes->below(20);
  int64_t features = bytes->byte();
  features |= int64_t{bytes->byte()} << 8;
  features &= (int64_t{kFeatureBlockMask} << 1) - 1;
  const auto has = [&](Feature bit) { return (features & bit) != 0; };
  if (backward_) {
    if (has(kFeatureBias)) features |= kFeatureWantDbias;
    if (has(kFeatureAlibi)) features |= kFeatureWantDslopes;
    if (has(kFeatureScaleArray)) features |= kFeatureWantDscale;
  }
  const int64_t shared = bytes->byte() & 1 && b > 0 ? 1 : b;  // batch entries of the operands
  const int64_t heads = bytes->byte() & 1 ? 1 : hq;

  const auto operand = [&](const char* name, Feature bit, int type, std::vector<int64_t> dims) {
    add(&operands_, name, type, has(bit) ? std::move(dims) : std::vector<int64_t>{0});
  };
  add(&operands_, "query", dtype, {b, lq, hq, d});
  add(&operands_, "key", dtype, {shared, lkv, hkv, d});
  add(&operands_, "value", dtype, {shared, lkv, hkv, dv});
  constexpr int kF32 = XLA_FFI_DataType_F32, kS32 = XLA_FFI_DataType_S32;
  constexpr int kU32 = XLA_FFI_DataType_U32;
  operand("bias", kFeatureBias, has(kFeatureCausal) ? dtype : kF32, {shared, heads, lq, lkv});
  operand("mask", kFeatureMask, XLA_FFI_DataType_PRED, {shared, heads, 1, lkv});
  operand("query_lengths", kFeatureQLengths, kS32, {b});
  operand("kv_lengths", kFeatureKvLengths, kS32, {shared});
  operand("query_segments", kFeatureSegments, kS32, {b, lq});
  operand("kv_segments", kFeatureSegments, kS32, {shared, lkv});
  operand("alibi_slopes", kFeatureAlibi, kF32, {shared, hq});
  operand("prefix_lengths", kFeaturePrefix, kS32, {b});
  operand("scale", kFeatureScaleArray, kF32, {shared});
  operand("dropout_seed", kFeatureDropout, kU32, {shared, 2});
  operand("dropout_batch", kFeatureDropout, kU32, {b});
  operand("dropout_head", kFeatureDropout, kU32, {hq});
  operand("block_index", kFeatureBlockMask, kS32,
          {shared, heads, ceil_div<int64_t>(lq, 64), ceil_div<int64_t>(lkv, 64)});
  operand("block_bits", kFeatureBlockMask, kU32, {2, 64, 2});

  PlanRequest request = {};
  request.batch = b;
  request.lq = lq;
  request.lkv = lkv;
  request.hq = hq;
  request.hkv = hkv;
  request.d = d;
  request.dv = dv;
  request.features = features;
  request.window_left = request.window_right = has(kFeatureWindow) ? 3 : -1;
  request.dbias_elements = has(kFeatureWantDbias) ? shared * heads * lq * lkv : 0;
  request.operation = backward_;
  request.dtype = dtype == kF32 ? 0 : dtype == XLA_FFI_DataType_BF16 ? 1 : 2;
  request.threads = static_cast<i32>(pool_threads_);
  PlanResult plan = {};
  (library_ == Library::kCpu ? attention_plan_cpu : attention_plan_emulated)(&request, &plan);

  if (backward_) {
    add(&operands_, "out", dtype, {b, lq, hq, dv});
    add(&operands_, "lse", kF32, {b, lq, hq});
    add(&operands_, "dout", dtype, {b, lq, hq, dv});
    add(&operands_, "dlse", kF32, {b, lq, hq});
    add(&results_, "dq", dtype, {b, lq, hq, d});
    add(&results_, "dk", dtype, {b, lkv, hkv, d});
    add(&results_, "dv", dtype, {b, lkv, hkv, dv});
    const auto result = [&](const char* name, Feature bit, std::vector<int64_t> dims) {
      add(&results_, name, kF32, has(bit) ? std::move(dims) : std::vector<int64_t>{0});
    };
    result("dbias", kFeatureWantDbias, {shared, heads, lq, lkv});
    result("dslopes_rows", kFeatureWantDslopes, {b, lq, hq});
    result("dscale_rows", kFeatureWantDscale, {b, lq, hq});
  } else {
    add(&results_, "out", dtype, {b, lq, hq, dv});
    add(&results_, "lse", kF32, {b, lq, hq});
  }
  add(&results_, "workspace", XLA_FFI_DataType_U8, {plan.workspace_bytes});

  constexpr int kI64 = XLA_FFI_DataType_S64;
  attribute<int64_t>("features", kI64, features);
  attribute<float>("scale", kF32, 0.5f);
  attribute<float>("soft_cap", kF32, has(kFeatureSoftCap) ? 2.f : 0.f);
  attribute<int64_t>("window_left", kI64, request.window_left);
  attribute<int64_t>("window_right", kI64, request.window_right);
  attribute<int64_t>("dropout_threshold", kI64, has(kFeatureDropout) ? 20000 : 0);
  attribute<float>("dropout_keep_scale", kF32, has(kFeatureDropout) ? 1.44f : 1.f);
  attribute<int32_t>("precision", kS32, 0);
  attribute<int64_t>("block_q", kI64, plan.block_q);
  attribute<int64_t>("block_k", kI64, plan.block_k);
  attribute<int64_t>("num_splits", kI64, plan.num_splits);
  attribute<int64_t>("threads", kI64, pool_threads_);
  attribute<int64_t>(ATTENTION_BATCH_DIV, kI64, 1);
  HostileAttribute& divs = attributes_.back();
  divs.type = XLA_FFI_AttrType_ARRAY;
  divs.count = ffi::kOperandCount;
  divs.data.resize(8 * divs.count);
  for (uint64_t i = 0; i < divs.count; ++i) {
    const int64_t one = 1;
    std::memcpy(divs.data.data() + 8 * i, &one, 8);
  }
  // XLA sorts them, and lookups rely on it.
  std::sort(attributes_.begin(), attributes_.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
}

HostileBuffer* HostileCall::some_buffer(Bytes* bytes) {
  const size_t n = bytes->byte();
  if (operands_.size() + results_.size() == 0) return nullptr;
  const size_t i = n % (operands_.size() + results_.size());
  return i < operands_.size() ? &operands_[i] : &results_[i - operands_.size()];
}

void HostileCall::change(Bytes* bytes) {
  ++changes_;
  const int kind = bytes->below(16);
  if (kind < 7) {
    HostileBuffer* const b = some_buffer(bytes);
    if (b == nullptr) return;
    switch (kind) {
      case 0: {
        const size_t axis = bytes->byte();
        const int64_t size = bytes->number();
        if (!b->dims.empty()) b->dims[axis % b->dims.size()] = size;
        return;
      }
      case 1:
        b->dims.resize(bytes->below(9), 1);
        return;
      case 2:
        b->dtype = bytes->below(kMaxDtype + 1);
        return;
      case 3:
        b->null = true;
        return;
      case 4:
        b->misaligned = bytes->below(16);
        return;
      case 5:
        b->fill = static_cast<uint8_t>(bytes->byte());
        return;
      default:
        // Ranks without dims behind them.
        b->null_dims = bytes->byte() & 1;
        b->rank_offset = b->null_dims ? 0 : (int64_t{1 + bytes->below(4)} << 32);
        return;
    }
  }
  if (kind < 12) {
    if (attributes_.empty()) return;
    const size_t at = bytes->byte() % attributes_.size();
    HostileAttribute& a = attributes_[at];
    switch (kind) {
      case 7: {
        const int64_t number = bytes->number();
        std::memcpy(a.data.data(), &number, 8);
        return;
      }
      case 8: {
        const float number = kFloats[bytes->byte() % std::size(kFloats)];
        std::memcpy(a.data.data(), &number, 4);
        return;
      }
      case 9:
        a.dtype = kAttributeDtypes[bytes->byte() % std::size(kAttributeDtypes)];
        return;
      case 10:
        a.type = 1 + bytes->below(4);
        return;
      default:
        attributes_.erase(attributes_.begin() + static_cast<std::ptrdiff_t>(at));
        return;
    }
  }
  if (kind == 12) {  // an entry of the divisors, or their number
    // Before all others in XLA's order.
    HostileAttribute* const a = attributes_.empty() ? nullptr : &attributes_.front();
    const size_t entry = bytes->byte() % 18;
    if (a == nullptr || a->name != ATTENTION_BATCH_DIV) return;
    const int64_t number = bytes->number();
    if (entry < a->data.size() / 8) {
      std::memcpy(a->data.data() + 8 * entry, &number, 8);
    } else {
      // Only what its memory holds, or so much that it must be refused before it is read.
      a->count = number >= 0 && number <= static_cast<int64_t>(entry)
                     ? static_cast<uint64_t>(number)
                     : (uint64_t{1} << 32) + ffi::kOperandCount;
    }
    return;
  }
  if (kind == 13) {
    auto& list = bytes->byte() & 1 ? results_ : operands_;
    if (bytes->byte() & 1 && !list.empty()) {
      list.erase(list.begin() + bytes->byte() % static_cast<std::ptrdiff_t>(list.size()));
    } else {
      add(&list, "extra", bytes->below(kMaxDtype + 1), {bytes->number()});
    }
    return;
  }
  if (kind == 14) {
    HostileBuffer* const one = some_buffer(bytes);
    HostileBuffer* const other = some_buffer(bytes);
    if (one != nullptr && one != other) std::swap(*one, *other);
    return;
  }
  for (HostileAttribute& a : attributes_) {
    if (a.name == "features") {
      const int64_t bits = int64_t{bytes->byte()} << bytes->below(40);
      int64_t features = 0;
      std::memcpy(&features, a.data.data(), 8);
      features ^= bits;
      std::memcpy(a.data.data(), &features, 8);
    }
  }
}

}  // namespace attention::testing
