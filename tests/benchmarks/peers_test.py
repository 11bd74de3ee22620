# SPDX-License-Identifier: Apache-2.0
"""The peers that come with --config=peers: torch and Flax measured, matplotlib's chart drawn."""

import dataclasses
import struct

import pytest

from benchmarks.harness.case import Case
from benchmarks.harness.implementations import IMPLEMENTATIONS
from benchmarks.harness.operation import operation_of
from tests.benchmarks.cli_test import TINY_SELF, rows_of
from tests.benchmarks.support import TINY, measure, run_binary

BOTH = ("fwd", "fwd_bwd")


def numbers(settings):
    """Rows by mode and implementation; fails for an error or a note."""
    found = {}
    for one in measure(settings):
        assert "error" not in one and "note" not in one, one
        assert 0 < one["q1_ms"] <= one["median_ms"] <= one["q3_ms"]
        found[one["mode"], one["impl"]] = one
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [0, 1])
def test_torch_obeys_the_accuracy_rule_with_grouped_heads(dtype, causal):
    """Layout, grouping, mask and gradients are translated rightly, or the gate would shut."""
    rows = numbers(
        dataclasses.replace(
            TINY, dtypes=(dtype,), modes=BOTH, causal=(causal,), seq_lens=(96,),
            impls=("jax_xla", "torch_sdpa"), baseline_impl="jax_xla",
        )
    )  # fmt: skip
    unit = {"float32": 1e-6, "bfloat16": 1e-2}[dtype]
    for mode in BOTH:
        assert 0 < rows[mode, "torch_sdpa"]["rel_vs_jax_xla"] < unit
        # XLA's figures are not torch's.
        assert "xla_temp_mb" not in rows[mode, "torch_sdpa"]


def test_flax_is_measured_and_says_what_it_lacks():
    settings = dataclasses.replace(TINY, modes=BOTH, impls=("flax",), kv_heads=(4,), causal=(0, 1))
    assert len(numbers(dataclasses.replace(settings, causal=(1,)))) == 2
    (row,) = measure(dataclasses.replace(settings, kv_heads=(2,), modes=("fwd",), causal=(0,)))
    assert row["error"] == "unsupported: flax needs equal head counts, got Hq=4 and Hkv=2"


@pytest.mark.parametrize("causal", [0, 1])
def test_both_layers_are_the_same_function_of_the_same_weights(causal):
    rows = numbers(
        dataclasses.replace(
            TINY, suite="layer", modes=BOTH, impls=("default", "flax"), kv_heads=(4,),
            model_dim=64, causal=(causal,), baseline_impl="flax",
        )
    )  # fmt: skip
    for mode in BOTH:
        assert rows[mode, "default"]["rel_vs_flax"] < 1e-6
        assert len(rows[mode, "flax"]["rel_err_parts"]) == (1 if mode == "fwd" else 5)


def test_torch_gets_its_own_layout_in_memory_of_its_own():
    case = Case("gqa", "bfloat16", "fwd", 2, 8, 8, 4, 2, 16)
    arrays = operation_of(case).inputs(case)
    program = operation_of(case).program("torch_sdpa", case, arrays, "cpu")
    assert IMPLEMENTATIONS["torch_sdpa"].library == "torch"
    first, second = program.stage(arrays), program.stage(arrays)
    assert [tuple(x.shape) for x in first] == [(2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16)]
    assert all(x.is_contiguous() for x in first)
    assert len({x.data_ptr() for x in (*first, *second)}) == 6


def test_a_chart_is_drawn(tmp_path):
    done = run_binary(
        "gqa", *TINY_SELF, "--kv_heads=2", "--modes=fwd", "--impls=jax_xla,torch_sdpa,jax_cudnn",
        "--output=out.json", "--plot=out.png", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "chart in" in done.stdout
    assert {one["impl"] for one in rows_of(tmp_path / "out.json")} == {
        "jax_xla", "torch_sdpa", "jax_cudnn",
    }  # fmt: skip
    data = (tmp_path / "out.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width == 1500 and height > 200
