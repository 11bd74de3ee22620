# SPDX-License-Identifier: Apache-2.0
"""The attention primitives that JAX transforms see: forward, tangent and backward.

All three take the operands that are present (positions in `Operands`: parameter `fields`) and

  forward:   -> out, lse
  tangent:   out, lse, then a tangent for each operand in `moving` -> tangents of out and lse.
             Linear in those tangents.
  backward:  out, lse, dout, dlse -> a gradient for each operand in `wanted`.
             Linear in (dout, dlse), and the transpose of `tangent`.

so that forward mode, reverse mode and their compositions follow from three rules. Second
derivatives differentiate the pure blockwise function (jax_ops/_xla). Each primitive has one
lowering for all platforms (partition.py, which leads to local.py).

Invariants under batching: lead axes are full or 1; a tangent has its operand's shape; a gradient
has its operand's shape.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_ops import _jax
from jax_ops._primitive import avals, partition, pure
from jax_ops._spec import DIFFERENTIABLE, EMPTY_TILE, TAIL_RANK, AttentionSpec, Operands

# Names for jax.checkpoint policies: saving both lets the backward pass run without a second
# forward pass.
CHECKPOINT_NAMES = ("attention_out", "attention_lse")

_Fields = tuple[int, ...]


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True

    @functools.lru_cache(maxsize=4096)
    def compiled(params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            return primitive.bind(*args, **dict(params))

        call.__name__ = name
        return jax.jit(call)

    def run_eagerly(*args: Any, **params: Any) -> Any:
        # jit must stay on for its own implementation's sake, or this would call itself for ever.
        with jax.disable_jit(False):
            return compiled(tuple(sorted(params.items(), key=lambda item: item[0])))(*args)

    primitive.def_impl(run_eagerly)
    return primitive


fwd_p = _primitive("attention_forward")
tan_p = _primitive("attention_tangent")
bwd_p = _primitive("attention_backward")


# Binding. Every bind aligns its arguments, so that shard_map's check needs no further rule.


def forward(spec: AttentionSpec, fields: _Fields, args: Sequence[Any]) -> list[Any]:
    """(out, lse) of packed operands."""
    return fwd_p.bind(
        *_jax.align_varying(args), spec=spec, fields=fields, marker=_jax.DEVICE_MARKER
    )


def _tangent(
    spec: AttentionSpec, fields: _Fields, moving: _Fields, args: Sequence[Any]
) -> list[Any]:
    return tan_p.bind(
        *_jax.align_varying(args),
        spec=spec,
        fields=fields,
        moving=moving,
        marker=_jax.DEVICE_MARKER,
    )


def _backward(
    spec: AttentionSpec, fields: _Fields, wanted: _Fields, args: Sequence[Any]
) -> list[Any]:
    optional = {"want_dbias": "bias", "want_dslopes": "alibi_slopes", "want_dscale": "scale"}
    wants: dict[str, Any] = {
        flag: Operands._fields.index(name) in wanted for flag, name in optional.items()
    }
    return bwd_p.bind(
        *_jax.align_varying(args),
        spec=dataclasses.replace(spec, **wants),
        fields=fields,
        wanted=wanted,
        marker=_jax.DEVICE_MARKER,
    )


# Abstract evaluation.


@fwd_p.def_abstract_eval
def _forward_abstract(*args: Any, spec: AttentionSpec, fields: _Fields, marker: Any) -> Any:
    return avals.forward_avals(fields, args)


@tan_p.def_abstract_eval
def _tangent_abstract(
    *args: Any, spec: AttentionSpec, fields: _Fields, moving: _Fields, marker: Any
) -> Any:
    return avals.forward_avals(fields, args)


@bwd_p.def_abstract_eval
def _backward_abstract(
    *args: Any, spec: AttentionSpec, fields: _Fields, wanted: _Fields, marker: Any
) -> Any:
    return avals.gradient_avals(fields, args, wanted)


# JVP rules.


def _moving_fields(fields: _Fields, tangents: Sequence[Any]) -> _Fields:
    return tuple(
        field
        for field, tangent in zip(fields, tangents[: len(fields)], strict=True)
        if field in DIFFERENTIABLE and not isinstance(tangent, ad.Zero)
    )


def _pick(fields: _Fields, chosen: _Fields, values: Sequence[Any]) -> list[Any]:
    return [values[fields.index(i)] for i in chosen]


def _add(terms: list[Sequence[Any]]) -> list[Any]:
    return [functools.reduce(jnp.add, parts) for parts in zip(*terms, strict=True)]


def _second(
    function: Callable[..., tuple[Any, ...]],
    fields: _Fields,
    through: _Fields,
    args: Sequence[Any],
    tangents: Sequence[Any],
    results: Sequence[Any],
) -> Sequence[Any]:
    """Tangents of function(operands, *rest) when the operands `through` move.

    `args` are the packed operands and the rest; `results` are typed like the results.
    """

    def call(directions: Sequence[Any], *args: Any) -> tuple[Any, ...]:
        operands, rest = avals.unpack(fields, args), args[len(fields) :]

        def moved(*values: Any) -> tuple[Any, ...]:
            return function(pure.replace(operands, through, values), *rest)

        return jax.jvp(moved, _pick(fields, through, args), list(directions))[1]

    return _jax.with_automatic_axes(call, results)(_pick(fields, through, tangents), *args)


def _forward_jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    spec: AttentionSpec,
    fields: _Fields,
    marker: Any,
) -> Any:
    out, lse = forward(spec, fields, primals)
    out, lse = (checkpoint_name(x, n) for x, n in zip((out, lse), CHECKPOINT_NAMES, strict=True))
    moving = _moving_fields(fields, tangents)
    if not moving:
        return [out, lse], [_jax.zero_tangent(out), _jax.zero_tangent(lse)]
    args = [*primals, out, lse, *_pick(fields, moving, tangents)]
    return [out, lse], _tangent(spec, fields, moving, args)


def _tangent_jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    spec: AttentionSpec,
    fields: _Fields,
    moving: _Fields,
    marker: Any,
) -> Any:
    # out and lse are functions of the operands, so their own tangents say nothing new.
    count = len(fields)
    result = _tangent(spec, fields, moving, primals)
    terms: list[Sequence[Any]] = []
    second = [ad.instantiate_zeros(t) for t in tangents[count + 2 :]]
    if any(not isinstance(t, ad.Zero) for t in tangents[count + 2 :]):
        terms.append(_tangent(spec, fields, moving, [*primals[: count + 2], *second]))
    through = _moving_fields(fields, tangents)
    if through:

        def function(operands: Operands, *tangents: Any) -> tuple[Any, Any]:
            return pure.tangent(spec, operands, moving, tangents)

        args = [*primals[:count], *primals[count + 2 :]]
        terms.append(_second(function, fields, through, args, tangents, result))
    if not terms:
        return result, [_jax.zero_tangent(x) for x in result]
    return result, _add(terms)


def _backward_jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    spec: AttentionSpec,
    fields: _Fields,
    wanted: _Fields,
    marker: Any,
) -> Any:
    count = len(fields)
    result = _backward(spec, fields, wanted, primals)
    terms: list[Sequence[Any]] = []
    cotangents = tangents[count + 2 :]
    if any(not isinstance(t, ad.Zero) for t in cotangents):
        args = [*primals[: count + 2], *map(ad.instantiate_zeros, cotangents)]
        terms.append(_backward(spec, fields, wanted, args))
    through = _moving_fields(fields, tangents)
    if through:

        def function(operands: Operands, dout: Any, dlse: Any) -> tuple[Any, ...]:
            return pure.backward(spec, operands, wanted, dout, dlse)

        args = [*primals[:count], *primals[count + 2 :]]
        terms.append(_second(function, fields, through, args, tangents, result))
    if not terms:
        return result, [_jax.zero_tangent(x) for x in result]
    return result, _add(terms)


ad.primitive_jvps[fwd_p] = _forward_jvp
ad.primitive_jvps[tan_p] = _tangent_jvp
ad.primitive_jvps[bwd_p] = _backward_jvp


# Transposes: tangent and backward are each other's.


def _tangent_transpose(
    cotangents: Sequence[Any],
    *args: Any,
    spec: AttentionSpec,
    fields: _Fields,
    moving: _Fields,
    marker: Any,
) -> Any:
    count = len(fields)
    linear = [ad.is_undefined_primal(x) for x in args[count + 2 :]]
    wanted = tuple(i for i, is_linear in zip(moving, linear, strict=True) if is_linear)
    gradients = iter(
        _backward(
            spec, fields, wanted, [*args[: count + 2], *map(ad.instantiate_zeros, cotangents)]
        )
    )
    return [None] * (count + 2) + [next(gradients) if is_linear else None for is_linear in linear]


def _backward_transpose(
    cotangents: Sequence[Any],
    *args: Any,
    spec: AttentionSpec,
    fields: _Fields,
    wanted: _Fields,
    marker: Any,
) -> Any:
    count = len(fields)
    moving = tuple(
        i for i, ct in zip(wanted, cotangents, strict=True) if not isinstance(ct, ad.Zero)
    )
    directions = _pick(wanted, moving, cotangents)
    results = _tangent(spec, fields, moving, [*args[: count + 2], *directions])
    return [None] * (count + 2) + [
        _sum_to(result, x.aval.shape) if ad.is_undefined_primal(x) else None
        for result, x in zip(results, args[count + 2 :], strict=True)
    ]


def _sum_to(x: Any, shape: Sequence[int]) -> Any:
    """Sums the axes of `x` that are 1 in `shape`."""
    axes = tuple(
        axis
        for axis, (size, wanted) in enumerate(zip(x.shape, shape, strict=True))
        if size != wanted
    )
    return jnp.sum(x, axis=axes, keepdims=True) if axes else x


ad.primitive_transposes[tan_p] = _tangent_transpose
ad.primitive_transposes[bwd_p] = _backward_transpose


# Batching: a mapped operand gets one more lead axis, an unmapped one a lead axis of 1.


def _batch_args(fields: _Fields, args: Sequence[Any], dims: Sequence[Any]) -> tuple[list[Any], Any]:
    """Moves mapped axes to the front; returns the new arguments and the size of the mapped axis."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    moved = []
    for position, (x, dim) in enumerate(zip(args, dims, strict=True)):
        has_lead = position >= len(fields) or TAIL_RANK[fields[position]] is not None
        if dim is not None:
            moved.append(jnp.moveaxis(x, dim, 0))
        else:
            moved.append(jnp.expand_dims(x, 0) if has_lead else x)
    return _fold_bit_tiles(fields, moved, dims), size


