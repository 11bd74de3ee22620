# SPDX-License-Identifier: Apache-2.0
"""Peak memory of one call, measured in a process that does nothing else.

CPU: the kernel's high-water mark of resident memory, reset just before the call. GPU: the
allocator's own peak. Both include the inputs and exclude the interpreter and its libraries.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.case import MIB
from benchmarks.harness.program import Program

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
# Writing this to clear_refs resets VmHWM to the present VmRSS (proc(5), Linux 4.0).
_RESET_PEAK = "5"


def peak_of_call(program: Program, arrays: Sequence[np.ndarray], backend: str) -> dict[str, float]:
    """Row fields peak_mb and inputs_mb, in MiB, for one call on one set of inputs."""
    inputs_mb = sum(array.nbytes for array in arrays) / MIB
    staged = program.stage(arrays)
    if backend == "gpu":
        program.wait(program.run(staged))
        return {"peak_mb": _allocator_peak_mb(), "inputs_mb": inputs_mb}
    # The first call is the one to look at: XLA keeps temporary memory for the next one.
    _return_free_memory()
    before = _status_mb("VmRSS")
    _CLEAR_REFS.write_text(_RESET_PEAK)
    outputs = program.run(staged)
    program.wait(outputs)
    grown = max(0.0, _status_mb("VmHWM") - before)
    return {"peak_mb": inputs_mb + grown, "inputs_mb": inputs_mb}


def _allocator_peak_mb() -> float:
    import jax

    stats: dict[str, Any] = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" not in stats:
        raise NotImplementedError("this device's allocator does not report its peak")
    return stats["peak_bytes_in_use"] / MIB


def _return_free_memory() -> None:
    """Hands freed heap back to the system, or the call could reuse it unseen."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status_mb(field: str) -> float:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise NotImplementedError(f"{_STATUS} has no {field}: peak memory needs Linux")


def virtual_bytes() -> int:
    """Address space in use by this process."""
    return int(_status_mb("VmSize") * MIB)


def available_bytes() -> int:
    """Memory that could be taken now without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise NotImplementedError("/proc/meminfo has no MemAvailable: max_seq needs Linux")
