# SPDX-License-Identifier: Apache-2.0
"""Checks and normal forms of single arguments: each function returns or refuses one."""

from __future__ import annotations

import contextlib
import inspect
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ops import _jax
from jax_ops._errors import argument_error, dtype_error, type_error
from jax_ops._spec import EMPTY_TILE, FULL_TILE, MASK_TILE, Sizes

PRECISIONS = ("default", "highest")
_MAX_INT32 = 2**31 - 1
# The largest segment id that the kernels can hold.
_MAX_ID = _MAX_INT32
# Values of jax.default_matmul_precision that mean full float32 products.
_FULL_FLOAT32 = ("highest", "float32", "F32_F32_F32")


def function(name: str, value: Any, parameters: str, others: str = "") -> None:
    """Refuses what cannot be called with these parameters, before a trace fails inside it."""
    allowed = f"a function ({parameters}){others}"
    if not callable(value):
        raise type_error(name, type(value).__name__, allowed)
    try:
        signature = inspect.signature(value)
    except ValueError:
        return  # Some built-in functions have none; calling them tells.
    try:
        signature.bind(*parameters.split(","))
    except TypeError as error:
        raise type_error(name, f"a function with parameters {signature}", allowed) from error


def as_array(name: str, x: Any) -> jax.Array:
    """`x` as a JAX array; anything that is not one raises a TypeError naming the argument."""
    if isinstance(x, jax.Array):
        return x
    try:
        # Also a TypeError that JAX raises later, and without the name: for what has a shape and
        # dtype but no values, and for masked arrays, whose mask JAX will not drop.
        if isinstance(x, (jax.ShapeDtypeStruct, np.ma.MaskedArray)):
            raise TypeError(type(x).__name__)
        return jnp.asarray(x)
    except OverflowError as error:
        raise argument_error(name, f"numbers too large ({error})", "numbers that fit") from error
    except (TypeError, ValueError) as error:
        raise type_error(name, _kind(x), "an array of numbers or booleans") from error


def _kind(x: Any) -> str:
    """Type of a value that is no array, with its dtype where it has one."""
    name = type(x).__name__
    return f"{name} of dtype {x.dtype}" if isinstance(x, (np.ndarray, np.generic)) else name


def _integers(name: str, x: Any) -> jax.Array | np.ndarray:
    """An array of an integer dtype; from the host as it is, for JAX would wrap 64-bit numbers."""
    if not isinstance(x, jax.Array):
        with contextlib.suppress(TypeError, ValueError):  # as_array says what is wrong
            host = np.asarray(x)
            if host.dtype.kind in "iu":
                return host
    x = as_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise dtype_error(name, f"dtype {x.dtype}", "an integer dtype")
    return x


def _floats(name: str, x: Any) -> jax.Array:
    x = as_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise dtype_error(name, f"dtype {x.dtype}", "a floating dtype")
    return x


def _to_int32(x: jax.Array | np.ndarray, low: int, high: int) -> jax.Array:
    """Clamps to [low, high] and converts, without wrapping whatever the integer dtype is."""
    numpy: Any = np if isinstance(x, np.ndarray) else jnp
    if jnp.iinfo(x.dtype).bits < 32:
        x = x.astype(np.int32)
    low = max(low, int(jnp.iinfo(x.dtype).min))
    return jnp.asarray(numpy.clip(x, low, high).astype(np.int32))


def boolean(name: str, x: Any) -> bool:
    """A Python bool."""
    if isinstance(x, (bool, np.bool_)):
        return bool(x)
    raise type_error(name, _describe(x), "True or False")


def choice(name: str, x: Any, allowed: tuple[str, ...]) -> str:
    """One of a few strings."""
    if isinstance(x, str) and x in allowed:
        return x
    raise argument_error(name, _describe(x), ", ".join(repr(a) for a in allowed))


def platform(x: Any) -> str | None:
    """One of JAX's platform names; which there are depends on its plugins."""
    if x is None or (isinstance(x, str) and x):
        return x
    raise type_error("platform", _describe(x), "None or a name such as 'cpu', 'cuda' or 'tpu'")


def _describe(x: Any) -> str:
    if isinstance(x, jax.core.Tracer):
        return f"a traced value ({jax.typeof(x)})"
    return repr(x) if isinstance(x, (str, int, float, tuple, type(None))) else type(x).__name__


