# SPDX-License-Identifier: Apache-2.0
"""Blockwise attention in jax.numpy: O(L) memory, any device, any order of derivative.

One tile of (query block, key block) at a time, with the online softmax of Milakov and Gimelshein
(arXiv:1805.02867) and the recomputing backward pass of FlashAttention (Dao et al.,
arXiv:2205.14135). `attention` can be differentiated by JAX to any order in O(L) memory, because
every query block is a checkpoint; `backward` is the same gradient in one pass over the tiles.
Nothing here depends on the order in which tiles run, and tiles that nobody may see are skipped.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ops._jax import broadcasting
from jax_ops._spec import AttentionSpec, Gradients, Operands, Sizes, lse_dtype, sizes_of
from jax_ops._xla.tile import Mods, Tile, score_dtype

# Tile sizes where the spec asks for none: large enough that a loop step costs little beside its
# matrix products, small enough that a tile stays near the cache.
DEFAULT_BLOCK_Q = 128
DEFAULT_BLOCK_K = 256


def forward(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Attention of one spec: (out [*lead, Lq, Hq, Dv] in query's dtype, lse [*lead, Lq, Hq]).

    lse is float32, or float64 for float64 inputs; rows with no allowed key give 0 and -inf.
    """
    return attention(spec, operands)


@broadcasting
def attention(
    spec: AttentionSpec, operands: Operands, mods: Mods | None = None
) -> tuple[jax.Array, jax.Array]:
    """`forward`, differentiable in forward and reverse mode to any order.

    Args:
      spec: the static options.
      operands: the arrays. Values of keys that nobody may see, and rows past their length, may be
        NaN or infinite: neither results nor derivatives depend on them.
      mods: score and mask functions, which may close over arrays that are differentiated.
    """
    sizes = sizes_of(operands)
    # Not in query's dtype yet: XLA's CPU backend updates 16-bit arrays through a converted copy.
    out = jnp.zeros(sizes.out_shape, score_dtype(operands))
    lse = jnp.full(sizes.lse_shape, -jnp.inf, lse_dtype(operands.query.dtype))
    if sizes.lq == 0 or sizes.lkv == 0:
        return out.astype(operands.query.dtype), lse
    blocks = _Blocks(spec, operands, mods or Mods(), sizes)

    def query_block(i: jax.Array, results: tuple[jax.Array, jax.Array]) -> Any:
        out, lse = results
        tile_out, tile_lse = jax.checkpoint(lambda i: _rows(blocks, i))(i)
        first_row = blocks.tile(i, jnp.int32(0)).first_row
        return (
            jax.lax.dynamic_update_slice_in_dim(out, tile_out, first_row, -3),
            jax.lax.dynamic_update_slice_in_dim(lse, tile_lse, first_row, -2),
        )

    out, lse = _loop(blocks.num_q, query_block, (out, lse))
    return out.astype(operands.query.dtype), lse


@broadcasting
def backward(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array,
) -> Gradients:
    """Gradients of `forward`: P is recomputed from lse, and each tile is visited once.

    Args:
      spec: the static options; want_* say which optional gradients are returned.
      operands: as in `forward`.
      out: what `forward` returned.
      lse: what `forward` returned.
      dout: the cotangent of out.
      dlse: the cotangent of lse, ignored on rows with no allowed key.
    """
    sizes = sizes_of(operands)
    wanted = {
        "query": operands.query,
        "key": operands.key,
        "value": operands.value,
        "bias": operands.bias if spec.want_dbias else None,
        "alibi_slopes": operands.alibi_slopes if spec.want_dslopes else None,
        "scale": operands.scale if spec.want_dscale else None,
    }
    accumulator = score_dtype(operands)
    totals = Gradients(
        **{
            name: None if x is None else jnp.zeros(x.shape, accumulator)
            for name, x in wanted.items()
        }
    )
    if sizes.lq > 0 and sizes.lkv > 0:
        # The number of splits is the forward pass's.
        blocks = _Blocks(dataclasses.replace(spec, num_splits=0), operands, Mods(), sizes)
        # Row i's softmax turns the weights' cotangent dP into dS = P * (dP - delta).
        delta = jnp.sum(dout.astype(accumulator) * out.astype(accumulator), axis=-1) - dlse

        def key_block(j: jax.Array, totals: Gradients) -> Gradients:
            def query_block(i: jax.Array, totals: Gradients) -> Gradients:
                tile = blocks.tile(i, j, summed=True)
                return _add_tile(tile, totals, _tile_gradients(tile, lse, dout, delta))

            return _loop(blocks.num_q, query_block, totals)

        totals = _loop(blocks.num_k, key_block, totals)
    return Gradients(
        *[
            None if total is None else total.astype(wanted[name].dtype)
            for name, total in zip(Gradients._fields, totals, strict=True)
        ]
    )


