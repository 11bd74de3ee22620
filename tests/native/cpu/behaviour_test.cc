// SPDX-License-Identifier: Apache-2.0
// What must hold to the bit: determinism, poison in places that nobody may look at, empty rows,
// sizes of 0, and the errors of the launchers.
#include <atomic>
#include <cmath>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "tests/native/check/check.h"
#include "tests/native/cpu/run.h"

namespace attention::testing {
namespace {

// Runs tasks on real threads, in whatever order they come.
class ThreadExecutor final : public cpu::Executor {
 public:
  explicit ThreadExecutor(int threads) : threads_(threads) {}
  int threads() const override { return threads_; }
  void run(i64 tasks, int workers, cpu::TaskFunction function) const override {
    std::atomic<i64> next{0};
    std::vector<std::thread> pool;
    for (int worker = 0; worker < workers; ++worker)
      pool.emplace_back([&, worker] {
        for (i64 task = next++; task < tasks; task = next++) function(task, worker);
      });
    for (std::thread& thread : pool) thread.join();
  }

 private:
  int threads_;
};

template <typename Function>
void for_each_isa(const Function& function) {
  const cpu::KernelList list = cpu::available_kernels();
  EXPECT(list.count >= 1);
  for (int n = 0; n < list.count; ++n) function(*list.entries[n]);
}

Options everything(u32 seed) {
  Options o;
  o.lq = 70;
  o.lkv = 150;
  o.hkv = 2;
  o.group = 3;
  o.d = 20;
  o.dv = 12;
  o.causal = o.bottom_right = o.alibi = o.bias = o.mask = o.segments = true;
  o.dropout = 0.1f;
  o.soft_cap = 4;
  o.seed = seed;
  return o;
}

Options decode(u32 seed) {
  Options o;
  o.lq = 2;
  o.lkv = 700;
  o.hkv = 2;
  o.group = 2;
  o.causal = o.bottom_right = true;
  o.seed = seed;
  return o;
}

void poison(std::vector<u8>* data, i64 first, i64 count, u8 with) {
  std::fill(data->begin() + first, data->begin() + first + count, with);
}

}  // namespace

TEST(results_do_not_depend_on_threads) {
  for_each_isa([](const cpu::Kernels& kernels) {
    for (const Options& options : {everything(1), decode(2)}) {
      const Case c(options);
      // The plan is made once, as in a compiled program; what varies is who runs it.
      ForwardArgs f;
      f.problem = c.problem;
      f.workspace_bytes = planned_bytes(c, Operation::kForward, &f.tuning, 4);
      BackwardArgs b;
      b.problem = c.problem;
      b.workspace_bytes = planned_bytes(c, Operation::kBackward, &b.tuning, 4);
      Output reference(c);
      EXPECT(f.tuning.num_splits > 1 || b.tuning.num_splits > 1);
      for (int n = 0; n < 4; ++n) {
        Output again(c);
        Output& output = n == 0 ? reference : again;
        const ThreadExecutor threads(n + 1);
        const ShuffledExecutor shuffled(3);
        const cpu::Executor& executor =
            n == 2 ? static_cast<const cpu::Executor&>(shuffled) : threads;
        Buffer forward_workspace(f.workspace_bytes), backward_workspace(b.workspace_bytes);
        f.workspace = forward_workspace.get();
        f.out = output.out.get();
        f.lse = output.lse.get<float>();
        EXPECT(cpu::forward_with(kernels, f, executor).ok());
        b.workspace = backward_workspace.get();
        b.out = f.out;
        b.lse = f.lse;
        b.dout = c.dout.data();
        b.dlse = c.dlse.data();
        b.dq = output.dq.get();
        b.dk = output.dk.get();
        b.dv = output.dv.get();
        b.dbias = c.problem.bias.data ? output.dbias.get<float>() : nullptr;
        b.dslopes_rows = output.dslopes.get<float>();
        b.dscale_rows = output.dscale.get<float>();
        EXPECT(cpu::backward_with(kernels, b, executor).ok());
        EXPECT_THAT(output == reference, c.name() + std::string(" ") + kernels.name);
      }
    }
  });
}

// Keys past a length, keys that a mask hides from every query, and query rows past their length
// hold NaN: everything must come out as with zeros there.
TEST(nothing_leaks) {
  for_each_isa([](const cpu::Kernels& kernels) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
      for (int kind = 0; kind < 4; ++kind) {
        Options o = kind == 1 ? decode(7) : everything(7);
        o.dtype = dtype;
        o.batch = 2;
        o.segments = o.bias = false;
        o.mask = kind == 2;
        o.block_mask = kind == 3;
        o.causal = kind < 2;
        o.q_lengths = o.kv_lengths = kind < 2;
        Output outputs[2] = {Output(Case(o)), Output(Case(o))};
        for (int n = 0; n < 2; ++n) {
          Case c(o);
          const u8 byte = n == 0 ? 0x00 : 0xFF;  // all bits set: NaN in every type
          const Problem& p = c.problem;
          const i64 size = size_of(dtype);
          const i64 key_k = p.hkv * p.d * size, key_v = p.hkv * p.dv * size;
          if (o.kv_lengths) {
            for (i64 b = 0; b < o.batch; ++b) {
              const i64 kv_len = *p.kv_lengths.row(b), q_len = *p.q_lengths.row(b);
              poison(&c.k, (b * p.lkv + kv_len) * key_k, (p.lkv - kv_len) * key_k, byte);
              poison(&c.v, (b * p.lkv + kv_len) * key_v, (p.lkv - kv_len) * key_v, byte);
              const i64 row_q = p.hq * p.d * size, row_o = p.hq * p.dv * size;
              poison(&c.q, (b * p.lq + q_len) * row_q, (p.lq - q_len) * row_q, byte);
              poison(&c.dout, (b * p.lq + q_len) * row_o, (p.lq - q_len) * row_o, byte);
            }
          }
          if (o.mask) {
            u8* mask = static_cast<u8*>(const_cast<void*>(p.mask.data));
            for (i64 row = 0; row < o.batch * p.hq * p.lq; ++row) mask[row * p.lkv + 17] = 0;
          }
          if (o.block_mask) {
            i32* index = const_cast<i32*>(p.block_mask.index);
            for (i64 row = 0; row < p.hq * ceil_div<i64>(p.lq, 64); ++row) {
              i32& state = index[row * p.block_mask.row_stride];
              if (state == kFullTile) state = 0;
            }
            u32* bits = const_cast<u32*>(p.block_mask.bits);
            for (i64 row = 0; row < static_cast<i64>(c.block_bits_size()) / 2; ++row)
              bits[row * 2] &= ~(1u << 17);
          }
          if (o.mask || o.block_mask)
            for (i64 b = 0; b < o.batch; ++b) {
              poison(&c.k, (b * p.lkv + 17) * key_k, key_k, byte);
              poison(&c.v, (b * p.lkv + 17) * key_v, key_v, byte);
            }
          const std::string error = run_case(c, kernels, ShuffledExecutor(2), {}, &outputs[n]);
          EXPECT_THAT(error.empty(), error);
        }
        EXPECT_THAT(outputs[0] == outputs[1],
                    std::string(kernels.name) + " kind " + std::to_string(kind));
      }
  });
}

