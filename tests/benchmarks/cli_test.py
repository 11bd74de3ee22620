# SPDX-License-Identifier: Apache-2.0
"""The suite binaries as a user runs them: tiny shapes, real processes, files and exit codes."""

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.harness import errors, isolate, schema, usage
from benchmarks.harness.case import Case
from benchmarks.harness.suites import SETTINGS_OF, Contender
from tests.benchmarks import support
from tests.benchmarks.support import TINY, measure, run_binary

TINY_SELF = (
    "--dtypes=float32", "--batches=1", "--heads=4", "--head_dims=16", "--seq_lens=32",
    "--repeats=2",
)  # fmt: skip


def rows_of(path):
    data = json.loads(path.read_text())
    for one in data["results"]:
        assert schema.row_problem(one) is None
    return data["results"]


def test_gqa_writes_rows_in_the_format_of_the_reference_data(tmp_path):
    done = run_binary(
        "gqa", *TINY_SELF, "--kv_heads=4,1", "--modes=fwd,fwd_bwd", "--impls=jax_xla",
        "--output=out.json", "--tag=try", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "out.json").read_text())
    rows = rows_of(tmp_path / "out.json")
    assert [(r["hkv"], r["mode"], r["round"]) for r in rows] == [
        (hkv, mode, index) for hkv in (4, 1) for mode in ("fwd", "fwd_bwd") for index in (0, 1)
    ]
    reference_fields = {
        "suite", "dtype", "batch", "lq", "lkv", "hq", "hkv", "head_dim", "impl", "mode", "round",
        "xla_temp_mb", "xla_arg_mb", "xla_out_mb", "rel_err", "rel_err_parts", "compile_s",
        "inner", "median_ms", "q1_ms", "q3_ms", "tag", "run",
    }  # fmt: skip
    for row in rows:
        assert reference_fields <= row.keys()
        assert ("residual_mb" in row) == (row["mode"] == "fwd_bwd")
        assert row["tag"] == "try"
    config = data["config"]["runs"][rows[0]["run"]]
    assert config["kv_heads"] == [4, 1] and config["repeats"] == 2
    assert config["ceilings"]["gflops"]["float32"] > 0
    assert {"jax", "python", "backend", "device_kind", "cpu", "cores"} <= data["device"].keys()
    assert "ratio" in done.stdout and "TFLOP/s" in done.stdout
    assert "[4/4]" in done.stderr


def test_a_long_case_beyond_the_reference_is_compared_with_the_baseline():
    settings = dataclasses.replace(
        TINY, modes=("fwd_bwd",), ref_max_seq=16, impls=("jax_xla", "default"),
        baseline_impl="jax_xla",
    )  # fmt: skip
    rows = {row["impl"]: row for row in measure(settings)}
    assert not any("rel_err" in row for row in rows.values())
    assert "rel_vs_jax_xla" not in rows["jax_xla"]
    assert 0 <= rows["default"]["rel_vs_jax_xla"] < 1e-5


def test_what_cannot_run_is_a_row_with_the_reason():
    settings = dataclasses.replace(TINY, impls=("jax_xla", "jax_cudnn"))
    rows = {row["impl"]: row for row in measure(settings)}
    assert rows["jax_cudnn"]["error"] == "unsupported: jax_cudnn needs a GPU"
    assert rows["jax_xla"]["kv_mb"] == pytest.approx(2 * 32 * 2 * 16 * 4 / 2**20)


def test_too_large_a_cache_is_a_skipped_row():
    (row,) = measure(dataclasses.replace(TINY, impls=("jax_xla",), max_kv_gb=1e-6))
    assert row["error"] == "skipped: K+V > 1e-06 GB"


def test_an_isolated_process_measures_its_own_peak():
    settings = dataclasses.replace(TINY, impls=("jax_xla",), seq_lens=(512,))
    (row,) = measure(settings, isolated=True)
    # At least inputs and output; at most those, a few copies of the scores, and one-time memory.
    scores_mb = 4 * 512 * 512 * 4 / 2**20
    assert row["inputs_mb"] + row["xla_out_mb"] <= row["peak_mb"] + 0.1
    assert row["peak_mb"] < row["inputs_mb"] + 6 * scores_mb + 40
    assert row["rel_err"] < 1e-5
    assert row["median_ms"] > 0


