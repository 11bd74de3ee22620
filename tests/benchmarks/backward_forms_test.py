# SPDX-License-Identifier: Apache-2.0
"""benchmarks.backward_forms on the emulator: both forms run, and what is wrong is said."""

import contextlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import backward_forms
from benchmarks.harness.budget import Budget
from benchmarks.harness.errors import WrongResultError

_TINY = backward_forms.PRESETS["tiny"]


def _run(*flags):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.backward_forms", *flags],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


def test_without_a_gpu_the_reason_is_given():
    # The flags of tools/gpu_trip.py.
    done = _run("--time_budget_s=90", "--output=forms.json")
    assert done.returncode == 2, done.stdout
    assert "--implementation=cuda: " in done.stderr


def test_both_forms_are_timed_and_the_choice_is_judged(tmp_path):
    output = tmp_path / "forms.json"
    done = _run("--implementation=emulated", "--preset=tiny", "--repeats=1", f"--output={output}")
    assert done.returncode == 0, done.stderr
    assert "one / two" in done.stdout
    assert "the planner's choice takes up to" in done.stdout
    entries = json.loads(output.read_text())["cases"]
    assert [entry["case"]["head_dim"] for entry in entries] == [64, 128]
    for entry in entries:
        two, one = entry["forms"]["two_kernels"], entry["forms"]["one_kernel"]
        rows = backward_forms.FORMS[entry["case"]["head_dim"]]
        assert {name: form["block_q"] for name, form in entry["forms"].items()} == rows
        for form in (two, one):
            assert 0 < form["q1_ms"] <= form["median_ms"] <= form["q3_ms"]
        assert entry["one_to_two"] == pytest.approx(one["median_ms"] / two["median_ms"])
        assert entry["planned"] in entry["forms"]
        assert entry["planned_to_best"] >= 1


def test_a_form_that_was_not_built_is_noticed(monkeypatch):
    from jax_ops import _plan

    # As if the request did not reach the planner.
    monkeypatch.setattr(_plan, "backward_block_q", lambda rows: contextlib.nullcontext())
    with pytest.raises(WrongResultError, match=r"no gradient kernel with block_q"):
        backward_forms.measure(_TINY[0], "emulated", "cpu", 1, Budget(None, 1))


@pytest.mark.parametrize(
    ("call", "message"),
    [(1, "one_kernel: dk differs from call to call"), (None, "dk: the forms differ by")],
)
def test_gradients_that_change_or_disagree_are_noticed(monkeypatch, call, message):
    plain = backward_forms.FormProgram.to_numpy
    calls = []

    def planted(self, outputs):
        dq, dk, dv = plain(self, outputs)
        # Of the one kernel alone, which comes second: calls 2 and 3.
        calls.append(self)
        if len(calls) - 1 in ((2 + call,) if call is not None else (2, 3)):
            dk = dk + np.float32(0.5) * np.abs(dk).max()
        return [dq, dk, dv]

    monkeypatch.setattr(backward_forms.FormProgram, "to_numpy", planted)
    with pytest.raises(WrongResultError, match=message):
        backward_forms.measure(_TINY[0], "emulated", "cpu", 1, Budget(None, 1))


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--implementation=cpu", "implementation"),
        ("--preset=all", "preset"),
        ("--repeats=0", "repeats"),
        ("--output=/none/forms.json", "does not exist"),
        ("stray", "unexpected argument"),
    ],
)
def test_bad_commands_are_refused(flag, message):
    done = _run(flag)
    assert done.returncode == 2, done.stdout
    assert message in done.stderr
