// SPDX-License-Identifier: Apache-2.0
// CPU attention: the launchers and what they need from their surroundings.
#pragma once

#include "kernels/common/plan.h"
#include "kernels/common/problem.h"
#include "kernels/common/status.h"

namespace attention::cpu {

// A callable by reference: no ownership, no allocation. The callable must outlive the call.
class TaskFunction {
 public:
  template <typename Function>
  TaskFunction(const Function& function)  // NOLINT: implicit, so that lambdas pass directly
      : object_(&function), call_([](const void* object, i64 task, int worker) {
          (*static_cast<const Function*>(object))(task, worker);
        }) {}
  void operator()(i64 task, int worker) const { call_(object_, task, worker); }

 private:
  const void* object_;
  void (*call_)(const void*, i64, int);
};

// Where tasks run. The launchers never start threads of their own.
class Executor {
 public:
  virtual ~Executor() = default;
  // The most tasks that run at the same time; at least 1.
  virtual int threads() const = 0;
  // Calls function(task, worker) once for every task in [0, tasks) and returns when all are done.
  // Tasks with the same worker never run at the same time; 0 <= worker < min(threads(), workers).
  // Results do not depend on which worker runs a task, nor on the order.
  virtual void run(i64 tasks, int workers, TaskFunction function) const = 0;
};

// Runs everything on the calling thread.
class InlineExecutor final : public Executor {
 public:
  int threads() const override { return 1; }
  void run(i64 tasks, int, TaskFunction function) const override {
    for (i64 task = 0; task < tasks; ++task) function(task, 0);
  }
};

// out and lse of `args.problem`. args.workspace must hold what attention_plan_cpu asks for at the
// same sizes and tuning; fewer threads than planned for are enough workspace for fewer workers.
Status forward(const ForwardArgs& args, const Executor& executor);

// Gradients, from out and lse of the forward pass.
Status backward(const BackwardArgs& args, const Executor& executor);

// The instruction set that kernels run with: the best one of this machine, or the one that the
// environment variable JAX_OPS_CPU_ISA names (portable, avx2, avx512, avx512_bf16, amx). Null, with
// `status` set, when that one is unknown or not available here.
const char* instruction_set(Status* status);

}  // namespace attention::cpu

// A PlanFunction (kernels/common/plan.h).
extern "C" int attention_plan_cpu(const attention::PlanRequest* request,
                                  attention::PlanResult* result);
