// SPDX-License-Identifier: Apache-2.0
#include "kernels/emulator/bank_log.h"

#include <cstdint>

namespace attention::emulator {
namespace {

constexpr int kBanks = 32;  // of 4 bytes
constexpr int kBankBytes = 4;

}  // namespace

void BankLog::add(int lane, const void* site, const void* p, int bytes) {
  const u32 bit = 1u << lane;
  const std::size_t size = groups_.size();
  std::size_t found = size;
  for (std::size_t i = 0; i < size; ++i) {
    const std::size_t at = (cursor_[lane] + i) % size;
    if (groups_[at].site == site && groups_[at].bytes == bytes && (groups_[at].lanes & bit) == 0) {
      found = at;
      break;
    }
  }
  if (found == size) groups_.push_back(Group{site, bytes, 0, {}});
  Group& group = groups_[found];
  group.lanes |= bit;
  group.address[lane] = reinterpret_cast<std::uintptr_t>(p);
  cursor_[lane] = found + 1;
}

// An access of 8 or 16 bytes a lane is served half a warp or a quarter of a warp at a time. In each
// turn, a bank serves one word; lanes that want the same word share it.
u64 BankLog::conflicts(const Group& group) {
  const int words = group.bytes <= kBankBytes ? 1 : group.bytes / kBankBytes;
  const int lanes_per_turn = 32 / words;
  u64 extra = 0;
  for (int first = 0; first < 32; first += lanes_per_turn) {
    u64 seen[kBanks][32];
    int count[kBanks] = {};
    int worst = 1;
    for (int lane = first; lane < first + lanes_per_turn; ++lane) {
      if ((group.lanes >> lane & 1u) == 0) continue;
      for (int w = 0; w < words; ++w) {
        const u64 word = group.address[lane] / kBankBytes + static_cast<u64>(w);
        const auto bank = static_cast<std::size_t>(word % kBanks);
        bool again = false;
        for (int i = 0; i < count[bank]; ++i) again = again || seen[bank][i] == word;
        if (!again) seen[bank][count[bank]++] = word;
        worst = max_of(worst, count[bank]);
      }
    }
    extra += static_cast<u64>(worst - 1);
  }
  return extra;
}

BankLog::Count BankLog::flush() {
  Count count;
  for (const Group& group : groups_) {
    ++count.accesses;
    count.conflicts += conflicts(group);
  }
  groups_.clear();
  for (std::size_t& c : cursor_) c = 0;
  return count;
}

}  // namespace attention::emulator
