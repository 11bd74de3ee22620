// SPDX-License-Identifier: Apache-2.0
// From XLA's call frame to the plain data of call.h.
#pragma once

#include <new>
#include <string>

#include "kernels/ffi/call.h"
#include "kernels/ffi/schema.h"
#include "xla/ffi/api/ffi.h"

namespace attention::ffi {

inline Element to_element(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::DataType::F32:
      return Element::kFloat32;
    case xla::ffi::DataType::BF16:
      return Element::kBFloat16;
    case xla::ffi::DataType::F16:
      return Element::kFloat16;
    case xla::ffi::DataType::PRED:
      return Element::kBool;
    case xla::ffi::DataType::S32:
      return Element::kInt32;
    case xla::ffi::DataType::U32:
      return Element::kUInt32;
    case xla::ffi::DataType::U8:
      return Element::kUInt8;
    default:
      return Element::kOther;
  }
}

inline Buffer to_buffer(const xla::ffi::AnyBuffer& buffer) {
  static_assert(sizeof(int64_t) == sizeof(i64), "64-bit sizes");
  return {to_element(buffer.element_type()),
          reinterpret_cast<const i64*>(buffer.dimensions().begin()),
          static_cast<int>(buffer.dimensions().size()), buffer.untyped_data()};
}

// The buffers and attributes of one call.
class Frame {
 public:
  Frame(const xla::ffi::RemainingArgs& args, const xla::ffi::RemainingRets& rets,
        const xla::ffi::Dictionary& dictionary) {
    if (args.size() > kMaxBuffers || rets.size() > kMaxBuffers) {
      error_ = "too many operands or results";
      return;
    }
    for (size_t i = 0; i < args.size() && ok(); ++i) {
      const auto buffer = args.get<xla::ffi::AnyBuffer>(i);
      if (buffer.has_error()) {
        error_ = buffer.error().message();
      } else if (check_dims("operand", i, *buffer)) {
        operands_[operand_count_++] = to_buffer(*buffer);
      }
    }
    for (size_t i = 0; i < rets.size() && ok(); ++i) {
      auto buffer = rets.get<xla::ffi::AnyBuffer>(i);
      if (buffer.has_error()) {
        error_ = buffer.error().message();
      } else if (check_dims("result", i, **buffer)) {
        results_[result_count_++] = to_buffer(**buffer);
      }
    }
#define ATTENTION_READ(name, cpp_type, type) read<cpp_type>(dictionary, #name, &attributes_.name);
    ATTENTION_ATTRIBUTES(ATTENTION_READ)
#undef ATTENTION_READ
    xla::ffi::Span<const int64_t> divs;
    read<xla::ffi::Span<const int64_t>>(dictionary, ATTENTION_BATCH_DIV, &divs);
    if (ok() && divs.size() > kMaxBuffers) {
      error_ = "attribute " ATTENTION_BATCH_DIV ": got " + std::to_string(divs.size()) +
               " entries; wanted at most " + std::to_string(kMaxBuffers);
    }
    if (!ok()) return;
    attributes_.batch_div = reinterpret_cast<const i64*>(divs.begin());
    attributes_.batch_div_size = static_cast<int>(divs.size());
  }

  bool ok() const { return error_.empty(); }
  const std::string& error() const { return error_; }
  BufferList operands() const { return {operands_, operand_count_}; }
  BufferList results() const { return {results_, result_count_}; }
  const Attributes& attributes() const { return attributes_; }

 private:
  // Whether there are dims to read, as many as fit into an int.
  bool check_dims(const char* kind, size_t number, const xla::ffi::AnyBuffer& buffer) {
    const auto dims = buffer.dimensions();
    if (dims.size() <= kMaxRank && (dims.size() == 0 || dims.begin() != nullptr)) return true;
    error_ = std::string(kind) + " " + std::to_string(number) + ": got rank " +
             std::to_string(static_cast<int64_t>(dims.size())) + "; wanted 0 to " +
             std::to_string(kMaxRank) + ", with dims";
    return false;
  }

  template <typename T, typename U>
  void read(const xla::ffi::Dictionary& dictionary, const char* name, U* value) {
    if (!ok()) return;
    const auto found = dictionary.get<T>(name);
    if (found.has_error()) {
      error_ = std::string("attribute ") + name + ": " + found.error().message();
    } else {
      *value = *found;
    }
  }

  static constexpr size_t kMaxBuffers = 32;
  static constexpr size_t kMaxRank = 8;
  Buffer operands_[kMaxBuffers];
  Buffer results_[kMaxBuffers];
  int operand_count_ = 0;
  int result_count_ = 0;
  Attributes attributes_;
  std::string error_;
};

// Runs the body of a handler, () -> Status, and tells XLA what came of it. XLA is compiled without
// exceptions and would end the process: a small allocation that fails becomes an error here.
template <typename Body>
xla::ffi::Error answer(const char* target, const Body& body) {
  try {
    const Status status = body();
    if (status.ok()) return xla::ffi::Error::Success();
    return xla::ffi::Error::InvalidArgument(std::string(target) + ": " + status.message());
  } catch (const std::bad_alloc&) {
    return xla::ffi::Error(xla::ffi::ErrorCode::kResourceExhausted,
                           std::string(target) + ": out of memory");
  }
}

}  // namespace attention::ffi

// Names of targets: attention_fwd_cpu_v1.
#define ATTENTION_TARGET_3(operation, library, abi) attention_##operation##_##library##_v##abi
#define ATTENTION_TARGET_2(operation, library, abi) ATTENTION_TARGET_3(operation, library, abi)
#define ATTENTION_TARGET(operation, library) ATTENTION_TARGET_2(operation, library, ATTENTION_ABI)
#define ATTENTION_TARGET_TEXT_2(name) #name
#define ATTENTION_TARGET_TEXT(name) ATTENTION_TARGET_TEXT_2(name)
