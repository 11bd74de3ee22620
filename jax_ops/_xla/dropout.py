# SPDX-License-Identifier: Apache-2.0
"""Counter-based dropout: the jax.numpy twin of kernels/common/dropout.h.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). One call
gives the 16-bit values of keys 8c .. 8c + 7 of one row, so an entry's fate depends on (seed, batch,
head, row, key) alone: never on block sizes, split counts or sharding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

# Keys that one Philox call decides about.
KEYS_PER_CALL = 8


def _multiply(a: np.uint32, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """High and low word of the 64-bit product of a constant and 32-bit words.

    By halves, because 64-bit integers do not exist in JAX unless x64 mode is on.
    """
    low_mask = np.uint32(0xFFFF)
    a_low, a_high = np.uint32(a & low_mask), np.uint32(a >> 16)
    b_low, b_high = b & low_mask, b >> 16
    low = a_low * b_low
    middle = a_high * b_low + (low >> 16)  # at most (2^16 - 1)^2 + 2^16 - 1 < 2^32
    middle_low = a_low * b_high + (middle & low_mask)
    return a_high * b_high + (middle >> 16) + (middle_low >> 16), a * b


def philox(
    key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Philox-4x32-10 on uint32 arrays that broadcast against each other."""
    key0, key1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        high0, low0 = _multiply(np.uint32(0xD2511F53), c0)
        high1, low1 = _multiply(np.uint32(0xCD9E8D57), c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0 = key0 + np.uint32(0x9E3779B9)
        key1 = key1 + np.uint32(0xBB67AE85)
    return c0, c1, c2, c3


def keep(
    seed: jax.Array,
    batch_index: jax.Array,
    head_index: jax.Array,
    row: jax.Array,
    first_key: jax.Array,
    num_keys: int,
    threshold: int,
) -> jax.Array:
    """Which weights of a tile are kept.

    Args:
      seed: [*lead, 2] uint32.
      batch_index: [*lead] uint32, the global batch index.
      head_index: [H] uint32, the global query-head index.
      row: [rows] int32, query positions.
      first_key: int32 scalar; the tile holds keys first_key .. first_key + num_keys - 1.
      num_keys: number of keys.
      threshold: an entry is dropped when its 16-bit value is below this.

    Returns:
      [*lead, H, rows, num_keys] bool.
    """
    # The tile need not start at a multiple of KEYS_PER_CALL: take whole groups, then cut.
    groups = (num_keys + KEYS_PER_CALL - 2) // KEYS_PER_CALL + 1
    first_group = first_key // KEYS_PER_CALL
    group = (first_group + jnp.arange(groups, dtype=jnp.int32)).astype(jnp.uint32)
    words = philox(
        (seed[..., 0, None, None, None], seed[..., 1, None, None, None]),
        (
            group,
            row.astype(jnp.uint32)[:, None],
            head_index[:, None, None],
            batch_index[..., None, None, None],
        ),
    )
    full = jnp.broadcast_arrays(*words)
    halves = jnp.stack([half for word in full for half in (word & 0xFFFF, word >> 16)], axis=-1)
    values = halves.reshape(*halves.shape[:-2], groups * KEYS_PER_CALL)
    values = jax.lax.dynamic_slice_in_dim(
        values, first_key - first_group * KEYS_PER_CALL, num_keys, axis=-1
    )
    return values.astype(jnp.int32) >= threshold
