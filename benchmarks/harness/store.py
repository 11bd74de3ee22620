# SPDX-License-Identifier: Apache-2.0
"""The result file of a running suite: whole after every write, resumable after any interruption."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.harness import schema


class StoreError(Exception):
    """The output file cannot be used as asked; the message is one line for the user."""


# Settings that may differ between a run and its resumption: they change no number.
# What a run finds out about its machine and itself: never a reason to refuse its resumption.
_FACTS = ("ceilings", "dropped_rounds", "machine_state")
_FREE_SETTINGS = ("output", "append", "resume", "plot", "time_budget_s", "argv", *_FACTS)

_DEVICE_IDENTITY = ("backend", "device_kind", "cpu", "cores", "jax", "jaxlib", "library")


class Store:
    """Rows of one file. Every `add` replaces the file atomically: a kill leaves the last version.

    With `path` None rows are kept in memory only.
    """

    def __init__(self, path: Path | None, device: dict[str, Any]):
        self.path = path
        self._data: dict[str, Any] = {
            "schema": schema.VERSION,
            "device": device,
            "config": {"runs": {}},
            "results": [],
        }
        self.run = ""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Every row of the file, those of earlier runs included."""
        return self._data["results"]

    def config_of(self, run: str) -> dict[str, Any]:
        return self._data["config"]["runs"][run]

    def rows_of_run(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row.get("run") == self.run]

    def load(self) -> None:
        """Reads the existing file to append to or to resume."""
        if self.path is None or not self.path.exists():
            return
        try:
            data = json.loads(self.path.read_text())
        except (OSError, ValueError) as error:
            raise StoreError(f"{self.path}: cannot be read as a result file: {error}") from error
        if not isinstance(data, dict) or data.get("schema") != schema.VERSION:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise StoreError(
                f"{self.path}: schema {found!r} cannot be extended, only {schema.VERSION} can"
            )
        theirs, ours = data.get("device", {}), self._data["device"]
        for name in _DEVICE_IDENTITY:
            if theirs.get(name) != ours.get(name):
                raise StoreError(
                    f"{self.path}: measured with {name} = {theirs.get(name)!r}, this is "
                    f"{ours.get(name)!r}: rows of two machines do not go into one file"
                )
        for index, row in enumerate(data.get("results", [])):
            problem = schema.row_problem(row)
            if problem:
                raise StoreError(f"{self.path}: row {index}: {problem}")
        self._data = data

    def begin_run(self, suite: str, config: dict[str, Any], resume: bool) -> None:
        """Starts a run, or with `resume` continues the one with this configuration.

        Raises StoreError when the file holds runs of this suite but none with this configuration.
        """
        runs = self._data["config"].setdefault("runs", {})
        if resume:
            wanted = _settled(config)
            same_suite = [name for name, run in runs.items() if run.get("suite") == suite]
            for name in same_suite:
                if _settled(runs[name]) == wanted:
                    self.run = name
                    return
            if same_suite:
                other = _settled(runs[same_suite[-1]])
                keys = sorted(
                    k for k in other.keys() | wanted.keys() if other.get(k) != wanted.get(k)
                )
                raise StoreError(
                    f"--resume: {self.path} has no {suite} run with this configuration "
                    f"(its last one differs in: {', '.join(keys)})"
                )
        self.run = f"{suite}_{1 + len(runs)}"
        runs[self.run] = config

    def record_setting(self, name: str, value: Any) -> None:
        """Adds a fact about the current run (one of _FACTS) to its configuration."""
        assert name in _FACTS, name
        self._data["config"]["runs"][self.run][name] = value

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Appends rows and writes the file."""
        for row in rows:
            problem = schema.row_problem(row)
            if problem:
                raise AssertionError(f"the harness made an invalid row: {problem}: {row}")
            self.rows.append(row)
        self.write()

    def write(self) -> None:
        """Writes to a temporary file beside the target, then renames over it."""
        if self.path is None:
            return
        text = _dump(self._data)
        temporary = None
        try:
            with tempfile.NamedTemporaryFile(
                "w", dir=self.path.parent, prefix=self.path.name + ".", suffix=".tmp", delete=False
            ) as file:
                temporary = file.name
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, self.path)
        except OSError as error:
            if temporary is not None and os.path.exists(temporary):
                os.unlink(temporary)
            kept = "its last complete version is kept" if self.path.exists() else "nothing is kept"
            raise StoreError(f"cannot write {self.path}: {error}; {kept}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _settled(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that must be equal for a resumption."""
    plain = json.loads(json.dumps(config))
    return {key: value for key, value in plain.items() if key not in _FREE_SETTINGS}


def _dump(data: dict[str, Any]) -> str:
    """JSON with one row a line: readable, and a diff shows rows."""
    head = {key: value for key, value in data.items() if key != "results"}
    text = json.dumps(head, indent=1)
    rows = ",\n".join("  " + json.dumps(row, allow_nan=False) for row in data["results"])
    return f'{text[:-2]},\n "results": [\n{rows}\n ]\n}}\n'
