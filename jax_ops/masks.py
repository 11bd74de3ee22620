# SPDX-License-Identifier: Apache-2.0
"""Masks as objects: which keys a query may attend to.

A mask is a frozen pytree. Masks combine with `&`, `|`, `^` and `~`, with each other, with bool
arrays and with functions `mask_mod(b, h, q_idx, kv_idx) -> bool`. Every mask is such a function
itself, so it can also be called with scalars or broadcasting integer arrays.

An `&` of `CausalMask`, `LocalWindowMask`, `PrefixLMMask`, `SegmentMask`, `KeyPaddingMask`,
`DenseMask` and one `BlockMask` runs in the fused kernels as it is. Whatever else is in an `&` runs
there through a `BlockMask` that `flex_attention` makes while tracing; see `create_block_mask`.

Masks that depend on the alignment of `flex_attention` (causal, window, prefix-LM) compare keys with
i' = i + shift; called as functions, they use shift = 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jax_ops import _arguments as arguments
from jax_ops._errors import argument_error, dtype_error, type_error
from jax_ops._jax import broadcasting
from jax_ops._spec import EMPTY_TILE, FULL_TILE, MASK_TILE, Sizes

__all__ = [
    "BlockMask",
    "CausalMask",
    "DenseMask",
    "FunctionMask",
    "KeyPaddingMask",
    "LocalWindowMask",
    "Mask",
    "PrefixLMMask",
    "SegmentMask",
    "as_mask",
]


# Metadata of a dataclass field that is no array, but part of the pytree's structure.
STATIC = {"static": True}


def pytree(cls: type) -> type:
    """Registers a dataclass as a pytree of its fields, except those marked STATIC."""
    fields = dataclasses.fields(cls)
    static = [f.name for f in fields if f.metadata.get("static")]
    data = [f.name for f in fields if not f.metadata.get("static")]
    return jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=static)


def describe(x: Any) -> str:
    """An array as its dtype and shape, anything else as its repr."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}{list(x.shape)}"
    return repr(x)


def describe_object(x: Any) -> str:
    """Class and fields of a dataclass; fields that are None are left out."""
    fields = [(f.name, getattr(x, f.name)) for f in dataclasses.fields(x)]
    inner = ", ".join(f"{name}={describe(value)}" for name, value in fields if value is not None)
    return f"{type(x).__name__}({inner})"


def lookup(x: jax.Array, *indices: Any) -> jax.Array:
    """Entry of an array in which an axis of size 1 stands for all its indices."""
    places = [0 if size == 1 else i for size, i in zip(x.shape, indices, strict=True)]
    return x[tuple(places)]


class Mask:
    """What all masks share: the operators, and being a `mask_mod` function."""

    # NumPy arrays on the left of an operator leave it to the mask.
    __array_ufunc__ = None

    def allows(self, b: Any, h: Any, i: Any, j: Any, shift: Any) -> Any:
        """Whether query i of batch entry b and query head h may attend to key j; i' = i + shift."""
        raise NotImplementedError

    def bound(self, sizes: Sizes, batched: bool) -> Mask:
        """Checked against the sizes of a call, its arrays in normal form.

        Raises:
          ValueError, TypeError: an array of the mask does not fit the call.
        """
        return self

    @broadcasting
    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """The mask as a `mask_mod` function."""
        return self.allows(b, h, q_idx, kv_idx, 0)

    def __and__(self, other: Any) -> Mask:
        return _combined("&", self, other)

    def __rand__(self, other: Any) -> Mask:
        return _combined("&", other, self)

    def __or__(self, other: Any) -> Mask:
        return _combined("|", self, other)

    def __ror__(self, other: Any) -> Mask:
        return _combined("|", other, self)

    def __xor__(self, other: Any) -> Mask:
        return _combined("^", self, other)

    def __rxor__(self, other: Any) -> Mask:
        return _combined("^", other, self)

    def __invert__(self) -> Mask:
        return self.operand if isinstance(self, NotMask) else NotMask(self)

    def __bool__(self) -> bool:
        raise type_error("mask", "`and`, `or`, `not` or `if` on a mask", "`&`, `|`, `^` and `~`")

    def __repr__(self) -> str:
        return describe_object(self)


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class CausalMask(Mask):
    """Query i sees keys j <= i'."""

    def allows(self, b: Any, h: Any, i: Any, j: Any, shift: Any) -> Any:
        """See `Mask.allows`."""
        return j <= i + shift


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class LocalWindowMask(Mask):
    """Query i sees keys i' - left <= j <= i' + right.

    Attributes:
      left: integer >= 0, or None for an unbounded side.
      right: the same.
    """

    left: int | None = dataclasses.field(default=None, metadata=STATIC)
    right: int | None = dataclasses.field(default=None, metadata=STATIC)

    def __post_init__(self) -> None:
        arguments.window("LocalWindowMask", (self.left, self.right))

    def allows(self, b: Any, h: Any, i: Any, j: Any, shift: Any) -> Any:
        """See `Mask.allows`."""
        distance = j - (i + shift)
        allowed = distance == distance
        if self.left is not None:
            allowed = allowed & (distance >= -self.left)
        if self.right is not None:
            allowed = allowed & (distance <= self.right)
        return allowed


