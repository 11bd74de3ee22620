# SPDX-License-Identifier: Apache-2.0
"""One tile of the score matrix: its operands, which entries are allowed, and their scores.

Score-shaped arrays are [*lead, Hkv, G, rows, keys] with G = Hq // Hkv query heads per key/value
head, so that keys and values are never repeated; an axis on which nothing depends may be 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ops._spec import (
    EMPTY_TILE,
    FULL_TILE,
    MASK_TILE,
    AttentionSpec,
    Gradients,
    Operands,
    Sizes,
    sizes_of,
)
from jax_ops._xla import dropout


@dataclasses.dataclass(frozen=True)
class Mods:
    """Score and mask functions of flex_attention, traced on scalars.

    Attributes:
      score_mod: (score, b, h, i, j) -> score, applied after the soft cap and before the bias.
      mask_mod: (b, h, i, j) -> bool, one more mask term.
    Both need exactly one lead axis, whose index is b.
    """

    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None


def score_dtype(operands: Operands) -> Any:
    """Dtype of scores and accumulators: float32, or float64 for float64 inputs."""
    return jnp.float64 if operands.query.dtype == jnp.float64 else jnp.float32


def slice_axis(x: jax.Array, axis: int, start: jax.Array, size: int) -> jax.Array:
    """`size` entries of `axis` (negative) from `start`; an axis of 1 stands for all and stays."""
    if x.shape[axis] == 1:
        return x
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=x.ndim + axis)


def split_heads(x: jax.Array, axis: int, sizes: Sizes) -> jax.Array:
    """Turns the query-head `axis` (negative) of H or 1 into two: (Hkv, G) or (1, 1)."""
    axis += x.ndim
    heads = (1, 1) if x.shape[axis] == 1 else (sizes.hkv, sizes.group)
    return x.reshape(*x.shape[:axis], *heads, *x.shape[axis + 1 :])


def both(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    """`a & b`, where None allows everything."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows first_row .. + rows - 1 and keys first_key .. + keys - 1 of one attention problem.

    The last tile of an axis starts early, so that it ends with the axis: nothing is padded. Keys
    below `fresh_key` were in the tile before and are masked; rows below `fresh_row` likewise in
    the backward pass, whose tiles add up.
    """

    spec: AttentionSpec
    operands: Operands
    mods: Mods
    rows: int
    keys: int
    first_row: jax.Array
    first_key: jax.Array
    fresh_row: jax.Array | None
    fresh_key: jax.Array | None

    @property
    def sizes(self) -> Sizes:
        return sizes_of(self.operands)

    @property
    def dtype(self) -> Any:
        """Dtype of scores and accumulators."""
        return score_dtype(self.operands)

    @property
    def row(self) -> jax.Array:
        """[rows] int32, query positions."""
        return self.first_row + jnp.arange(self.rows, dtype=jnp.int32)

    @property
    def key(self) -> jax.Array:
        """[keys] int32, key positions."""
        return self.first_key + jnp.arange(self.keys, dtype=jnp.int32)

    # Operands.

    def query(self, x: jax.Array) -> jax.Array:
        """[*lead, Lq, Hq, E] -> [*lead, rows, Hkv, G, E] in the accumulator's dtype."""
        x = slice_axis(x, -3, self.first_row, self.rows)
        return split_heads(x, -2, self.sizes).astype(self.dtype)

    def keys_of(self, x: jax.Array) -> jax.Array:
        """[*lead, Lkv, Hkv, E] -> [*lead, keys, Hkv, E] in the accumulator's dtype."""
        return slice_axis(x, -3, self.first_key, self.keys).astype(self.dtype)

    def row_values(self, x: jax.Array) -> jax.Array:
        """[*lead, Lq, Hq] -> [*lead, Hkv, G, rows]."""
        x = split_heads(slice_axis(x, -2, self.first_row, self.rows), -1, self.sizes)
        return jnp.moveaxis(x, -3, -1)

    def score_operand(self, x: jax.Array) -> jax.Array:
        """[*lead, H|1, Lq|1, Lkv|1] -> [*lead, Hkv|1, G|1, rows|1, keys|1]."""
        x = slice_axis(x, -2, self.first_row, self.rows)
        return split_heads(slice_axis(x, -1, self.first_key, self.keys), -3, self.sizes)

    # Positions.

    def lengths(self) -> tuple[jax.Array, jax.Array]:
        """Clamped query and key lengths, int32 [*lead] or []."""
        sizes = self.sizes
        q_len, kv_len = self.operands.query_lengths, self.operands.kv_lengths
        q_len = jnp.int32(sizes.lq) if q_len is None else jnp.clip(q_len, 0, sizes.lq)
        kv_len = jnp.int32(sizes.lkv) if kv_len is None else jnp.clip(kv_len, 0, sizes.lkv)
        return q_len.astype(jnp.int32), kv_len.astype(jnp.int32)

    def aligned_row(self) -> jax.Array:
        """Aligned query positions i' = i + shift, int32 [*lead, rows] or [rows]."""
        if not self.spec.bottom_right:
            return self.row
        q_len, kv_len = self.lengths()
        return self.row + (kv_len - q_len)[..., None]

    def distance(self) -> jax.Array:
        """|i' - j| in the accumulator's dtype: [*lead, rows, keys] or [rows, keys]."""
        return jnp.abs(self.aligned_row()[..., None] - self.key).astype(self.dtype)

    def key_range(self) -> tuple[jax.Array, jax.Array] | None:
        """Row i sees, of the terms that depend on positions alone, keys begin <= j < end.

        Causal, window, prefix and lengths; int32 [*lead, rows] or [rows]. None if there are none.
        """
        spec, operands, sizes = self.spec, self.operands, self.sizes
        has_lengths = operands.query_lengths is not None or operands.kv_lengths is not None
        if not (has_lengths or spec.causal or spec.has_window):
            return None
        q_len, kv_len = (x[..., None] for x in self.lengths())
        row, aligned = self.row, self.aligned_row()
        # A window wider than both sequences masks nothing; the clamp keeps 32 bits enough.
        widest = sizes.lq + sizes.lkv
        begin = jnp.int32(0)
        end = kv_len
        if spec.causal:
            end = jnp.minimum(end, aligned + 1)
            if operands.prefix_lengths is not None:
                prefix = jnp.minimum(operands.prefix_lengths[..., None], kv_len)
                end = jnp.maximum(end, prefix.astype(jnp.int32))
        if spec.window_left is not None:
            begin = jnp.maximum(begin, aligned - min(spec.window_left, widest))
        if spec.window_right is not None:
            end = jnp.minimum(end, aligned + min(spec.window_right, widest) + 1)
        begin = jnp.where(row < q_len, begin, kv_len)
        end = jnp.where(row < q_len, end, kv_len)
        shape = jnp.broadcast_shapes(begin.shape, end.shape)
        return jnp.broadcast_to(begin, shape), jnp.broadcast_to(end, shape)

    # Mask.

    def allowed(self) -> jax.Array | None:
        """Allowed entries, bool, broadcasts to a score-shaped array; None: all of them."""
        operands = self.operands
        terms = None
        key_range = self.key_range()
        if key_range is not None:
            begin, end = (x[..., None] for x in key_range)
            terms = _with_heads((self.key >= begin) & (self.key < end))
        if self.fresh_key is not None:
            terms = both(terms, self.key >= self.fresh_key)
        if self.fresh_row is not None:
            terms = both(terms, (self.row >= self.fresh_row)[:, None])
        if operands.query_segments is not None:
            q_ids = slice_axis(operands.query_segments, -1, self.first_row, self.rows)[..., None]
            kv_ids = slice_axis(operands.kv_segments, -1, self.first_key, self.keys)[..., None, :]
            terms = both(terms, _with_heads((q_ids == kv_ids) & (q_ids >= 0)))
        if operands.mask is not None:
            terms = both(terms, self.score_operand(operands.mask))
        if operands.block_index is not None:
            terms = both(terms, self._block_mask())
        if operands.bias is not None:
            # A bias of -inf masks: such a key must not be loaded where nobody else sees it.
            terms = both(terms, self.score_operand(operands.bias) != -jnp.inf)
        if self.mods.mask_mod is not None:
            terms = both(terms, self._over_scores(self.mods.mask_mod).astype(jnp.bool_))
        return None if terms is None else _at_least_rank(terms, len(self.sizes.lead) + 4)

    def _block_mask(self) -> jax.Array:
        index = split_heads(self.operands.block_index, -3, self.sizes)
        state = jnp.take(index, self.row // MASK_TILE, axis=-2)
        state = jnp.take(state, self.key // MASK_TILE, axis=-1)
        if self.operands.block_bits.shape[0] == 0:
            return state == FULL_TILE
        word = self.operands.block_bits[
            jnp.maximum(state, 0), (self.row % MASK_TILE)[:, None], self.key % MASK_TILE // 32
        ]
        bit = word >> (self.key % 32).astype(jnp.uint32) & 1
        return (state == FULL_TILE) | ((state != EMPTY_TILE) & (bit == 1))

    def is_needed(self) -> jax.Array | None:
        """Scalar bool: False only if no entry is allowed, by cheap tests. None: always needed."""
        operands = self.operands
        needed = None
        key_range = self.key_range()
        if key_range is not None:
            begin, end = key_range
            first, last = self.first_key, self.first_key + self.keys
            needed = jnp.any((begin < end) & (begin < last) & (end > first))
        if operands.query_segments is not None:
            q_ids = slice_axis(operands.query_segments, -1, self.first_row, self.rows)
            kv_ids = slice_axis(operands.kv_segments, -1, self.first_key, self.keys)
            q_low, q_high = _range_of_ids(q_ids)
            kv_low, kv_high = _range_of_ids(kv_ids)
            needed = both(needed, jnp.any((q_low <= kv_high) & (kv_low <= q_high)))
        if operands.block_index is not None:
            index = operands.block_index
            tile_row = self.first_row // MASK_TILE + jnp.arange(_tiles_across(self.rows))
            tile_key = self.first_key // MASK_TILE + jnp.arange(_tiles_across(self.keys))
            state = jnp.take(index, tile_row, axis=-2, mode="clip")
            state = jnp.take(state, tile_key, axis=-1, mode="clip")
            needed = both(needed, jnp.any(state != EMPTY_TILE))
        return needed

    # Scores.

    def loads(self) -> Gradients:
        """The tile's part of every operand that a gradient flows to, in the scores' dtype.

        query [*lead, rows, Hkv, G, D], key and value [*lead, keys, Hkv, D or Dv], bias [*lead,
        Hkv|1, G|1, rows|1, keys|1], alibi_slopes [*lead, Hq], scale [*lead].
        """
        operands = self.operands

        def cast(x: jax.Array | None) -> jax.Array | None:
            return None if x is None else x.astype(self.dtype)

        return Gradients(
            query=self.query(operands.query),
            key=self.keys_of(operands.key),
            value=self.keys_of(operands.value),
            bias=None if operands.bias is None else cast(self.score_operand(operands.bias)),
            alibi_slopes=cast(operands.alibi_slopes),
            scale=cast(operands.scale),
        )

    def scores(self, loads: Gradients) -> jax.Array:
        """Scores before the mask, [*lead, Hkv, G, rows, keys]."""
        spec = self.spec
        s = self.dot("...qhgd,...khd->...hgqk", loads.query, loads.key)
        if loads.scale is None:
            assert spec.scale is not None
            s = s * spec.scale
        else:
            s = s * loads.scale[..., None, None, None, None]
        # The maximum keeps compilers from fusing the product into `s - lse` in one place and not in
        # another: of a score of thousands that alone would move the weight by 1e-3.
        s = jnp.maximum(s, jnp.finfo(s.dtype).min)
        if spec.soft_cap is not None:
            s = spec.soft_cap * jnp.tanh(s / spec.soft_cap)
        if self.mods.score_mod is not None:
            s = self._over_scores(self.mods.score_mod, s)
        if loads.bias is not None:
            s = s + loads.bias
        if loads.alibi_slopes is not None:
            slopes = split_heads(loads.alibi_slopes, -1, self.sizes)[..., None, None]
            s = s - slopes * _with_heads(self.distance())
        return s

    def dot(self, equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
        """Einsum in the accumulator's dtype; lead axes of 1 broadcast."""
        precision = jax.lax.Precision.HIGHEST if self.spec.precision == "highest" else None
        return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=self.dtype)

    def keep(self) -> jax.Array | None:
        """Dropout's factor on the weights, score-shaped: 0 or 1 / (1 - rate); None without it."""
        spec, operands = self.spec, self.operands
        if spec.dropout_rate == 0.0:
            return None
        kept = dropout.keep(
            operands.dropout_seed,
            operands.dropout_batch,
            operands.dropout_head,
            self.row,
            self.first_key,
            self.keys,
            spec.dropout_threshold,
        )
        kept = split_heads(kept, -3, self.sizes)
        return jnp.where(kept, spec.dropout_keep_scale, 0.0).astype(self.dtype)

    def _over_scores(self, fn: Callable[..., Any], *scores: jax.Array) -> jax.Array:
        """Maps a function of ([score,] b, h, i, j) over the tile: [B, Hkv, G, rows, keys]."""
        sizes = self.sizes
        (batch,) = sizes.lead
        indices = (
            jnp.arange(batch, dtype=jnp.int32),
            jnp.arange(sizes.hq, dtype=jnp.int32).reshape(sizes.hkv, sizes.group),
            self.row,
            self.key,
        )
        # Which of (b, h, i, j) each vmap maps, innermost first; a head has two axes.
        for mapped in (3, 2, 1, 1, 0):
            in_axes = tuple(0 if axis == mapped else None for axis in range(4))
            fn = jax.vmap(fn, in_axes=(*[0] * len(scores), *in_axes))
        return fn(*scores, *indices)


def _with_heads(x: jax.Array) -> jax.Array:
    """[*lead, rows, keys] -> [*lead, 1, 1, rows, keys]; an array without lead axes stays."""
    return x if x.ndim == 2 else x[..., None, None, :, :]


def _at_least_rank(x: jax.Array, rank: int) -> jax.Array:
    return x.reshape((1,) * (rank - x.ndim) + x.shape)


def _range_of_ids(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Smallest and largest id over the last axis, padding left out."""
    largest = jnp.iinfo(jnp.int32).max
    return jnp.min(jnp.where(ids >= 0, ids, largest), axis=-1), jnp.max(ids, axis=-1)


def _tiles_across(size: int) -> int:
    """Most mask tiles that `size` positions can touch, wherever they start."""
    return (size - 2) // MASK_TILE + 2 if size > 1 else 1
