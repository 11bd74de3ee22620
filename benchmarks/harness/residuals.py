# SPDX-License-Identifier: Apache-2.0
"""What the forward pass keeps for the backward pass, beyond the inputs themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness.case import MIB


def saved_residuals(function: Callable[..., Any], inputs: Sequence[Any]) -> dict[str, Any]:
    """Row fields residual_mb (MiB) and residual_shapes ('float32[1, 1024, 32]', ...).

    `jax.vjp` returns its residuals as the leaves of the pullback. Tracing only that shows which
    values they are; inputs kept as residuals cost no memory of their own and are left out.
    """
    import jax
    from jax.extend.core import Literal

    def residuals(*args):
        return jax.tree.leaves(jax.vjp(function, *args)[1])

    jaxpr = jax.make_jaxpr(residuals)(*inputs).jaxpr
    seen = set(jaxpr.invars)
    kept = []
    for variable in jaxpr.outvars:
        # A literal is a scalar inside the program: it takes no memory.
        if isinstance(variable, Literal) or variable in seen:
            continue
        seen.add(variable)
        kept.append(variable.aval)
    return {
        "residual_mb": sum(_bytes(aval) for aval in kept) / MIB,
        "residual_shapes": [f"{aval.dtype}[{', '.join(map(str, aval.shape))}]" for aval in kept],
    }


def _bytes(aval: Any) -> int:
    size = 1
    for length in aval.shape:
        size *= length
    return size * aval.dtype.itemsize
