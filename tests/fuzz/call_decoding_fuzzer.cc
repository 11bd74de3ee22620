// SPDX-License-Identifier: Apache-2.0
// The fuzz target of the FFI handlers: whatever a call holds, it ends with success or with an error
// that names its target. See hostile_call.h for what an input's bytes mean.
#include <cstdio>
#include <cstdlib>

#include "tests/fuzz/hostile_call.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using attention::testing::HostileCall, attention::testing::Library;
  const auto stop = [](const std::string& why) {
    std::fprintf(stderr, "call_decoding_fuzzer: %s\n", why.c_str());
    std::abort();
  };
  HostileCall call(attention::testing::Bytes(data, size));
  if (const std::string wrong = call.check_decoded(); !wrong.empty()) stop(wrong);
  const std::string message = call.run();
  if (message.empty()) return 0;
  const std::string target = std::string("attention_") + (call.backward() ? "bwd" : "fwd") +
                             (call.library() == Library::kCpu ? "_cpu_v" : "_emulated_v");
  if (message.compare(0, target.size(), target) != 0)
    stop("an error without its target: " + message);
  // A correct call must run, or every input would be refused for one and the same reason.
  if (!call.changed()) stop("a correct call was refused: " + message);
  return 0;
}
