# SPDX-License-Identifier: Apache-2.0
"""Calls into the native libraries: operands in FFI order, attributes, results, workspace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ops import _libraries, _plan, _schema
from jax_ops._spec import TAIL_RANK, AttentionSpec, Gradients, Operands, Sizes, sizes_of

# Dtype of the placeholder of each operand that may be absent.
_PLACEHOLDER_DTYPES = Operands(
    query=None,
    key=None,
    value=None,
    bias=np.float32,
    mask=np.bool_,
    query_lengths=np.int32,
    kv_lengths=np.int32,
    query_segments=np.int32,
    kv_segments=np.int32,
    alibi_slopes=np.float32,
    prefix_lengths=np.int32,
    scale=np.float32,
    dropout_seed=np.uint32,
    dropout_batch=np.uint32,
    dropout_head=np.uint32,
    block_index=np.int32,
    block_bits=np.uint32,
)


def _flatten_lead(x: Any, tail: int, lead: Sequence[Any]) -> tuple[Any, int]:
    """Joins the lead axes of an operand: (x [Bm, *tail], div).

    Entry (b / div) % Bm of the result serves batch index b.

    That form exists when the axes that x really has are neighbours, as they are unless two vmaps
    enclose a third one that the operand does not take part in; then the operand is repeated.
    """
    rank = len(lead)
    own = [axis for axis in range(rank) if not _is_one(x.shape[axis])]
    if own:
        first, last = own[0], own[-1]
        behind = lead[last + 1 :]
        if all(isinstance(size, int) for size in behind):
            wanted = [lead[a] if first <= a <= last else 1 for a in range(rank)]
            div = int(np.prod(behind, dtype=np.int64))
        else:
            wanted, div = list(lead), 1
    else:
        wanted, div = [1] * rank, 1
    tail_shape = x.shape[rank:]
    x = jnp.broadcast_to(x, (*wanted, *tail_shape))
    size = 1
    for part in wanted:
        size = size * part
    return x.reshape((size, *tail_shape)), div


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _arguments(spec: AttentionSpec, operands: Operands, sizes: Sizes) -> tuple[list[Any], Any]:
    """The operands in FFI order, with placeholders, and their batch divisors."""
    arrays, divs = [], []
    for x, tail, dtype in zip(operands, TAIL_RANK, _PLACEHOLDER_DTYPES, strict=True):
        div = 1
        if x is None:
            x = jnp.zeros((0,), dtype)
        elif tail is not None:
            x, div = _flatten_lead(x, tail, sizes.lead)
        arrays.append(x)
        divs.append(div)
    return arrays, np.array(divs, np.int64)


def _attributes(
    spec: AttentionSpec, operands: Operands, plan: _plan.Plan, batch_div: Any
) -> dict[str, Any]:
    present = {name for name, x in zip(Operands._fields, operands, strict=True) if x is not None}
    values = {
        "features": _schema.features(spec, present),
        "scale": 1.0 if spec.scale is None else spec.scale,
        "soft_cap": 0.0 if spec.soft_cap is None else spec.soft_cap,
        "window_left": -1 if spec.window_left is None else spec.window_left,
        "window_right": -1 if spec.window_right is None else spec.window_right,
        "dropout_threshold": spec.dropout_threshold,
        "dropout_keep_scale": spec.dropout_keep_scale,
        "precision": _plan.PRECISIONS[spec.precision],
        "block_q": plan.block_q,
        "block_k": plan.block_k,
        "num_splits": plan.num_splits,
        "threads": plan.threads,
        "batch_div": batch_div,
    }
    return {
        name: values[name] if type_ is np.ndarray else type_(values[name])
        for name, type_ in _schema.ATTRIBUTES.items()
    }


def forward(
    implementation: str, spec: AttentionSpec, operands: Operands
) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of one device's operands."""
    library = _libraries.load(implementation)
    plan = _plan.make(library, spec, operands, "fwd")
    sizes = sizes_of(operands)
    arrays, batch_div = _arguments(spec, operands, sizes)
    batch, lq, hq = sizes.batch, sizes.lq, sizes.hq
    results = (
        jax.ShapeDtypeStruct((batch, lq, hq, sizes.dv), operands.query.dtype),
        jax.ShapeDtypeStruct((batch, lq, hq), np.float32),
        jax.ShapeDtypeStruct((plan.workspace_bytes,), np.uint8),
    )
    call = jax.ffi.ffi_call(_schema.target("fwd", implementation), results)
    out, lse, _ = call(*arrays, **_attributes(spec, operands, plan, batch_div))
    return out.reshape(sizes.out_shape), lse.reshape(sizes.lse_shape)


