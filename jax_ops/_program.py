# SPDX-License-Identifier: Apache-2.0
"""Functions of users as programs that can be compared, so that what was compiled is found again.

jit finds compiled code by the identity of a function, which says too little here: a lambda is a new
function in each call, and a method that reads `self.table` stays the same one when the table has
changed. So a function is traced in every call, on scalars, which is cheap; what it captured becomes
operands; and programs are compared equation by equation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function without the values that it captured. Hashable.

    Attributes:
      key: its equations and mesh. Programs of equal keys do the same; the other way round need not
        hold.
      jaxpr: the equations for running them. Keeps alive what `key` knows by address.
    """

    key: Any = dataclasses.field(repr=False)
    jaxpr: Any = dataclasses.field(compare=False)

    def bind(self, captured: Sequence[Any]) -> Callable[..., Any]:
        """The function, with the values that it captured; several results make a tuple."""
        function = jex.jaxpr_as_fun(jex.ClosedJaxpr(self.jaxpr, list(captured)))

        def call(*args: Any) -> Any:
            results = function(*args)
            return results[0] if len(results) == 1 else tuple(results)

        return call


def trace(function: Callable[..., Any], *shapes: jax.ShapeDtypeStruct) -> tuple[Program, list[Any]]:
    """A function as (program, captured values), from the shapes and dtypes of its arguments."""
    closed = jax.make_jaxpr(function)(*shapes)
    # Equations remember the mesh that was set, and run with no other.
    key = jax.sharding.get_abstract_mesh(), _key(closed.jaxpr)
    return Program(key, closed.jaxpr), list(closed.consts)


def _key(jaxpr: Any) -> Any:
    """Equations in a form that compares: variables as numbers, parameters by value."""
    numbers: dict[Any, int] = {}

    def atom(x: Any) -> Any:
        if isinstance(x, jex.Literal):
            return x.aval, np.asarray(x.val).tobytes()
        return numbers.setdefault(x, len(numbers))

    def define(variables: Sequence[Any]) -> tuple[Any, ...]:
        return tuple((atom(v), v.aval) for v in variables)

    return (
        define(jaxpr.constvars),
        define(jaxpr.invars),
        tuple(
            (
                equation.primitive,
                tuple(map(atom, equation.invars)),
                _parameter(equation.params),
                define(equation.outvars),
            )
            for equation in jaxpr.eqns
        ),
        tuple(map(atom, jaxpr.outvars)),
    )


def _parameter(x: Any) -> Any:
    """A parameter of an equation by value; by address where it has none that can be compared."""
    if isinstance(x, jex.ClosedJaxpr):
        return _key(x.jaxpr), tuple(map(id, x.consts))
    if isinstance(x, jex.Jaxpr):
        return _key(x)
    if isinstance(x, dict):
        return tuple((name, _parameter(x[name])) for name in sorted(x))
    if isinstance(x, (tuple, list)):
        return type(x), tuple(map(_parameter, x))
    try:
        hash(x)
    except TypeError:
        return id(x)
    return x
