# SPDX-License-Identifier: Apache-2.0
"""What differs between JAX versions, or has no fully public name, is reached through this file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import ad, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def setting(name: str) -> Any:
    """Value of one of JAX's configuration options, in this thread's context."""
    return getattr(jax.config, name)


def broadcasting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets `function` broadcast arrays of different ranks, whatever the user's setting.

    jax_numpy_rank_promotion = 'raise' is meant for the user's arithmetic; here it is on purpose.
    """
    return jax.numpy_rank_promotion("allow")(function)


def varying_axes(aval: Any) -> frozenset:
    """Manual mesh axes over which a value varies (shard_map's check_vma)."""
    manual = getattr(aval, "manual_axis_type", None)
    return manual.varying if manual is not None else getattr(aval, "vma", frozenset())


def align_varying(args: Sequence[Any]) -> list[Any]:
    """Casts `args` so that all vary over the union of their varying mesh axes.

    With aligned inputs a primitive needs no replication rule, and the transpose of the cast sums
    the gradient of an operand that was shared over a mesh axis.
    """
    axes = [varying_axes(jax.typeof(x)) for x in args]
    union = frozenset().union(*axes)
    if not union:
        return list(args)
    return [
        jax.lax.pcast(x, tuple(sorted(union - own, key=str)), to="varying") if union - own else x
        for x, own in zip(args, axes, strict=True)
    ]


def result_aval(like: Any, shape: Sequence[int], dtype: Any, spec: Sequence[Any]) -> Any:
    """An aval with `like`'s mesh and varying axes, of another shape, dtype and partition spec."""
    sharding = NamedSharding(like.sharding.mesh, PartitionSpec(*spec))
    return like.update(shape=tuple(shape), dtype=dtype, weak_type=False, sharding=sharding)


def zero_tangent(x: Any) -> ad.Zero:
    """The symbolic zero tangent of a value."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def with_automatic_axes(function: Callable[..., Any], results: Sequence[Any]) -> Callable[..., Any]:
    """`function` of explicitly sharded arrays, traced with the partitioner in charge instead.

    `results` are arrays or avals typed like its results, whose shardings those then get.
    """
    types = [x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x) for x in results]
    shardings = tuple(type_.sharding for type_ in types)
    if AxisType.Explicit not in shardings[0].mesh.axis_types:
        return function
    return jax.sharding.auto_axes(function, out_sharding=shardings)


def has_typed_mesh_axes() -> bool:
    """Whether types of values traced here name mesh axes: in shard_map, and with explicit axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return bool(mesh.manual_axes) or AxisType.Explicit in mesh.axis_types


def has_explicit_axes(x: Any) -> bool:
    """Whether the type of a value is on a mesh with explicit axes."""
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def without_mesh() -> contextlib.AbstractContextManager[Any]:
    """Traces as if no mesh were set."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def lower_as_jax(function: Callable[..., Any]) -> Callable[..., Any]:
    """A lowering rule that traces `function` on plain avals.

    A lowering works on one device's arrays or leaves distribution to the partitioner, so it traces
    without explicit shardings and varying axes: its reshapes and loops need not carry them.
    """
    lower = mlir.lower_fun(function, multiple_results=True)

    def rule(ctx: Any, *args: Any, **params: Any) -> Any:
        def plain(avals: Sequence[Any]) -> list[Any]:
            return [jax.core.ShapedArray(a.shape, a.dtype) for a in avals]

        ctx = ctx.replace(avals_in=plain(ctx.avals_in), avals_out=plain(ctx.avals_out))
        return lower(ctx, *args, **params)

    return rule


def inside_manual_axes(ctx: Any) -> bool:
    """Whether a lowering happens in shard_map, where custom_partitioning must not be used."""
    return bool(getattr(ctx.module_context.axis_context, "manual_axes", ()))


def _device_marker() -> Any:
    @custom_partitioning
    def marked(x: jax.Array) -> jax.Array:
        return x

    marked.def_partition(
        partition=lambda mesh, args, result: (
            mesh,
            lambda x: x,
            result.sharding,
            (args[0].sharding,),
        ),
        sharding_rule="i -> i",
    )
    return jax.make_jaxpr(marked)(jax.ShapeDtypeStruct((1,), "float32"))


# jit tells a lowering which devices it compiles for only when the program holds a
# custom_partitioning equation, also one inside an equation's parameters. Ours appear only during
# lowering, so each differentiable primitive carries this one-equation program as a parameter.
DEVICE_MARKER = _device_marker()
