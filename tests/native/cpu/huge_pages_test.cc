// SPDX-License-Identifier: Apache-2.0
// Which pages are asked for: whole ones within large results, and nothing beside them.
#include "kernels/ffi/huge_pages.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

#include "tests/native/check/check.h"

namespace attention::ffi {
namespace {

char* at(i64 address) { return reinterpret_cast<char*>(static_cast<uintptr_t>(address)); }

// Whether the system was asked for huge pages at an address.
bool asked_for(const void* address) {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  std::ifstream maps("/proc/self/smaps");
  bool here = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long long first = 0, last = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &first, &last) == 2)
      here = first <= wanted && wanted < last;
    if (here && line.rfind("VmFlags:", 0) == 0) return line.find(" hg") != std::string::npos;
  }
  return false;
}

}  // namespace

TEST(whole_pages_of_large_ranges) {
  const i64 page = kHugePage;
  for (const i64 offset : {i64{0}, i64{16}, page - 16}) {
    char* const data = at(8 * page + offset);
    EXPECT(huge_pages_within(data, kLargeResult - 1).bytes == 0);
    for (const i64 bytes : {kLargeResult, kLargeResult + 4096, 16 * page, 16 * page + 1}) {
      const HugePages pages = huge_pages_within(data, bytes);
      EXPECT(bytes_past(pages.begin, page) == 0 && pages.bytes % page == 0);
      EXPECT(pages.begin >= data && pages.begin + pages.bytes <= data + bytes);
      // Not one page more would fit on either side.
      EXPECT(pages.begin - page < data && pages.begin + pages.bytes + page > data + bytes);
    }
  }
  EXPECT(huge_pages_within(at(8 * page), 16 * page).bytes == 16 * page);
  EXPECT(huge_pages_within(at(8 * page + 16), 16 * page).bytes == 15 * page);
}

TEST(only_large_results_are_asked_for) {
  const i64 bytes = 12 * kHugePage;
  void* const memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  EXPECT(memory != MAP_FAILED);
  char* const start = huge_pages_within(memory, bytes).begin;
  const i64 large[] = {2, kHugePage}, small[] = {2, 16, 3}, none[] = {0, kHugePage};
  Buffer results[3];
  results[0] = {Element::kBFloat16, large, 2, start + 2 * kHugePage};
  results[1] = {Element::kFloat32, small, 3, start + 7 * kHugePage};
  results[2] = {Element::kFloat32, none, 2, nullptr};
  ask_for_huge_pages({results, 3});
  // A system built without huge pages knows no such flag.
  const bool exist = std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled").good();
  EXPECT(asked_for(start + 2 * kHugePage) == exist);
  EXPECT(asked_for(start + 6 * kHugePage - 1) == exist);
  EXPECT(!asked_for(start + 2 * kHugePage - 1));
  EXPECT(!asked_for(start + 6 * kHugePage));
  EXPECT(!asked_for(start + 7 * kHugePage));
  munmap(memory, static_cast<size_t>(bytes));
}

}  // namespace attention::ffi

TEST_MAIN()
