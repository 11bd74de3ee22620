# SPDX-License-Identifier: Apache-2.0
"""What the numbers were measured on: the `device` header of a result file."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_CACHE_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")
# Where no cache size can be read: large enough for most machines.
_ASSUMED_CACHE_BYTES = 32 << 20


def describe_device() -> dict[str, Any]:
    """Device, versions and machine, under the names of the reference data plus a few more."""
    import jax
    import jaxlib

    devices = jax.devices()
    device: dict[str, Any] = {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "library": _library_version(),
        "backend": jax.default_backend(),
        "devices": [str(d) for d in devices],
        "python": platform.python_version(),
        "device_kind": devices[0].device_kind,
        "os": f"{platform.system()} {platform.release()}",
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(_memory_bytes() / (1 << 30), 1),
        "last_level_cache_mb": cache_bytes(jax.default_backend()) / (1 << 20),
    }
    for package in ("torch", "flax", "numpy"):
        version = _version(package)
        if version:
            device[package] = version
    if device["backend"] == "gpu":
        device |= _gpu(devices[0])
    return device


def machine_state() -> dict[str, Any]:
    """Facts that drift: load, and on a GPU clocks and temperature. Recorded per run."""
    state: dict[str, Any] = {"load_average": round(os.getloadavg()[0], 2)}
    frequency = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq")
    if frequency.exists():
        state["cpu_mhz"] = int(frequency.read_text()) // 1000
    fields = "clocks.sm,clocks.mem,temperature.gpu,power.draw"
    answer = _nvidia_smi(fields)
    if answer:
        state |= dict(zip(fields.split(","), answer, strict=False))
    return state


def cpu_model() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cache_bytes(backend: str) -> int:
    """Size of the last-level cache in bytes (the L2 of a GPU, where CUDA's runtime tells it)."""
    if backend == "gpu":
        # No portable query: 64 MiB is more than the L2 of any GPU up to H100 (50 MiB).
        return 64 << 20
    largest = 0
    for size in _CACHE_FOLDER.glob("index*/size"):
        text = size.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        largest = max(largest, int(text.rstrip("KMG")) * unit)
    return largest or _ASSUMED_CACHE_BYTES


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _library_version() -> str | None:
    try:
        import jax_ops
    except ImportError:
        return None
    return getattr(jax_ops, "__version__", None)


def _gpu(device: Any) -> dict[str, Any]:
    gpu: dict[str, Any] = {"gpu": device.device_kind}
    answer = _nvidia_smi("driver_version")
    if answer:
        gpu["driver"] = answer[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        gpu["gpu_memory_gb"] = round(stats["bytes_limit"] / (1 << 30), 1)
    return gpu


def _nvidia_smi(fields: str) -> list[str]:
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    first = answer.stdout.splitlines()
    return [part.strip() for part in first[0].split(",")] if first else []
