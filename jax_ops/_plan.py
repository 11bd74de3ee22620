# SPDX-License-Identifier: Apache-2.0
"""Asks a native library's planner (kernels/common/plan.h) for tile sizes, splits and workspace."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jax_ops import _schema
from jax_ops._libraries import Library
from jax_ops._spec import AttentionSpec, Operands, sizes_of

DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
PRECISIONS = {"default": 0, "highest": 1}
OPERATIONS = {"fwd": 0, "bwd": 1}

# What a plan for CUDA assumes where no device is there to ask (export from another machine).
_ASSUMED_SM_COUNT = 108
_ASSUMED_COMPUTE_CAPABILITY = 80


class _Request(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "lq", "lkv", "hq", "hkv", "d", "dv")),
        ("features", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("block_q", "block_k", "num_splits")),
        *((name, ctypes.c_int64) for name in ("window_left", "window_right", "dbias_elements")),
        *((name, ctypes.c_int32) for name in ("operation", "dtype", "precision")),
        *((name, ctypes.c_int32) for name in ("threads", "sm_count", "compute_capability")),
    ]


class _Result(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("block_q", "block_k", "num_splits")),
        ("workspace_bytes", ctypes.c_int64),
        ("message", ctypes.c_char * 256),
    ]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a kernel will use; `workspace_bytes` may be a symbolic expression of the batch."""

    block_q: int
    block_k: int
    num_splits: int
    workspace_bytes: Any
    threads: int


# Query rows of a tile of the gradient kernels; 0: the planner chooses.
_backward_block_q = contextvars.ContextVar("backward_block_q", default=0)


@contextlib.contextmanager
def backward_block_q(rows: int) -> Iterator[None]:
    """Plans gradients with tiles of `rows` query rows while it lasts.

    The CUDA kernels have two forms, which it tells apart (backward_block_q in
    kernels/common/planner.h). For tests and measurements that compare them; not part of the API.
    """
    token = _backward_block_q.set(rows)
    try:
        yield
    finally:
        _backward_block_q.reset(token)


class PlanError(ValueError):
    """The planner refuses the call; the message is its reason."""


def cpu_threads() -> int:
    """Size of XLA's CPU thread pool in this process."""
    given = os.environ.get("NPROC", "")
    return int(given) if given.isdigit() and int(given) > 0 else len(os.sched_getaffinity(0))


def _cuda_device() -> tuple[int, int]:
    """Multiprocessor count and compute capability of the first CUDA device."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return _ASSUMED_SM_COUNT, _ASSUMED_COMPUTE_CAPABILITY
    major, _, minor = str(device.compute_capability).partition(".")
    return int(device.core_count), int(major) * 10 + int(minor or 0)


def make(library: Library, spec: AttentionSpec, operands: Operands, operation: str) -> Plan:
    """The plan of one call; `operands` are arrays, avals or ShapeDtypeStructs.

    Raises:
      PlanError: the library does not support the call.
    """
    sizes = sizes_of(operands)
    if isinstance(sizes.batch, int):
        return _ask(library, spec, operands, operation, sizes.batch)
    # A symbolic batch (export): the workspace must be an expression. With fixed sizes it grows at
    # most linearly with the batch, so a line above these probes holds it; handlers check the size.
    first = _ask(library, spec, operands, operation, 1)
    fixed = dataclasses.replace(
        spec, block_q=first.block_q, block_k=first.block_k, num_splits=first.num_splits
    )
    probes = {
        batch: _ask(library, fixed, operands, operation, batch).workspace_bytes
        for batch in (1, 2, 3, 7, 64, 1000, 4096)
    }
    constant = probes[1]
    slope = max(-(-(size - constant) // (batch - 1)) for batch, size in probes.items() if batch > 1)
    return dataclasses.replace(first, workspace_bytes=constant + slope * sizes.batch)


def _ask(
    library: Library, spec: AttentionSpec, operands: Operands, operation: str, batch: int
) -> Plan:
    sizes = sizes_of(operands)
    present = {name for name, x in zip(Operands._fields, operands, strict=True) if x is not None}
    threads, (sm_count, capability) = 1, (0, 0)
    if library.name == "cpu":
        threads = cpu_threads()
    elif library.name == "cuda":
        sm_count, capability = _cuda_device()
    if operation == "bwd":
        # Sizes that a caller asks for are the forward pass's; the backward kernels have their own.
        spec = dataclasses.replace(spec, block_q=_backward_block_q.get(), block_k=0, num_splits=0)
    dbias = 0
    if spec.want_dbias:
        shape = operands.bias.shape
        dbias = int(np.prod([s if isinstance(s, int) else batch for s in shape]))
    request = _Request(
        batch=batch,
        lq=sizes.lq,
        lkv=sizes.lkv,
        hq=sizes.hq,
        hkv=sizes.hkv,
        d=sizes.d,
        dv=sizes.dv,
        features=_schema.features(spec, present),
        block_q=spec.block_q,
        block_k=spec.block_k,
        num_splits=spec.num_splits,
        window_left=-1 if spec.window_left is None else spec.window_left,
        window_right=-1 if spec.window_right is None else spec.window_right,
        dbias_elements=dbias,
        operation=OPERATIONS[operation],
        dtype=DTYPES[str(operands.query.dtype)],
        precision=PRECISIONS[spec.precision],
        threads=threads,
        sm_count=sm_count,
        compute_capability=capability,
    )
    result = _Result()
    function = getattr(library.handle, f"attention_plan_{library.name}")
    function.argtypes = [ctypes.POINTER(_Request), ctypes.POINTER(_Result)]
    function.restype = ctypes.c_int
    if function(ctypes.byref(request), ctypes.byref(result)):
        raise PlanError(result.message.decode(errors="replace"))
    return Plan(result.block_q, result.block_k, result.num_splits, result.workspace_bytes, threads)
