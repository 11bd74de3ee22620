# SPDX-License-Identifier: Apache-2.0
"""The result file of a running suite: whole after every write, resumable after any interruption."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import json_text, schema


class StoreError(Exception):
    """The output file cannot be used as asked; the message is one line for the user."""


# What a run finds out about its machine and itself: never a reason to refuse its resumption.
_FACTS = ("automatic_choice", "ceilings", "dropped_rounds", "machine_state")

# Settings that may differ between a run and its resumption: they change no number.
_FREE_SETTINGS = ("output", "append", "resume", "plot", "time_budget_s", "argv", *_FACTS)

_DEVICE_IDENTITY = ("backend", "device_kind", "cpu", "cores", "jax", "jaxlib", "library")


class Store:
    """Rows of one file. Every `add` replaces the file atomically: a kill leaves the last version.

    Of two processes that write to one file at once, the one that finds the other's version puts its
    rows beside it and says so. With `path` None rows are kept in memory only.
    """

    def __init__(self, path: Path | None, device: dict[str, Any]):
        self.path = path
        self._version = _version(path)
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
        version = _version(self.path)
        try:
            data = json_text.parse(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, json_text.JsonError) as error:
            raise StoreError(f"{self.path}: cannot be read as a result file: {error}") from error
        problem = self._problem(data)
        if problem:
            raise StoreError(f"{self.path}: {problem}")
        self._version = version
        self._data = {"device": {}, "config": {}} | data

    def _problem(self, data: Any) -> str | None:
        """Why rows cannot be added to a file with this content; None if they can."""
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        if not isinstance(found, int) or found is True or found != schema.VERSION:
            found = json_text.shortened(found)
            return f"schema {found} cannot be extended, only {schema.VERSION} can"
        if data.repeated is not None:
            return f"field {data.repeated!r} is given twice"
        for part, problem_of in (
            ("device", schema.device_problem),
            ("config", schema.config_problem),
        ):
            problem = problem_of(data.get(part, {}))
            if problem:
                return f"field '{part}': {problem}"
        theirs, ours = data.get("device", {}), self._data["device"]
        for name in _DEVICE_IDENTITY:
            if theirs.get(name) != ours.get(name):
                return (
                    f"measured with {name} = {theirs.get(name)!r}, this is {ours.get(name)!r}: "
                    "rows of two machines do not go into one file"
                )
        if not isinstance(data.get("results"), list):
            return "field 'results' is no list"
        for index, row in enumerate(data["results"]):
            problem = schema.row_problem(row)
            if problem:
                return f"row {index}: {problem}"
        return None

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
        try:
            with _alone_in(self.path.parent):
                overtaken = _version(self.path) != self._version
                written = self._beside() if overtaken else self.path
                replace_file(written, _dump(self._data))
                self._version = _version(self.path)
        except OSError as error:
            kept = "its last complete version is kept" if self.path.exists() else "nothing is kept"
            raise StoreError(f"cannot write {self.path}: {error}; {kept}") from error
        if overtaken:
            raise StoreError(
                f"another process wrote to {self.path} meanwhile: the rows of this run, with those "
                f"that it had read, are in {written}"
            )

    def _beside(self) -> Path:
        """A file of this process beside the target; never one that exists."""
        assert self.path is not None
        number = 1
        while True:
            path = self.path.with_name(f"{self.path.stem}.{os.getpid()}_{number}.json")
            if not path.exists():
                return path
            number += 1


def _version(path: Path | None) -> tuple[int, ...] | None:
    """Tells one version of a file from the next: each is a new file, so its inode changes."""
    if path is None:
        return None
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_ino, status.st_size, status.st_mtime_ns)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keeps other stores from writing in a folder while a file is looked at and replaced."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def replace_file(path: Path, text: str) -> None:
    """Writes a file so that a kill or a full disk leaves its last whole version.

    Raises OSError. Of two processes in one folder only one at a time may call it.
    """
    # One name for all: what a kill leaves there, the next write takes away.
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


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
