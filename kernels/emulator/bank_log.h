// SPDX-License-Identifier: Apache-2.0
// Counts bank conflicts of shared loads and stores. The lanes of an emulated warp run one after
// another, so accesses that one machine instruction would make together are put together again:
// same place in the program, same turn of its loop.
#pragma once

#include <vector>

#include "kernels/common/types.h"

namespace attention::emulator {

class BankLog {
 public:
  struct Count {
    u64 accesses = 0;   // warp-wide
    u64 conflicts = 0;  // extra passes over the banks
  };

  // `site` identifies the place in the program.
  void add(int lane, const void* site, const void* p, int bytes);
  // Counts what has been added since, and forgets it. Called where the lanes of the warp meet.
  Count flush();

 private:
  struct Group {
    const void* site;
    int bytes;
    u32 lanes;
    u64 address[32];
  };
  static u64 conflicts(const Group& group);

  std::vector<Group> groups_;
  std::size_t cursor_[32] = {};  // where the lane's next access is expected
};

}  // namespace attention::emulator
