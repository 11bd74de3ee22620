# SPDX-License-Identifier: Apache-2.0
"""The attention primitives. `attend` is the only way in."""

from __future__ import annotations

from typing import Any

from jax_ops._primitive import avals, differentiable
from jax_ops._primitive.differentiable import CHECKPOINT_NAMES
from jax_ops._spec import AttentionSpec, Operands

__all__ = ["CHECKPOINT_NAMES", "attend"]


def attend(spec: AttentionSpec, operands: Operands) -> tuple[Any, Any]:
    """Runs a normalised problem through every transform that JAX has.

    Returns:
      out [*lead, Lq, Hq, Dv] in query's dtype and lse [*lead, Lq, Hq], float32 (float64 for float64
      inputs). `*lead` is the broadcast of the operands' lead axes.
    """
    fields, args = avals.pack(operands)
    out, lse = differentiable.forward(spec, fields, args)
    return out, lse
