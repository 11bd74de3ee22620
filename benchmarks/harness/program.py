# SPDX-License-Identifier: Apache-2.0
"""A program is one compiled operation that the clock can run: the only thing timing.py knows.

`JaxProgram` compiles ahead of time, so that neither tracing nor compilation can fall inside the
clock, and returns every output (in fwd_bwd the gradient of every input), so that the compiler has
nothing to remove.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from benchmarks.harness.case import MIB
from benchmarks.harness.errors import WrongResultError


class Program(Protocol):
    """What timing needs of an implementation that is ready to run."""

    compile_s: float
    # Row fields known after compilation: xla_*_mb, residual_*.
    memory: dict[str, Any]

    def stage(self, arrays: Sequence[np.ndarray]) -> Any:
        """Copies one set of inputs to the device; every call makes new buffers."""

    def run(self, staged: Any) -> Any:
        """Starts one call and returns its outputs, possibly before they are computed."""

    def wait(self, outputs: Any) -> None:
        """Returns once every output is computed."""

    def to_numpy(self, outputs: Any) -> list[np.ndarray]:
        """Outputs as float32 numpy arrays, in the order (out,) or gradients by input."""


class JaxProgram:
    """An ahead-of-time compiled JAX function of arrays.

    Args:
      function: maps the inputs (all but the cotangent) to one array.
      arrays: the inputs and, where `backward`, the cotangent of the output as the last one.
      backward: compile the vjp instead of the function.
      backend: the JAX backend on whose first device it runs.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arrays: Sequence[np.ndarray],
        backward: bool,
        backend: str,
    ):
        import jax

        from benchmarks.harness.residuals import saved_residuals

        self._device = jax.devices(backend)[0]
        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        self.memory: dict[str, Any] = {}
        if backward:
            self.memory |= saved_residuals(function, shapes[:-1])

        def forward(*inputs):
            return (function(*inputs),)

        def forward_backward(*inputs_and_cotangent):
            *inputs, cotangent = inputs_and_cotangent
            _, pullback = jax.vjp(function, *inputs)
            return pullback(cotangent)

        started = time.perf_counter()
        with jax.default_device(self._device):
            lowered = jax.jit(forward_backward if backward else forward).lower(*shapes)
            self._compiled = lowered.compile()
        self.compile_s = time.perf_counter() - started
        self.memory |= _memory_analysis(self._compiled)
        _check_arguments(self.memory, arrays)

    def stage(self, arrays: Sequence[np.ndarray]) -> Any:
        import jax
        import jax.numpy as jnp

        # On the CPU device_put may alias the numpy buffer: copy, or rotated inputs would be one.
        with jax.default_device(self._device):
            staged = [jnp.array(jax.device_put(array, self._device), copy=True) for array in arrays]
        jax.block_until_ready(staged)
        return staged

    def run(self, staged: Any) -> Any:
        return self._compiled(*staged)

    def wait(self, outputs: Any) -> None:
        import jax

        jax.block_until_ready(outputs)

    def to_numpy(self, outputs: Any) -> list[np.ndarray]:
        return [np.asarray(x).astype(np.float32) for x in outputs]


def _memory_analysis(compiled: Any) -> dict[str, float]:
    analysis = compiled.memory_analysis()
    if analysis is None:  # Some backends have none; the fields are then absent.
        return {}
    return {
        "xla_temp_mb": analysis.temp_size_in_bytes / MIB,
        "xla_arg_mb": analysis.argument_size_in_bytes / MIB,
        "xla_out_mb": analysis.output_size_in_bytes / MIB,
    }


def _check_arguments(memory: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
    """Refuses a program that takes less than its inputs: captured constants or unread inputs."""
    expected = sum(array.nbytes for array in arrays) / MIB
    taken = memory.get("xla_arg_mb")
    if taken is not None and taken < expected * 0.999:
        raise WrongResultError(
            f"the compiled program takes {taken:.6g} MiB of arguments, its inputs are "
            f"{expected:.6g} MiB: an input was captured as a constant or is never read"
        )