def test_peak_rows_have_memory_and_no_times():
    settings = dataclasses.replace(TINY, suite="peak", impls=("jax_xla",))
    (row,) = measure(settings)
    assert row["peak_mb"] >= row["inputs_mb"] > 0
    assert row["rel_err"] < 1e-5
    assert "median_ms" not in row


def test_max_seq_ends_at_its_bound():
    settings = dataclasses.replace(TINY, suite="max_seq", impls=("jax_xla",), max_seq=512)
    (row,) = measure(settings)
    assert (row["longest_seq"], row["limit"]) == (512, "max_seq")


@pytest.mark.parametrize(
    ("length", "memory_mb", "timeout", "expected"),
    [(8192, 200, 120, "out of memory"), (256, 200, 120, None), (256, 0, 0.2, "timeout")],
)
def test_a_try_ends_by_memory_or_time_or_fits(length, memory_mb, timeout, expected):
    """Scores of 8192^2 floats are 256 MiB: more than the try may have."""
    case = Case("max_seq", "float32", "fwd", 1, length, length, 1, 1, 16)
    request = isolate.Request(
        "try", Contender("jax_xla", case), "cpu", 1, memory_bytes=memory_mb << 20
    )
    result = isolate.run(request, timeout_s=timeout)
    if expected is None:
        assert result["fields"]["call_ms"] > 0
    elif expected == "timeout":
        assert result == {"timeout": True}
    else:
        assert errors.kind(result["error"]) == errors.OUT_OF_MEMORY, result


@pytest.mark.parametrize(
    ("code", "stderr", "kind"),
    [
        (-signal.SIGKILL, "", errors.OUT_OF_MEMORY),
        (-signal.SIGABRT, "terminate: std::bad_alloc", errors.OUT_OF_MEMORY),
        (127, "cannot allocate memory for thread-local data: ABORT", errors.OUT_OF_MEMORY),
        (-signal.SIGSEGV, "boom", errors.CRASHED),
        (3, "", errors.CRASHED),
    ],
)
def test_every_death_of_a_process_is_classified(code, stderr, kind):
    assert errors.kind(isolate._death(code, stderr)) == kind


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--impls=nothing", "--impls: unknown value 'nothing'; choices: default"),
        ("--dtypes=int8", "--dtypes: unknown value 'int8'; choices: float32"),
        ("--modes=bwd", "--modes: unknown value 'bwd'; choices: fwd, fwd_bwd"),
        ("--causal=2", "--causal: unknown value '2'; choices: 0, 1"),
        ("--kv_heads=3", "--kv_heads: 3 does not divide --heads 32"),
        ("--seq_lens=long", "--seq_lens: 'long' is no integer"),
        ("--seq_lens=0", "--seq_lens: 0 is out of range"),
        ("--seq_lens=", "--seq_lens: an empty list"),
        ("--repeats=-1", "--repeats: -1 is out of range"),
        ("--max_kv_gb=much", "--max_kv_gb: 'much' is no number"),
        ("--time_budget_s=nan", "--time_budget_s: nan is out of range"),
        ("--splits=none", "--splits: 'none' is neither 'auto' nor a count"),
        ("--baseline_impl=x", "--baseline_impl: unknown value 'x'"),
        ("--preset=huge", "--preset: unknown value 'huge'; choices: auto, quick, reference"),
        ("--tag=none", "--tag: 'none'"),
        ("--output=no/such/folder/x.json", "--output: the folder"),
        ("--output=.", "--output: "),
        ("--output=/proc/x.json", "--output: cannot write in /proc: "),
        ("--resume", "--resume and --append need --output"),
        ("--resume --append --output=x.json", "not both"),
        ("--impls=jax_xla --baseline_impl=mha", "mha is not measured; choices: jax_xla"),
        ("--no_such_flag", "no_such_flag"),
        ("--isolate=maybe", "isolate"),
        ("stray", "unexpected argument 'stray'"),
    ],
)
def test_a_bad_flag_is_one_line_and_exit_code_2(tmp_path, flag, message, capfd, monkeypatch):
    code, _, err = _in_process("gqa", flag, tmp_path, capfd, monkeypatch)
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2
    assert len(lines) == 1, err
    assert message in lines[0]


