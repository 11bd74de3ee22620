# SPDX-License-Identifier: Apache-2.0
"""`decode_attention`: a few new queries against a cache of keys and values."""

from __future__ import annotations

from typing import Any

import jax

from jax_ops._errors import argument_error
from jax_ops._problem import attend, make_problem


def decode_attention(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    key_value_seq_lengths: Any,
    *,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    scale: Any = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Any = None,
    precision: str | None = None,
    num_splits: int | str = "auto",
    block_k: int | str = "auto",
    implementation: str | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Causal attention of the last Lq positions of each sequence, read from a cache.

    Equals `dot_product_attention` with is_causal=True and alignment='bottom_right' at each
    sequence's own length n: query i stands at position n - Lq + i. The keys and values of the new
    positions are in the cache already, and n counts them. What the cache holds from n on is never
    used, be it NaN. The key axis is split over the machine where that is faster (split-KV).

    Args:
      query: [B, Lq, Hq, D]; float32, bfloat16, float16, or float64 (computed in float64).
      key_cache: [B, cache size, Hkv, D], query's dtype; Hkv divides Hq.
      value_cache: [B, cache size, Hkv, Dv], query's dtype. All three may lack B.
      key_value_seq_lengths: integer [B] ([1] without B): n, clamped to [0, cache size]. Rows that
        stand before the sequence (n < Lq) give 0 and lse = -inf.
      local_window_size: (left, right) around each query's own position; an integer w means (w, w),
        None is an unbounded side.
      scale: factor on q . k: a number, a differentiable scalar array, or None for 1 / sqrt(D).
      logits_soft_cap: s becomes cap * tanh(s / cap).
      alibi_slopes: floating [Hq] or [B, Hq]: adds -slope * distance.
      precision: as in `dot_product_attention`.
      num_splits: 'auto', or into how many parts the key axis is split; >= 1. With an explicit
        number a row's result does not depend on B by a bit.
      block_k: keys of a tile, or 'auto'.
      implementation: as in `dot_product_attention`.
      return_residual: also return lse [B, Lq, Hq]; see `merge_attention`.

    Returns:
      out [B, Lq, Hq, Dv] in query's dtype; with `return_residual` (out, lse), lse in float32
      (float64 for float64 inputs). Without B where the inputs had none.

    Raises:
      ValueError, TypeError: an argument is refused; the message names it.
      UnsupportedError: the implementation that was asked for cannot run this call.
    """
    if key_value_seq_lengths is None:
        raise argument_error("key_value_seq_lengths", None, "an integer array [B]")
    problem = make_problem(
        query,
        key_cache,
        value_cache,
        is_causal=True,
        alignment="bottom_right",
        key_value_seq_lengths=key_value_seq_lengths,
        window=local_window_size,
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        precision=precision,
        num_splits=num_splits,
        block_k=block_k,
        implementation=implementation,
    )
    return attend(problem, return_residual)