def _number(name: str, x: Any, allowed: str) -> float:
    """A static real number (a Python or NumPy scalar)."""
    if isinstance(x, numbers.Real | np.floating | np.integer) and not isinstance(x, bool):
        try:
            return float(x)
        except OverflowError as error:  # an int
            raise argument_error(name, "an integer too large for a float", allowed) from error
    raise type_error(name, _describe(x), allowed)


def _integer(name: str, x: Any, low: int, allowed: str) -> int:
    """A static integer that is at least `low`."""
    if isinstance(x, bool) or not isinstance(x, (int, np.integer)):
        raise type_error(name, _describe(x), allowed)
    if x < low:
        raise argument_error(name, int(x), allowed)
    return int(x)


def count(name: str, x: Any) -> int:
    """A tile size or a number of splits; 0 stands for 'auto', the planner's choice."""
    allowed = "'auto' or an integer in [1, 2^31 - 1]"
    if isinstance(x, str):
        if x != "auto":
            raise argument_error(name, repr(x), allowed)
        return 0
    size = _integer(name, x, 1, allowed)
    # What the planners' 64 bits cannot hold would reach them as another number.
    if size > _MAX_INT32:
        raise argument_error(name, size, allowed)
    return size


def window(name: str, x: Any) -> tuple[int | None, int | None]:
    """(left, right) sizes of a local window; None is an unbounded side."""
    allowed = "None, an integer w >= 0 for (w, w), or (left, right) with None for unbounded"
    if x is None:
        return None, None
    sides = x if isinstance(x, (tuple, list)) else (x, x)
    if len(sides) != 2:
        raise argument_error(name, repr(x), allowed)
    left, right = (_window_side(name, side, allowed) for side in sides)
    return left, right


def _window_side(name: str, x: Any, allowed: str) -> int | None:
    size = None if x is None else _integer(name, x, 0, allowed)
    # No sequence is longer than 2^31 - 1, so a wider window is an unbounded side.
    return None if size is None or size >= _MAX_INT32 else size


