# SPDX-License-Identifier: Apache-2.0
"""The format of a result file: its version, its row fields and what makes a row valid.

A file is one JSON object {schema, device, config, results}. `config.runs` maps a run's name to the
complete configuration that produced it; each row names its run. Files of the reference data have
no `schema` and are read as version 0 (analysis/reading.py).
"""

from __future__ import annotations

import math
from typing import Any

from benchmarks.harness import json_text
from benchmarks.harness.case import DTYPES, MODES
from benchmarks.harness.precision import PRECISIONS

VERSION = 1
SUITES = ("dispatch", "gqa", "decode", "splitsweep", "blockk", "peak", "max_seq", "layer")

# Fields that say what was measured. Equal values mean the same measurement.
CASE_FIELDS = (
    "suite",
    "impl",
    "dtype",
    "precision",
    "mode",
    "batch",
    "lq",
    "lkv",
    "hq",
    "hkv",
    "head_dim",
    "causal",
    "num_splits",
    "block_k",
    "model_dim",
)

_COUNTS = ("batch", "lq", "lkv", "hq", "hkv", "head_dim", "inner", "block_k", "model_dim")
_TIMES = ("median_ms", "q1_ms", "q3_ms")
_MEASURES = (
    "compile_s",
    "rel_err",
    "xla_temp_mb",
    "xla_arg_mb",
    "xla_out_mb",
    "residual_mb",
    "kv_mb",
    "peak_mb",
    "inputs_mb",
)
_TEXTS = ("tag", "note", "run", "error", "limit")
_LISTS = ("rel_err_parts", "residual_shapes")
_OTHER = ("round", "causal", "num_splits", "suite", "impl", "dtype", "precision", "mode")

# max_seq: the longest length that ran, and what stopped the search (memory, time or max_seq).
_SEARCH = ("longest_seq",)

# Beyond any measurement. Between them no ratio, product or share of a peak leaves a float's range.
_LARGEST = json_text.LARGEST_INTEGER
_SHORTEST_MS = 1e-9

FIELDS = frozenset(_COUNTS + _TIMES + _MEASURES + _TEXTS + _LISTS + _OTHER + _SEARCH)
LIMITS = ("memory", "time", "max_seq", "unsupported")


def is_field(name: str) -> bool:
    """Whether a row may have a field of this name."""
    return name in FIELDS or name.startswith("rel_vs_")


def row_problem(row: Any) -> str | None:
    """Says what is wrong with a row of the current version, naming the field; None if nothing."""
    if not isinstance(row, dict):
        return f"expected an object, got {type(row).__name__}"
    twice = repetition(row)
    if twice:
        return twice
    for name in ("suite", "impl", "dtype", "mode", "batch", "lq", "lkv", "hq", "hkv", "head_dim"):
        if name not in row:
            return f"field '{name}' is missing"
    for name, value in row.items():
        problem = value_problem(name, value)
        if problem:
            return f"field {name!r}: {problem}"
    if "error" in row:
        return None
    if row["suite"] == "peak":
        required: tuple[str, ...] = ("peak_mb",)
    elif row["suite"] == "max_seq":
        required = ("longest_seq", "limit")
    else:
        required = _TIMES
    for name in required:
        if name not in row:
            return f"field '{name}' is missing (and there is no 'error')"
    timed = all(name in row for name in _TIMES)
    if timed and not row["q1_ms"] <= row["median_ms"] <= row["q3_ms"]:
        return "fields 'q1_ms', 'median_ms', 'q3_ms' are not in order"
    if row["suite"] == "peak" and not row["peak_mb"]:
        return "field 'peak_mb': 0 is no peak"
    return None


def repetition(row: dict[str, Any]) -> str | None:
    """Says that a row of a file has a field twice; None if it has not."""
    if isinstance(row, json_text.Object) and row.repeated is not None:
        return f"field {row.repeated!r} is given twice"
    return None


def device_problem(device: Any) -> str | None:
    """Says what is wrong with a file's `device`; None if nothing."""
    if not isinstance(device, dict):
        return f"expected an object, got {type(device).__name__}"
    return json_text.value_problem(device)


def config_problem(config: Any) -> str | None:
    """Says what is wrong with a file's `config`, naming run and field; None if nothing."""
    if not isinstance(config, dict):
        return f"expected an object, got {type(config).__name__}"
    problem = json_text.value_problem(config)
    if problem:
        return problem
    runs = config.get("runs", {})
    if not isinstance(runs, dict):
        return f"'runs': expected an object, got {type(runs).__name__}"
    for name, run in runs.items():
        if not isinstance(run, dict):
            return f"run {name!r}: expected an object, got {type(run).__name__}"
        problem = _ceilings_problem(run.get("ceilings"))
        if problem:
            return f"run {name!r}: field 'ceilings': {problem}"
    return None


def _ceilings_problem(ceilings: Any) -> str | None:
    """Ceilings are divided by and compared: numbers, or nothing."""
    if ceilings is None:
        return None
    if not isinstance(ceilings, dict):
        return f"expected an object, got {type(ceilings).__name__}"
    gflops = ceilings.get("gflops", {})
    if not isinstance(gflops, dict):
        return f"'gflops': expected an object, got {type(gflops).__name__}"
    for name, value in (gflops | {"read_gb_s": ceilings.get("read_gb_s", 0.0)}).items():
        if not _is_number(value) or not 0 <= value <= _LARGEST:
            return f"{name!r}: {json_text.shortened(value)} is no number >= 0"
    if not isinstance(ceilings.get("method", ""), str):
        return f"'method': {json_text.shortened(ceilings['method'])} is no text"
    return None


def value_problem(name: str, value: Any) -> str | None:
    """Says what is wrong with the value of one field of a row; None if nothing."""
    got = json_text.shortened(value)
    choices = {
        "suite": SUITES,
        "dtype": DTYPES,
        "mode": MODES,
        "precision": PRECISIONS,
        "limit": LIMITS,
    }
    if not is_field(name):
        return "unknown field"
    if name in choices:
        known = isinstance(value, str) and value in choices[name]
        return None if known else f"{got} is none of {', '.join(choices[name])}"
    if name in _COUNTS:
        return None if _is_count(value, 1) else f"{got} is no positive integer"
    if name in ("round", "longest_seq"):
        return None if _is_count(value, 0) else f"{got} is no count"
    if name in _TIMES:
        valid = _is_number(value) and _SHORTEST_MS <= value <= _LARGEST
        return None if valid else f"{got} is no positive number"
    if name in _MEASURES or name.startswith("rel_vs_"):
        valid = _is_number(value) and 0 <= value <= _LARGEST
        return None if valid else f"{got} is no number >= 0"
    if name == "causal":
        return None if isinstance(value, bool) else f"{got} is neither true nor false"
    if name == "num_splits":
        valid = value == "auto" or _is_count(value, 1)
        return None if valid else f"{got} is neither 'auto' nor a count >= 1"
    if name == "tag" and value is None:
        return None
    if name == "impl" or name in _TEXTS:
        valid = isinstance(value, str) and json_text.is_text(value)
        valid = valid and (value != "" or name != "impl")
        return None if valid else f"{got} is no {'name' if name == 'impl' else 'text'}"
    if name in _LISTS:
        valid = isinstance(value, list) and json_text.value_problem(value) is None
        return None if valid else f"{got} is no list of values"
    return None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any, least: int) -> bool:
    return _is_int(value) and least <= value <= _LARGEST


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))