TEST(empty_rows) {
  for_each_isa([](const cpu::Kernels& kernels) {
    Options o;
    o.lq = 5;
    o.lkv = 2;
    o.batch = 1;
    o.causal = o.bottom_right = true;
    const Case c(o);
    Output output(c);
    EXPECT(run_case(c, kernels, cpu::InlineExecutor(), {}, &output).empty());
    for (int row = 0; row < 3; ++row) {
      EXPECT(output.lse.get<float>()[row] == -std::numeric_limits<float>::infinity());
      for (int d = 0; d < 16; ++d) {
        EXPECT(output.out.get<float>()[row * 16 + d] == 0);
        EXPECT(output.dq.get<float>()[row * 16 + d] == 0);
      }
    }
    for (int n = 0; n < 2 * 16; ++n) EXPECT(std::isfinite(output.dk.get<float>()[n]));
  });
}

TEST(sizes_of_zero) {
  for_each_isa([](const cpu::Kernels& kernels) {
    for (int axis = 0; axis < 3; ++axis) {
      Options o;
      o.bias = true;
      o.lq = axis == 0 ? 0 : 9;
      o.lkv = axis == 1 ? 0 : 9;
      o.batch = axis == 2 ? 0 : 2;
      const Case c(o);
      Output output(c);
      const std::string error = run_case(c, kernels, cpu::InlineExecutor(), {}, &output);
      EXPECT_THAT(error.empty(), error);
      const Problem& p = c.problem;
      for (i64 n = 0; n < p.batch * p.lq * p.hq; ++n)
        EXPECT(output.lse.get<float>()[n] == -std::numeric_limits<float>::infinity());
      for (i64 n = 0; n < p.batch * p.lq * p.hq * p.dv; ++n)
        EXPECT(output.out.get<float>()[n] == 0);
      for (i64 n = 0; n < p.batch * p.lkv * p.hkv * p.d; ++n)
        EXPECT(output.dk.get<float>()[n] == 0);
    }
  });
}