def _fold_bit_tiles(fields: _Fields, args: list[Any], dims: Sequence[Any]) -> list[Any]:
    """Stacks mapped bit tiles [v, n, 64, 2] into one list, to which the tile numbers then point."""
    bits_field = Operands._fields.index("block_bits")
    if bits_field not in fields or dims[fields.index(bits_field)] is None:
        return args
    at_bits = fields.index(bits_field)
    at_index = fields.index(Operands._fields.index("block_index"))
    bits, index = args[at_bits], args[at_index]
    first = jnp.arange(bits.shape[0], dtype=np.int32) * bits.shape[1]
    first = first.reshape((-1,) + (1,) * (index.ndim - 1))
    args[at_index] = jnp.where(index > EMPTY_TILE, index + first, index)
    args[at_bits] = bits.reshape((-1, *bits.shape[2:]))
    return args


def _maps_dropout_heads(fields: _Fields, dims: Sequence[Any]) -> bool:
    field = Operands._fields.index("dropout_head")
    return field in fields and dims[fields.index(field)] is not None


def _one_by_one(primitive: Primitive, args: Sequence[Any], dims: Sequence[Any], params: Any) -> Any:
    """Batches by a loop: for mapped dropout head indices, which kernels share between batches."""
    mapped = [jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True) if d is not None]

    def call(slices: list[Any]) -> Any:
        rest = iter(slices)
        full = [x if d is None else next(rest) for x, d in zip(args, dims, strict=True)]
        return primitive.bind(*full, **params)

    outs = jax.lax.map(call, mapped)
    return outs, [0] * len(outs)


