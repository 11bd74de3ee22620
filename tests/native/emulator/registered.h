// SPDX-License-Identifier: Apache-2.0
// Registers the buffers of a test case with the emulator, so that checked runs notice every access
// outside them, every output byte that is written twice or never, and every workspace byte that is
// read before it is written.
#pragma once

#include <string>
#include <vector>

#include "kernels/emulator/emulator.h"
#include "tests/native/case.h"

namespace attention::testing {

// The inputs of a case; results and workspaces are added by whoever allocates them.
class Registered {
 public:
  explicit Registered(const Case& c) {
    const Problem& p = c.problem;
    input("q", c.q);
    input("k", c.k);
    input("v", c.v);
    input("dout", c.dout);
    add("dlse", c.dlse.data(), c.dlse.size() * 4, emulator::Access::kInput);
    operand("bias", p.bias, size_of(p.bias_dtype));
    operand("mask", p.mask, 1);
    vector("scale_array", p.scale_array);
    vector("alibi_slopes", p.alibi_slopes);
    vector("q_lengths", p.q_lengths);
    vector("kv_lengths", p.kv_lengths);
    vector("q_segments", p.q_segments);
    vector("kv_segments", p.kv_segments);
    vector("prefix_lengths", p.prefix_lengths);
    vector("dropout.seed", p.dropout.seed);
    vector("dropout.batch_index", p.dropout.batch_index);
    if (p.dropout.head_index != nullptr) {
      add("dropout.head_index", p.dropout.head_index, static_cast<u64>(p.hq) * 4,
          emulator::Access::kInput);
    }
    if (p.block_mask.index != nullptr) {
      const i64 tiles = p.block_mask.batch.mod * p.block_mask.batch_stride;
      i32 last = -1;
      for (i64 n = 0; n < tiles; ++n) last = max_of(last, p.block_mask.index[n]);
      add("block_mask.index", p.block_mask.index, static_cast<u64>(tiles) * 4,
          emulator::Access::kInput);
      add("block_mask.bits", p.block_mask.bits, static_cast<u64>(last + 1) * kMaskTile * 8,
          emulator::Access::kInput);
    }
  }

  void add(const std::string& name, const void* data, u64 bytes, emulator::Access access) {
    if (data != nullptr && bytes > 0) session_.add(name, data, bytes, access);
    if (access == emulator::Access::kOutput && data != nullptr && bytes > 0)
      outputs_.push_back(name);
  }

  // Empty when every output byte was written, else where the first gap is.
  std::string unwritten() const {
    for (const std::string& name : outputs_) {
      if (std::string gap = session_.unwritten(name); !gap.empty()) return gap;
    }
    return {};
  }

 private:
  void input(const std::string& name, const std::vector<u8>& data) {
    add(name, data.data(), data.size(), emulator::Access::kInput);
  }
  void operand(const std::string& name, const ScoreOperand& x, i64 size) {
    add(name, x.data, static_cast<u64>(x.batch.mod * x.batch_stride * size),
        emulator::Access::kInput);
  }
  template <typename T>
  void vector(const std::string& name, const BatchVector<T>& x) {
    add(name, x.data, static_cast<u64>(x.batch.mod * x.stride) * sizeof(T),
        emulator::Access::kInput);
  }

  emulator::Session session_;
  std::vector<std::string> outputs_;
};

}  // namespace attention::testing