def backward(
    implementation: str,
    spec: AttentionSpec,
    operands: Operands,
    out: Any,
    lse: Any,
    dout: Any,
    dlse: Any,
) -> Gradients:
    """Gradients of one device's operands, each in its operand's shape and dtype."""
    library = _libraries.load(implementation)
    plan = _plan.make(library, spec, operands, "bwd")
    sizes = sizes_of(operands)
    arrays, batch_div = _arguments(spec, operands, sizes)
    batch = sizes.batch
    rows = (batch, sizes.lq, sizes.hq)
    saved = [x.reshape((batch, *x.shape[len(sizes.lead) :])) for x in (out, lse, dout, dlse)]
    dtype = operands.query.dtype
    bias_shape = arrays[Operands._fields.index("bias")].shape
    results = (
        jax.ShapeDtypeStruct((*rows, sizes.d), dtype),
        jax.ShapeDtypeStruct((batch, sizes.lkv, sizes.hkv, sizes.d), dtype),
        jax.ShapeDtypeStruct((batch, sizes.lkv, sizes.hkv, sizes.dv), dtype),
        jax.ShapeDtypeStruct(bias_shape if spec.want_dbias else (0,), np.float32),
        jax.ShapeDtypeStruct(rows if spec.want_dslopes else (0,), np.float32),
        jax.ShapeDtypeStruct(rows if spec.want_dscale else (0,), np.float32),
        jax.ShapeDtypeStruct((plan.workspace_bytes,), np.uint8),
    )
    call = jax.ffi.ffi_call(_schema.target("bwd", implementation), results)
    dq, dk, dv, dbias, dslopes, dscale, _ = call(
        *arrays, *saved, **_attributes(spec, operands, plan, batch_div)
    )

    def per_batch(gradient: Any, operand: Any, axes: tuple[int, ...] = ()) -> Any:
        """Sums a gradient of every batch index over `axes`, and to the operand's lead axes."""
        if axes:
            gradient = jnp.sum(gradient, axis=axes)
        gradient = gradient.reshape((*sizes.lead, *gradient.shape[1:]))
        return sum_to(gradient, operand)

    return Gradients(
        query=per_batch(dq, operands.query),
        key=per_batch(dk, operands.key),
        value=per_batch(dv, operands.value),
        bias=_bias_gradient(dbias, operands.bias, sizes) if spec.want_dbias else None,
        alibi_slopes=per_batch(dslopes, operands.alibi_slopes, (1,)) if spec.want_dslopes else None,
        scale=per_batch(dscale, operands.scale, (1, 2)) if spec.want_dscale else None,
    )


def _bias_gradient(dbias: Any, bias: Any, sizes: Sizes) -> Any:
    """Undoes `_flatten_lead` for a gradient that the kernel already summed to the operand."""
    rank = len(sizes.lead)
    own = [axis for axis in range(rank) if not _is_one(bias.shape[axis])]
    if dbias.shape[0] == sizes.batch:
        lead = sizes.lead
    else:
        lead = tuple(sizes.lead[a] if own and own[0] <= a <= own[-1] else 1 for a in range(rank))
    return sum_to(dbias.reshape((*lead, *dbias.shape[1:])), bias)


def sum_to(x: Any, operand: Any) -> Any:
    """Sums, in float32 or better, the axes that `operand` has as 1; casts to its dtype."""
    axes = tuple(
        axis
        for axis, (size, wanted) in enumerate(zip(x.shape, operand.shape, strict=True))
        if not _is_one(size) and _is_one(wanted)
    )
    if axes:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        x = jnp.sum(x, axis=axes, keepdims=True, dtype=wide)
    return x.astype(operand.dtype)
