// SPDX-License-Identifier: Apache-2.0
// Runs a test case on the CPU kernels of one instruction set and compares it with the reference.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/dispatch.h"
#include "tests/native/case.h"

namespace attention::testing {

// Runs tasks in reverse order, each on another worker than the last: an order that no pool
// promises.
class ShuffledExecutor final : public cpu::Executor {
 public:
  explicit ShuffledExecutor(int threads) : threads_(threads) {}
  int threads() const override { return threads_; }
  void run(i64 tasks, int workers, cpu::TaskFunction function) const override {
    for (i64 n = tasks - 1; n >= 0; --n) function(n, static_cast<int>(n % workers));
  }

 private:
  int threads_;
};

// Memory that starts as NaN and ends with a guard that nobody may touch.
class Buffer {
 public:
  explicit Buffer(i64 bytes) : bytes_(bytes), data_(static_cast<size_t>(bytes) + 2 * kGuard, 0xFF) {
    offset_ = kGuard - reinterpret_cast<uintptr_t>(data_.data()) % kGuard;
  }
  template <typename T = void>
  T* get() {
    return reinterpret_cast<T*>(data_.data() + offset_);
  }
  bool guard_intact() const {
    const u8* end = data_.data() + data_.size();
    return std::all_of(data_.data() + offset_ + bytes_, end, [](u8 x) { return x == 0xFF; });
  }
  bool operator==(const Buffer& other) const {
    return std::memcmp(data_.data() + offset_, other.data_.data() + other.offset_,
                       static_cast<size_t>(bytes_)) == 0;
  }

