# SPDX-License-Identifier: Apache-2.0
"""Selectors: FILE or FILE:field=value[,field=value...] names some rows of a file.

`none` selects rows without the field or with null; reference names of implementations are
accepted. Example: rtx3090_dispatch.json.gz:tag=after,dtype=bfloat16
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from benchmarks.harness import schema
from benchmarks.harness.flags import typed_path
from benchmarks.harness.implementations import canonical

_SELECTABLE = (*schema.CASE_FIELDS, "tag", "run", "round")


class SelectorError(Exception):
    """A selector that cannot be understood; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Selector:
    """A file and the values that fields must have."""

    text: str
    path: Path
    wanted: tuple[tuple[str, str], ...]

    def keeps(self, row: dict[str, Any]) -> bool:
        """Whether a row is selected."""
        return all(_text(row.get(name)) == value for name, value in self.wanted)


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(int(value))
    return str(value)


def parse(text: str) -> Selector:
    """Parses one command-line argument; raises SelectorError."""
    name, colon, conditions = text.rpartition(":")
    if not colon or "=" not in conditions:
        name, conditions = text, ""
    wanted = []
    for condition in filter(None, conditions.split(",")):
        field, equals, value = (part.strip() for part in condition.partition("="))
        if not equals or field not in _SELECTABLE:
            raise SelectorError(
                f"selector {condition!r} in {text!r}: expected field=value with a field of "
                f"{', '.join(_SELECTABLE)}"
            )
        if field == "impl":
            value = canonical(value)
        if field == "num_splits" and value == "0":
            value = "1"  # The reference data's name for no splitting.
        if field == "causal":
            value = {"true": "1", "false": "0"}.get(value.lower(), value)
        wanted.append((field, value))
    path = typed_path(name)
    if not name or path is None:
        raise SelectorError(f"{text!r} names no file")
    return Selector(text, path, tuple(wanted))