@pytree
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class PrefixLMMask(Mask):
    """Query i sees the prefix, keys j < prefix_lengths, and keys j <= i'.

    Attributes:
      prefix_lengths: integer, or integer array [] or [B].
    """

    prefix_lengths: Any

    def allows(self, b: Any, h: Any, i: Any, j: Any, shift: Any) -> Any:
        """See `Mask.allows`."""
        return (j <= i + shift) | (j < lookup(jnp.atleast_1d(self.prefix_lengths), b))

    def bound(self, sizes: Sizes, batched: bool) -> PrefixLMMask:
        """See `Mask.bound`."""
        return PrefixLMMask(arguments.prefix_lengths(self.prefix_lengths, sizes))


@pytree
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class SegmentMask(Mask):
    """Query i sees key j only where their ids are equal; negative ids are padding: nothing.

    Attributes:
      query_segment_ids: integer array [B, Lq], or [Lq] for all.
      key_value_segment_ids: integer array [B, Lkv] or [Lkv]; None: the query's ids (Lq = Lkv).
    """

    query_segment_ids: Any
    key_value_segment_ids: Any = None

    def allows(self, b: Any, h: Any, i: Any, j: Any, shift: Any) -> Any:
        """See `Mask.allows`."""
        query_ids = jnp.atleast_2d(self.query_segment_ids)
        kv_ids = self.key_value_segment_ids
        kv_ids = query_ids if kv_ids is None else jnp.atleast_2d(kv_ids)
        query_id = query_ids[0 if query_ids.shape[0] == 1 else b, i]
        return (query_id >= 0) & (query_id == kv_ids[0 if kv_ids.shape[0] == 1 else b, j])

    def bound(self, sizes: Sizes, batched: bool) -> SegmentMask:
        """See `Mask.bound`."""

        def with_batch(ids: Any) -> Any:
            return ids[None] if getattr(ids, "ndim", None) == 1 else ids

        query_ids, kv_ids = map(with_batch, (self.query_segment_ids, self.key_value_segment_ids))
        return SegmentMask(*arguments.segments(query_ids, kv_ids, sizes, batched))


@pytree
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class KeyPaddingMask(Mask):
    """Nobody sees keys j >= lengths.

    With alignment='bottom_right' these lengths also align causal, window and ALiBi, if the mask is
    a term of the outermost `&`.

    Attributes:
      lengths: integer, or integer array [] or [B]; clamped to [0, Lkv].
    """

    lengths: Any

    def allows(self, b: Any, h: Any, i: Any, j: Any, shift: Any) -> Any:
        """See `Mask.allows`."""
        return j < lookup(jnp.atleast_1d(self.lengths), b)

    def bound(self, sizes: Sizes, batched: bool) -> KeyPaddingMask:
        """See `Mask.bound`."""
        name, lengths = "KeyPaddingMask lengths", self.lengths
        if np.ndim(lengths) > 0:
            return KeyPaddingMask(arguments.lengths(name, lengths, sizes, sizes.lkv))
        one: Any = arguments.lengths(name, lengths, dataclasses.replace(sizes, lead=()), sizes.lkv)
        return KeyPaddingMask(jnp.broadcast_to(one, sizes.lead))