 private:
  static constexpr size_t kGuard = 64;
  i64 bytes_;
  std::vector<u8> data_;
  size_t offset_;
};

struct Output {
  explicit Output(const Case& c)
      : out(c.problem.batch * c.problem.lq * c.problem.hq * c.problem.dv *
            size_of(c.problem.dtype)),
        lse(rows(c) * 4),
        dq(rows(c) * c.problem.d * size_of(c.problem.dtype)),
        dk(keys(c) * c.problem.d * size_of(c.problem.dtype)),
        dv(keys(c) * c.problem.dv * size_of(c.problem.dtype)),
        dbias(c.dbias_size() * 4),
        dslopes(rows(c) * 4),
        dscale(rows(c) * 4) {}
  static i64 rows(const Case& c) { return c.problem.batch * c.problem.lq * c.problem.hq; }
  static i64 keys(const Case& c) { return c.problem.batch * c.problem.lkv * c.problem.hkv; }
  bool operator==(const Output& o) const {
    return out == o.out && lse == o.lse && dq == o.dq && dk == o.dk && dv == o.dv &&
           dbias == o.dbias && dslopes == o.dslopes && dscale == o.dscale;
  }
  bool guards_intact() const {
    for (const Buffer* b : {&out, &lse, &dq, &dk, &dv, &dbias, &dslopes, &dscale})
      if (!b->guard_intact()) return false;
    return true;
  }
  Buffer out, lse, dq, dk, dv, dbias, dslopes, dscale;
};

inline i64 planned_bytes(const Case& c, Operation operation, Tuning* tuning, int threads) {
  const Problem& p = c.problem;
  PlanRequest request{};
  request.batch = p.batch;
  request.lq = p.lq;
  request.lkv = p.lkv;
  request.hq = p.hq;
  request.hkv = p.hkv;
  request.d = p.d;
  request.dv = p.dv;
  const auto feature = [](bool present, Feature bit) { return present ? i64{bit} : 0; };
  request.features = feature(p.bias.data, kFeatureBias) | feature(p.mask.data, kFeatureMask) |
                     feature(p.block_mask.index, kFeatureBlockMask) |
                     feature(p.q_segments.data, kFeatureSegments) |
                     feature(p.dropout.threshold != 0, kFeatureDropout) |
                     feature(p.soft_cap != 0, kFeatureSoftCap) | feature(p.causal, kFeatureCausal) |
                     feature(p.bias.data && operation == Operation::kBackward, kFeatureWantDbias);
  request.block_q = tuning->block_q;
  request.block_k = tuning->block_k;
  request.num_splits = tuning->num_splits;
  request.operation = static_cast<i32>(operation);
  request.dtype = static_cast<i32>(p.dtype);
  request.threads = threads;
  PlanResult result;
  if (attention_plan_cpu(&request, &result) != 0) return -1;
  *tuning = {result.block_q, result.block_k, result.num_splits};
  return result.workspace_bytes;
}

// Runs forward and backward; "" or what went wrong.
inline std::string run_case(const Case& c, const cpu::Kernels& kernels,
                            const cpu::Executor& executor, const Tuning& tuning, Output* output) {
  ForwardArgs f;
  f.problem = c.problem;
  f.tuning = tuning;
  f.workspace_bytes = planned_bytes(c, Operation::kForward, &f.tuning, executor.threads());
  if (f.workspace_bytes < 0) return "the forward plan refuses";
  Buffer forward_workspace(f.workspace_bytes);
  f.workspace = forward_workspace.get();
  f.out = output->out.get();
  f.lse = output->lse.get<float>();
  if (const Status s = cpu::forward_with(kernels, f, executor); !s.ok()) return s.message();

  BackwardArgs b;
  b.problem = c.problem;
  b.tuning.block_q = tuning.block_q;
  b.tuning.block_k = tuning.block_k;
  b.workspace_bytes = planned_bytes(c, Operation::kBackward, &b.tuning, executor.threads());
  if (b.workspace_bytes < 0) return "the backward plan refuses";
  Buffer backward_workspace(b.workspace_bytes);
  b.workspace = backward_workspace.get();
  b.out = f.out;
  b.lse = f.lse;
  b.dout = c.dout.data();
  b.dlse = c.options().dlse ? c.dlse.data() : nullptr;
  b.dq = output->dq.get();
  b.dk = output->dk.get();
  b.dv = output->dv.get();
  b.dbias = c.problem.bias.data ? output->dbias.get<float>() : nullptr;
  b.dslopes_rows = output->dslopes.get<float>();
  b.dscale_rows = output->dscale.get<float>();
  if (const Status s = cpu::backward_with(kernels, b, executor); !s.ok()) return s.message();
  if (!forward_workspace.guard_intact() || !backward_workspace.guard_intact())
    return "written past the workspace";
  return output->guards_intact() ? "" : "written past a result";
}

inline std::vector<double> values(Buffer& buffer, DType dtype, size_t count) {
  std::vector<double> result(count);
  for (size_t n = 0; n < count; ++n) result[n] = read(buffer.get(), dtype, static_cast<i64>(n));
  return result;
}

// "" or the first result that breaks the accuracy rule.
inline std::string compare(const Expected& e, Output* o) {
  const DType dtype = e.dtype;
  constexpr DType kFloat = DType::kFloat32;
  std::string error;
  const auto check = [&](const char* what, Buffer& buffer, DType type, auto field,
                         double deviation = 0) {
    if (error.empty())
      error = check_accuracy(what, values(buffer, type, field(e.reference).size()), type, e, field,
                             deviation);
  };
  check("out", o->out, dtype, [](auto& r) -> auto& { return r.out; });
  check("lse", o->lse, kFloat, [](auto& r) -> auto& { return r.lse; });
  check("dq", o->dq, dtype, [](auto& r) -> auto& { return r.grad.dq; });
  check("dk", o->dk, dtype, [](auto& r) -> auto& { return r.grad.dk; });
  check("dv", o->dv, dtype, [](auto& r) -> auto& { return r.grad.dv; });
  check(
      "dbias", o->dbias, kFloat, [](auto& r) -> auto& { return r.grad.dbias; }, e.dbias_deviation);
  check(
      "dslopes", o->dslopes, kFloat, [](auto& r) -> auto& { return r.grad.dslopes_rows; },
      e.dslopes_deviation);
  check(
      "dscale", o->dscale, kFloat, [](auto& r) -> auto& { return r.grad.dscale_rows; },
      e.dscale_deviation);
  return error;
}

}  // namespace attention::testing
