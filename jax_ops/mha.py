# SPDX-License-Identifier: Apache-2.0
"""`mha`: the bare kernel call with explicit sizes, for tuning."""

from __future__ import annotations

from typing import Any

import jax

from jax_ops._arguments import boolean
from jax_ops._problem import attend, make_problem


def mha(
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: bool = False,
    scale: Any = None,
    block_q: int | str = "auto",
    block_k: int | str = "auto",
    num_splits: int | str = "auto",
    implementation: str | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention without options, but with the kernel's sizes in the caller's hands.

    Args:
      query: [B, Lq, Hq, D]; float32, bfloat16, float16, or float64 (computed in float64).
      key: [B, Lkv, Hkv, D], query's dtype; Hkv divides Hq.
      value: [B, Lkv, Hkv, Dv], query's dtype. All three may lack B.
      causal: row i sees keys j <= i.
      scale: factor on q . k: a number, a differentiable scalar array, or None for 1 / sqrt(D).
      block_q: query rows of a tile of the forward pass, or 'auto'. A kernel that lacks a size says
        which it has. The backward kernels have sizes of their own, which nothing here changes: they
        hold other tiles, so a size that suits the forward pass says nothing about theirs.
      block_k: keys of a tile of the forward pass, or 'auto'.
      num_splits: 'auto', or into how many parts the key axis is split (split-KV) in the forward
        pass; >= 1. 'xla' attends to the parts one after another.
      implementation: as in `dot_product_attention`.
      return_residual: also return lse [B, Lq, Hq].

    Returns:
      out [B, Lq, Hq, Dv] in query's dtype; with `return_residual` (out, lse), lse in float32
      (float64 for float64 inputs). Without B where the inputs had none.

    Raises:
      ValueError, TypeError: an argument is refused; the message names it.
      UnsupportedError: the implementation that was asked for cannot run this call.
    """
    problem = make_problem(
        query,
        key,
        value,
        is_causal=boolean("causal", causal),
        scale=scale,
        block_q=block_q,
        block_k=block_k,
        num_splits=num_splits,
        implementation=implementation,
    )
    return attend(problem, return_residual)
