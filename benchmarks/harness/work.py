# SPDX-License-Identifier: Apache-2.0
"""Work in a case, counted exactly: FLOPs from the allowed pairs, bytes from each array once."""

from __future__ import annotations

import dataclasses

from benchmarks.harness.case import DTYPE_BYTES, Case

# Matrix products per (query, key) pair: QK^T and PV forward; QK^T again, dP, dV, dQ, dK backward.
_FORWARD_PRODUCTS = 2
_BACKWARD_PRODUCTS = 5


@dataclasses.dataclass(frozen=True)
class Work:
    """FLOPs (a multiply-add is 2) and bytes that any implementation must at least move."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    def tflops(self, milliseconds: float) -> float:
        return self.flops / milliseconds / 1e9

    def gb_per_s(self, milliseconds: float) -> float:
        return self.bytes / milliseconds / 1e6


def allowed_pairs(lq: int, lkv: int, causal: bool) -> int:
    """Number of (query, key) pairs that may attend; causal is aligned bottom-right."""
    if not causal:
        return lq * lkv
    offset = lkv - lq
    # Row i sees keys 0 .. i + offset: i + offset + 1 of them, none where that is negative.
    first = max(0, -offset)
    rows = lq - first
    return rows * (first + offset + 1) + rows * (rows - 1) // 2 if rows > 0 else 0


def count(case: Case) -> Work:
    """Work of one call of the case."""
    pairs = allowed_pairs(case.lq, case.lkv, case.causal) * case.batch * case.hq
    products = _FORWARD_PRODUCTS + (_BACKWARD_PRODUCTS if case.mode == "fwd_bwd" else 0)
    flops = 2 * products * pairs * case.head_dim
    q_elements = case.batch * case.lq * case.hq * case.head_dim
    kv_elements = 2 * case.batch * case.lkv * case.hkv * case.head_dim
    if case.model_dim is not None:
        return _count_layer(case, flops)
    # fwd reads q, k, v and writes out; fwd_bwd reads the cotangent too and writes dq, dk, dv.
    elements = 2 * q_elements + kv_elements
    if case.mode == "fwd_bwd":
        elements += q_elements + kv_elements
    return Work(flops, elements * DTYPE_BYTES[case.dtype])


def _count_layer(case: Case, attention_flops: int) -> Work:
    """A layer: attention plus four projections; each product has two gradient products."""
    assert case.model_dim is not None
    tokens = case.batch * case.lq
    heads = 2 * case.hq + 2 * case.hkv
    weights = case.model_dim * heads * case.head_dim
    factor = 3 if case.mode == "fwd_bwd" else 1
    flops = attention_flops + 2 * factor * tokens * weights
    elements = 2 * tokens * case.model_dim + weights
    if case.mode == "fwd_bwd":
        elements += tokens * case.model_dim + weights
    return Work(flops, elements * DTYPE_BYTES[case.dtype])