class _Blocks:
    """How a problem is cut into tiles."""

    def __init__(self, spec: AttentionSpec, operands: Operands, mods: Mods, sizes: Sizes) -> None:
        self.spec, self.operands, self.mods, self.sizes = spec, operands, mods, sizes
        self.rows = min(spec.block_q or DEFAULT_BLOCK_Q, sizes.lq)
        # As many parts as were asked for, as long as each has a key.
        part = -(-sizes.lkv // (spec.num_splits or 1))
        self.keys = min(spec.block_k or DEFAULT_BLOCK_K, part)
        self.num_q = -(-sizes.lq // self.rows)
        self.num_k = -(-sizes.lkv // self.keys)
        self.part_tiles = -(-part // self.keys)
        self.num_parts = -(-self.num_k // self.part_tiles)

    def tile(self, i: jax.Array, j: jax.Array, summed: bool = False) -> Tile:
        """Tile of query block i and key block j; `summed`: rows of earlier tiles are masked."""
        row, key = i * self.rows, j * self.keys
        ragged_rows = self.sizes.lq % self.rows != 0
        # Tiles that the last part has too many have no fresh key at all.
        ragged_keys = self.num_parts * self.part_tiles * self.keys != self.sizes.lkv
        return Tile(
            spec=self.spec,
            operands=self.operands,
            mods=self.mods,
            rows=self.rows,
            keys=self.keys,
            first_row=jnp.minimum(row, self.sizes.lq - self.rows),
            first_key=jnp.minimum(key, self.sizes.lkv - self.keys),
            fresh_row=row if ragged_rows and summed else None,
            fresh_key=key if ragged_keys else None,
        )


def _loop(count: int, body: Callable[[jax.Array, Any], Any], state: Any) -> Any:
    """body(count - 1, ... body(0, state)), differentiable; one step needs no loop."""
    state = _typed_as_result(state, lambda state: body(jnp.int32(0), state))
    if count == 1:
        return body(jnp.int32(0), state)
    steps = jnp.arange(count, dtype=jnp.int32)
    return jax.lax.scan(lambda state, step: (body(step, state), None), state, steps)[0]


def _typed_as_result(state: Any, step: Callable[[Any], Any]) -> Any:
    """Casts `state` to vary over the manual mesh axes over which step(state) varies.

    Inside shard_map a loop's state has one such type from the start, but zeros vary over nothing.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return state

    def cast(x: jax.Array, result: jax.ShapeDtypeStruct) -> jax.Array:
        missing = _varying(result) - _varying(jax.typeof(x))
        return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x

    return jax.tree.map(cast, state, jax.eval_shape(step, state))


def _varying(aval: Any) -> frozenset[str]:
    """Mesh axes over which an array varies; none are known under shard_map(check_vma=False)."""
    axes = getattr(aval, "manual_axis_type", None)
    return frozenset() if axes is None else frozenset(axes.varying)


def _rows(blocks: _Blocks, i: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Query block i: (out [*lead, rows, Hq, Dv], lse [*lead, rows, Hq]) in the scores' dtype."""
    sizes = blocks.sizes
    dtype = score_dtype(blocks.operands)
    heads = (*sizes.lead, sizes.hkv, sizes.group, blocks.rows)

    # The checkpoint keeps a tile's scores from being saved once per key block. It is around the
    # condition, because a condition would save whatever its branches read.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def key_block(j: jax.Array, state: Any) -> Any:
        tile = blocks.tile(i, j)
        loads, needed = tile.loads(), tile.is_needed()
        if needed is None:
            return _update(tile, loads, state)
        update = functools.partial(_update, tile)
        return jax.lax.cond(needed, update, lambda loads, state: state, loads, state)

    state = (
        jnp.full(heads, -jnp.inf, dtype),
        jnp.zeros(heads, dtype),
        jnp.zeros((*heads, sizes.dv), dtype),
    )
    first_tile = blocks.tile(i, jnp.int32(0))
    state = _typed_as_result(state, lambda state: _update(first_tile, first_tile.loads(), state))

    def part(p: jax.Array, merged: Any) -> Any:
        first = p * blocks.part_tiles
        return _merge(
            merged, _loop(blocks.part_tiles, lambda j, state: key_block(first + j, state), state)
        )

    if blocks.num_parts == 1:
        largest, total, acc = _loop(blocks.num_k, key_block, state)
    else:
        largest, total, acc = _loop(blocks.num_parts, part, state)

    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    lse = jnp.where(is_empty, -jnp.inf, largest + jnp.log(total))
    # Selected rather than 0 / 1, so that a NaN in an empty row's cotangent stops here.
    out = jnp.where(is_empty[..., None], 0, acc / total[..., None])
    out = jnp.moveaxis(out, -2, -4)
    lse = jnp.moveaxis(lse, -1, -3)
    rows = (*sizes.lead, blocks.rows, sizes.hq)
    return out.reshape(*rows, sizes.dv), lse.reshape(rows)


def _update(tile: Tile, loads: Gradients, state: Any) -> Any:
    """One step of the online softmax: folds a tile into (largest, total, acc)."""
    largest, total, acc = state
    allowed = tile.allowed()
    loads = _select(allowed, loads)
    s = tile.scores(loads)
    if allowed is not None:
        s = jnp.where(allowed, s, -jnp.inf)
    # The result does not depend on the maximum that is subtracted, so no derivative does.
    new_largest = jnp.maximum(largest, jax.lax.stop_gradient(jnp.max(s, axis=-1)))
    # Where nothing is allowed yet, subtracting 0 keeps -inf - -inf away.
    reference = jnp.where(new_largest == -jnp.inf, 0, new_largest)
    p = jnp.exp(s - reference[..., None])
    shrink = jnp.exp(largest - reference)
    total = total * shrink + jnp.sum(p, axis=-1)
    keep = tile.keep()
    weights = p if keep is None else p * keep
    acc = acc * shrink[..., None] + tile.dot("...hgqk,...khd->...hgqd", weights, loads.value)
    return new_largest, total, acc


def _merge(a: Any, b: Any) -> Any:
    """Online softmax states of two disjoint sets of keys as that of both."""
    largest = jnp.maximum(a[0], b[0])
    reference = jnp.where(largest == -jnp.inf, 0, largest)
    shrink = [jnp.exp(state[0] - reference) for state in (a, b)]
    total = a[1] * shrink[0] + b[1] * shrink[1]
    acc = a[2] * shrink[0][..., None] + b[2] * shrink[1][..., None]
    return largest, total, acc


def _select(allowed: jax.Array | None, loads: Gradients) -> Gradients:
    """The loads of a tile, with 0 for queries, keys and values that take no part in it.

    A weight of 0 is not enough: 0 * NaN is NaN.
    """
    if allowed is None:
        return loads
    seen = jnp.any(allowed, axis=(-3, -2))  # [*lead, Hkv | 1, keys | 1]
    seen = jnp.swapaxes(seen, -1, -2)[..., None]
    return loads._replace(
        query=_select_rows(allowed, loads.query),
        key=jnp.where(seen, loads.key, 0),
        value=jnp.where(seen, loads.value, 0),
    )


def _select_rows(allowed: jax.Array | None, x: jax.Array) -> jax.Array:
    """[*lead, rows, Hkv, G, E] with 0 in rows that see no key of the tile."""
    if allowed is None:
        return x
    active = jnp.any(allowed, axis=-1)  # [*lead, Hkv | 1, G | 1, rows | 1]
    return jnp.where(jnp.moveaxis(active, -1, -3)[..., None], x, 0)


def _tile_gradients(tile: Tile, lse: jax.Array, dout: jax.Array, delta: jax.Array) -> Gradients:
    """What one tile adds to the gradients of its loads: zeros where the tile may be skipped."""
    spec = tile.spec

    def compute(loads: Gradients) -> Gradients:
        allowed = tile.allowed()
        s, scores_vjp = jax.vjp(lambda loads: tile.scores(_select(allowed, loads)), loads)
        tile_lse = tile.row_values(lse)[..., None]
        p = jnp.exp(s - jnp.where(tile_lse == -jnp.inf, 0, tile_lse))
        if allowed is not None:
            p = jnp.where(allowed, p, 0)
        keep = tile.keep()
        weights = p if keep is None else p * keep

        def weighted_sum(loads: Gradients) -> jax.Array:
            return tile.dot("...hgqk,...khd->...qhgd", weights, _select(allowed, loads).value)

        _, value_vjp = jax.vjp(weighted_sum, loads)
        tile_dout = _select_rows(allowed, tile.query(dout))
        dp = tile.dot("...qhgd,...khd->...hgqk", tile_dout, _select(allowed, loads).value)
        if keep is not None:
            dp = dp * keep
        ds = p * (dp - tile.row_values(delta)[..., None])
        if allowed is not None:
            ds = jnp.where(allowed, ds, 0)
        # A lead axis that only value or a cotangent has is missing from the scores.
        shared = tuple(a for a in range(s.ndim) if s.shape[a] != ds.shape[a])
        (dloads,) = scores_vjp(jnp.sum(ds, shared, keepdims=True) if shared else ds)
        return dloads._replace(value=value_vjp(tile_dout)[0].value)

    loads = tile.loads()
    needed = tile.is_needed()
    if needed is None:
        dloads = compute(loads)
    else:
        dloads = jax.lax.cond(needed, compute, lambda x: jax.tree.map(jnp.zeros_like, x), loads)
    # The compiler removes the work for what is not wanted.
    return dloads._replace(
        bias=dloads.bias if spec.want_dbias else None,
        alibi_slopes=dloads.alibi_slopes if spec.want_dslopes else None,
        scale=dloads.scale if spec.want_dscale else None,
    )


def _add_tile(tile: Tile, totals: Gradients, dloads: Gradients) -> Gradients:
    """Adds the gradients of a tile's loads at the tile's place."""
    rows, keys = (tile.first_row, tile.rows), (tile.first_key, tile.keys)
    places = Gradients(
        query={-3: rows},
        key={-3: keys},
        value={-3: keys},
        bias={-2: rows, -1: keys},
        alibi_slopes={},
        scale={},
    )

    def add(total: jax.Array | None, update: jax.Array | None, place: Any) -> jax.Array | None:
        if total is None or update is None:
            return None
        start, shape = [jnp.int32(0)] * total.ndim, list(total.shape)
        for axis, (first, size) in place.items():
            if shape[axis] != 1:
                start[axis], shape[axis] = first, size
        old = jax.lax.dynamic_slice(total, start, shape)
        return jax.lax.dynamic_update_slice(total, old + update.reshape(shape), start)

    return Gradients(*map(add, totals, dloads, places))
