# SPDX-License-Identifier: Apache-2.0
"""Packing of operands for primitives, and the abstract values of their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax_ops import _jax
from jax_ops._errors import argument_error
from jax_ops._spec import TAIL_RANK, Operands, Sizes, lse_dtype, sizes_of

# Positions of the head axis and of the axes that no sharding may split, behind the lead axes.
_HEAD_AXIS = Operands(
    query=1, key=1, value=1, bias=0, mask=0, alibi_slopes=0, block_index=0, dropout_head=0
)


def pack(operands: Operands) -> tuple[tuple[int, ...], list[Any]]:
    """The positions of the operands that are there, and those operands."""
    fields = tuple(i for i, x in enumerate(operands) if x is not None)
    return fields, [operands[i] for i in fields]


def unpack(fields: Sequence[int], args: Sequence[Any]) -> Operands:
    """Inverse of `pack`; ignores further arguments behind the operands."""
    values: list[Any] = [None] * len(Operands._fields)
    for field, x in zip(fields, args[: len(fields)], strict=True):
        values[field] = x
    return Operands(*values)


def head_axis(field: int) -> int | None:
    """Axis, behind the lead axes, on which an operand has its heads; None if it has none."""
    return _HEAD_AXIS[field]


def sizes(fields: Sequence[int], args: Sequence[Any]) -> Sizes:
    """Sizes of the problem of packed operands; arrays shaped like out or lse may follow them.

    The lead axes of those count too: under vmap a cotangent can be mapped where no operand is.
    """
    operands = unpack(fields, args)
    lead_rank = operands.query.ndim - TAIL_RANK.query
    result = sizes_of(operands)
    lead = list(result.lead)
    for x in args[len(fields) :]:
        for axis, size in enumerate(x.shape[:lead_rank]):
            if isinstance(lead[axis], int) and lead[axis] == 1:
                lead[axis] = size
    return Sizes(tuple(lead), result.lq, result.lkv, result.hq, result.hkv, result.d, result.dv)


def forward_avals(fields: Sequence[int], args: Sequence[Any]) -> tuple[Any, Any]:
    """Avals of (out, lse), with the explicit sharding that the operands imply."""
    operands = unpack(fields, args)
    problem = sizes(fields, args)
    query = operands.query
    spec = _result_spec(fields, args)
    out = _jax.result_aval(query, problem.out_shape, query.dtype, (*spec, None))
    lse = _jax.result_aval(query, problem.lse_shape, lse_dtype(query.dtype), spec)
    return out, lse


def gradient_avals(fields: Sequence[int], args: Sequence[Any], wanted: Sequence[int]) -> list[Any]:
    """Avals of the gradients of the operands at positions `wanted`: their own."""
    operands = unpack(fields, args)
    return [operands[field].update(weak_type=False) for field in wanted]


def _result_spec(fields: Sequence[int], args: Sequence[Any]) -> tuple[Any, ...]:
    """Partition spec of lse's axes [*lead, Lq, Hq] under explicit sharding."""
    operands = unpack(fields, args)
    lead_rank = operands.query.ndim - TAIL_RANK.query
    lead: list[Any] = [None] * lead_rank
    for field, x in zip(fields, args[: len(fields)], strict=True):
        if TAIL_RANK[field] is None:
            continue
        spec = tuple(x.sharding.spec) + (None,) * (x.ndim - len(x.sharding.spec))
        for axis in range(lead_rank):
            lead[axis] = spec[axis] if lead[axis] is None else lead[axis]
        for axis in range(lead_rank, x.ndim):
            if spec[axis] is not None and axis - lead_rank != _HEAD_AXIS[field]:
                raise argument_error(
                    Operands._fields[field],
                    f"axis {axis - x.ndim} sharded over explicit mesh axis {spec[axis]!r}",
                    "explicit sharding of batch and head axes; reshard the others first",
                )
    query_spec = tuple(operands.query.sharding.spec) + (None,) * operands.query.ndim
    return (*lead, None, query_spec[lead_rank + 1])
