# SPDX-License-Identifier: Apache-2.0
"""The rules of kernels/cuda/tile/README.md that a reader could break without noticing.

Device code outside the tile layer must not contain PTX, CUDA built-ins or look at the compiler, and
must reach memory through the tile layer's functions: the emulator cannot see anything else.
"""

from __future__ import annotations

import re

# (what is forbidden, why)
_FORBIDDEN = [
    (r"\basm\b", "PTX belongs into kernels/cuda/tile"),
    (r"<<<", "kernels are launched by launch()"),
    (r"\b(?:threadIdx|blockIdx|blockDim|gridDim|warpSize)\b", "indices come from thread.h"),
    (
        r"\b__(?:global|device|host|shared|constant|restrict|launch_bounds|grid_constant)__\b",
        "annotations come from config.h; shared memory from Smem",
    ),
    (
        r"\b__(?:sync|shfl|ballot|any|all|match|activemask|ldg|stg|ldca|ldcg|stcg|threadfence|"
        r"nanosleep|cvta|float|half|bfloat|int|uint|f[a-z]+_r[nzud]|popc|ffs|clz|brev)\w*\s*\(",
        "intrinsics belong into kernels/cuda/tile",
    ),
    (r"\batomic[A-Z]\w*\s*\(", "atomics come from grid_sync.h"),
    (
        r"\b(?:ATTENTION_ON_GPU|__CUDACC__|__CUDA_ARCH__|__CUDACC_RTC__|__NVCC__)\b",
        "code that differs on the GPU is not tested by the emulator",
    ),
    (r"#\s*include\s*<", "device headers include neither std nor CUDA headers"),
    (r"\bemulator::", "kernels do not know what runs them"),
    (r"\b(?:memcpy|memset|printf|malloc)\s*\(", "memory moves through memory.h"),
]

_POINTER = re.compile(r"[\w>]\s*\*\s*(?:const\s+)?(\w+)\s*(?:[;,=)({]|$)", re.MULTILINE)
_ARRAY = re.compile(
    r"\b[\w>]+\s+\(?&?(\w+)\)?\[[^\]]*\](?:\[[^\]]*\])*\s*(?:[;,={)]|$)", re.MULTILINE
)


def _without_comments(text: str) -> str:
    """Comments and string literals replaced by blanks, so that line numbers stay."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', blank, text, flags=re.DOTALL)


def pointer_members(text: str) -> set[str]:
    """Names of the pointer fields that the structs in a header declare."""
    return set(re.findall(r"\*\s*(\w+)\s*(?:=\s*nullptr\s*)?;", _without_comments(text)))


def complaints(text: str, members: set[str]) -> list[tuple[int, str]]:
    """(line, what is wrong) of the device code `text`.

    members: names of pointer fields of the parameter structs.
    """
    code = _without_comments(text)
    # #include "..." lost its string; what is left of system includes still shows.
    found = [(m.start(), why) for rule, why in _FORBIDDEN for m in re.finditer(rule, code)]
    local = set(_POINTER.findall(code)) - set(_ARRAY.findall(code)) - {"operator"}
    raw = "memory is reached through global_load, shared_load, ... only"
    for name in local:
        for m in re.finditer(
            rf"(?<![\w.>]){name}\s*\[|(?<![\w)\]>]\s)(?<![\w)\]>])\*\s*{name}\b(?!\s*[(:])", code
        ):
            found.append((m.start(), f"`{name}` is a pointer: {raw}"))
    for name in members:
        for m in re.finditer(
            rf"(?:\.|->){name}\s*\[|(?<![\w)\]>] )(?<![\w)\]>])\*\s*[\w.>()-]*(?:\.|->){name}\b",
            code,
        ):
            found.append((m.start(), f"`{name}` is a pointer: {raw}"))
    for m in re.finditer(
        r"\brow\([^()]*\)\s*\[|(?<![\w)\]>] )(?<![\w)\]>])\*\s*[\w.>-]*\brow\(", code
    ):
        found.append((m.start(), f"row() is a pointer: {raw}"))
    for m in re.finditer(r"(?:\.|->)p\b(?!\s*\()", code):
        found.append((m.start(), "Shared<T>::p is the tile layer's own"))
    return sorted({(code.count("\n", 0, at) + 1, why) for at, why in found})
