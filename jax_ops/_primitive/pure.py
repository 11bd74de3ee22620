# SPDX-License-Identifier: Apache-2.0
"""Derivatives of the pure blockwise function: forward mode, and everything of second order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ops._spec import AttentionSpec, Operands
from jax_ops._xla import blockwise


def replace(operands: Operands, fields: Sequence[int], values: Sequence[Any]) -> Operands:
    """`operands` with other values at the positions `fields`."""
    names = [Operands._fields[i] for i in fields]
    return operands._replace(**dict(zip(names, values, strict=True)))


def _function_of(spec: AttentionSpec, operands: Operands, fields: Sequence[int]) -> Any:
    def function(*values: Any) -> tuple[Any, Any]:
        return blockwise.attention(spec, replace(operands, fields, values))

    return function


def tangent(
    spec: AttentionSpec, operands: Operands, moving: Sequence[int], tangents: Sequence[Any]
) -> tuple[Any, Any]:
    """Tangents of (out, lse) when the operands at positions `moving` move along `tangents`."""
    function = _function_of(spec, operands, moving)
    return jax.jvp(function, [operands[i] for i in moving], list(tangents))[1]


def backward(
    spec: AttentionSpec, operands: Operands, wanted: Sequence[int], dout: Any, dlse: Any
) -> tuple[Any, ...]:
    """Gradients of the operands at positions `wanted`, differentiable again."""
    function = _function_of(spec, operands, wanted)
    (out, lse), vjp = jax.vjp(function, *[operands[i] for i in wanted])
    return vjp((jnp.broadcast_to(dout, out.shape), jnp.broadcast_to(dlse, lse.shape)))
