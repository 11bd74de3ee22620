# SPDX-License-Identifier: Apache-2.0
"""Biases as objects: what is added to the scores, after scale and soft cap and before the mask.

A bias is a frozen pytree whose arrays have gradients; biases add with `+`, with each other and with
floating arrays. ALiBi slopes, distance decays and dense arrays run in the fused kernels.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ops import _arguments as arguments
from jax_ops._errors import argument_error, dtype_error, type_error
from jax_ops._spec import Sizes
from jax_ops.masks import STATIC, describe_object, lookup, pytree

__all__ = [
    "AlibiBias",
    "Bias",
    "ConstantBias",
    "DenseBias",
    "DistanceDecayBias",
    "SoftCap",
    "SumBias",
    "as_bias",
]


class Bias:
    """What all biases share: the operator `+`."""

    # NumPy arrays on the left of `+` leave it to the bias.
    __array_ufunc__ = None

    def value(self, b: Any, h: Any, i: Any, j: Any, shift: Any) -> Any:
        """What is added to the score of query i and key j; i' = i + shift."""
        raise NotImplementedError

    def bound(self, sizes: Sizes, batched: bool, dtype: np.dtype) -> Bias:
        """Checked against the sizes of a call, its arrays in normal form.

        Raises:
          ValueError, TypeError: an array of the bias does not fit the call.
        """
        raise NotImplementedError

    def __add__(self, other: Any) -> Bias:
        return _sum(self, other)

    def __radd__(self, other: Any) -> Bias:
        return _sum(other, self)

    def __repr__(self) -> str:
        return describe_object(self)


@pytree
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class AlibiBias(Bias):
    """Adds -slope[h] * |i' - j| (Press et al., "Train short, test long", ICLR 2022).

    Attributes:
      slopes: floating [Hq] or [B, Hq].
    """

    slopes: Any

    def value(self, b: Any, h: Any, i: Any, j: Any, shift: Any) -> Any:
        """See `Bias.value`."""
        return -lookup(jnp.atleast_2d(self.slopes), b, h) * jnp.abs(i + shift - j)

    def bound(self, sizes: Sizes, batched: bool, dtype: np.dtype) -> AlibiBias:
        """See `Bias.bound`."""
        return AlibiBias(arguments.alibi_slopes(self.slopes, sizes, batched, dtype))


@pytree
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class DistanceDecayBias(Bias):
    """Adds -alpha * |i' - j|, with one alpha for all heads.

    Attributes:
      alpha: number or floating scalar array.
    """

    alpha: Any

    def value(self, b: Any, h: Any, i: Any, j: Any, shift: Any) -> Any:
        """See `Bias.value`."""
        return -self.alpha * jnp.abs(i + shift - j)

    def bound(self, sizes: Sizes, batched: bool, dtype: np.dtype) -> DistanceDecayBias:
        """See `Bias.bound`."""
        return DistanceDecayBias(_scalar("DistanceDecayBias alpha", self.alpha, dtype))


@pytree
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class ConstantBias(Bias):
    """Adds c to every score: out stays as it is and lse grows by c.

    Attributes:
      c: number or floating scalar array.
    """

    c: Any

    def value(self, b: Any, h: Any, i: Any, j: Any, shift: Any) -> Any:
        """See `Bias.value`."""
        return self.c

    def bound(self, sizes: Sizes, batched: bool, dtype: np.dtype) -> ConstantBias:
        """See `Bias.bound`."""
        return ConstantBias(_scalar("ConstantBias c", self.c, dtype))


@pytree
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class DenseBias(Bias):
    """Adds an array.

    Attributes:
      array: floating, of rank 1 to 4, aligned on the right with [B, Hq, Lq, Lkv], each axis 1 or
        full. An entry of -inf masks.
    """

    array: Any

    def value(self, b: Any, h: Any, i: Any, j: Any, shift: Any) -> Any:
        """See `Bias.value`."""
        array = jnp.asarray(self.array)
        return lookup(array, *(b, h, i, j)[4 - array.ndim :])

    def bound(self, sizes: Sizes, batched: bool, dtype: np.dtype) -> DenseBias:
        """See `Bias.bound`."""
        return DenseBias(arguments.bias(self.array, sizes, dtype))


@pytree
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class SumBias(Bias):
    """The sum of its terms; made by `+`."""

    terms: tuple[Bias, ...]

    def value(self, b: Any, h: Any, i: Any, j: Any, shift: Any) -> Any:
        """See `Bias.value`."""
        return sum(term.value(b, h, i, j, shift) for term in self.terms)

    def bound(self, sizes: Sizes, batched: bool, dtype: np.dtype) -> SumBias:
        """See `Bias.bound`."""
        return SumBias(tuple(term.bound(sizes, batched, dtype) for term in self.terms))

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.terms))


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class SoftCap:
    """cap * tanh(score / cap), as a `score_mod` that the fused kernels know.

    Attributes:
      cap: positive number.
    """

    cap: float = dataclasses.field(metadata=STATIC)

    def __post_init__(self) -> None:
        if arguments.soft_cap(self.cap, np.dtype(np.float64)) is None:
            raise type_error("cap", None, "a positive finite number")

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """The soft cap as a `score_mod` function."""
        return self.cap * jnp.tanh(score / self.cap)

    def __repr__(self) -> str:
        return describe_object(self)


def _scalar(name: str, x: Any, dtype: np.dtype) -> jax.Array:
    """A floating scalar array from a number or a scalar array."""
    allowed = "a number or a floating scalar array"
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return jnp.asarray(x, dtype)
    x = arguments.as_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise dtype_error(name, f"dtype {x.dtype}", allowed)
    if x.shape != ():
        raise argument_error(name, f"shape {x.shape}", allowed)
    return x.astype(dtype)


def as_bias(name: str, x: Any) -> Bias:
    """A bias object from a bias object or a floating array.

    Raises:
      TypeError: for anything else; it names the argument `name`.
    """
    if isinstance(x, Bias):
        return x
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return DenseBias(x)
    raise type_error(name, type(x).__name__, "a bias object or a floating array")


def _sum(left: Any, right: Any) -> Bias:
    """Adds two biases; chains become one flat sum."""
    terms: list[Bias] = []
    for side in (as_bias("bias", left), as_bias("bias", right)):
        terms.extend(side.terms if isinstance(side, SumBias) else (side,))
    return SumBias(tuple(terms))
