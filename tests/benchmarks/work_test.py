# SPDX-License-Identifier: Apache-2.0
"""FLOPs, bytes and saved memory by count; ceilings and the search for the longest sequence."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from benchmarks.harness import ceilings, residuals, search, work
from benchmarks.harness.case import Case

CASE = Case("gqa", "bfloat16", "fwd", 2, 16, 16, 4, 2, 8)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (4, 4), (3, 8), (8, 3), (1, 9), (9, 1)])
def test_allowed_pairs_equal_brute_force(causal, lengths):
    lq, lkv = lengths
    pairs = sum(not causal or j <= i + lkv - lq for i in range(lq) for j in range(lkv))
    assert work.allowed_pairs(lq, lkv, causal) == pairs


def test_the_mask_counts():
    """Causal self-attention has just over half of the pairs: not counting it doubles TFLOP/s."""
    full = work.count(CASE).flops
    causal = work.count(dataclasses.replace(CASE, causal=True)).flops
    assert causal / full == (16 + 1) / (2 * 16)


def test_flops_and_bytes_of_both_directions():
    pairs = 2 * 4 * 16 * 16
    forward = work.count(CASE)
    both = work.count(dataclasses.replace(CASE, mode="fwd_bwd"))
    assert forward.flops == 4 * pairs * 8
    assert both.flops == 14 * pairs * 8
    q, kv = 2 * 16 * 4 * 8, 2 * 16 * 2 * 8
    assert forward.bytes == 2 * (2 * q + 2 * kv)
    assert both.bytes == 2 * (3 * q + 4 * kv)


def test_rates():
    amount = work.Work(flops=2_000_000_000, bytes=1_000_000)
    assert amount.tflops(1.0) == pytest.approx(2.0)
    assert amount.gb_per_s(1.0) == pytest.approx(1.0)
    assert amount.intensity == 2000


def test_a_layer_counts_its_projections():
    case = Case("layer", "float32", "fwd", 1, 8, 8, 2, 2, 4, model_dim=8)
    attention = work.count(dataclasses.replace(case, model_dim=None)).flops
    assert work.count(case).flops == attention + 4 * 2 * 8 * 8 * 8


def test_residuals_are_what_the_forward_pass_saves_beyond_its_inputs():
    @jax.custom_vjp
    def dot(x, y):
        return (x * y).sum(-1)

    def forward(x, y):
        out = dot(x, y)
        # The input is no cost, out counts once, its rounded copy is another array.
        return out, (x, y, out, out, out.astype(jnp.bfloat16))

    def backward(saved, cotangent):
        return saved[1] * cotangent[..., None], saved[0] * cotangent[..., None]

    dot.defvjp(forward, backward)
    shape = jax.ShapeDtypeStruct((2, 8, 4), jnp.float32)
    assert residuals.saved_residuals(dot, [shape, shape]) == {
        "residual_mb": 16 * (4 + 2) / 2**20,
        "residual_shapes": ["float32[2, 8]", "bfloat16[2, 8]"],
    }


def test_impossible_needs_a_wide_margin():
    known = {"is_bound": True, "gflops": {"float32": 100.0}, "read_gb_s": 10.0}
    assert not ceilings.impossible(known, "float32", 120)
    assert ceilings.impossible(known, "float32", 200)
    # A precision without a ceiling of its own is held against the highest one.
    assert ceilings.impossible(known, "tf32", 200)
    assert not ceilings.impossible({"is_bound": True, "gflops": {}}, "float32", 1e9)
    # What only stands in for a ceiling accuses nobody.
    assert not ceilings.impossible(known | {"is_bound": False}, "float32", 1e9)


def test_measured_ceilings_are_plausible():
    measured = ceilings.measure("cpu")
    assert 0.1 < measured["gflops"]["float32"] < 1e5
    assert 0.1 < measured["read_gb_s"] < 1e4
    assert measured["method"]


def test_only_the_native_loops_bound_a_cpu(monkeypatch, tmp_path):
    """Without the native program XLA's product stands in: slow at 16 bits on many CPUs."""
    monkeypatch.setattr(ceilings, "NATIVE", tmp_path / "absent")
    measured = ceilings.measure("cpu")
    assert not measured["is_bound"]
    assert measured["gflops"]["bfloat16"] >= measured["gflops"]["float32"] > 0
    script = tmp_path / "machine_peaks"
    script.write_text('#!/bin/sh\necho \'{"method": "m", "gflops": {}, "read_gb_s": 1}\'\n')
    script.chmod(0o755)
    monkeypatch.setattr(ceilings, "NATIVE", script)
    assert ceilings.measure("cpu") == {
        "method": "m", "gflops": {}, "read_gb_s": 1, "is_bound": True,
    }  # fmt: skip


@pytest.mark.parametrize("longest", [0, 1, 255, 256, 300, 1000, 4095, 4096])
def test_bisection_finds_the_longest_length(longest):
    tried = []

    def attempt(length):
        assert length not in tried
        tried.append(length)
        return length <= longest, None if length <= longest else ("memory", f"at {length}")

    found, reason = search.bisect(attempt, 4096)
    if longest == 4096:
        assert (found, reason) == (4096, None)
    else:
        assert longest - max(1, longest // search.RESOLUTION) <= found <= longest
        assert reason[0] == "memory"
    assert all(length <= 4096 for length in tried)
