# SPDX-License-Identifier: Apache-2.0
"""Delegation to jax.nn.dot_product_attention ('jax_xla', 'jax_cudnn'), with its own semantics.

For comparison: 'auto' never comes here. Options that jax.nn lacks are refused, each by name; what
it has is passed on, so that rows without keys, the residual's dtype and the like are jax.nn's.
"""

from __future__ import annotations

from typing import Any

import jax

from jax_ops._errors import UnsupportedError
from jax_ops._spec import Operands, Problem

_JAX_NAMES = {"jax_xla": "xla", "jax_cudnn": "cudnn"}

# Operands that jax.nn has no argument for, under the names that users know.
_LACKING_OPERANDS = {
    "query_segments": "query_segment_ids",
    "alibi_slopes": "alibi_slopes",
    "prefix_lengths": "prefix_lengths",
    "dropout_seed": "dropout_rate",
    "block_index": "block_mask",
}


def refusal(problem: Problem) -> str:
    """Which options of a problem jax.nn lacks; '' if it has them all."""
    spec, operands = problem.spec, problem.operands
    lacking = [
        name for field, name in _LACKING_OPERANDS.items() if getattr(operands, field) is not None
    ]
    if spec.soft_cap is not None:
        lacking.append("logits_soft_cap")
    if spec.bottom_right:
        lacking.append("alignment='bottom_right'")
    if spec.has_window and None in (spec.window_left, spec.window_right):
        lacking.append("local_window_size with an unbounded side")
    if operands.value.shape[-1] != operands.query.shape[-1]:
        lacking.append(
            f"value head dim {operands.value.shape[-1]} other than query's "
            f"{operands.query.shape[-1]}"
        )
    for name, used in (
        ("block_q", spec.block_q),
        ("block_k", spec.block_k),
        ("num_splits", spec.num_splits),
    ):
        if used:
            lacking.append(name)
    if spec.implementation == "jax_cudnn" and operands.scale is not None:
        lacking.append("scale as an array")
    return f"jax.nn.dot_product_attention has no {', no '.join(lacking)}" if lacking else ""


def attend(problem: Problem, return_residual: bool) -> Any:
    """Runs a problem on jax.nn.

    Raises:
      UnsupportedError: jax.nn lacks an option, or cuDNN refuses the call (its message is kept).
    """
    spec, operands = problem.spec, problem.operands
    name = spec.implementation
    if reason := refusal(problem):
        raise UnsupportedError(f"implementation={name!r}: {reason}")
    window = (spec.window_left, spec.window_right) if spec.has_window else None
    try:
        result = _call(spec, operands, window, return_residual, _JAX_NAMES[name])
    except (NotImplementedError, RuntimeError) as error:
        raise UnsupportedError(f"implementation={name!r}: {error}") from error
    if problem.batched:
        return result
    return jax.tree.map(lambda x: x[0], result)


def _call(
    spec: Any, operands: Operands, window: Any, return_residual: bool, implementation: str
) -> Any:
    # Called through Any: its overloads know no computed return_residual.
    function: Any = jax.nn.dot_product_attention
    with jax.default_matmul_precision("highest" if spec.precision == "highest" else None):
        return function(
            operands.query,
            operands.key,
            operands.value,
            operands.bias,
            operands.mask,
            scale=operands.scale[0] if spec.scale is None else spec.scale,
            is_causal=spec.causal,
            query_seq_lengths=operands.query_lengths,
            key_value_seq_lengths=operands.kv_lengths,
            local_window_size=window,
            implementation=implementation,
            return_residual=return_residual,
        )
