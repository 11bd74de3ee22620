# SPDX-License-Identifier: Apache-2.0
"""Result files: atomic, valid, resumable; a kill or a full disk loses at most one row."""

import dataclasses
import json
import os
import resource
import subprocess
import sys
import textwrap

import pytest

from benchmarks.harness import rows, schema, store
from benchmarks.harness.suites import groups_of
from tests.benchmarks import support
from tests.benchmarks.support import TINY, attention, measure, planted
from tests.benchmarks.timing_test import row

DEVICE = {"backend": "cpu", "device_kind": "cpu", "cores": 2}


def open_store(path, suite="gqa", config=None, resume=False, device=DEVICE):
    result = store.Store(path, device)
    result.load()
    result.begin_run(suite, {"suite": suite, "seq_lens": [8]} | (config or {}), resume)
    return result


def test_file_is_whole_after_every_row(tmp_path):
    path = tmp_path / "r.json"
    writer = open_store(path)
    for index in range(3):
        writer.add([row(round_index=index)])
        data = json.loads(path.read_text())
        assert [one["round"] for one in data["results"]] == list(range(index + 1))
        assert data["schema"] == schema.VERSION
        assert data["device"] == DEVICE
        assert data["config"]["runs"]["gqa_1"]["seq_lens"] == [8]
    assert os.listdir(tmp_path) == ["r.json"]


