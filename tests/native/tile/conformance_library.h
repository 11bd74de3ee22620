// SPDX-License-Identifier: Apache-2.0
// The conformance library, for the source file that is compiled by nvcc and the one that is
// compiled by the host compiler. Each defines how memory of the device is had:
//   struct DeviceWords { DeviceWords(count); bool ok(); u32* data(); Status upload(const u32*);
//   Status download(u32*); }
#pragma once

#include <cstdio>
#include <cstring>

#include "kernels/cuda/tile/launch.h"
#include "tests/native/tile/conformance_abi.h"
#include "tests/native/tile/primitives.h"

namespace attention::conformance {

template <typename P>
Status run_primitive(const u32* in, u32* out) {
  using Kernel = Conformance<P>;
  DeviceWords device_in(P::kBlocks * P::kIn * P::kThreads);
  DeviceWords device_out(P::kBlocks * P::kOut * P::kThreads);
  DeviceWords counters(Kernel::kCounters);
  u32 start[Kernel::kCounters] = {};
  if (kCountersHoldPattern<P>) {
    for (u32 i = 0; i < Kernel::kCounters; ++i) start[i] = 0x01010101u * (i + 1);
  }
  if (Status s = device_in.upload(in); !s.ok()) return s;
  if (Status s = counters.upload(start); !s.ok()) return s;
  const typename Kernel::Params params{device_in.data(), device_out.data(), counters.data()};
  if (Status s = launch<Kernel>(Dim3{P::kBlocks}, nullptr, params); !s.ok()) return s;
  return device_out.download(out);
}

struct Entry {
  const char* name;
  int shape[4];
  Status (*run)(const u32* in, u32* out);
};

template <typename P>
constexpr Entry entry_of(const char* name) {
  return Entry{name, {P::kThreads, P::kBlocks, P::kIn, P::kOut}, run_primitive<P>};
}

#define ATTENTION_ENTRY(name, ...) entry_of<__VA_ARGS__>(#name),
inline const Entry kEntries[] = {ATTENTION_FOR_EACH_PRIMITIVE(ATTENTION_ENTRY)};
inline constexpr int kEntryCount = static_cast<int>(sizeof(kEntries) / sizeof(kEntries[0]));

}  // namespace attention::conformance

extern "C" {

int attention_conformance_count() { return attention::conformance::kEntryCount; }

const char* attention_conformance_name(int i) { return attention::conformance::kEntries[i].name; }

void attention_conformance_shape(int i, int* shape) {
  std::memcpy(shape, attention::conformance::kEntries[i].shape, 4 * sizeof(int));
}

int attention_conformance_run(int i, const unsigned* in, unsigned* out, char* message, int size) {
  const attention::Status status = attention::conformance::kEntries[i].run(in, out);
  std::snprintf(message, static_cast<std::size_t>(size), "%s", status.message());
  return status.ok() ? 0 : 1;
}
}
