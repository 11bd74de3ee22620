# SPDX-License-Identifier: Apache-2.0
"""Reads JSON that somebody else wrote: a text becomes plain values or one line that says why not.

Python's own reader takes more than JSON's standard does and more than we can use. Here nesting is
bounded, an integer that no 64-bit program can hold becomes a float (infinite, if need be), and an
object with a repeated name says so instead of dropping a value.
"""

from __future__ import annotations

import json
import math
import reprlib
from typing import Any

# Result files nest 6 deep.
DEEPEST = 32

# Beyond it, a float (and so JavaScript) cannot tell neighbouring integers apart.
LARGEST_INTEGER = 2**53

# Digits beyond which int() itself refuses to convert; 19 hold every 64-bit integer.
_MOST_DIGITS = 20


class JsonError(Exception):
    """The text cannot be used; the message is one line without the file's name."""


class Object(dict[str, Any]):
    """A JSON object that knows which of its names came twice (None: none did)."""

    repeated: str | None = None


def parse(text: str) -> Any:
    """Parses a document; raises JsonError."""
    try:
        data = json.loads(text, object_pairs_hook=_object, parse_int=_integer)
    except json.JSONDecodeError as error:
        what = "truncated" if error.pos >= len(text.rstrip()) - 1 else "no JSON"
        raise JsonError(f"{what}: {error.msg} at line {error.lineno}") from error
    except RecursionError as error:
        raise JsonError(f"nested deeper than {DEEPEST} levels") from error
    level, depth = [data], 0
    while level:
        if depth > DEEPEST:
            raise JsonError(f"nested deeper than {DEEPEST} levels")
        level = [part for value in level for part in _parts(value)]
        depth += 1
    return data


def value_problem(value: Any) -> str | None:
    """Says which part of a value no reader could use, 'at NAME: reason'; None if all can.

    Repeated names, numbers that are not finite, and texts that UTF-8 cannot hold.
    """
    if isinstance(value, Object) and value.repeated is not None:
        return f"{value.repeated!r} is given twice"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value!r} is no finite number"
    if isinstance(value, str) and not is_text(value):
        return f"{shortened(value)} is no Unicode text"
    if isinstance(value, dict):
        for name, part in value.items():
            problem = value_problem(name) or value_problem(part)
            if problem:
                return f"in {name!r}: {problem}"
    if isinstance(value, list):
        for part in value:
            problem = value_problem(part)
            if problem:
                return problem
    return None


def is_text(value: str) -> bool:
    """Whether a text can be written to a file: JSON's escapes can spell halves of characters."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def shortened(value: Any) -> str:
    """A value in a message: at most a line, whatever the value."""
    return reprlib.repr(value)


def _object(pairs: list[tuple[str, Any]]) -> Object:
    made = Object(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        made.repeated = next(name for n, name in enumerate(names) if name in names[:n])
    return made


def _integer(digits: str) -> int | float:
    value = float(digits) if len(digits) > _MOST_DIGITS else int(digits)
    return value if abs(value) <= LARGEST_INTEGER else float(value)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