// finfo.min as a bias keeps a row finite: its weights are those without the bias.
TEST(lowest_bias) {
  for_each_isa([](const cpu::Kernels& kernels) {
    Options o;
    o.bias = true;
    o.bias_axes = {false, false, false, false};
    o.batch = 1;
    const Case plain(o), low(o);
    float* bias = static_cast<float*>(const_cast<void*>(low.problem.bias.data));
    *bias = std::numeric_limits<float>::lowest();
    Output output(low);
    EXPECT(run_case(low, kernels, cpu::InlineExecutor(), {}, &output).empty());
    for (int n = 0; n < 64 * 16; ++n) EXPECT(std::isfinite(output.out.get<float>()[n]));
  });
}

// Scores far beyond the cap are the cap, to the last bit, and have no gradient.
TEST(saturated_cap) {
  for_each_isa([](const cpu::Kernels& kernels) {
    for (const i64 lkv : {70, 200}) {
      Options o;
      o.batch = 1;
      o.lq = 2;
      o.lkv = lkv;
      o.soft_cap = 1.f / (1 << 20);
      const Case c(o);
      Output output(c);
      EXPECT(run_case(c, kernels, cpu::InlineExecutor(), {}, &output).empty());
      for (i64 row = 0; row < Output::rows(c); ++row) {
        EXPECT(output.dscale.get<float>()[row] == 0);
        for (i64 d = 0; d < o.d; ++d) EXPECT(output.dq.get<float>()[row * o.d + d] == 0);
      }
    }
  });
}

TEST(errors) {
  Options o;
  const Case c(o);
  ForwardArgs f;
  f.problem = c.problem;
  f.workspace_bytes = 16;
  EXPECT_CONTAINS(std::string(cpu::forward(f, cpu::InlineExecutor()).message()),
                  "workspace of 16 bytes is too small");
  PlanRequest request{};
  request.batch = request.lq = request.lkv = request.hq = request.hkv = request.d = 1;
  request.dv = 257;
  PlanResult result;
  EXPECT(attention_plan_cpu(&request, &result) != 0);
  EXPECT_CONTAINS(std::string(result.message), "head dim of value is 257");
  request.dv = 1;
  request.num_splits = -2;
  EXPECT(attention_plan_cpu(&request, &result) != 0);
  EXPECT_CONTAINS(std::string(result.message), "num_splits -2");
  request.num_splits = 0;
  request.hq = 3;
  request.hkv = 2;
  EXPECT(attention_plan_cpu(&request, &result) != 0);
  EXPECT_CONTAINS(std::string(result.message), "3 query heads are not a multiple of 2");
}

