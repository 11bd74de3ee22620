// SPDX-License-Identifier: Apache-2.0
// Counter-based dropout (Philox-4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2,
// 3", SC 2011). An entry's fate depends on (seed, b, h, i, j) alone, so it is the same in the
// forward and the backward pass, for any tile size, split count or sharding.
//
// One Philox call gives 128 bits = 8 values of 16 bits: the keep decisions of keys 8c .. 8c + 7 of
// one row.
//   counter = (c, i, global head, global batch), key = seed words; value of key j = 16-bit half (j
//   % 2) (low first) of word (j % 8) / 2.
#pragma once

#include "kernels/common/problem.h"

namespace attention {

struct Philox {
  u32 word[4];
};

ATTENTION_HOST_DEVICE constexpr Philox philox(u32 key0, u32 key1, u32 c0, u32 c1, u32 c2, u32 c3) {
  for (int round = 0; round < 10; ++round) {
    const u64 p0 = u64{0xD2511F53u} * c0;
    const u64 p1 = u64{0xCD9E8D57u} * c2;
    const u32 n0 = static_cast<u32>(p1 >> 32) ^ c1 ^ key0;
    const u32 n2 = static_cast<u32>(p0 >> 32) ^ c3 ^ key1;
    c1 = static_cast<u32>(p1);
    c3 = static_cast<u32>(p0);
    c0 = n0;
    c2 = n2;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The random words that decide about keys 8 * (j / 8) .. + 7 of row i.
ATTENTION_HOST_DEVICE constexpr Philox dropout_words(const u32* seed, u32 batch_index,
                                                     u32 head_index, u32 i, u32 j) {
  return philox(seed[0], seed[1], j / 8, i, head_index, batch_index);
}

ATTENTION_HOST_DEVICE constexpr bool dropout_keeps(const Philox& words, u32 j, u32 threshold) {
  // A choice among registers: indexing would put the words into a GPU thread's local memory.
  const u32 low = j & 2u ? words.word[1] : words.word[0];
  const u32 high = j & 2u ? words.word[3] : words.word[2];
  return ((j & 4u ? high : low) >> (16 * (j % 2)) & 0xFFFFu) >= threshold;
}

}  // namespace attention
