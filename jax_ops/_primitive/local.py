# SPDX-License-Identifier: Apache-2.0
"""One device's work: primitives that exist only inside lowerings, with a lowering per platform.

Here a call meets its implementation: `dispatch` chooses, on the platform that is compiled for and
with the sizes of one shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_ops import _jax, dispatch
from jax_ops._primitive import avals, native, pure
from jax_ops._spec import AttentionSpec, Gradients, Operands
from jax_ops._xla import blockwise

forward_local_p = Primitive("attention_forward_local")
forward_local_p.multiple_results = True
backward_local_p = Primitive("attention_backward_local")
backward_local_p.multiple_results = True

# The forward and the backward program of each implementation of our own.
PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "xla": (blockwise.forward, blockwise.backward),
    **{
        name: (functools.partial(native.forward, name), functools.partial(native.backward, name))
        for name in ("cpu", "cuda", "emulated")
    },
}
_OTHER_PLATFORMS = "other"


def local_function(
    kind: str, spec: AttentionSpec, fields: tuple[int, ...], chosen: tuple[int, ...]
) -> Callable[..., Sequence[Any]]:
    """The work of one shard, as a function of packed arguments.

    Args:
      kind: 'forward', 'tangent' or 'backward'; the arguments are those of the primitive of that
        name in differentiable.py, all in full lead shape where they look like out or lse.
      spec: the static options.
      fields: positions of the operands that are packed.
      chosen: positions of the operands that move (tangent) or whose gradients are wanted.
    """
    count = len(fields)

    def forward(*args: Any) -> Sequence[Any]:
        return forward_local_p.bind(*_jax.align_varying(args), spec=spec, fields=fields)

    def tangent(*args: Any) -> Sequence[Any]:
        return pure.tangent(spec, avals.unpack(fields, args), chosen, args[count + 2 :])

    def backward(*args: Any) -> Sequence[Any]:
        return backward_local_p.bind(
            *_jax.align_varying(args), spec=spec, fields=fields, wanted=chosen
        )

    return {"forward": forward, "tangent": tangent, "backward": backward}[kind]


@forward_local_p.def_abstract_eval
def _forward_abstract(*args: Any, spec: AttentionSpec, fields: tuple[int, ...]) -> Any:
    return avals.forward_avals(fields, args)


@backward_local_p.def_abstract_eval
def _backward_abstract(
    *args: Any, spec: AttentionSpec, fields: tuple[int, ...], wanted: tuple[int, ...]
) -> Any:
    return avals.gradient_avals(fields, args, wanted)


def _lower_forward(platform: str) -> Callable[..., Any]:
    def rule(ctx: Any, *args: Any, spec: AttentionSpec, fields: tuple[int, ...]) -> Any:
        shapes = avals.unpack(fields, ctx.avals_in)
        implementation = dispatch.implementation_for(platform, spec, shapes, "fwd")

        forward, _ = PROGRAMS[implementation]

        def call(*arrays: Any) -> Any:
            return forward(spec, avals.unpack(fields, arrays))

        return _jax.lower_as_jax(call)(ctx, *args)

    return rule


def _lower_backward(platform: str) -> Callable[..., Any]:
    def rule(
        ctx: Any,
        *args: Any,
        spec: AttentionSpec,
        fields: tuple[int, ...],
        wanted: tuple[int, ...],
    ) -> Any:
        shapes = avals.unpack(fields, ctx.avals_in)
        implementation = dispatch.implementation_for(platform, spec, shapes, "bwd")

        _, backward = PROGRAMS[implementation]

        def call(*arrays: Any) -> Any:
            operands = avals.unpack(fields, arrays)
            gradients = backward(spec, operands, *arrays[len(fields) :])
            by_field = dict(zip(Gradients._fields, gradients, strict=True))
            return [by_field[Operands._fields[field]] for field in wanted]

        return _jax.lower_as_jax(call)(ctx, *args)

    return rule


for _primitive, _lower in (
    (forward_local_p, _lower_forward),
    (backward_local_p, _lower_backward),
):
    mlir.register_lowering(_primitive, _lower("cpu"), platform="cpu")
    mlir.register_lowering(_primitive, _lower("cuda"), platform="cuda")
    mlir.register_lowering(_primitive, _lower(_OTHER_PLATFORMS))