def _same_mapping(x: Any, y: Any, size: Any) -> tuple[Any, Any]:
    """Repeats the unmapped one of a pair of which only one is mapped."""
    if x.shape[0] == y.shape[0]:
        return x, y
    x, y = (jnp.broadcast_to(a, (size, *a.shape[1:])) for a in (x, y))
    return x, y


def _forward_batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    fields = params["fields"]
    if _maps_dropout_heads(fields, dims):
        return _one_by_one(fwd_p, args, dims, params)
    args, size = _batch_args(fields, args, dims)
    return _full_results(fwd_p.bind(*_jax.align_varying(args), **params), size), [0, 0]


def _full_results(results: Sequence[Any], size: Any) -> list[Any]:
    """Results of a call of which only operands without lead axes were mapped lack the new axis."""
    return [x if x.shape[0] == size else jnp.broadcast_to(x, (size, *x.shape[1:])) for x in results]


def _tangent_batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    fields, moving = params["fields"], params["moving"]
    if _maps_dropout_heads(fields, dims):
        return _one_by_one(tan_p, args, dims, params)
    args, size = _batch_args(fields, args, dims)
    for number, field in enumerate(moving):
        at_operand, at_tangent = fields.index(field), len(fields) + 2 + number
        args[at_operand], args[at_tangent] = _same_mapping(args[at_operand], args[at_tangent], size)
    return _full_results(tan_p.bind(*_jax.align_varying(args), **params), size), [0, 0]


def _backward_batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    fields, wanted = params["fields"], params["wanted"]
    if _maps_dropout_heads(fields, dims):
        return _one_by_one(bwd_p, args, dims, params)
    args, size = _batch_args(fields, args, dims)
    # A gradient under vmap belongs to one mapped index, also for an operand that all share.
    for field in wanted:
        position = fields.index(field)
        x = args[position]
        args[position] = jnp.broadcast_to(x, (size, *x.shape[1:]))
    return bwd_p.bind(*_jax.align_varying(args), **params), [0] * len(wanted)


batching.primitive_batchers[fwd_p] = _forward_batch
batching.primitive_batchers[tan_p] = _tangent_batch
batching.primitive_batchers[bwd_p] = _backward_batch


# Lowering: one rule for all platforms.


def _lower(kind: str) -> Callable[..., Any]:
    def rule(ctx: Any, *args: Any, marker: Any, **params: Any) -> Any:
        function = partition.global_function(
            kind,
            ctx.avals_in,
            ctx.avals_out,
            distributed=not _jax.inside_manual_axes(ctx),
            **params,
        )
        return _jax.lower_as_jax(function)(ctx, *args)

    return rule


mlir.register_lowering(fwd_p, _lower("forward"))
mlir.register_lowering(tan_p, _lower("tangent"))
mlir.register_lowering(bwd_p, _lower("backward"))
