# SPDX-License-Identifier: Apache-2.0
"""`merge_attention`: partial results over disjoint sets of keys, merged exactly."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_ops import _arguments as arguments
from jax_ops._errors import argument_error, dtype_error
from jax_ops._jax import broadcasting


@broadcasting
def merge_attention(outs: Any, residuals: Any) -> tuple[jax.Array, jax.Array]:
    """Attention over all keys, from its results over parts of the keys.

    Exact, whatever the parts: each is weighted with exp(its residual). The neutral element is
    (0, -inf), the result of a part without any allowed key; merging only such parts, or no part at
    all, gives (0, -inf) again. Differentiable in both arguments, to any order.

    Args:
      outs: floating [parts, *rows, Dv], the parts stacked on axis 0; `*rows` is [B, Lq, Hq] as a
        rule, but may be anything.
      residuals: floating [parts, *rows]: lse of each part, as `return_residual` gives it.

    Returns:
      (out [*rows, Dv] in the dtype of outs, lse [*rows] in float32, or float64 where an argument
      is float64).

    Raises:
      ValueError, TypeError: an argument is refused; the message names it.
    """
    outs = arguments.as_array("outs", outs)
    residuals = arguments.as_array("residuals", residuals)
    for name, x in (("outs", outs), ("residuals", residuals)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise dtype_error(name, f"dtype {x.dtype}", "a floating dtype")
    if outs.ndim < 2:
        raise argument_error("outs", f"shape {outs.shape}", "[parts, *rows, Dv]")
    if residuals.shape != outs.shape[:-1]:
        raise argument_error(
            "residuals", f"shape {residuals.shape}", f"outs' shape without Dv, {outs.shape[:-1]}"
        )
    is_double = jnp.float64 in (outs.dtype, residuals.dtype)
    dtype = jnp.float64 if is_double else jnp.float32
    lse = residuals.astype(dtype)
    # The result does not depend on what is subtracted, so no derivative does.
    largest = jax.lax.stop_gradient(jnp.max(lse, axis=0, initial=-jnp.inf))
    reference = jnp.where(largest == -jnp.inf, 0, largest)
    weights = jnp.exp(lse - reference)
    total = jnp.sum(weights, axis=0)
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    # A part without keys does not count, whatever its out holds.
    parts = jnp.where((lse == -jnp.inf)[..., None], 0, outs.astype(dtype))
    out = jnp.sum((weights / total)[..., None] * parts, axis=0)
    merged = jnp.where(is_empty, -jnp.inf, reference + jnp.log(total))
    return out.astype(outs.dtype), merged
