# SPDX-License-Identifier: Apache-2.0
"""`create_block_mask`: any mask as a block-sparse one, which the fused kernels run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ops import _arguments as arguments
from jax_ops import _program
from jax_ops._errors import argument_error, type_error
from jax_ops._jax import broadcasting
from jax_ops._spec import EMPTY_TILE, FULL_TILE, MASK_TILE, Sizes
from jax_ops.masks import BlockMask, DenseMask, Mask, as_mask

__all__ = ["create_block_mask"]

# Positions are 32-bit integers.
_MAX_SIZE = 2**31 - 1
# Entries that are evaluated at once: bounds the memory that making a mask takes.
_CHUNK_ENTRIES = 1 << 22


def create_block_mask(
    mask_mod: Any,
    batch: int | None,
    num_heads: int | None,
    query_length: int,
    key_length: int,
) -> BlockMask:
    """Evaluates a mask once into tiles of 64 x 64 entries.

    Takes one evaluation of every entry, so make it once and reuse it. `flex_attention` does the
    same while it is traced when it gets a mask that the kernels do not know.

    Args:
      mask_mod: function (b, h, q_idx, kv_idx) -> bool, a mask object, or a bool array.
      batch: B, or None for a mask that is the same for all batch entries.
      num_heads: Hq, or None for a mask that is the same for all heads.
      query_length: Lq.
      key_length: Lkv.

    Returns:
      A `BlockMask`. Its memory is one number per tile and 512 bytes per distinct partial tile.

    Raises:
      TypeError: the mask depends on traced values (arguments of a function under jit, grad, ..).
      ValueError: a size is negative or over 2^31 - 1, or the mask does not fit the sizes.
    """
    for name, size in (
        ("batch", batch),
        ("num_heads", num_heads),
        ("query_length", query_length),
        ("key_length", key_length),
    ):
        optional = name in ("batch", "num_heads")
        if size is None and optional:
            continue
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
            allowed = "an integer >= 0" + (", or None" if optional else "")
            raise type_error(name, repr(size), allowed)
        if not 0 <= size <= _MAX_SIZE:
            raise argument_error(name, size, "an integer in [0, 2^31 - 1]")
    lead, heads = (1 if x is None else int(x) for x in (batch, num_heads))
    sizes = Sizes((lead,), int(query_length), int(key_length), heads, heads, 1, 1)
    mask = as_mask("mask_mod", mask_mod)
    if isinstance(mask, DenseMask):
        mask = DenseMask(arguments.mask(mask.array, sizes, "mask_mod"))
    made = evaluate(mask.bound(sizes, batched=True), sizes)
    if made is None:
        raise type_error(
            "mask_mod", "a mask that depends on traced values", "one whose values are known"
        )
    return made


@broadcasting
def evaluate(mask: Mask, sizes: Sizes, shift: Any = 0) -> BlockMask | None:
    """The tiles of a bound mask for sizes.lead[0] batch entries and sizes.hq heads.

    Args:
      mask: what to evaluate.
      sizes: the sizes of the call.
      shift: i' - i.

    Returns:
      The block mask, with batch and head axes of 1 where the mask does not depend on them; None if
      the mask depends on traced values.
    """
    (batch,) = sizes.lead
    if not isinstance(batch, int):
        return None
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(mask)):
        return None
    with jax.ensure_compile_time_eval():
        by_batch, by_head, by_shift = _depends_on(mask)
        if not by_shift:
            shift = 0
        if isinstance(shift, jax.core.Tracer):
            return None
        by_batch = by_batch or np.ndim(shift) > 0
        # Without batch entries or heads there is none to evaluate the mask for.
        batch = batch if by_batch or batch == 0 else 1
        heads = sizes.hq if by_head or sizes.hq == 0 else 1
        tile_rows, tile_cols = -(-sizes.lq // MASK_TILE), -(-sizes.lkv // MASK_TILE)
        index = np.full((batch, heads, tile_rows, tile_cols), EMPTY_TILE, np.int32)
        if index.size == 0:
            return BlockMask(index, _bits(()), sizes.lq, sizes.lkv)
        numbers: dict[bytes, int] = {}  # content of a bit tile -> its number
        step = max(1, _CHUNK_ENTRIES // (MASK_TILE * MASK_TILE * tile_cols))
        chunk = functools.partial(_tiles, mask, sizes, shift)
        scalar, rows = (jax.ShapeDtypeStruct(shape, np.int32) for shape in ((), (step,)))
        program, captured = _program.trace(chunk, scalar, scalar, rows)
        if any(isinstance(x, jax.core.Tracer) for x in captured):
            return None
        for b, h in np.ndindex(batch, heads):
            for first in range(0, tile_rows, step):
                tile_row = np.arange(first, first + step, dtype=np.int32)
                place = (np.int32(b), np.int32(h), tile_row)
                state, bits = map(np.asarray, _compiled(program)(captured, *place))
                state = state[: tile_rows - first]
                index[b, h, first : first + len(state)] = state
                for r, c in np.argwhere(state == 0):
                    content = bits[r, c].tobytes()
                    index[b, h, first + r, c] = numbers.setdefault(content, len(numbers))
    return BlockMask(index, _bits(numbers), sizes.lq, sizes.lkv)


@functools.lru_cache(maxsize=64)
def _compiled(program: _program.Program) -> Callable[..., Any]:
    """`program` under jit: takes what it captured, then its arguments."""
    return jax.jit(lambda captured, *args: program.bind(captured)(*args))


def _bits(tiles: Iterable[bytes]) -> np.ndarray:
    """The bit tiles [n, 64, 2] from the content of each."""
    return np.frombuffer(b"".join(tiles), np.uint32).reshape(-1, MASK_TILE, MASK_TILE // 32)


def _depends_on(mask: Mask) -> tuple[bool, bool, bool]:
    """Whether the mask reads the batch index, the head index, and the alignment."""
    scalar = jax.ShapeDtypeStruct((), np.int32)
    jaxpr = jax.make_jaxpr(mask.allows)(*[scalar] * 5).jaxpr
    read = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
    by_batch, by_head, _, _, by_shift = (id(v) in read for v in jaxpr.invars)
    return by_batch, by_head, by_shift


def _tiles(
    mask: Mask, sizes: Sizes, shift: Any, b: jax.Array, h: jax.Array, tile_row: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """State [rows, cols] (0 for partial tiles) and bits [rows, cols, 64, 2] of some tile rows."""
    tile_cols = -(-sizes.lkv // MASK_TILE)
    row = (tile_row[:, None] * MASK_TILE + jnp.arange(MASK_TILE, dtype=jnp.int32)).reshape(-1)
    key = jnp.arange(tile_cols * MASK_TILE, dtype=jnp.int32)
    is_inside = (row < sizes.lq)[:, None] & (key < sizes.lkv)
    # Positions past the end repeat the last one, so that no function sees an index out of range.
    row, key = jnp.minimum(row, sizes.lq - 1), jnp.minimum(key, sizes.lkv - 1)
    shift = jnp.asarray(shift, jnp.int32)
    shift = shift[b] if shift.ndim else shift

    def entry(i: jax.Array, j: jax.Array) -> jax.Array:
        return jnp.asarray(mask.allows(b, h, i, j, shift)).astype(jnp.bool_)

    allowed = jax.vmap(jax.vmap(entry, (None, 0)), (0, None))(row, key)
    shape = (-1, MASK_TILE, tile_cols, MASK_TILE)
    allowed = (allowed & is_inside).reshape(shape).swapaxes(1, 2)
    is_inside = is_inside.reshape(shape).swapaxes(1, 2)
    is_empty = ~jnp.any(allowed, (2, 3))
    is_full = jnp.all(allowed | ~is_inside, (2, 3))
    words = allowed.reshape(*allowed.shape[:3], MASK_TILE // 32, 32).astype(jnp.uint32)
    bits = jnp.sum(words << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    state = jnp.where(is_empty, EMPTY_TILE, jnp.where(is_full, FULL_TILE, 0))
    return state, bits
