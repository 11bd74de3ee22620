// SPDX-License-Identifier: Apache-2.0
// Runs a test case through the launchers of the emulated library and compares it with the
// reference.
//
// By default the emulator checks everything (races, bounds, uninitialised reads, outputs written
// exactly once), and results and workspaces start as NaN.
#pragma once

#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/attention.h"
#include "kernels/emulator/emulator.h"
#include "tests/native/case.h"
#include "tests/native/check/check.h"
#include "tests/native/emulator/registered.h"

namespace attention::testing {

struct RunOptions {
  Tuning tuning;             // of the forward pass
  i64 backward_block_q = 0;  // tells the forms of the backward pass apart; 0: the planner's choice
  Precision precision = Precision::kDefault;
  bool backward = true;
  emulator::Options emulator = [] {
    emulator::Options options;
    options.checked = true;
    return options;
  }();
};

struct Run {
  std::string error;  // "" when all went well
  Tuning planned;
  std::vector<u8> out, lse, dq, dk, dv, dbias, dslopes, dscale;
  bool operator==(const Run& o) const {
    return out == o.out && lse == o.lse && dq == o.dq && dk == o.dk && dv == o.dv &&
           dbias == o.dbias && dslopes == o.dslopes && dscale == o.dscale;
  }
};

// The plan request of a case; features as the FFI layer sets them.
inline PlanRequest plan_request(const Case& c, Operation operation, const RunOptions& options) {
  const Problem& p = c.problem;
  const auto feature = [](bool present, Feature bit) { return present ? i64{bit} : 0; };
  PlanRequest r{};
  r.batch = p.batch;
  r.lq = p.lq;
  r.lkv = p.lkv;
  r.hq = p.hq;
  r.hkv = p.hkv;
  r.d = p.d;
  r.dv = p.dv;
  r.features =
      feature(p.causal, kFeatureCausal) | feature(p.bottom_right, kFeatureBottomRight) |
      feature(p.window_left >= 0 || p.window_right >= 0, kFeatureWindow) |
      feature(p.soft_cap != 0, kFeatureSoftCap) |
      feature(p.dropout.threshold != 0, kFeatureDropout) | feature(p.bias.data, kFeatureBias) |
      feature(p.mask.data, kFeatureMask) | feature(p.q_lengths.data, kFeatureQLengths) |
      feature(p.kv_lengths.data, kFeatureKvLengths) | feature(p.q_segments.data, kFeatureSegments) |
      feature(p.alibi_slopes.data, kFeatureAlibi) | feature(p.prefix_lengths.data, kFeaturePrefix) |
      feature(p.scale_array.data, kFeatureScaleArray) |
      feature(p.block_mask.index, kFeatureBlockMask);
  if (operation == Operation::kForward) {
    r.block_q = options.tuning.block_q;
    r.block_k = options.tuning.block_k;
    r.num_splits = options.tuning.num_splits;
  } else {
    r.block_q = options.backward_block_q;
  }
  r.window_left = p.window_left;
  r.window_right = p.window_right;
  r.operation = static_cast<i32>(operation);
  r.dtype = static_cast<i32>(p.dtype);
  r.precision = static_cast<i32>(options.precision);
  return r;
}

// A result array that starts as NaN.
inline void* poisoned(std::vector<u8>& data, i64 bytes) {
  data.assign(static_cast<size_t>(bytes), 0xFF);
  return data.data();
}

inline Run run(const Case& c, const RunOptions& options = {}) {
  Run r;
  emulator::set_options(options.emulator);
  ForwardArgs f;
  f.problem = c.problem;
  f.problem.precision = options.precision;
  const Problem& p = f.problem;
  const i64 size = size_of(p.dtype);
  const i64 rows = p.batch * p.lq * p.hq;
  const i64 keys = p.batch * p.lkv * p.hkv;

  PlanResult plan;
  PlanRequest request = plan_request(c, Operation::kForward, options);
  if (attention_plan_emulated(&request, &plan) != 0) {
    r.error = plan.message;
    return r;
  }
  r.planned = f.tuning = {plan.block_q, plan.block_k, plan.num_splits};
  std::vector<u8> workspace;
  f.workspace = poisoned(workspace, plan.workspace_bytes);
  f.workspace_bytes = plan.workspace_bytes;
  f.out = poisoned(r.out, rows * p.dv * size);
  f.lse = static_cast<float*>(poisoned(r.lse, rows * 4));
  {
    Registered buffers(c);
    buffers.add("workspace", workspace.data(), workspace.size(), emulator::Access::kWorkspace);
    buffers.add("out", r.out.data(), r.out.size(), emulator::Access::kOutput);
    buffers.add("lse", r.lse.data(), r.lse.size(), emulator::Access::kOutput);
    if (const Status s = cuda::forward(f, nullptr); !s.ok()) r.error = s.message();
    if (r.error.empty() && options.emulator.checked) r.error = buffers.unwritten();
  }
  if (!r.error.empty() || !options.backward) return r;

  BackwardArgs b;
  b.problem = p;
  request = plan_request(c, Operation::kBackward, options);
  if (attention_plan_emulated(&request, &plan) != 0) {
    r.error = plan.message;
    return r;
  }
  b.tuning = {plan.block_q, plan.block_k, plan.num_splits};
  b.workspace = poisoned(workspace, plan.workspace_bytes);
  b.workspace_bytes = plan.workspace_bytes;
  b.out = f.out;
  b.lse = f.lse;
  b.dout = c.dout.data();
  b.dlse = c.options().dlse ? c.dlse.data() : nullptr;
  b.dq = poisoned(r.dq, rows * p.d * size);
  b.dk = poisoned(r.dk, keys * p.d * size);
  b.dv = poisoned(r.dv, keys * p.dv * size);
  if (p.bias.data) b.dbias = static_cast<float*>(poisoned(r.dbias, c.dbias_size() * 4));
  if (p.alibi_slopes.data) b.dslopes_rows = static_cast<float*>(poisoned(r.dslopes, rows * 4));
  if (p.scale_array.data) b.dscale_rows = static_cast<float*>(poisoned(r.dscale, rows * 4));
  Registered buffers(c);
  buffers.add("workspace", workspace.data(), workspace.size(), emulator::Access::kWorkspace);
  buffers.add("out", r.out.data(), r.out.size(), emulator::Access::kInput);
  buffers.add("lse", r.lse.data(), r.lse.size(), emulator::Access::kInput);
  for (auto [name, data] : {std::pair{"dq", &r.dq},
                            {"dk", &r.dk},
                            {"dv", &r.dv},
                            {"dbias", &r.dbias},
                            {"dslopes", &r.dslopes},
                            {"dscale", &r.dscale}}) {
    buffers.add(name, data->data(), data->size(), emulator::Access::kOutput);
  }
  if (const Status s = cuda::backward(b, nullptr); !s.ok()) r.error = s.message();
  if (r.error.empty() && options.emulator.checked) r.error = buffers.unwritten();
  return r;
}

inline std::vector<double> values(const std::vector<u8>& data, DType dtype) {
  std::vector<double> result(data.size() / size_of(dtype));
  for (size_t n = 0; n < result.size(); ++n) result[n] = read(data.data(), dtype, n);
  return result;
}

// Every result of a run against the reference; "" or the first disagreement.
inline std::string compare(const Case& c, const Run& r, const RunOptions& options) {
  if (!r.error.empty()) return r.error;
  const DType dtype = c.problem.dtype;
  const Expected expected(c, dtype == DType::kFloat32 && options.precision == Precision::kDefault);
  const auto check = [&](const char* what, const std::vector<u8>& data, DType type, auto field,
                         double deviation = 0) {
    return check_accuracy(what, values(data, type), type, expected, field, deviation);
  };
  constexpr DType kF32 = DType::kFloat32;
  std::string wrong = check("out", r.out, dtype, [](const Result& x) -> auto& { return x.out; });
  if (wrong.empty()) {
    wrong = check("lse", r.lse, kF32, [](const Result& x) -> auto& { return x.lse; });
  }
  if (!options.backward || !wrong.empty()) return wrong;
  wrong = check("dq", r.dq, dtype, [](const Result& x) -> auto& { return x.grad.dq; });
  if (!wrong.empty()) return wrong;
  wrong = check("dk", r.dk, dtype, [](const Result& x) -> auto& { return x.grad.dk; });
  if (!wrong.empty()) return wrong;
  wrong = check("dv", r.dv, dtype, [](const Result& x) -> auto& { return x.grad.dv; });
  if (wrong.empty() && c.problem.bias.data) {
    wrong = check(
        "dbias", r.dbias, kF32, [](const Result& x) -> auto& { return x.grad.dbias; },
        expected.dbias_deviation);
  }
  if (wrong.empty() && c.problem.alibi_slopes.data) {
    wrong = check("dslopes", r.dslopes, kF32,
                  [](const Result& x) -> auto& { return x.grad.dslopes_rows; });
  }
  if (wrong.empty() && c.problem.scale_array.data) {
    wrong = check("dscale", r.dscale, kF32,
                  [](const Result& x) -> auto& { return x.grad.dscale_rows; });
  }
  return wrong;
}

// Runs and compares; one check of the running test.
inline void expect_accurate(const Options& o, const RunOptions& options = {}) {
  const Case c(o);
  const std::string wrong = compare(c, run(c, options), options);
  EXPECT_THAT(wrong.empty(), c.name() + ": " + wrong);
}

}  // namespace attention::testing
