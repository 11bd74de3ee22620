# SPDX-License-Identifier: Apache-2.0
"""Runs one contender in a process of its own and turns every way it can end into a result."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.errors import CRASHED, OUT_OF_MEMORY
from benchmarks.harness.suites import Contender

# Texts on a dying process's stderr that mean "no memory" even where it ended with abort().
_MEMORY_DEATHS = (
    "bad_alloc",
    "out of memory",
    "resource_exhausted",
    "memoryerror",
    "cannot allocate memory",
    "failed to allocate",
)


@dataclasses.dataclass(frozen=True)
class Request:
    """What the worker process is to do; see worker.py for the three kinds.

    Attributes:
      kind: 'time', 'peak' or 'try'.
      contender: the implementation and its case.
      backend: JAX backend of the parent: a worker on another one would measure something else.
      cache_bytes: last-level cache, for the rotation of inputs.
      round: round index of kind 'time'.
      yardstick: .npz file with reference and limits, or None beyond --ref_max_seq.
      baseline: .npz file for the baseline's outputs; written by the baseline, read by the others.
      writes_baseline: whether this contender is the baseline.
      memory_bytes: address space that kind 'try' may take; 0 is no limit.
    """

    kind: str
    contender: Contender
    backend: str
    cache_bytes: int
    round: int = 0
    yardstick: str | None = None
    baseline: str | None = None
    writes_baseline: bool = False
    memory_bytes: int = 0


def run(request: Request, timeout_s: float | None = None) -> dict[str, Any]:
    """The worker's result: {'fields': ..., 'samples': ...} or {'error': text}.

    {'timeout': True} when it did not end within `timeout_s`.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        asked, answered, said = (Path(folder) / name for name in ("request", "result", "stderr"))
        asked.write_text(json.dumps(dataclasses.asdict(request)))
        # The same interpreter and import path as ours: under Bazel that path is the runfiles'.
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
        # The worker is alone on its device and its allocator must report its peak: our own choice
        # of allocator (runner.py) is not for it.
        environment.pop("XLA_PYTHON_CLIENT_ALLOCATOR", None)
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        worker = [sys.executable, "-m", "benchmarks.harness.worker"]
        command = [*worker, str(asked), str(answered), str(os.getpid())]
        with said.open("wb") as stderr:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr
            )
            try:
                process.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                return {"timeout": True}
            finally:
                # Also on Ctrl-C: a worker must not outlive the run that asked for it.
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if process.returncode == 0 and answered.exists():
            return json.loads(answered.read_text())
        return {"error": _death(process.returncode, said.read_text(errors="replace"))}


def _death(code: int, stderr: str) -> str:
    """Why a worker ended without a result."""
    tail = " ".join(stderr.split())[-300:]
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    if code == -signal.SIGKILL:
        return f"{OUT_OF_MEMORY}: the process was killed ({name}), as the system does then"
    if any(sign in stderr.lower() for sign in _MEMORY_DEATHS):
        return f"{OUT_OF_MEMORY}: the process ended with {name}: {tail}"
    return f"{CRASHED}: the process ended with {name}: {tail}"