@pytree
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class DenseMask(Mask):
    """A bool array: True means attend.

    Attributes:
      array: bool, of rank 1 to 4, aligned on the right with [B, Hq, Lq, Lkv], each axis 1 or full.
    """

    array: Any

    def allows(self, b: Any, h: Any, i: Any, j: Any, shift: Any) -> Any:
        """See `Mask.allows`."""
        array = jnp.asarray(self.array)
        return lookup(array, *(b, h, i, j)[4 - array.ndim :])

    def bound(self, sizes: Sizes, batched: bool) -> DenseMask:
        """See `Mask.bound`."""
        return DenseMask(arguments.mask(self.array, sizes))


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class FunctionMask(Mask):
    """A `mask_mod` function as a mask object.

    Attributes:
      mask_mod: (b, h, q_idx, kv_idx) -> bool; traced on int32 scalars.
    """

    mask_mod: Callable[[Any, Any, Any, Any], Any] = dataclasses.field(metadata=STATIC)

    def allows(self, b: Any, h: Any, i: Any, j: Any, shift: Any) -> Any:
        """See `Mask.allows`."""
        return self.mask_mod(b, h, i, j)

    def bound(self, sizes: Sizes, batched: bool) -> FunctionMask:
        """See `Mask.bound`."""
        arguments.function("mask_mod", self.mask_mod, "b, h, q_idx, kv_idx")
        scalar = jax.ShapeDtypeStruct((), np.int32)
        result = jax.eval_shape(self.mask_mod, *[scalar] * 4)
        if getattr(result, "shape", None) != () or result.dtype != np.bool_:
            raise dtype_error("mask_mod", f"a function that returns {result}", "one bool per call")
        return self

    def __repr__(self) -> str:
        return f"FunctionMask({getattr(self.mask_mod, '__name__', repr(self.mask_mod))})"