def test_kill_at_any_moment_leaves_a_whole_file(tmp_path):
    """SIGKILL inside write, fsync or rename: the last complete version is there."""
    path = tmp_path / "r.json"
    script = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        from benchmarks.harness import store
        from tests.benchmarks.timing_test import row
        point, path = sys.argv[1], Path(sys.argv[2])
        s = store.Store(path, {"backend": "cpu"})
        s.begin_run("gqa", {"suite": "gqa"}, False)
        s.add([row(round_index=0)])
        def die(*_, **__):
            os.kill(os.getpid(), signal.SIGKILL)
        setattr(os, point, die)
        s.add([row(round_index=1)])
        """
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    for point in ("fsync", "replace"):
        done = subprocess.run(
            [sys.executable, "-c", script, point, str(path)], env=environment, check=False
        )
        assert done.returncode == -9
        assert len(json.loads(path.read_text())["results"]) == 1
    assert len(os.listdir(tmp_path)) == 2
    open_store(path, device={"backend": "cpu"}).add([row()])
    assert os.listdir(tmp_path) == ["r.json"]


def test_full_disk_is_said_and_keeps_the_last_version(tmp_path):
    path = tmp_path / "r.json"
    writer = open_store(path)
    writer.add([row(round_index=0)])
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        with pytest.raises(store.StoreError, match=r"cannot write .*r\.json.*is kept"):
            writer.add([row(round_index=1)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["r.json"]


def test_resume_skips_done_rounds_and_measures_the_rest(tmp_path):
    """A file cut after its first rows is completed without measuring those again."""
    path = tmp_path / "r.json"
    settings = dataclasses.replace(TINY, repeats=3, modes=("fwd", "fwd_bwd"))
    with planted(lambda case, backend: attention(case)):
        measure(settings, support.open_store(settings, path))
        data = json.loads(path.read_text())
        complete = [(*rows.identity(one), one["round"]) for one in data["results"]]
        assert len(complete) == 6
        data["results"] = kept = data["results"][:4]
        path.write_text(json.dumps(data))
        again = measure(settings, support.open_store(settings, path, resume=True))
    assert [(*rows.identity(one), one["round"]) for one in again] == complete
    assert again[:4] == kept
    assert {one["run"] for one in again} == {"gqa_1"}


@pytest.mark.parametrize("isolated", [False, True])
def test_resumed_rows_are_compared_with_a_baseline_that_was_complete(tmp_path, isolated):
    path = tmp_path / "r.json"
    settings = dataclasses.replace(
        TINY, repeats=2, impls=("jax_xla", "default"), baseline_impl="jax_xla"
    )
    measure(settings, support.open_store(settings, path))
    data = json.loads(path.read_text())
    assert [one["impl"] for one in data["results"]] == ["jax_xla", "default"] * 2
    kept = data["results"][:3]
    path.write_text(json.dumps(data | {"results": kept}))
    again = measure(settings, support.open_store(settings, path, resume=True), isolated=isolated)
    assert again[:3] == kept
    (row,) = again[3:]
    assert (row["impl"], row["round"]) == ("default", 1)
    assert row["rel_vs_jax_xla"] == kept[1]["rel_vs_jax_xla"]


def test_a_resumed_search_leaves_the_baseline_alone(tmp_path):
    """The others are not compared with its outputs there."""
    path = tmp_path / "r.json"
    settings = dataclasses.replace(
        TINY, suite="max_seq", impls=("jax_xla", "default"), baseline_impl="jax_xla", max_seq=256
    )
    measure(settings, support.open_store(settings, path))
    data = json.loads(path.read_text())
    kept = data["results"][:1]
    path.write_text(json.dumps(data | {"results": kept}))
    again = measure(settings, support.open_store(settings, path, resume=True))
    assert again[:1] == kept
    assert [one["impl"] for one in again] == ["jax_xla", "default"]


@pytest.mark.parametrize(
    ("settings", "ending"),
    [
        (dataclasses.replace(TINY, impls=("jax_cudnn",), repeats=3), {"error": "unsupported: x"}),
        (dataclasses.replace(TINY, suite="peak", impls=("jax_xla",)), {"peak_mb": 1.0}),
    ],
)
def test_an_error_and_a_row_without_rounds_are_not_measured_again(
    tmp_path, monkeypatch, settings, ending
):
    path = tmp_path / "r.json"
    held = support.open_store(settings, path)
    (group,) = groups_of(settings)
    held.add([rows.base(group.contenders[0], "cpu", None, held.run) | ending])
    monkeypatch.setattr("benchmarks.harness.yardstick.make_yardstick", None)
    again = measure(settings, support.open_store(settings, path, resume=True))
    assert again == held.rows


def test_resume_refuses_another_configuration_and_names_the_difference(tmp_path):
    path = tmp_path / "r.json"
    open_store(path).add([row()])
    with pytest.raises(store.StoreError, match="differs in: seq_lens"):
        open_store(path, config={"seq_lens": [16]}, resume=True)
    # What a run finds out, and what changes no number, may differ.
    assert open_store(path, config={"output": "elsewhere"}, resume=True).run == "gqa_1"
    ceilings = {"gflops": {"float32": 2.0}}
    facts = {"machine_state": {"load": 1}, "ceilings": ceilings, "dropped_rounds": 3}
    for name, value in facts.items():
        first = open_store(path, resume=True)
        first.record_setting(name, value)
        first.write()
        assert open_store(path, resume=True).run == "gqa_1", name


def test_append_adds_a_run_and_refuses_another_machine(tmp_path):
    path = tmp_path / "r.json"
    open_store(path).add([row(run="gqa_1")])
    second = open_store(path)
    second.add([row(run="gqa_2")])
    data = json.loads(path.read_text())
    assert list(data["config"]["runs"]) == ["gqa_1", "gqa_2"]
    assert len(data["results"]) == 2
    with pytest.raises(store.StoreError, match="cores = 2, this is 64"):
        open_store(path, device=DEVICE | {"cores": 64})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 1, "results": [', "cannot be read as a result file"),
        ('{"device": {}, "results": []}', "schema None cannot be extended"),
        ('{"schema": 9, "results": []}', "schema 9 cannot be extended"),
        ('{"schema": 1, "device": {"backend": "cpu", "device_kind": "cpu", "cores": 2}, '
         '"results": [{"suite": "gqa"}]}', "row 0: field 'impl' is missing"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_extended_is_refused(tmp_path, text, message):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(store.StoreError, match=message):
        open_store(path)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"median_ms": "fast"}, "median_ms"),
        ({"median_ms": float("nan")}, "median_ms"),
        ({"q1_ms": 9.0}, "q1_ms"),
        ({"lq": 0}, "lq"),
        ({"dtype": "int8"}, "dtype"),
        ({"suite": "gpu"}, "suite"),
        ({"causal": 1}, "causal"),
        ({"num_splits": 0}, "num_splits"),
        ({"surprise": 1}, "surprise"),
        ({"rel_err": -1.0}, "rel_err"),
        ({"round": True}, "round"),
    ],
)
def test_an_invalid_row_names_its_field(change, field):
    assert schema.row_problem(row()) is None
    problem = schema.row_problem(row() | change)
    assert problem is not None and field in problem


def test_missing_fields_are_named_and_an_error_replaces_numbers():
    incomplete = row()
    del incomplete["median_ms"]
    assert "median_ms" in schema.row_problem(incomplete)
    assert schema.row_problem(incomplete | {"error": "skipped: too large"}) is None
