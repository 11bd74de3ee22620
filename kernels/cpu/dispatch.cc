// SPDX-License-Identifier: Apache-2.0
// Run-time choice of the instruction set, and the public launchers on top of it.
#include "kernels/cpu/dispatch.h"

#include <cstdlib>
#include <cstring>
#include <iterator>

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace attention::cpu {
namespace {

struct Candidate {
  const Kernels& (*kernels)();
  bool (*available)();
  bool (*preferred)();  // to those that come after it
};

// Best first.
#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
// Linux hands out the tile registers on request, once for all threads of the process, and refuses
// where a thread's stack for signals has no room for them.
bool has_amx() {
  static const bool granted = [] {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
    return has_avx512_bf16() && __builtin_cpu_supports("amx-tile") &&
           __builtin_cpu_supports("amx-bf16") &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return granted;
}
// Intel's processors take three times as long for a bfloat16 dot product as for a float32 one.
bool prefers_avx512_bf16() { return has_avx512_bf16() && !__builtin_cpu_is("intel"); }
#endif
bool always() { return true; }

constexpr Candidate kCandidates[] = {
#if defined(__x86_64__)
    {amx_kernels, has_amx, has_amx},
    {avx512_bf16_kernels, has_avx512_bf16, prefers_avx512_bf16},
    {avx512_kernels, has_avx512, has_avx512},
    {avx2_kernels, has_avx2, has_avx2},
#endif
    {portable_kernels, always, always},
};

struct Choice {
  const Kernels* kernels = nullptr;
  Status status;
};

Choice choose() {
  Choice choice;
  const char* asked = std::getenv("JAX_OPS_CPU_ISA");
  const bool forced = asked && asked[0] != '\0';
  for (const Candidate& candidate : kCandidates) {
    const Kernels& kernels = candidate.kernels();
    if (forced && std::strcmp(asked, kernels.name) != 0) continue;
    if (forced ? candidate.available() : candidate.preferred()) {
      choice.kernels = &kernels;
      return choice;
    }
    if (forced) {
      choice.status = Status::error("JAX_OPS_CPU_ISA is '%s', which this processor does not have",
                                    kernels.name);
      return choice;
    }
  }
  char names[128] = {};
  for (const Candidate& candidate : kCandidates) {
    if (names[0]) std::strncat(names, ", ", sizeof(names) - std::strlen(names) - 1);
    std::strncat(names, candidate.kernels().name, sizeof(names) - std::strlen(names) - 1);
  }
  choice.status = Status::error("JAX_OPS_CPU_ISA is '%s'; allowed: %s", asked, names);
  return choice;
}

}  // namespace

const Kernels* select_kernels(Status* status) {
  static const Choice choice = choose();
  *status = choice.status;
  return choice.kernels;
}

KernelList available_kernels() {
  static_assert(std::size(kCandidates) <= KernelList::kMost, "every candidate has an entry");
  KernelList list;
  for (const Candidate& candidate : kCandidates)
    if (candidate.available()) list.entries[list.count++] = &candidate.kernels();
  return list;
}

Status forward(const ForwardArgs& args, const Executor& executor) {
  Status status;
  const Kernels* kernels = select_kernels(&status);
  return kernels ? forward_with(*kernels, args, executor) : status;
}

Status backward(const BackwardArgs& args, const Executor& executor) {
  Status status;
  const Kernels* kernels = select_kernels(&status);
  return kernels ? backward_with(*kernels, args, executor) : status;
}

const char* instruction_set(Status* status) {
  const Kernels* kernels = select_kernels(status);
  return kernels ? kernels->name : nullptr;
}

}  // namespace attention::cpu
