# SPDX-License-Identifier: Apache-2.0
"""Faults around a run: a full disk, no home folder, another run at once. No row is lost."""

import json
import os
import resource

import pytest

from benchmarks.analysis import reading
from benchmarks.harness import store
from tests.benchmarks import support
from tests.benchmarks.timing_test import row

TINY = (
    "--dtypes=float32", "--batches=1", "--heads=2", "--head_dims=16", "--seq_lens=32",
    "--kv_heads=2", "--modes=fwd", "--impls=jax_xla",
)  # fmt: skip
DEVICE = {"backend": "cpu"}


def open_store(path):
    opened = store.Store(path, DEVICE)
    opened.begin_run("gqa", {"suite": "gqa"}, resume=False)
    return opened


def test_of_two_runs_that_write_one_file_neither_loses_a_row(tmp_path):
    path = tmp_path / "r.json"
    first, second = open_store(path), open_store(path)
    first.add([row(round_index=0)])
    with pytest.raises(store.StoreError, match=r"another process wrote to .*r\.json meanwhile"):
        second.add([row(round_index=7)])
    first.add([row(round_index=1)])
    (beside,) = set(tmp_path.iterdir()) - {path}
    assert [one["round"] for one in reading.read(path).rows] == [0, 1]
    assert [one["round"] for one in reading.read(beside).rows] == [7]
    # Asked again, it keeps what it has, in a file of its own again.
    with pytest.raises(store.StoreError, match="another process"):
        second.add([row(round_index=8)])
    found = [reading.read(one) for one in tmp_path.iterdir()]
    assert sorted(len(one.rows) for one in found) == [1, 2, 2]
    assert not any(one.problems for one in found)


def test_two_runs_at_once_in_one_folder(tmp_path):
    """Different files: both complete. The same file: one says where its rows are."""
    outputs = ("a.json", "b.json", "b.json")
    started = [
        support.start_binary("gqa", *TINY, "--repeats=3", f"--output={name}", cwd=tmp_path)
        for name in outputs
    ]
    ended = [(process.communicate(timeout=400)[1], process.returncode) for process in started]
    assert ended[0][1] == 0, ended[0][0]
    files = [reading.read(path) for path in sorted(tmp_path.iterdir())]
    assert not any(file.problems for file in files)
    assert {file.name for file in files} >= {"a.json", "b.json"}
    assert all(file.rows for file in files)
    for stderr, code in ended[1:]:
        assert "Traceback" not in stderr
        if code:
            assert "another process wrote to" in stderr and "are in" in stderr
            assert len(files) == 3


def limited(nbytes, module, *flags, cwd):
    """Runs a binary whose files cannot grow beyond `nbytes`, as on a disk without space."""
    script = (
        "import resource, runpy, sys\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({nbytes}, {resource.RLIM_INFINITY}))\n"
        f"runpy.run_module('benchmarks.{module}', run_name='__main__', alter_sys=True)\n"
    )
    return support.run_script(script, *flags, cwd=cwd, timeout=400)


def test_no_space_for_results(tmp_path):
    path = tmp_path / "out.json"
    open_store(path).add([row()])
    before = path.read_bytes()
    done = limited(64, "gqa", *TINY, "--repeats=1", "--output=out.json", cwd=tmp_path)
    assert done.returncode == 1
    assert "cannot write" in done.stderr and "its last complete version is kept" in done.stderr
    assert "File too large" in done.stderr and "Traceback" not in done.stderr
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["out.json"]


def test_no_space_for_scratch_files(tmp_path):
    flags = (*TINY, "--repeats=1", "--isolate", "--output=out.json")
    done = limited(0, "gqa", *flags, cwd=tmp_path)
    assert done.returncode == 1
    assert "stopped: " in done.stderr and "0 rows are kept" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_home_that_cannot_be_written(tmp_path, monkeypatch):
    """Below a device no folder can be made, not even by root."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, "/dev/null/home")
    done = support.run_binary(
        "gqa", *TINY, "--repeats=1", "--output=out.json", cwd=tmp_path, timeout=400
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "out.json").read_text())["results"]) == 1
