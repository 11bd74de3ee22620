# SPDX-License-Identifier: Apache-2.0
"""Reads result files of every known format into rows of the current schema.

Nothing is guessed silently: a row that cannot be read is left out and named (file, row, field),
and the rest of the file is still read. Reference data (files without a `schema`) is translated:
its implementation names, `seq`/`heads`, the missing `impl` of splitsweep and blockk rows,
num_splits 0, and the precision of its float32 rows.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import zlib
from pathlib import Path
from typing import Any

from benchmarks.harness import json_text, schema
from benchmarks.harness.implementations import canonical

# A hundred times the reference data; what is larger (a packed bomb, a device) is none of ours.
LARGEST_BYTES = 256 << 20


@dataclasses.dataclass
class ResultFile:
    """One file: its header, its valid rows and, in words, what could not be read."""

    name: str
    device: dict[str, Any] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    version: int = schema.VERSION


def read(path: Path, name: str | None = None) -> ResultFile:
    """Reads a .json or .json.gz file; never raises for what the file holds."""
    file = ResultFile(name or path.name)
    try:
        data = json_text.parse(_text(path))
    except OSError as error:
        reason = error.strerror or str(error)
        file.problems.append(f"{path}: cannot be read: {reason}")
    except (EOFError, zlib.error) as error:
        file.problems.append(f"{path}: truncated or damaged gzip data: {error}")
    except UnicodeDecodeError as error:
        file.problems.append(f"{path}: is no UTF-8 text: {error.reason} at byte {error.start}")
    except json_text.JsonError as error:
        file.problems.append(f"{path}: {error}")
    else:
        _take(file, path, data)
    return file


def _text(path: Path) -> str:
    """The file's text, unpacked; reads no more than a result file can have."""
    with path.open("rb") as stream:
        raw = stream.read(LARGEST_BYTES + 1)
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.GzipFile(fileobj=io.BytesIO(raw)).read(LARGEST_BYTES + 1)
    if len(raw) > LARGEST_BYTES:
        raise json_text.JsonError(f"holds more than {LARGEST_BYTES >> 20} MiB")
    return raw.decode("utf-8")


def _take(file: ResultFile, path: Path, data: Any) -> None:
    if not isinstance(data, dict) or not isinstance(data.get("results"), list):
        file.problems.append(f"{path}: is no result file: expected an object with a list 'results'")
        return
    if isinstance(data, json_text.Object) and data.repeated is not None:
        file.problems.append(f"{path}: field {data.repeated!r} is given twice")
        return
    version = data.get("schema", 0)
    if not isinstance(version, int) or version is True or version not in (0, schema.VERSION):
        file.problems.append(
            f"{path}: schema {json_text.shortened(version)} is unknown; this program reads 0 "
            f"(reference) and {schema.VERSION}"
        )
        return
    file.version = version
    for part, problem_of in (
        ("device", schema.device_problem),
        ("config", schema.config_problem),
    ):
        value = data.get(part, {})
        problem = problem_of(value)
        if problem:
            file.problems.append(f"{path}: field '{part}': {problem}")
        else:
            setattr(file, part, value)
    if not data["results"]:
        file.problems.append(f"{path}: holds no rows")
    for index, row in enumerate(data["results"]):
        problem = schema.row_problem(row) if version else reference_problem(row)
        if version == 0 and not problem:
            row = from_reference(row)
            problem = schema.row_problem(row)
        if problem:
            file.problems.append(f"{path}: row {index}: {problem}")
        else:
            file.rows.append(row)


def reference_problem(row: Any) -> str | None:
    """What keeps a row of the reference data from being translated, naming the field."""
    if not isinstance(row, dict):
        return schema.row_problem(row)
    for new, old in (("lq", "seq"), ("lkv", "seq"), ("hq", "heads"), ("hkv", "heads")):
        if new in row and old in row:
            return f"fields '{new}' and '{old}': one of them is meant"
    for name in ("suite", "impl", "dtype", "rel_err"):
        problem = schema.value_problem(name, row[name]) if name in row else None
        if problem:
            return f"field '{name}': {problem}"
    return schema.repetition(row)


# splitsweep and blockk rows of the reference data name no implementation.
_UNNAMED = {"splitsweep": "splitkv", "blockk": "mha"}


def from_reference(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the reference data in the current schema."""
    new = {name: value for name, value in row.items() if name not in ("seq", "heads", "device_arg")}
    if "seq" in row:
        new["lq"] = new["lkv"] = row["seq"]
    if "heads" in row:
        new["hq"] = new["hkv"] = row["heads"]
    if "impl" in row:
        new["impl"] = canonical(row["impl"])
    elif row.get("suite") in _UNNAMED:
        new["impl"] = _UNNAMED[row["suite"]]
    elif "error" in row:
        # A skipped case stands for every implementation of its run.
        new["impl"] = "every"
    new.setdefault("causal", False)
    new.setdefault("mode", "fwd")
    if new.get("num_splits") == 0 and new["num_splits"] is not False:
        new["num_splits"] = 1
    if row.get("suite") == "splitsweep":
        new.setdefault("num_splits", 1)
    for name in list(new):
        if name.startswith("rel_vs_"):
            new[f"rel_vs_{canonical(name[len('rel_vs_') :])}"] = new.pop(name)
    new["precision"] = _reference_precision(new)
    return new


def _reference_precision(row: dict[str, Any]) -> str:
    """float32 rows are TF32 except torch's: their errors (4e-4 against 1e-6) show it."""
    dtype = row.get("dtype")
    if dtype != "float32":
        return str(dtype)
    if "rel_err" in row:
        return "tf32" if row["rel_err"] > 1e-5 else "float32"
    return "float32" if row.get("impl") == "torch_sdpa" else "tf32"
