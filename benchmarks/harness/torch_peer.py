# SPDX-License-Identifier: Apache-2.0
"""torch.nn.functional.scaled_dot_product_attention as a measured peer.

torch gets its inputs in its own layout, [B, H, L, D] and contiguous, so that no transposition is
charged to it. It uses as many threads as XLA's pool has.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.harness.case import Case
from benchmarks.harness.errors import UnsupportedCaseError


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise UnsupportedCaseError(
            f"torch is not installed ({error}); it comes with --config=peers"
        ) from error
    return torch


def attention(case: Case) -> Callable[..., Any]:
    """A function of torch tensors q, k, v in [B, H, L, D]."""
    torch = _torch()
    if case.causal and case.lq != case.lkv:
        raise UnsupportedCaseError("torch aligns is_causal top-left; this case has Lq != Lkv")
    options: dict[str, Any] = {"is_causal": case.causal}
    if case.group != 1:
        options["enable_gqa"] = True
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def call(q, k, v):
        try:
            return sdpa(q, k, v, **options)
        except TypeError as error:  # enable_gqa came with torch 2.5.
            raise UnsupportedCaseError(
                f"torch {torch.__version__} lacks enable_gqa: {error}"
            ) from error

    return call


class TorchProgram:
    """The Program protocol over an eager torch function of [B, H, L, D] tensors."""

    def __init__(
        self,
        function: Callable[..., Any],
        arrays: Sequence[np.ndarray],
        backward: bool,
        backend: str,
    ):
        self._torch = _torch()
        self._function = function
        self._backward = backward
        if backend == "cpu":
            self._device = "cpu"
            self._torch.set_num_threads(len(os.sched_getaffinity(0)))
        elif self._torch.cuda.is_available():
            self._device = "cuda"
        else:
            raise UnsupportedCaseError(
                "this torch has no CUDA; it would be measured on another device"
            )
        self.memory: dict[str, Any] = {}
        # Eager torch compiles nothing; its set-up is the first call, which is not timed either.
        started = time.perf_counter()
        self.wait(self.run(self.stage(arrays)))
        self.compile_s = time.perf_counter() - started

    def stage(self, arrays: Sequence[np.ndarray]) -> Any:
        return [self._tensor(array) for array in arrays]

    def _tensor(self, array: np.ndarray) -> Any:
        torch = self._torch
        transposed = np.ascontiguousarray(array.transpose(0, 2, 1, 3))
        if array.dtype.name == "bfloat16":
            tensor = torch.from_numpy(transposed.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(transposed)
        # clone: the tensor must own its memory, or rotated inputs could share one numpy buffer.
        return tensor.clone().to(self._device).requires_grad_(self._backward)

    def run(self, staged: Any) -> Any:
        if not self._backward:
            with self._torch.no_grad():
                return (self._function(*staged),)
        *inputs, cotangent = staged
        out = self._function(*inputs)
        return self._torch.autograd.grad(out, inputs, cotangent)

    def wait(self, outputs: Any) -> None:
        if self._device == "cuda":
            self._torch.cuda.synchronize()

    def to_numpy(self, outputs: Any) -> list[np.ndarray]:
        return [
            x.detach().to("cpu", self._torch.float32).numpy().transpose(0, 2, 1, 3) for x in outputs
        ]
