// SPDX-License-Identifier: Apache-2.0
// A call of an FFI handler made from a string of bytes: a correct call of small sizes, then changes
// to it, each of which a file or a faulty caller could contain.
//
// What stays true is what no handler could check: pointers to structures are valid, and a buffer
// with a pointer has the memory that its dims and type ask for. Each buffer is an allocation of
// exactly that size, so that AddressSanitizer sees the first byte beyond it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/ffi/call.h"
#include "xla/ffi/api/c_api.h"

namespace attention::testing {

// The bytes of an input, from front to back; zeros follow the last.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : at_(data), left_(size) {}

  bool empty() const { return left_ == 0; }

  int byte() {
    if (left_ == 0) return 0;
    --left_;
    return *at_++;
  }

  int below(int limit) { return byte() % limit; }

  // A number at which arithmetic goes wrong, or any.
  int64_t number();

 private:
  const uint8_t* at_;
  size_t left_;
};

struct HostileBuffer {
  std::string name;
  int dtype = XLA_FFI_DataType_F32;
  std::vector<int64_t> dims;
  int64_t rank_offset = 0;  // added to the true rank
  bool null = false;
  bool null_dims = false;
  int misaligned = 0;  // bytes
  uint8_t fill = 0;    // the byte of its integer contents

  // Number of elements; -1 when it is more than `limit` or a dim is negative.
  int64_t elements(int64_t limit) const;
};

struct HostileAttribute {
  std::string name;
  int type = XLA_FFI_AttrType_SCALAR;
  int dtype = XLA_FFI_DataType_S64;
  std::vector<uint8_t> data;  // always at least 8 bytes
  uint64_t count = 1;         // of an array
};

// Which library's targets and planner a call is for.
enum class Library { kCpu, kEmulated };

class HostileCall {
 public:
  explicit HostileCall(Bytes bytes);

  bool changed() const { return changes_ > 0; }
  bool backward() const { return backward_; }
  Library library() const { return library_; }
  const std::vector<HostileBuffer>& operands() const { return operands_; }
  const std::vector<HostileBuffer>& results() const { return results_; }

  // Runs the handler; "" for success, else the message of its error. `on_handler` is told when the
  // handler begins (true) and has returned (false).
  std::string run(const std::function<void(bool)>& on_handler = nullptr);

  // Tells apart what successful runs wrote to their results; the workspace is not looked at.
  uint64_t digest() const { return digest_; }

  // Decodes the call without running it, as if there were memory behind every size, and computes
  // both plans; "" or what breaks the promise of kernels/ffi/call.h.
  std::string check_decoded() const;

 private:
  void make_problem(Bytes* bytes);
  void add(std::vector<HostileBuffer>* list, const char* name, int dtype,
           std::vector<int64_t> dims);
  template <typename T>
  void attribute(const char* name, int dtype, T value);
  void change(Bytes* bytes);
  HostileBuffer* some_buffer(Bytes* bytes);
  bool is_heavy() const;

  bool backward_ = false;
  Library library_ = Library::kCpu;
  int64_t pool_threads_ = 1;
  bool late_ = false;
  int changes_ = 0;
  uint64_t digest_ = 0;
  std::vector<HostileBuffer> operands_, results_;
  std::vector<HostileAttribute> attributes_;
};

}  // namespace attention::testing
