# SPDX-License-Identifier: Apache-2.0
"""The format of a result file: its version, its row fields and what makes a row valid.

A file is one JSON object {schema, device, config, results}. `config.runs` maps a run's name to the
complete configuration that produced it; each row names its run. Files of the reference data have
no `schema` and are read as version 0 (analysis/reading.py).
"""

from __future__ import annotations

import math
from typing import Any

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

FIELDS = frozenset(_COUNTS + _TIMES + _MEASURES + _TEXTS + _LISTS + _OTHER + _SEARCH)
LIMITS = ("memory", "time", "max_seq", "unsupported")


def is_field(name: str) -> bool:
    """Whether a row may have a field of this name."""
    return name in FIELDS or name.startswith("rel_vs_")


def row_problem(row: Any) -> str | None:
    """Says what is wrong with a row of the current version, naming the field; None if nothing."""
    if not isinstance(row, dict):
        return f"expected an object, got {type(row).__name__}"
    for name in ("suite", "impl", "dtype", "mode", "batch", "lq", "lkv", "hq", "hkv", "head_dim"):
        if name not in row:
            return f"field '{name}' is missing"
    for name, value in row.items():
        problem = _value_problem(name, value)
        if problem:
            return f"field '{name}': {problem}"
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
    return None


def _value_problem(name: str, value: Any) -> str | None:
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
        return (
            None if value in choices[name] else f"{value!r} is none of {', '.join(choices[name])}"
        )
    if name in _COUNTS:
        return None if _is_int(value) and value >= 1 else f"{value!r} is no positive integer"
    if name in ("round", "longest_seq"):
        return None if _is_int(value) and value >= 0 else f"{value!r} is no count"
    if name in _TIMES:
        return None if _is_number(value) and value > 0 else f"{value!r} is no positive number"
    if name in _MEASURES or name.startswith("rel_vs_"):
        return None if _is_number(value) and value >= 0 else f"{value!r} is no number >= 0"
    if name == "causal":
        return None if isinstance(value, bool) else f"{value!r} is neither true nor false"
    if name == "num_splits":
        valid = value == "auto" or (_is_int(value) and value >= 1)
        return None if valid else f"{value!r} is neither 'auto' nor a count >= 1"
    if name == "impl":
        return None if isinstance(value, str) and value else f"{value!r} is no name"
    if name == "tag" and value is None:
        return None
    if name in _TEXTS:
        return None if isinstance(value, str) else f"{value!r} is no text"
    if name in _LISTS:
        return None if isinstance(value, list) else f"{value!r} is no list"
    return None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))
