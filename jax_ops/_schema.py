# SPDX-License-Identifier: Apache-2.0
"""The interface between this package and its native libraries, as Python sees it.

The C++ side is kernels/ffi/schema.h. A library describes the interface that it was built for
(`attention_schema()`); loading compares that with `description()` and refuses a library that
differs. Raise ABI on both sides for every change: target names carry it, so that an exported
program never reaches a library that would read its operands differently.
"""

from __future__ import annotations

import numpy as np

from jax_ops._spec import AttentionSpec, Operands

ABI = 1

OPERANDS = Operands._fields
BACKWARD_OPERANDS = ("out", "lse", "dout", "dlse")
FORWARD_RESULTS = ("out", "lse", "workspace")
BACKWARD_RESULTS = ("dq", "dk", "dv", "dbias", "dslopes_rows", "dscale_rows", "workspace")

ATTRIBUTES = {
    "features": np.int64,
    "scale": np.float32,
    "soft_cap": np.float32,
    "window_left": np.int64,
    "window_right": np.int64,
    "dropout_threshold": np.int64,
    "dropout_keep_scale": np.float32,
    "precision": np.int32,
    "block_q": np.int64,
    "block_k": np.int64,
    "num_splits": np.int64,
    "threads": np.int64,
    "batch_div": np.ndarray,  # int64, one for each operand
}

FEATURES = (
    "causal",
    "bottom_right",
    "window",
    "soft_cap",
    "dropout",
    "bias",
    "mask",
    "q_lengths",
    "kv_lengths",
    "segments",
    "alibi",
    "prefix",
    "scale_array",
    "block_mask",
    "want_dbias",
    "want_dslopes",
    "want_dscale",
)  # bit i of the attribute `features` is the i-th

_TYPE_NAMES = {np.int64: "i64", np.int32: "i32", np.float32: "f32", np.ndarray: "i64[]"}


def description() -> str:
    """The interface as text, exactly as `attention_schema()` writes it."""
    lists = (
        ("operands", OPERANDS),
        ("backward_operands", BACKWARD_OPERANDS),
        ("forward_results", FORWARD_RESULTS),
        ("backward_results", BACKWARD_RESULTS),
        ("attributes", (f"{name}:{_TYPE_NAMES[type_]}" for name, type_ in ATTRIBUTES.items())),
        ("features", (f"{name}:{bit}" for bit, name in enumerate(FEATURES))),
    )
    return f"abi {ABI}\n" + "".join(f"{key} {' '.join(names)}\n" for key, names in lists)


def target(operation: str, library: str) -> str:
    """Name of the FFI target of an operation ('fwd' or 'bwd') in a library."""
    return f"attention_{operation}_{library}_v{ABI}"


def features(spec: AttentionSpec, present: frozenset[str] | set[str]) -> int:
    """Feature bits of a call; `present` are the names of the operands that are there."""
    on = {
        "causal": spec.causal,
        "bottom_right": spec.bottom_right,
        "window": spec.has_window,
        "soft_cap": spec.soft_cap is not None,
        "dropout": spec.dropout_threshold > 0,
        "bias": "bias" in present,
        "mask": "mask" in present,
        "q_lengths": "query_lengths" in present,
        "kv_lengths": "kv_lengths" in present,
        "segments": "query_segments" in present,
        "alibi": "alibi_slopes" in present,
        "prefix": "prefix_lengths" in present,
        "scale_array": "scale" in present,
        "block_mask": "block_index" in present,
        "want_dbias": spec.want_dbias,
        "want_dslopes": spec.want_dslopes,
        "want_dscale": spec.want_dscale,
    }
    return sum(1 << bit for bit, name in enumerate(FEATURES) if on[name])
