// SPDX-License-Identifier: Apache-2.0
// Manual poisoning for AddressSanitizer; no-ops in other builds.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#define ATTENTION_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ATTENTION_ASAN 1
#endif
#endif
#ifndef ATTENTION_ASAN
#define ATTENTION_ASAN 0
#endif

#if ATTENTION_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace attention::emulator {

inline void poison(const void* p, std::size_t bytes) {
#if ATTENTION_ASAN
  __asan_poison_memory_region(p, bytes);
#else
  (void)p;
  (void)bytes;
#endif
}

inline void unpoison(const void* p, std::size_t bytes) {
#if ATTENTION_ASAN
  __asan_unpoison_memory_region(p, bytes);
#else
  (void)p;
  (void)bytes;
#endif
}

}  // namespace attention::emulator