@pytest.mark.parametrize(
    ("suite", "flag"),
    [
        ("gqa", "--splits=4"),
        ("dispatch", "--kv_lens=64"),
        ("decode", "--seq_lens=64"),
        ("splitsweep", "--block_ks=32"),
        ("blockk", "--model_dim=64"),
        ("peak", "--repeats=3"),
        ("max_seq", "--ref_max_seq=64"),
        ("layer", "--head_dims=64"),
    ],
)
def test_a_flag_that_a_suite_does_not_read_is_refused(suite, flag, tmp_path, capfd, monkeypatch):
    code, _, err = _in_process(suite, flag, tmp_path, capfd, monkeypatch)
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith(f"{flag.split('=')[0]}: suite {suite} does not have it; it has --b")


def test_peak_has_nothing_to_plot(tmp_path, capfd, monkeypatch):
    code, _, err = _in_process("peak", "--plot=p.png", tmp_path, capfd, monkeypatch)
    assert code == 2 and err.startswith("--plot: draws times and suite peak has none")


@pytest.mark.parametrize("suite", [*schema.SUITES, "all"])
def test_help_tells_the_flags_of_the_suite_and_no_others(suite, tmp_path, capfd, monkeypatch):
    code, out, err = _in_process(suite, "--help", tmp_path, capfd, monkeypatch)
    assert (code, err) == (0, "")
    told = set(re.findall(r"^  --(\w+) ", out, re.M))
    grid = told - set(usage.RUN_FLAGS) | {"tag"}
    every = set().union(*SETTINGS_OF.values())
    assert told >= set(usage.RUN_FLAGS)
    assert grid == (every if suite == "all" else SETTINGS_OF[suite])
    assert max(map(len, out.splitlines())) <= 100
    assert "Exit code: 0" in out


def _in_process(suite, flag, tmp_path, capfd, monkeypatch):
    """Runs the entry point without a new interpreter: two dozen starts would take a minute."""
    from absl import app, flags

    from benchmarks.harness import flags as harness_flags
    from benchmarks.harness import runner

    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    fresh = flags.FlagValues()
    monkeypatch.setattr(flags, "FLAGS", fresh)
    monkeypatch.setattr(harness_flags.flags, "FLAGS", fresh)
    for name in ("DEFINE_list", "DEFINE_string", "DEFINE_bool"):
        define = getattr(flags, name)
        monkeypatch.setattr(
            flags, name, lambda *a, _define=define, **k: _define(*a, flag_values=fresh, **k)
        )

    def run(main, flags_parser):
        import sys

        sys.exit(main(flags_parser(["binary", *flag.split()])))

    monkeypatch.setattr(app, "run", run)
    with pytest.raises(SystemExit) as ended:
        runner.main(suite)
    out, err = capfd.readouterr()
    return ended.value.code, out, err


def test_a_wrong_result_makes_the_exit_code_1(tmp_path):
    """A broken implementation in the real binary: the run goes on and fails at its end."""
    script = """
import sys
from benchmarks.harness import runner
from tests.benchmarks.support import attention, planted
with planted(lambda case, backend: lambda q, k, v: attention(case)(q, k, v) * 1.1, "broken"):
    runner.main("gqa")
"""
    flags = (*TINY_SELF, "--modes=fwd", "--impls=broken,jax_xla", "--output=out.json")
    done = support.run_script(script, *flags, cwd=tmp_path)
    assert done.returncode == 1
    assert "FAILED gqa broken: wrong: out: relative error 0.1" in done.stderr
    rows = rows_of(tmp_path / "out.json")
    assert [row["impl"] for row in rows if "error" not in row] == ["jax_xla"] * 2


