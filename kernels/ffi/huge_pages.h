// SPDX-License-Identifier: Apache-2.0
// Huge pages for large results. XLA takes fresh memory for a large result, and the kernel of the
// system hands it out as it is first written. In pages of 4 kB that is a fifth of the processor
// time of a call with a result of 32 MB and short sequences.
#pragma once

#include "kernels/ffi/call.h"
#include "kernels/ffi/elements.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace attention::ffi {

inline constexpr i64 kHugePage = i64{2} << 20;
// Smaller results come from memory that the allocator keeps.
inline constexpr i64 kLargeResult = 2 * kHugePage;

// The whole huge pages within a range of memory; of a small range, none.
struct HugePages {
  char* begin = nullptr;
  i64 bytes = 0;
};
inline HugePages huge_pages_within(void* data, i64 bytes) {
  if (bytes < kLargeResult) return {};
  const i64 skipped = (kHugePage - bytes_past(data, kHugePage)) % kHugePage;
  return {static_cast<char*>(data) + skipped, (bytes - skipped) / kHugePage * kHugePage};
}

// Asks for them in every large result. A system without them refuses, and nothing changes. What
// lies beside a result is never asked for: it might be somebody's who wants small pages.
inline void ask_for_huge_pages(BufferList results) {
#if defined(__linux__)
  for (int i = 0; i < results.size; ++i) {
    const Buffer& result = results.data[i];
    i64 bytes = size_of(result.element);
    for (int axis = 0; axis < result.rank; ++axis) bytes *= result.dims[axis];
    const HugePages pages = huge_pages_within(result.data, bytes);
    if (pages.bytes > 0) madvise(pages.begin, static_cast<size_t>(pages.bytes), MADV_HUGEPAGE);
  }
#else
  (void)results;
#endif
}

}  // namespace attention::ffi
