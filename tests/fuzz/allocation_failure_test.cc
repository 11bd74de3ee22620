// SPDX-License-Identifier: Apache-2.0
// No memory inside a call of the CPU handlers: each of the handler's own allocations fails once, in
// a run of its own. The call then ends with an error that says so, or with the right result; it
// never ends the process, and never returns while helpers still work on its memory.
#include <cstdio>
#include <cstdlib>
#include <new>
#include <random>

#include "tests/fuzz/hostile_call.h"
#include "tests/native/check/check.h"

namespace {

// Allocations until one fails; below 0, none does.
int countdown = -1;
bool failed = false;

void* allocate(std::size_t bytes) {
  if (countdown >= 0 && countdown-- == 0) {
    failed = true;
    throw std::bad_alloc();
  }
  void* const p = std::malloc(bytes == 0 ? 1 : bytes);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }

namespace attention::testing {
namespace {

// Runs the call with its `fail_at`-th allocation failing; false when it has fewer.
bool run_with_failure(const HostileCall& original, int fail_at, uint64_t expected, int* errors) {
  HostileCall call = original;
  failed = false;
  const std::string message = call.run([&](bool begins) { countdown = begins ? fail_at : -1; });
  if (!failed) return false;
  if (message.empty()) {
    EXPECT(call.digest() == expected);
  } else {
    ++*errors;
    EXPECT_CONTAINS(message, "_cpu_v");
    EXPECT_CONTAINS(message, ": out of memory");
  }
  return true;
}

TEST(every_allocation_of_a_call_may_fail) {
  std::mt19937_64 random(1);
  int calls = 0, failures = 0, errors = 0;
  for (int made = 0; made < 4000; ++made) {
    // The bytes of a correct call; the first says direction, lateness of helpers and threads.
    uint8_t bytes[13];
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    HostileCall call(Bytes(bytes, sizeof(bytes)));
    if (call.changed() || call.library() != Library::kCpu) continue;
    ++calls;
    HostileCall good = call;
    EXPECT(good.run().empty());
    for (int fail_at = 0; run_with_failure(call, fail_at, good.digest(), &errors); ++fail_at) {
      ++failures;
    }
  }
  std::printf("%d calls, %d failed allocations, %d errors\n", calls, failures, errors);
  EXPECT(calls > 1000);
  // Some allocations are a matter of life, some (helpers) are not.
  EXPECT(errors > 0);
  EXPECT(failures > errors);
}

}  // namespace
}  // namespace attention::testing

TEST_MAIN()
