# SPDX-License-Identifier: Apache-2.0
"""From user arguments to one normalised problem: validation, dtypes, shapes.

Every public entry point calls `make_problem` and then `attend`. Nothing behind this file checks a
user's argument again, except that the FFI handlers check everything that comes from a file.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ops import _arguments as arguments
from jax_ops import _peers, _primitive, dispatch
from jax_ops._errors import argument_error, dtype_error, type_error
from jax_ops._spec import AttentionSpec, Operands, Problem, Sizes

INPUT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)
ALIGNMENTS = ("top_left", "bottom_right")


def make_problem(
    query: Any,
    key: Any,
    value: Any,
    *,
    bias: Any = None,
    mask: Any = None,
    scale: Any = None,
    is_causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    alignment: str = "top_left",
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
    prefix_lengths: Any = None,
    block_mask: tuple[Any, Any] | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Any = None,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    dropout_batch_indices: Any = None,
    dropout_head_indices: Any = None,
    precision: Any = None,
    block_q: int | str = "auto",
    block_k: int | str = "auto",
    num_splits: int | str = "auto",
    implementation: str | None = None,
) -> Problem:
    """Validates the arguments of an attention call and normalises them.

    What `dot_product_attention` does not have, or names otherwise:
      window: None, w for (w, w), or (left, right) with None for an unbounded side.
      prefix_lengths: int or integer array [] or [B]: keys before it are exempt from `is_causal`.
      block_mask: (index [B|1, H|1, ceil(Lq/64), ceil(Lkv/64)] int32, bits [n, 64, 2] uint32).
      block_q, block_k: tile sizes >= 1, or 'auto' for the planner's choice.
      num_splits: number of parts of the key axis, or 'auto'.

    Raises:
      ValueError, TypeError: for a refused argument; the message names it.
    """
    query, key, value, batched = _query_key_value(query, key, value)
    *_, lq, hq, d = query.shape
    *_, lkv, hkv, dv = value.shape
    sizes = Sizes(lead=(query.shape[0],), lq=lq, lkv=lkv, hq=hq, hkv=hkv, d=d, dv=dv)
    dtype = query.dtype
    small_float = np.dtype(np.float64 if dtype == np.float64 else np.float32)

    window_left, window_right = arguments.window("local_window_size", window)
    static_scale, scale_array = arguments.scale(scale, d, small_float)
    query_segments, kv_segments = arguments.segments(
        query_segment_ids, key_value_segment_ids, sizes, batched
    )
    rate = arguments.dropout_rate(dropout_rate, dropout_key)
    # Checked also where the rate is 0, so that a mistake does not wait for training to begin.
    seed = None if dropout_key is None else arguments.dropout_seed(dropout_key)[None]
    batch_index = arguments.dropout_indices(
        "dropout_batch_indices", dropout_batch_indices, sizes.lead[0]
    )
    head_index = arguments.dropout_indices("dropout_head_indices", dropout_head_indices, hq)
    block_index, block_bits = arguments.block_mask(block_mask, sizes)

    spec = AttentionSpec(
        causal=arguments.boolean("is_causal", is_causal),
        bottom_right=arguments.choice("alignment", alignment, ALIGNMENTS) == "bottom_right",
        window_left=window_left,
        window_right=window_right,
        scale=static_scale,
        soft_cap=arguments.soft_cap(logits_soft_cap, small_float),
        dropout_rate=rate,
        precision=arguments.precision(precision, dtype),
        block_q=arguments.count("block_q", block_q),
        block_k=arguments.count("block_k", block_k),
        num_splits=arguments.count("num_splits", num_splits),
        implementation=dispatch.canonical_implementation(implementation),
    )
    operands = Operands(
        query=query,
        key=key,
        value=value,
        bias=arguments.bias(bias, sizes, small_float),
        mask=arguments.mask(mask, sizes),
        query_lengths=arguments.lengths("query_seq_lengths", query_seq_lengths, sizes, lq),
        kv_lengths=arguments.lengths("key_value_seq_lengths", key_value_seq_lengths, sizes, lkv),
        query_segments=query_segments,
        kv_segments=kv_segments,
        alibi_slopes=arguments.alibi_slopes(alibi_slopes, sizes, batched, small_float),
        prefix_lengths=arguments.prefix_lengths(prefix_lengths, sizes),
        scale=scale_array,
        dropout_seed=seed if rate > 0 else None,
        dropout_batch=batch_index if rate > 0 else None,
        dropout_head=head_index if rate > 0 else None,
        block_index=block_index,
        block_bits=block_bits,
    )
    return Problem(spec, operands, batched)


def attend(problem: Problem, return_residual: bool = False) -> Any:
    """Runs a problem, here or on the peer that was asked for.

    Returns:
      out [B, Lq, Hq, Dv] in query's dtype, and with `return_residual` also lse [B, Lq, Hq]
      (float32; float64 for float64 inputs). Both lose B where the inputs had none.

    Raises:
      UnsupportedError: the implementation that was asked for cannot run this; every reason is said.
    """
    return_residual = arguments.boolean("return_residual", return_residual)
    if problem.spec.implementation in dispatch.PEERS:
        return _peers.attend(problem, return_residual)
    dispatch.require_support(problem.spec, problem.operands)
    out, lse = _primitive.attend(problem.spec, problem.operands)
    if not problem.batched:
        out, lse = out[0], lse[0]
    return (out, lse) if return_residual else out


def _query_key_value(
    query: Any, key: Any, value: Any
) -> tuple[jax.Array, jax.Array, jax.Array, bool]:
    """Checks the three inputs against each other and gives them a batch axis."""
    arrays = {}
    for name, x in (("query", query), ("key", key), ("value", value)):
        x = arguments.as_array(name, x)
        if x.dtype not in INPUT_DTYPES:
            allowed = "float32, bfloat16, float16 or float64"
            raise dtype_error(name, f"dtype {x.dtype}", allowed)
        if x.ndim not in (3, 4):
            raise argument_error(
                name, f"shape {x.shape}", "[B, L, H, D], or [L, H, D] for all three inputs"
            )
        arrays[name] = x
    query, key, value = arrays.values()
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise dtype_error(name, f"dtype {x.dtype}", f"query's dtype, {query.dtype}")
        if x.ndim != query.ndim:
            raise argument_error(name, f"shape {x.shape}", f"query's rank ({query.ndim})")
    batched = query.ndim == 4
    if not batched:
        query, key, value = query[None], key[None], value[None]
    for name, x in (("key", key), ("value", value)):
        if x.shape[0] != query.shape[0]:
            raise argument_error(
                name, f"batch size {x.shape[0]}", f"query's batch size, {query.shape[0]}"
            )
    for name, x, other, axis, what in (
        ("value", value, key, 1, "length"),
        ("value", value, key, 2, "number of heads"),
        ("key", key, query, 3, "head dim"),
    ):
        if x.shape[axis] != other.shape[axis]:
            owner = "key" if other is key else "query"
            raise argument_error(
                name, f"{what} {x.shape[axis]}", f"the {what} of {owner}, {other.shape[axis]}"
            )
    for name, size in (("query", query.shape[3]), ("value", value.shape[3])):
        if size < 1:
            raise argument_error(name, f"head dim {size}", "head dims of at least 1")
    hq, hkv = query.shape[2], key.shape[2]
    if hkv < 1 or hq < 1 or hq % hkv:
        raise argument_error(
            "query",
            f"{hq} heads with {hkv} key/value heads",
            "at least one head, and a multiple of the number of key/value heads",
        )
    for name, x in (("query", query), ("key", key)):
        if not isinstance(x.shape[1], int):
            raise type_error(name, f"symbolic length {x.shape[1]}", "only the batch is symbolic")
    return query, key, value, batched
