# SPDX-License-Identifier: Apache-2.0
"""What is computed: bare attention, or (suite `layer`) an attention layer with projections.

An operation gives inputs, a reference and programs; everything that measures is written against
it and does not know which one it has.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from benchmarks.harness import inputs, reference
from benchmarks.harness.case import Case
from benchmarks.harness.implementations import IMPLEMENTATIONS
from benchmarks.harness.inputs import Arrays
from benchmarks.harness.layer import LayerOperation
from benchmarks.harness.program import JaxProgram, Program


class Operation(Protocol):
    """The interface of everything that is measured."""

    def part_names(self, case: Case) -> tuple[str, ...]:
        """Names of the outputs that the gate compares."""

    def inputs(self, case: Case) -> Arrays:
        """The differentiable inputs, and in fwd_bwd the cotangent as the last one."""

    def reference(self, case: Case, arrays: Arrays, arithmetic: reference.Arithmetic) -> Arrays:
        """The outputs in the given arithmetic."""

    def reordered(self, arrays: Arrays, variant: int, back: bool = False) -> Arrays:
        """Inputs, or outputs, with their features in another order (inputs.feature_order).

        The problem is the same, but sums over features round differently.
        """

    def program(self, impl: str, case: Case, arrays: Arrays, backend: str) -> Program:
        """The compiled implementation; raises UnsupportedCaseError with the reason."""


class AttentionOperation:
    """out = attention(q, k, v), or dq, dk, dv from a cotangent of out."""

    def part_names(self, case: Case) -> tuple[str, ...]:
        return ("out",) if case.mode == "fwd" else ("dq", "dk", "dv")

    def inputs(self, case: Case) -> Arrays:
        q, k, v, cotangent = inputs.attention_inputs(case)
        return (q, k, v) if case.mode == "fwd" else (q, k, v, cotangent)

    def reference(self, case: Case, arrays: Arrays, arithmetic: reference.Arithmetic) -> Arrays:
        cotangent = arrays[3] if case.mode == "fwd_bwd" else None
        return reference.attention(case, *arrays[:3], cotangent, arithmetic)

    def reordered(self, arrays: Arrays, variant: int, back: bool = False) -> Arrays:
        order = inputs.feature_order(arrays[0].shape[-1], variant, back)
        return tuple(array[..., order] for array in arrays)

    def program(self, impl: str, case: Case, arrays: Arrays, backend: str) -> Program:
        implementation = IMPLEMENTATIONS[impl]
        function = implementation.build(case, backend)
        backward = case.mode == "fwd_bwd"
        if implementation.library == "torch":
            from benchmarks.harness.torch_peer import TorchProgram

            return TorchProgram(function, arrays, backward, backend)
        return JaxProgram(function, arrays, backward, backend)


def operation_of(case: Case) -> Operation:
    """The operation of a case's suite."""
    if case.model_dim is not None:
        return LayerOperation()
    return AttentionOperation()


def different(arrays: Arrays) -> Arrays:
    """Other inputs of the same shapes: a program that reads its arguments must answer otherwise.

    Each array is rolled by a different amount along its last axis (equal rolls of q and k would
    leave every score as it was) and negated.
    """
    return tuple(-np.roll(array, shift + 1, axis=-1) for shift, array in enumerate(arrays))
