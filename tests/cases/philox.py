# SPDX-License-Identifier: Apache-2.0
"""Philox-4x32-10 and the dropout counter scheme, in NumPy.

Written from the paper (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and
from the scheme's description, not from the kernels' code, so that the two check each other.
"""

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_ROUNDS = 10


def philox4x32(counter, key):
    """Ten rounds of Philox.

    Args:
      counter: four integer arrays that broadcast together, each below 2**32.
      key: two integers below 2**32.

    Returns:
      uint32 array [4, *broadcast shape].
    """
    c = [np.asarray(x, np.uint64) for x in np.broadcast_arrays(*counter)]
    k0, k1 = (int(x) for x in key)
    for _ in range(_ROUNDS):
        first = _MULTIPLIERS[0] * c[0]
        second = _MULTIPLIERS[1] * c[2]
        c = [
            (second >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            second & _MASK,
            (first >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            first & _MASK,
        ]
        k0 = (k0 + _WEYL[0]) % 2**32
        k1 = (k1 + _WEYL[1]) % 2**32
    return np.stack(c).astype(np.uint32)


def keep_mask(seed, batch_index, head_index, lq, lkv, rate):
    """Which entries of the weight matrix survive dropout.

    One Philox call decides about eight keys: counter (j // 8, i, head, batch); the value of key j
    is the 16-bit half j % 2 (low half first) of word (j % 8) // 2. An entry is kept when its value
    is at least round(rate * 65536).

    Args:
      seed: two key words.
      batch_index: [B] the batch index that the counter uses.
      head_index: [Hq] the query-head index that the counter uses.
      lq: number of queries.
      lkv: number of keys.
      rate: drop probability in [0, 1].

    Returns:
      bool array [B, Hq, lq, lkv], True = kept.
    """
    batch = np.asarray(batch_index, np.uint64).reshape(-1, 1, 1, 1)
    head = np.asarray(head_index, np.uint64).reshape(1, -1, 1, 1)
    row = np.arange(lq, dtype=np.uint64).reshape(1, 1, -1, 1)
    chunk = np.arange(-(-lkv // 8), dtype=np.uint64).reshape(1, 1, 1, -1)
    words = philox4x32((chunk, row, head, batch), seed)
    halves = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=1)
    values = np.moveaxis(halves.reshape(8, *words.shape[1:]), 0, -1)
    values = values.reshape(*values.shape[:-2], -1)[..., :lkv]
    return values >= int(np.floor(rate * 65536 + 0.5))
