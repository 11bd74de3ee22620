# SPDX-License-Identifier: Apache-2.0
"""Why a case has no numbers: the kinds of `error` rows and which of them fail the run."""

from __future__ import annotations

SKIPPED = "skipped"
UNSUPPORTED = "unsupported"
OUT_OF_MEMORY = "out of memory"
WRONG = "wrong"
CRASHED = "crashed"

# A run with rows of these kinds exits with 1; the other kinds are facts about a machine or a peer.
FAILING = (WRONG, CRASHED)

_MEMORY_SIGNS = (
    "RESOURCE_EXHAUSTED",
    "out of memory",
    "Out of memory",
    "Unable to allocate",
    "can't allocate",
    "Cannot allocate memory",
)


class SkippedError(Exception):
    """The case is outside a limit that the caller set (--max_kv_gb, for example)."""


class UnsupportedCaseError(Exception):
    """The implementation does not do this case; the message says what it lacks."""


class WrongResultError(Exception):
    """The measured program does not compute what it should."""


def describe(exception: BaseException) -> str:
    """One line 'kind: reason' for a row's `error` field."""
    reason = " ".join(str(exception).split())
    if isinstance(exception, SkippedError):
        return f"{SKIPPED}: {reason}"
    if isinstance(exception, (UnsupportedCaseError, NotImplementedError)):
        return f"{UNSUPPORTED}: {reason}"
    if isinstance(exception, WrongResultError):
        return f"{WRONG}: {reason}"
    named = f"{type(exception).__name__}: {reason}"[:600]
    if isinstance(exception, MemoryError) or any(sign in reason for sign in _MEMORY_SIGNS):
        return f"{OUT_OF_MEMORY}: {named}"
    return f"{CRASHED}: {named}"


def kind(error: str) -> str:
    """The kind of an `error` text; texts of other writers that name no kind are classified too."""
    for name in (SKIPPED, UNSUPPORTED, OUT_OF_MEMORY, WRONG, CRASHED):
        if error.startswith(name):
            return name
    if any(sign in error for sign in _MEMORY_SIGNS):
        return OUT_OF_MEMORY
    return CRASHED


def fails_run(error: str) -> bool:
    """Whether an error row of this text makes the run exit with 1."""
    return kind(error) in FAILING
