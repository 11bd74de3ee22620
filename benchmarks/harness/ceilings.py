# SPDX-License-Identifier: Apache-2.0
"""What this machine can do at most, measured in the same run as the suites.

On a CPU a small native program (benchmarks/native) runs multiply-add loops and streams memory on
all cores; without it, and on a GPU, the best matrix product and the best sum through JAX stand in.
`method` in the result says which it was, `is_bound` whether nothing can be faster: XLA's own
product is none on a CPU, where it widens 16-bit operands as slowly as it likes.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Not resolved: under Bazel this file is a link into the sources; the program is beside the link.
NATIVE = Path(__file__).absolute().parent.parent / "native" / "machine_peaks"

# A result faster than this multiple of the ceiling was not computed: clocks wobble, but not so far.
IMPOSSIBLE_FACTOR = 1.5


def measure(backend: str) -> dict[str, Any]:
    """{method, is_bound, gflops: {precision: float}, read_gb_s}; takes about two seconds."""
    if backend == "cpu" and NATIVE.exists():
        peaks = _native()
        if peaks is not None:
            return peaks
    return _through_jax(backend)


def _native() -> dict[str, Any] | None:
    try:
        answer = subprocess.run(
            [str(NATIVE), str(len(os.sched_getaffinity(0)))],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return json.loads(answer.stdout) | {"is_bound": True}
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _through_jax(backend: str) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    size = 1024 if backend == "cpu" else 8192
    product = jax.jit(lambda a, b: jnp.matmul(a, b))
    gflops = {}
    for dtype in ("float32", "bfloat16"):
        a = jax.random.normal(jax.random.key(0), (size, size), dtype)
        precision = "tf32" if backend == "gpu" and dtype == "float32" else dtype
        gflops[precision] = 2 * size**3 / _best_seconds(lambda a=a: product(a, a)) / 1e9
    # As in benchmarks/native: 16-bit operands can always be widened and multiplied in float32.
    gflops["bfloat16"] = max(gflops.values())
    gflops["float16"] = gflops["bfloat16"]
    elements = (128 << 20) // 4
    x = jax.random.normal(jax.random.key(1), (elements,), jnp.float32)
    total = jax.jit(jnp.sum)
    read = 4 * elements / _best_seconds(lambda: total(x)) / 1e9
    return {
        "method": "best JAX matrix product and sum",
        "is_bound": backend != "cpu",
        "gflops": gflops,
        "read_gb_s": read,
    }


def _best_seconds(call: Callable[[], Any], repeats: int = 5) -> float:
    import jax

    jax.block_until_ready(call())
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(call())
        best = min(best, time.perf_counter() - started)
    return best


def compute_gflops(ceilings: dict[str, Any], precision: str) -> float | None:
    """The compute ceiling of a precision; None where it was not measured."""
    return ceilings.get("gflops", {}).get(precision)


def impossible(ceilings: dict[str, Any], precision: str, gflops: float) -> bool:
    """Whether a speed is beyond anything the machine can do, whatever the precision."""
    if not ceilings["is_bound"]:
        return False
    known = [value for value in ceilings.get("gflops", {}).values() if value]
    limit = compute_gflops(ceilings, precision) or (max(known) if known else None)
    return limit is not None and gflops > IMPOSSIBLE_FACTOR * limit
