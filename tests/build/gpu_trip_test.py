# SPDX-License-Identifier: Apache-2.0
"""The GPU script where there is no GPU: what is missing is said at once, and steps are bounded."""

import json
import os
import pathlib
import sys

import pytest

from tools import gpu_trip


def _arguments(tmp_path, *more):
    return gpu_trip.parse(
        ["run", "--files", str(tmp_path / "files"), "--out", str(tmp_path / "out"), *more]
    )


def test_everything_that_is_missing_is_named(tmp_path, capsys):
    assert gpu_trip.run(_arguments(tmp_path)) == 2
    said = capsys.readouterr().err
    assert "holds 0 wheels; one is needed" in said
    assert "libconformance_gpu.so is not there" in said
    assert "libconformance_emulated.so is not there" in said
    assert not (tmp_path / "out").exists()


def test_without_a_gpu_the_reason_of_jax_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    files = tmp_path / "files"
    files.mkdir()
    for name in ("x-1-py3-none-any.whl", "libconformance_gpu.so", "libconformance_emulated.so"):
        (files / name).touch()
    monkeypatch.setattr(gpu_trip, "_PACKAGES", ("jax", "numpy", "pytest"))
    (problem,) = gpu_trip.missing(files)
    assert problem.startswith("JAX finds no GPU: ")


def test_an_unknown_step_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        _arguments(tmp_path, "--steps", "everything")
    assert "invalid choice: 'everything'" in capsys.readouterr().err


@pytest.mark.parametrize("limit_s, timed_out", [(60, False), (0.2, True)])
def test_a_step_is_stopped_at_its_limit(tmp_path, limit_s, timed_out):
    code = "import time; print('began', flush=True); time.sleep(0 if LONG else 5)"
    step = gpu_trip.Step(
        "sleep", [sys.executable, "-c", code.replace("LONG", str(not timed_out))], limit_s
    )
    log = tmp_path / "log"
    entry = gpu_trip.run_step(step, dict(os.environ), tmp_path, log, limit_s)
    assert entry["timed_out"] is timed_out
    assert (entry["exit_code"] == 0) is not timed_out
    json.dumps(entry)
    if not timed_out:
        assert "began" in entry["output_tail"]


def test_every_step_names_files_that_exist():
    root = pathlib.Path(gpu_trip.__file__).parent.parent
    for step in gpu_trip.steps(pathlib.Path("files"), pathlib.Path("out"), 60):
        for word in step.command:
            if word.startswith("tests/"):
                assert (root / word).exists(), word
            if word.startswith("benchmarks."):
                assert (root / (word.replace(".", "/") + ".py")).exists(), word