def scale(x: Any, d: int, dtype: np.dtype) -> tuple[float | None, jax.Array | None]:
    """The factor on q . k, as (number, None) or (None, array of one lead entry)."""
    if x is None:
        return 1.0 / math.sqrt(d), None
    if isinstance(x, (jax.Array, np.ndarray)):
        x = as_array("scale", x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise dtype_error("scale", f"dtype {x.dtype}", "a number or a floating scalar array")
        if x.shape != ():
            raise argument_error("scale", f"shape {x.shape}", "a number or a scalar array")
        return None, x.astype(dtype)[None]
    number = _number("scale", x, "a number or a floating scalar array")
    if not abs(number) <= float(jnp.finfo(dtype).max):
        raise argument_error("scale", number, f"a number that is finite in {dtype}")
    return number, None


def soft_cap(x: Any, dtype: np.dtype) -> float | None:
    """The cap of cap * tanh(s / cap), which is computed in `dtype`."""
    if x is None:
        return None
    number = _number("logits_soft_cap", x, "None or a positive number")
    limits = jnp.finfo(dtype)
    if not float(limits.tiny) <= number <= float(limits.max):
        allowed = f"None, or a positive number that is finite and normal in {dtype}"
        raise argument_error("logits_soft_cap", number, allowed)
    return number


def precision(x: Any, dtype: np.dtype) -> str:
    """'default' or 'highest'. 16-bit and float64 products have one precision, so it is dropped."""
    if x is None:
        x = "default"
    elif isinstance(x, jax.lax.Precision):
        x = "highest" if x == jax.lax.Precision.HIGHEST else "default"
    x = choice("precision", x, PRECISIONS)
    if dtype != np.float32:
        return "default"
    if x == "default" and str(_jax.setting("jax_default_matmul_precision")) in _FULL_FLOAT32:
        return "highest"
    return x


def _score_shape(name: str, x: jax.Array, sizes: Sizes) -> jax.Array:
    """Gives `x` rank 4, after checking that it broadcasts to [B, Hq, Lq, Lkv]."""
    full = (*sizes.lead, sizes.hq, sizes.lq, sizes.lkv)
    wanted = (
        f"rank 1 to 4, aligned on the right with [B, Hq, Lq, Lkv] = {full}, each axis 1 or full"
    )
    if not 1 <= x.ndim <= 4:
        raise argument_error(name, f"shape {x.shape}", wanted)
    shape = (1,) * (4 - x.ndim) + x.shape
    if any(size != 1 and size != all_ for size, all_ in zip(shape, full, strict=True)):
        raise argument_error(name, f"shape {x.shape}", wanted)
    return x.reshape(shape) if x.ndim < 4 else x


def mask(x: Any, sizes: Sizes, name: str = "mask") -> jax.Array | None:
    """A bool mask, [B|1, Hq|1, Lq|1, Lkv|1]."""
    if x is None:
        return None
    x = as_array(name, x)
    if x.dtype != np.bool_:
        raise dtype_error(
            name, f"dtype {x.dtype}", "bool (True: attend); additive values belong in `bias`"
        )
    return _score_shape(name, x, sizes)


def bias(x: Any, sizes: Sizes, dtype: np.dtype) -> jax.Array | None:
    """A floating bias, [B|1, Hq|1, Lq|1, Lkv|1]; kept in its dtype where every kernel takes it."""
    if x is None:
        return None
    x = as_array("bias", x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        hint = "; a bool mask belongs in `mask`" if x.dtype == np.bool_ else ""
        raise dtype_error("bias", f"dtype {x.dtype}", f"a floating dtype{hint}")
    if dtype == np.float64 or x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        x = x.astype(dtype)
    return _score_shape("bias", x, sizes)


def lengths(name: str, x: Any, sizes: Sizes, length: int) -> jax.Array | None:
    """Sequence lengths as int32 [B], clamped to [0, length]."""
    if x is None:
        return None
    x = _integers(name, x)
    if x.shape != sizes.lead:
        raise argument_error(name, f"shape {x.shape}", f"[B] = {sizes.lead}")
    return _to_int32(x, 0, length)


def prefix_lengths(x: Any, sizes: Sizes) -> jax.Array | None:
    """Prefix lengths as int32 [B|1], clamped to [0, Lkv]."""
    if x is None:
        return None
    x = _integers("prefix_lengths", x)
    if x.shape not in ((), (1,), sizes.lead):
        raise argument_error("prefix_lengths", f"shape {x.shape}", f"[] or [B] = {sizes.lead}")
    return _to_int32(x.reshape(x.shape or (1,)), 0, sizes.lkv)


def segments(
    query_ids: Any, kv_ids: Any, sizes: Sizes, batched: bool
) -> tuple[jax.Array | None, jax.Array | None]:
    """Segment ids as int32 [B|1, L]; query ids alone serve both sides of self-attention."""
    if query_ids is None:
        if kv_ids is not None:
            raise argument_error(
                "key_value_segment_ids", "ids without query_segment_ids", "both, or query ids alone"
            )
        return None, None
    query_ids = _segment_ids("query_segment_ids", query_ids, sizes, sizes.lq, batched)
    if kv_ids is not None:
        kv_ids = _segment_ids("key_value_segment_ids", kv_ids, sizes, sizes.lkv, batched)
    elif sizes.lq != sizes.lkv:
        raise argument_error(
            "key_value_segment_ids",
            f"None with Lq = {sizes.lq} and Lkv = {sizes.lkv}",
            "query_segment_ids alone only if Lq = Lkv",
        )
    else:
        kv_ids = query_ids
    if all(jnp.iinfo(x.dtype).max <= _MAX_ID for x in (query_ids, kv_ids)):
        return _to_int32(query_ids, -1, _MAX_ID), _to_int32(kv_ids, -1, _MAX_ID)
    return _ranks(query_ids, kv_ids)


def _segment_ids(name: str, x: Any, sizes: Sizes, length: int, batched: bool) -> jax.Array:
    x = _integers(name, x)
    if not batched and x.ndim == 1:
        x = x[None]
    if x.shape not in ((*sizes.lead, length), (1, length)):
        raise argument_error(name, f"shape {x.shape}", f"[B, L] = {(*sizes.lead, length)}")
    if isinstance(x, jax.Array):
        return x
    if x.size and x.max() > _MAX_ID:
        raise argument_error(name, f"the id {x.max()}", f"ids of at most {_MAX_ID}")
    return _to_int32(x, -1, _MAX_ID)


def _ranks(query_ids: jax.Array, kv_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ids of a dtype wider than int32 as numbers that are equal where the ids are.

    Their values are not known while tracing, and clamping would make different ids equal.
    """
    lead = jnp.broadcast_shapes(query_ids.shape[:1], kv_ids.shape[:1])
    both = [jnp.broadcast_to(x, (*lead, x.shape[1])) for x in (query_ids, kv_ids)]
    # Not the promoted dtype, which for int64 and uint64 is a floating one.
    wide = jnp.uint64 if any(jnp.iinfo(x.dtype).bits > 32 for x in both) else jnp.uint32
    ids = [jnp.where(x < 0, 0, x).astype(wide) for x in both]
    ordered = jnp.sort(jnp.concatenate(ids, axis=1), axis=1)
    rank = jax.vmap(jnp.searchsorted)
    query_ids, kv_ids = (
        jnp.where(x < 0, -1, rank(ordered, unsigned).astype(jnp.int32))
        for x, unsigned in zip(both, ids, strict=True)
    )
    return query_ids, kv_ids


def alibi_slopes(x: Any, sizes: Sizes, batched: bool, dtype: np.dtype) -> jax.Array | None:
    """ALiBi slopes, [B|1, Hq]."""
    if x is None:
        return None
    x = _floats("alibi_slopes", x)
    if x.shape not in ((sizes.hq,), (1, sizes.hq), (*sizes.lead, sizes.hq)):
        allowed = f"[Hq] = ({sizes.hq},)" + (", or [B, Hq]" if batched else "")
        raise argument_error("alibi_slopes", f"shape {x.shape}", allowed)
    return x.reshape((-1, sizes.hq) if x.ndim == 1 else x.shape).astype(dtype)


def dropout_rate(rate: Any, key: Any) -> float:
    """The drop probability; a positive one needs a key."""
    rate = _number("dropout_rate", rate, "a number in [0, 1]")
    if not 0 <= rate <= 1:
        raise argument_error("dropout_rate", rate, "a number in [0, 1]")
    if rate > 0 and key is None:
        raise argument_error("dropout_key", "None with dropout_rate > 0", "a JAX random key")
    # The counter knows rates to 1 / 2^16; below half of that nothing is ever dropped.
    return rate if round(rate * 65536) > 0 else 0.0


def dropout_seed(key: Any) -> jax.Array:
    """The two uint32 words of a typed or raw random key."""
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape != ():
            raise argument_error("dropout_key", f"shape {key.shape}", "a single key")
        words = jax.random.key_data(key)
    else:
        words = as_array("dropout_key", key)
        if words.dtype != np.uint32 or words.ndim != 1:
            raise dtype_error(
                "dropout_key",
                f"{words.dtype}{list(words.shape)}",
                "a typed key or a raw uint32 key",
            )
    if words.shape == (2,):
        return words
    # Key implementations of other sizes (rbg has four words) are reduced to two by drawing them.
    return jax.random.bits(key, (2,), np.uint32)


def dropout_indices(name: str, x: Any, size: Any) -> jax.Array:
    """Indices that the dropout counter uses, as uint32 [size]."""
    if x is None:
        return jnp.arange(size, dtype=np.uint32)
    x = _integers(name, x)
    if x.shape != (size,):
        raise argument_error(name, f"shape {x.shape}", f"({size},)")
    return jnp.asarray(x.astype(np.uint32))


def block_mask(x: Any, sizes: Sizes) -> tuple[jax.Array | None, jax.Array | None]:
    """The two arrays of a block-sparse mask."""
    if x is None:
        return None, None
    index, bits = (as_array("block_mask", a) for a in x)
    if index.dtype != np.int32 or bits.dtype != np.uint32:
        raise dtype_error("block_mask", f"{index.dtype} and {bits.dtype}", "int32 and uint32")
    tiles = (-(-sizes.lq // MASK_TILE), -(-sizes.lkv // MASK_TILE))
    full = (*sizes.lead, sizes.hq)
    if (
        index.ndim != 4
        or index.shape[2:] != tiles
        or any(size != 1 and size != all_ for size, all_ in zip(index.shape[:2], full, strict=True))
    ):
        raise argument_error(
            "block_mask",
            f"index of shape {index.shape}",
            f"[B|1, Hq|1, *{tiles}] with B, Hq = {full}",
        )
    if bits.ndim != 3 or bits.shape[1:] != (MASK_TILE, 2):
        raise argument_error("block_mask", f"bits of shape {bits.shape}", f"[n, {MASK_TILE}, 2]")
    last = bits.shape[0] - 1  # without any bit tile the largest allowed number is EMPTY_TILE
    if isinstance(x[0], np.ndarray) and not np.all((x[0] >= FULL_TILE) & (x[0] <= last)):
        raise argument_error(
            "block_mask",
            f"tile numbers from {x[0].min()} to {x[0].max()}",
            f"{FULL_TILE} (full), {EMPTY_TILE} (empty), or up to {last} (bit tiles)",
        )
    # A kernel on a device cannot refuse a tile number that does not exist.
    return jnp.clip(index, FULL_TILE, last), bits
