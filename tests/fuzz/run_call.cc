// SPDX-License-Identifier: Apache-2.0
// Running a hostile call: its memory, XLA's frame around it, the handler.
#include <cstring>
#include <memory>
#include <new>

#include "kernels/ffi/frame.h"
#include "tests/fuzz/fake_xla.h"
#include "tests/fuzz/hostile_call.h"

extern "C" {
XLA_FFI_Error* ATTENTION_TARGET(fwd, cpu)(XLA_FFI_CallFrame*);
XLA_FFI_Error* ATTENTION_TARGET(bwd, cpu)(XLA_FFI_CallFrame*);
XLA_FFI_Error* ATTENTION_TARGET(fwd, emulated)(XLA_FFI_CallFrame*);
XLA_FFI_Error* ATTENTION_TARGET(bwd, emulated)(XLA_FFI_CallFrame*);
}

namespace attention::testing {
namespace {

// A buffer of more elements than this is not allocated; a real one would not be here either.
constexpr int64_t kMaxElements = 1 << 14;
constexpr int64_t kMaxWorkspace = 1 << 23;  // bytes
// Pairs of a query and a key, over all heads, that one input may compute.
constexpr int64_t kMaxPairs = 1 << 16;

int bytes_of(int dtype) {
  switch (dtype) {
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_U8:
      return 1;
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      return 2;
    case XLA_FFI_DataType_F32:
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
      return 4;
    default:
      return 16;  // the largest type
  }
}

// Memory of one buffer: exactly the bytes that it claims, at an address that is as odd as asked.
class Memory {
 public:
  Memory(const HostileBuffer& buffer, bool withheld) {
    const bool is_bytes = buffer.dtype == XLA_FFI_DataType_U8;
    const int64_t elements = buffer.elements(is_bytes ? kMaxWorkspace : kMaxElements);
    if (elements < 0 || buffer.null || withheld) return;
    const int64_t size = size_ = elements * bytes_of(buffer.dtype);
    base_.reset(new (std::align_val_t{64}) uint8_t[size + buffer.misaligned]);
    data_ = base_.get() + buffer.misaligned;
    std::memset(data_, buffer.fill, static_cast<size_t>(size));
    const bool is_float = buffer.dtype == XLA_FFI_DataType_F32;
    for (int64_t i = 0; is_float && i + 4 <= size; i += 4) {
      const float value = 0.25f * static_cast<float>(i / 4 % 7) - 0.5f;
      std::memcpy(data_ + i, &value, 4);
    }
  }
  void* data() const { return data_; }
  int64_t size() const { return data_ == nullptr ? 0 : size_; }

 private:
  struct Free {
    void operator()(uint8_t* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<uint8_t[], Free> base_;
  uint8_t* data_ = nullptr;
  int64_t size_ = 0;  // bytes
};

// The structures of XLA's frame for a list of buffers.
struct Buffers {
  std::vector<Memory> memory;
  std::vector<XLA_FFI_Buffer> buffers;
  std::vector<void*> pointers;

  Buffers(std::vector<HostileBuffer>& list, bool withheld) {
    memory.reserve(list.size());
    buffers.reserve(list.size());
    for (HostileBuffer& b : list) {
      memory.emplace_back(b, withheld);
      buffers.push_back({sizeof(XLA_FFI_Buffer), nullptr, static_cast<XLA_FFI_DataType>(b.dtype),
                         memory.back().data(), static_cast<int64_t>(b.dims.size()) + b.rank_offset,
                         b.null_dims ? nullptr : b.dims.data()});
      pointers.push_back(&buffers.back());
    }
  }

  // FNV-1a over the contents of all but the last, which is the workspace.
  uint64_t digest() const {
    uint64_t hash = 0xcbf29ce484222325;
    for (size_t i = 0; i + 1 < memory.size(); ++i) {
      const auto* bytes = static_cast<const uint8_t*>(memory[i].data());
      for (int64_t j = 0; j < memory[i].size(); ++j) hash = (hash ^ bytes[j]) * 0x100000001b3;
    }
    return hash;
  }
};

}  // namespace

// Whether the sizes ask for more work than an input should take.
bool HostileCall::is_heavy() const {
  if (operands_.size() < 3 || results_.empty()) return false;
  const auto& q = operands_[0].dims;
  const auto& v = operands_[2].dims;
  if (q.size() != 4 || v.size() != 4) return false;
  __int128 pairs = 1;
  for (int64_t size : {results_[0].dims.empty() ? 1 : results_[0].dims[0], q[1], q[2], v[1]}) {
    if (size < 0 || size > kMaxElements) return false;  // refused before it is used
    pairs *= size;
  }
  return pairs > (library_ == Library::kCpu ? kMaxPairs : kMaxPairs / 8);
}

std::string HostileCall::run(const std::function<void(bool)>& on_handler) {
  const bool withheld = is_heavy();
  Buffers operands(operands_, withheld), results(results_, withheld);
  std::vector<XLA_FFI_ArgType> arg_types(operands_.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(results_.size(), XLA_FFI_RetType_BUFFER);

  const size_t n = attributes_.size();
  std::vector<XLA_FFI_AttrType> types(n);
  std::vector<XLA_FFI_ByteSpan> names(n), texts(n);
  std::vector<XLA_FFI_ByteSpan*> name_pointers(n);
  std::vector<XLA_FFI_Scalar> scalars(n);
  std::vector<XLA_FFI_Array> arrays(n);
  std::vector<void*> values(n);
  XLA_FFI_Attrs empty = {};
  empty.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
  for (size_t i = 0; i < n; ++i) {
    HostileAttribute& a = attributes_[i];
    types[i] = static_cast<XLA_FFI_AttrType>(a.type);
    names[i] = {a.name.data(), a.name.size()};
    name_pointers[i] = &names[i];
    texts[i] = {reinterpret_cast<const char*>(a.data.data()), a.data.size()};
    const auto dtype = static_cast<XLA_FFI_DataType>(a.dtype);
    scalars[i] = {dtype, a.data.data()};
    arrays[i] = {dtype, a.count, a.data.data()};
    void* const of_type[] = {&arrays[i], &empty, &scalars[i], &texts[i]};
    values[i] = of_type[a.type - 1];
  }

  XLA_FFI_ExecutionContext context;
  context.threads = pool_threads_;
  context.late = late_;
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = fake_xla();
  frame.ctx = &context;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(operands_.size()),
                arg_types.data(), operands.pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(results_.size()),
                ret_types.data(), results.pointers.data()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr,      static_cast<int64_t>(n), types.data(),
                 name_pointers.data(),      values.data()};

  const bool cpu = library_ == Library::kCpu;
  XLA_FFI_Handler* const forward =
      cpu ? ATTENTION_TARGET(fwd, cpu) : ATTENTION_TARGET(fwd, emulated);
  XLA_FFI_Handler* const backward =
      cpu ? ATTENTION_TARGET(bwd, cpu) : ATTENTION_TARGET(bwd, emulated);
  if (on_handler) on_handler(true);
  const std::unique_ptr<XLA_FFI_Error> error((backward_ ? backward : forward)(&frame));
  if (on_handler) on_handler(false);
  for (const auto& task : context.waiting) task();
  digest_ = results.digest();
  return error == nullptr ? "" : error->message;
}

}  // namespace attention::testing