def test_killed_runs_are_resumed_to_a_complete_file(tmp_path):
    """Killed at random moments again and again, then resumed: every row once, none lost."""
    path = tmp_path / "out.json"
    flags = (
        *TINY_SELF[:-1], "--repeats=3", "--kv_heads=4,2", "--modes=fwd,fwd_bwd", "--impls=jax_xla",
        "--output=out.json", "--resume",
    )  # fmt: skip
    chance = random.Random(7)
    seen = 0
    for _ in range(2):
        process = support.start_binary("gqa", *flags, cwd=tmp_path)
        try:
            process.wait(timeout=chance.uniform(3, 9))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        held = len(rows_of(path)) if path.exists() else 0
        assert held >= seen
        seen = held
    assert run_binary("gqa", *flags, cwd=tmp_path).returncode == 0
    keys = [(r["hkv"], r["mode"], r["round"]) for r in rows_of(path)]
    assert len(keys) == len(set(keys)) == 12
    assert len({row["run"] for row in rows_of(path)}) == 1


def is_worker(pid, measuring=False):
    """Whether a process is alive (a zombie has no command line) and measures for a run.

    With `measuring`, whether it has begun: JAX is loaded only then.
    """
    try:
        process = Path(f"/proc/{pid}")
        begun = not measuring or "jaxlib" in (process / "maps").read_text()
        return begun and b"harness.worker" in (process / "cmdline").read_bytes()
    except OSError:
        return False


def wait_for(answer, seconds):
    """The first true answer of a function; fails without one."""
    deadline = time.monotonic() + seconds
    while not (found := answer()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_a_killed_run_leaves_no_worker_behind(tmp_path):
    """A worker of a killed run would take the cores of the run that resumes it."""
    process = support.start_binary(
        "max_seq", "--dtypes=float32", "--impls=jax_xla", "--max_seq=65536", cwd=tmp_path
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

    def measuring():
        return [pid for pid in children.read_text().split() if is_worker(pid, measuring=True)]

    try:
        (worker,) = wait_for(measuring, 200)
        # Stopped, it cannot end by itself.
        os.kill(int(worker), signal.SIGSTOP)
    finally:
        process.kill()
        process.wait()
    try:
        wait_for(lambda: not is_worker(worker), 60)
    finally:
        if is_worker(worker):
            os.kill(int(worker), signal.SIGKILL)


def test_interrupting_says_how_to_go_on(tmp_path):
    process = support.start_binary(
        "gqa", *TINY_SELF[:-1], "--repeats=200", "--impls=jax_xla", "--output=out.json",
        cwd=tmp_path,
    )  # fmt: skip
    path = tmp_path / "out.json"
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 130, stderr
    assert "interrupted" in stderr and "--resume" in stderr
    assert rows_of(path)


def test_all_runs_several_suites_into_one_file(tmp_path):
    done = run_binary(
        "all", *TINY_SELF[:-1], "--repeats=1", "--q_lens=1", "--kv_lens=64",
        "--impls=default,splitkv", "--max_seq=64", "--model_dim=32", "--block_ks=32",
        "--splits=auto,1", "--modes=fwd",
        "--output=out.json", cwd=tmp_path,
    )  # fmt: skip
    rows = rows_of(tmp_path / "out.json")
    assert {row["suite"] for row in rows} == set(schema.SUITES), done.stderr
    # `default` has no split counts and no tiles: those two suites have error rows, the rest runs.
    assert {row["suite"] for row in rows if "error" in row} == {"splitsweep", "blockk"}
    assert done.returncode == 0, done.stderr
    # How far automatic choices are from the best: printed, and in the header.
    runs = json.loads((tmp_path / "out.json").read_text())["config"]["runs"].values()
    chosen = {run["suite"]: run["automatic_choice"] for run in runs if "automatic_choice" in run}
    assert chosen.keys() == {"dispatch", "splitsweep"}
    for figures in chosen.values():
        assert 1 <= figures["geometric_mean"] <= figures["worst"]
        assert f"worst {figures['worst']:.3f}" in done.stdout
        assert all(one["distance"] >= 1 and one["best"] for one in figures["problems"])