// Sizes whose products do not fit into 64 bits are refused, not wrapped into a small workspace.
TEST(hostile_sizes) {
  const i64 huge = i64{1} << 31;
  const auto planned = [](i64 batch, i64 lq, i64 lkv, i64 hq, i64 hkv, i64 splits, i32 operation) {
    PlanRequest request{};
    request.batch = batch;
    request.lq = lq;
    request.lkv = lkv;
    request.hq = hq;
    request.hkv = hkv;
    request.d = request.dv = 256;
    request.num_splits = splits;
    request.operation = operation;
    request.threads = 1 << 30;
    PlanResult result;
    if (attention_plan_cpu(&request, &result) != 0) return std::string(result.message);
    EXPECT(result.workspace_bytes > 0 && result.workspace_bytes <= i64{1} << 48);
    return std::string();
  };
  const std::string too_large = "would be larger than any memory";
  for (const i32 operation : {0, 1}) {
    EXPECT(planned(1, 4096, 4096, 8, 8, 0, operation).empty());
    EXPECT_CONTAINS(planned(1 << 20, 1 << 11, 1 << 11, 1 << 11, 1 << 11, 1 << 20, operation),
                    too_large);
    EXPECT_CONTAINS(planned(1, huge - 4096, huge - 4096, 1 << 11, 1 << 11, huge - 1, operation),
                    too_large);
    EXPECT_CONTAINS(planned(i64{1} << 62, 16, 16, 8, 8, 0, operation), "than any array holds");
    EXPECT_CONTAINS(planned(i64{1} << 32, 1, 16, i64{1} << 20, 1, 0, operation),
                    "than any array holds");
    EXPECT_CONTAINS(planned(1, 1, 16, huge, 1, 0, operation), "query heads");
    EXPECT_CONTAINS(planned(1, 1, 16, huge - 4096, 1, 0, operation), "for each key/value head");
    EXPECT_CONTAINS(planned(-1, 1, 16, 1, 1, 0, operation), "batch -1");
  }
}

// A plan that is planned again from its own answer does not change: the lowering sends the answer
// as attributes, and the launcher plans from those.
TEST(plans_are_stable) {
  for (const i64 lkv : {1, 100, 333, 4096, 65536})
    for (const i64 lq : {1, 16, 1000})
      for (const i64 splits : {0, 1, 3, 7, 100, 70000})
        for (const i32 operation : {0, 1}) {
          PlanRequest request{};
          request.batch = 2;
          request.lq = lq;
          request.lkv = lkv;
          request.hq = 6;
          request.hkv = 2;
          request.d = request.dv = 64;
          request.num_splits = splits;
          request.operation = operation;
          request.threads = 4;
          PlanResult first, second;
          EXPECT(attention_plan_cpu(&request, &first) == 0);
          request.block_q = first.block_q;
          request.block_k = first.block_k;
          request.num_splits = first.num_splits;
          EXPECT(attention_plan_cpu(&request, &second) == 0);
          EXPECT(first.block_q == second.block_q && first.block_k == second.block_k &&
                 first.num_splits == second.num_splits &&
                 first.workspace_bytes == second.workspace_bytes);
        }
}

// An exported program with a symbolic batch asks for a workspace on a line above those of some
// batch sizes (jax_ops/_plan.py), with the blocks and splits of one batch entry.
TEST(workspaces_lie_below_a_line) {
  for (const i32 threads : {1, 2, 8, 64})
    for (const i64 lkv : {16, 64, 300, 4096})
      for (const i64 lq : {1, 16, 64, 300})
        for (const i64 hkv : {1, 8}) {
          PlanRequest request{};
          request.lq = lq;
          request.lkv = lkv;
          request.hq = 16;
          request.hkv = hkv;
          request.d = request.dv = 64;
          request.threads = threads;
          PlanResult result;
          const auto workspace = [&](i64 batch) {
            request.batch = batch;
            EXPECT(attention_plan_cpu(&request, &result) == 0);
            return result.workspace_bytes;
          };
          const i64 first = workspace(1);
          request.block_q = result.block_q;
          request.block_k = result.block_k;
          request.num_splits = result.num_splits;
          i64 slope = 0;
          for (const i64 batch : {2, 3, 7, 64, 1000, 4096})
            slope = std::max(slope, ceil_div(workspace(batch) - first, batch - 1));
          for (i64 batch = 1; batch <= 100; ++batch)
            EXPECT(workspace(batch) <= first + slope * (batch - 1));
        }
}

}  // namespace attention::testing

TEST_MAIN()