@pytree
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class BlockMask(Mask):
    """A block-sparse mask: tiles of 64 x 64 that are empty, full, or hold one bit per entry.

    Made by `create_block_mask`, once, and used in any number of calls. Kernels skip empty tiles and
    do no mask work in full ones.

    Attributes:
      index: int32 [B|1, H|1, ceil(Lq/64), ceil(Lkv/64)]: -1 empty, -2 full, else a tile number.
      bits: uint32 [n, 64, 2]: bit j % 32 of word j / 32 in row i says whether entry (i, j) of the
        tile is allowed. Equal tiles are stored once.
      query_length: Lq.
      key_length: Lkv.
    """

    index: Any
    bits: Any
    query_length: int = dataclasses.field(metadata=STATIC)
    key_length: int = dataclasses.field(metadata=STATIC)

    def allows(self, b: Any, h: Any, i: Any, j: Any, shift: Any) -> Any:
        """See `Mask.allows`."""
        index, bits = jnp.asarray(self.index), jnp.asarray(self.bits)
        state = lookup_tile(index, b, h, i // MASK_TILE, j // MASK_TILE)
        if bits.shape[0] == 0:
            return state == FULL_TILE
        word = bits[jnp.maximum(state, 0), i % MASK_TILE, j % MASK_TILE // 32]
        bit = word >> jnp.asarray(j % 32).astype(jnp.uint32) & 1
        return (state == FULL_TILE) | ((state != EMPTY_TILE) & (bit == 1))

    def bound(self, sizes: Sizes, batched: bool) -> BlockMask:
        """See `Mask.bound`."""
        lengths, wanted = (self.query_length, self.key_length), (sizes.lq, sizes.lkv)
        if lengths != wanted:
            raise argument_error("block_mask", f"one made for lengths {lengths}", f"{wanted}")
        index, bits = arguments.block_mask((self.index, self.bits), sizes)
        return dataclasses.replace(self, index=index, bits=bits)

    @broadcasting
    def to_dense(self) -> jax.Array:
        """The mask as bool [B|1, H|1, Lq, Lkv]: for looking at, not for large lengths."""
        batch, heads = self.index.shape[:2]
        dense = jax.jit(self)(
            np.arange(batch)[:, None, None, None],
            np.arange(heads)[:, None, None],
            np.arange(self.query_length)[:, None],
            np.arange(self.key_length),
        )
        return jnp.broadcast_to(dense, (batch, heads, self.query_length, self.key_length))

    @property
    def visited(self) -> float:
        """Fraction of the tiles that are not empty."""
        index = np.asarray(self.index)
        return float(np.mean(index != EMPTY_TILE)) if index.size else 0.0

    def __repr__(self) -> str:
        arrays = self.index, self.bits
        if [len(getattr(x, "shape", ())) for x in arrays] != [4, 3]:
            # Not checked before the mask is used; an error about it shows it.
            parts = [*map(describe, arrays), repr(self.query_length), repr(self.key_length)]
            return f"BlockMask({', '.join(parts)})"
        batch, heads = self.index.shape[:2]
        size = f"{self.query_length}x{self.key_length}, batch {batch}, heads {heads}"
        if isinstance(self.index, jax.core.Tracer):
            return f"BlockMask({size})"
        return (
            f"BlockMask({size}, {100 * self.visited:.1f} % of tiles visited, "
            f"{self.bits.shape[0]} bit tiles)"
        )


def lookup_tile(index: jax.Array, b: Any, h: Any, tile_row: Any, tile_col: Any) -> jax.Array:
    """Entry of a block index, whose batch and head axes may be 1 but whose tile axes are full."""
    return index[
        0 if index.shape[0] == 1 else b, 0 if index.shape[1] == 1 else h, tile_row, tile_col
    ]


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class _Combination(Mask):
    """Two or more masks with one operator between them."""

    terms: tuple[Mask, ...]

    symbol = ""

    def bound(self, sizes: Sizes, batched: bool) -> Self:
        """See `Mask.bound`."""
        return type(self)(tuple(term.bound(sizes, batched) for term in self.terms))

    def __repr__(self) -> str:
        parts = [f"({t!r})" if isinstance(t, _Combination) else repr(t) for t in self.terms]
        return f" {self.symbol} ".join(parts)


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class AndMask(_Combination):
    """Allowed where every term allows."""

    symbol = "&"

    def allows(self, b: Any, h: Any, i: Any, j: Any, shift: Any) -> Any:
        """See `Mask.allows`."""
        first, *rest = (term.allows(b, h, i, j, shift) for term in self.terms)
        for term in rest:
            first = first & term
        return first


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class OrMask(_Combination):
    """Allowed where at least one term allows."""

    symbol = "|"

    def allows(self, b: Any, h: Any, i: Any, j: Any, shift: Any) -> Any:
        """See `Mask.allows`."""
        first, *rest = (term.allows(b, h, i, j, shift) for term in self.terms)
        for term in rest:
            first = first | term
        return first


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class XorMask(_Combination):
    """Allowed where an odd number of terms allows."""

    symbol = "^"

    def allows(self, b: Any, h: Any, i: Any, j: Any, shift: Any) -> Any:
        """See `Mask.allows`."""
        first, *rest = (term.allows(b, h, i, j, shift) for term in self.terms)
        for term in rest:
            first = first ^ term
        return first


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class NotMask(Mask):
    """Allowed where the operand does not allow."""

    operand: Mask

    def allows(self, b: Any, h: Any, i: Any, j: Any, shift: Any) -> Any:
        """See `Mask.allows`."""
        return jnp.logical_not(self.operand.allows(b, h, i, j, shift))

    def bound(self, sizes: Sizes, batched: bool) -> NotMask:
        """See `Mask.bound`."""
        return NotMask(self.operand.bound(sizes, batched))

    def __repr__(self) -> str:
        inner = repr(self.operand)
        return f"~({inner})" if isinstance(self.operand, _Combination) else f"~{inner}"


_COMBINATIONS = {"&": AndMask, "|": OrMask, "^": XorMask}


def as_mask(name: str, x: Any) -> Mask:
    """A mask object from a mask object, a bool array or a `mask_mod` function.

    Raises:
      TypeError: for anything else; it names the argument `name`.
    """
    if isinstance(x, Mask):
        return x
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return DenseMask(x)
    if callable(x):
        return FunctionMask(x)
    raise type_error(
        name, type(x).__name__, "a mask object, a bool array, or a function (b, h, q_idx, kv_idx)"
    )


def _combined(symbol: str, left: Any, right: Any) -> Mask:
    """Joins two masks; chains of one operator become one flat combination."""
    cls = _COMBINATIONS[symbol]
    terms: list[Mask] = []
    for side in (as_mask("mask", left), as_mask("mask", right)):
        terms.extend(side.terms if isinstance(side, cls) else (side,))
    return cls(tuple(terms))
