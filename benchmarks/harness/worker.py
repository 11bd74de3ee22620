# SPDX-License-Identifier: Apache-2.0
"""The isolated process: reads one request, measures, writes one result.

usage: python -m benchmarks.harness.worker REQUEST RESULT PARENT_PID

Kinds: 'time' prepares, checks and times one round; 'peak' measures the memory of one call; 'try'
runs one call under an address-space limit (suite max_seq).
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import memory
from benchmarks.harness.case import MIB, Case
from benchmarks.harness.errors import describe
from benchmarks.harness.implementations import precision_of
from benchmarks.harness.isolate import Request
from benchmarks.harness.operation import operation_of
from benchmarks.harness.prepare import against_baseline, check_program, prepare
from benchmarks.harness.suites import Contender
from benchmarks.harness.timing import samples_for
from benchmarks.harness.yardstick import Yardstick

_PR_SET_PDEATHSIG = 1  # prctl(2)
_PROGRAM_MEMORY = ("xla_temp_mb", "xla_arg_mb", "xla_out_mb")
# A program that needs more than this part of its limit and fails has most likely met the limit.
_SUSPICIOUS_SHARE = 0.5


def load_request(path: Path) -> Request:
    """Reads what isolate.run wrote."""
    data = json.loads(path.read_text())
    contender = data.pop("contender")
    return Request(
        contender=Contender(contender["impl"], Case(**contender["case"])),
        **data,
    )


def answer(request: Request) -> dict[str, Any]:
    """Does what the request asks; failures come back as {'error': text}."""
    import jax

    if jax.default_backend() != request.backend:
        return {
            "error": f"crashed: the worker runs on {jax.default_backend()}, not on "
            f"{request.backend}"
        }
    try:
        return {"time": _time, "peak": _peak, "try": _try}[request.kind](request)
    except Exception as error:  # Every failure of a case is a row, whatever its type.
        return {"error": describe(error)}


def _time(request: Request) -> dict[str, Any]:
    contender = request.contender
    arrays = operation_of(contender.case).inputs(contender.case)
    yardstick = Yardstick.load(Path(request.yardstick)) if request.yardstick else None
    fields = _measure_peak(request, arrays)
    prepared = prepare(contender, arrays, yardstick, request.backend, request.cache_bytes)
    fields |= prepared.fields
    if request.baseline:
        path = Path(request.baseline)
        if request.writes_baseline:
            temporary = path.with_suffix(".writing.npz")
            np.savez(temporary, *prepared.outputs)
            os.replace(temporary, path)
        elif path.exists():
            with np.load(path) as data:
                baseline = [data[name] for name in data.files]
            fields["rel_vs_baseline"] = against_baseline(prepared.outputs, baseline)
    samples = [prepared.stopwatch.sample() for _ in range(samples_for(prepared.call_ms))]
    return {"fields": fields, "samples": samples, "inner": prepared.stopwatch.inner}


def _measure_peak(request: Request, arrays: tuple[np.ndarray, ...]) -> dict[str, Any]:
    case = request.contender.case
    program = operation_of(case).program(request.contender.impl, case, arrays, request.backend)
    return memory.peak_of_call(program, arrays, request.backend)


def _peak(request: Request) -> dict[str, Any]:
    contender = request.contender
    case = contender.case
    operation = operation_of(case)
    arrays = operation.inputs(case)
    program = operation.program(contender.impl, case, arrays, request.backend)
    fields: dict[str, Any] = {"kv_mb": case.kv_mb, "compile_s": program.compile_s}
    fields |= program.memory
    fields |= memory.peak_of_call(program, arrays, request.backend)
    yardstick = Yardstick.load(Path(request.yardstick)) if request.yardstick else None
    precision = precision_of(contender.impl, case.dtype, request.backend)
    fields |= check_program(program, contender, arrays, yardstick, precision)[0]
    return {"fields": fields}


def _try(request: Request) -> dict[str, Any]:
    case = request.contender.case
    operation = operation_of(case)
    limited = request.memory_bytes and request.backend == "cpu"
    if limited:
        # Threads and code that every program needs exist before the limit: it is for the case.
        _warm_up()
        # Added to what the interpreter and its libraries have mapped already.
        limit = memory.virtual_bytes() + request.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    arrays = operation.inputs(case)
    program = operation.program(request.contender.impl, case, arrays, request.backend)
    needs_mb = sum(program.memory.get(name, 0.0) for name in _PROGRAM_MEMORY)
    try:
        staged = program.stage(arrays)
        del arrays
        started = time.perf_counter()
        outputs = program.run(staged)
        program.wait(outputs)
    except Exception as error:
        # Libraries report a failed allocation in words of their own, or in none. What the compiler
        # says that the program needs is the better witness.
        if limited and needs_mb * MIB > _SUSPICIOUS_SHARE * request.memory_bytes:
            raise MemoryError(
                f"the program needs {needs_mb:.0f} MiB of {request.memory_bytes / MIB:.0f} MiB: "
                f"{type(error).__name__}: {error}"
            ) from error
        raise
    return {"fields": {"call_ms": (time.perf_counter() - started) * 1e3}}


def _warm_up() -> None:
    import jax
    import jax.numpy as jnp

    x = jnp.ones((256, 256))
    jax.block_until_ready(jax.jit(lambda a: jax.nn.softmax(a @ a))(x))


def _die_with(parent: int) -> None:
    """Ends this process when its parent is killed: it would take the cores of the resumed run."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux only, as all that is isolated.
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def main(argv: list[str]) -> int:
    """Answers one request."""
    _die_with(int(argv[3]))
    request = load_request(Path(argv[1]))
    Path(argv[2]).write_text(json.dumps(answer(request)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
