# SPDX-License-Identifier: Apache-2.0
"""`explain`: which implementation would run a call, and why each other one would not, in words."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
import numpy as np

from jax_ops import _peers, dispatch
from jax_ops._arguments import platform as checked_platform
from jax_ops._spec import AttentionSpec, Operands, Problem
from jax_ops.attention import dot_product_attention, problem_of


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What would happen to a call. `str()` of it is the text for people.

    Attributes:
      platform: what the call would be compiled for.
      implementation: the one that would run the forward pass; None: the call would raise.
      backward: the one that would run its gradient; None: that would raise.
      reasons: why each other implementation would not run the forward pass.
    """

    platform: str
    implementation: str | None
    backward: str | None
    reasons: dict[str, str]

    def __str__(self) -> str:
        lines = [
            f"On {self.platform}: " + (self.implementation or "no implementation can run this")
        ]
        if self.implementation and self.backward != self.implementation:
            lines[0] += f" (gradient: {self.backward or 'none'})"
        lines += [f"  {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)


def explain(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Explanation:
    """Says which implementation `dot_product_attention` with these arguments would run, and why.

    Takes what `dot_product_attention` takes; arrays may be `jax.ShapeDtypeStruct`s, and nothing is
    computed. The further option `platform` ('cpu', 'cuda', ..) asks about another platform than the
    default device's.

    Raises:
      ValueError, TypeError: as `dot_product_attention` would, for arguments that no implementation
        takes.
    """
    platform = checked_platform(options.pop("platform", None)) or dispatch.default_platform()
    call = inspect.signature(dot_product_attention).bind(query, key, value, *args, **options)
    problem = _abstract_problem(call.arguments)
    spec, operands = problem.spec, problem.operands
    if spec.implementation in dispatch.PEERS:
        reason = _peers.refusal(problem)
        reasons = {spec.implementation: reason} if reason else {}
        name = None if reason else spec.implementation
        return Explanation(platform, name, name, reasons)
    forward = dispatch.choose(platform, spec, operands)
    backward = dispatch.choose(platform, _with_gradients(spec, operands), operands, "bwd")
    reasons = dict(forward.reasons)
    for peer in dispatch.PEERS:
        reasons[peer] = "is a peer with its own semantics: only an explicit choice takes it"
    return Explanation(platform, forward.implementation, backward.implementation, reasons)


def _with_gradients(spec: AttentionSpec, operands: Operands) -> AttentionSpec:
    """The spec of the gradient of every operand that has one."""
    return dataclasses.replace(
        spec,
        want_dbias=operands.bias is not None,
        want_dslopes=operands.alibi_slopes is not None,
        want_dscale=operands.scale is not None,
    )


def _abstract_problem(arguments: dict[str, Any]) -> Problem:
    """The problem of a call, with shapes in place of arrays."""
    arrays = {name: x for name, x in arguments.items() if _is_array(x)}
    static = {name: x for name, x in arguments.items() if name not in arrays}
    kept: list[Problem] = []

    def trace(arrays: dict[str, Any]) -> Operands:
        problem = problem_of(**arrays, **static)
        kept.append(problem)
        return problem.operands

    operands = jax.eval_shape(trace, arrays)
    return kept[0]._replace(operands=operands)


def _is_array(x: Any) -> bool:
    """Whether JAX can trace a value as an array; what it cannot is refused by name elsewhere."""
    if not isinstance(x, np.ndarray):
        return isinstance(x, (jax.Array, jax.ShapeDtypeStruct))
    try:
        jax.eval_shape(lambda x: x, x)
    except (TypeError, ValueError):
        return False
    return True
