# SPDX-License-Identifier: Apache-2.0
"""Suite max_seq: the longest sequence that runs, by doubling and then bisection."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks.harness import isolate, memory
from benchmarks.harness.errors import OUT_OF_MEMORY, UNSUPPORTED, kind
from benchmarks.harness.settings import Settings
from benchmarks.harness.suites import Contender

# The search stops when the interval is this small a part of the length: more would be noise.
RESOLUTION = 16
_FIRST_LENGTH = 256
# Without --memory_limit_gb a try may take this part of the memory that is free now.
_SHARE_OF_FREE = 0.6

# (fits, reason): reason is None when it fits, else the limit and the error text.
Attempt = Callable[[int], tuple[bool, tuple[str, str] | None]]


def bisect(attempt: Attempt, max_seq: int) -> tuple[int, tuple[str, str] | None]:
    """The longest length <= max_seq that fits (0 if none does), and what stopped the search.

    Assumes that a length that fails makes longer ones fail too.
    """
    longest, too_long, reason = 0, None, None
    length = min(_FIRST_LENGTH, max_seq)
    while too_long is None:
        fits, why = attempt(length)
        if not fits:
            too_long, reason = length, why
        else:
            longest = length
            if length == max_seq:
                return longest, None
            length = min(2 * length, max_seq)
    while too_long - longest > max(1, longest // RESOLUTION):
        middle = (longest + too_long) // 2
        fits, why = attempt(middle)
        if fits:
            longest = middle
        else:
            too_long, reason = middle, why
    return longest, reason


def search_longest(
    contender: Contender,
    backend: str,
    cache_bytes: int,
    settings: Settings,
    report: Callable[[int], None],
) -> dict[str, Any]:
    """Row fields longest_seq, limit, note, or an error. Each try is a process of its own."""
    limit = int(settings.memory_limit_gb * (1 << 30))
    if not limit:
        limit = int(_SHARE_OF_FREE * memory.available_bytes())
    times: dict[int, float] = {}

    def attempt(length: int) -> tuple[bool, tuple[str, str] | None]:
        report(length)
        case = dataclasses.replace(contender.case, lq=length, lkv=length)
        request = isolate.Request(
            "try", Contender(contender.impl, case), backend, cache_bytes, memory_bytes=limit
        )
        result = isolate.run(request, timeout_s=settings.try_seconds)
        if "fields" in result:
            times[length] = result["fields"]["call_ms"]
            return True, None
        if "timeout" in result:
            return False, ("time", f"length {length}: longer than {settings.try_seconds:g} s")
        error = result["error"]
        names = {OUT_OF_MEMORY: "memory", UNSUPPORTED: "unsupported"}
        # The row names the kind itself.
        reason = error.removeprefix(f"{kind(error)}: ")
        return False, (names.get(kind(error), "crashed"), f"length {length}: {reason}")

    longest, reason = bisect(attempt, settings.max_seq)
    if reason is not None and (longest == 0 or reason[0] == "crashed"):
        name, text = reason
        prefix = {"memory": OUT_OF_MEMORY, "time": "skipped"}.get(name, name)
        return {"error": f"{prefix}: {text}"}
    fields: dict[str, Any] = {
        "longest_seq": longest,
        "limit": reason[0] if reason else "max_seq",
        "note": f"memory limit {limit / (1 << 30):.1f} GiB" + (f"; {reason[1]}" if reason else ""),
    }
    if longest in times:
        fields |= dict.fromkeys(("q1_ms", "median_ms", "q3_ms"), times[longest])
        fields["inner"] = 1
    return fields
