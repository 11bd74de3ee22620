# SPDX-License-Identifier: Apache-2.0
"""compare: matching, ratios, intervals, summaries, and the program around them."""

import json

import pytest

from benchmarks.analysis import comparing, reading
from tests.benchmarks.reading_test import DISPATCH, GQA_DECODE, result
from tests.benchmarks.support import run_binary
from tests.benchmarks.timing_test import row


def test_a_file_compared_with_itself_is_one_everywhere():
    for path in (DISPATCH, GQA_DECODE):
        rows = reading.read(path).rows
        outcome = comparing.compare(rows, rows)
        assert outcome.matched
        assert {one.ratio for one in outcome.matched} == {1.0}
        assert {one.verdict for one in outcome.matched} == {"same"}
        assert not outcome.only_a and not outcome.only_b


def test_ratio_and_interval():
    (one,) = comparing.compare([row(median=2.0)], [row(median=3.0)]).matched
    assert one.ratio == pytest.approx(1.5)
    assert one.low == pytest.approx(3.0 * 0.9 / (2.0 * 1.2))
    assert one.high == pytest.approx(3.0 * 1.2 / (2.0 * 0.9))
    assert one.verdict == "worse"
    (one,) = comparing.compare([row(median=2.0)], [row(median=1.0)]).matched
    assert one.verdict == "better"


def test_memory_and_length_are_compared_by_their_own_measure():
    peak = {"suite": "peak", "peak_mb": 100.0}
    bare = {k: v for k, v in row().items() if k not in ("median_ms", "q1_ms", "q3_ms", "round")}
    (one,) = comparing.compare([bare | peak], [bare | peak | {"peak_mb": 50.0}]).matched
    assert (one.ratio, one.unit) == (0.5, "MiB")
    longest = {"suite": "max_seq", "longest_seq": 1000, "limit": "memory"}
    (one,) = comparing.compare([bare | longest], [bare | longest | {"longest_seq": 2000}]).matched
    assert (one.ratio, one.unit) == (0.5, "tokens")


def test_rows_match_by_configuration_only():
    a = [row(), row(lq=16, lkv=16), row(impl="b", error="skipped: x")]
    b = [row(tag="after", run="other", round_index=5), row(lq=32, lkv=32), row(impl="b")]
    outcome = comparing.compare(a, b)
    assert len(outcome.matched) == 1
    assert [one.case.lq for one in outcome.only_a] == [16]
    assert [one.case.lq for one in outcome.only_b] == [32]
    assert [(side, one.error) for side, one in outcome.errors] == [("A", "skipped: x")]


def test_different_precisions_do_not_match_and_are_marked_when_asked_for():
    a, b = [row(precision="tf32")], [row(impl="torch_sdpa", precision="float32")]
    assert not comparing.compare(a, b).matched
    ignored = comparing.ignored_fields({"impl": "a"}, {"impl": "torch_sdpa"})
    outcome = comparing.compare(a, b, ignored)
    assert not outcome.matched[0].like_for_like
    assert "different precisions" in comparing.render(outcome)


def test_before_and_after_of_the_reference_data(tmp_path):
    done = run_binary("compare", f"{DISPATCH}:tag=none", f"{DISPATCH}:tag=after", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "dispatch: 240 configurations, geometric mean 0.747" in done.stdout
    # Recomputed here from the raw rows.
    rows = reading.read(DISPATCH).rows
    key = lambda one: tuple(one[n] for n in ("impl", "dtype", "mode", "lq", "head_dim", "causal"))  # noqa: E731
    before = {key(one): one["median_ms"] for one in rows if one["tag"] is None}
    ratios = [one["median_ms"] / before[key(one)] for one in rows if one["tag"] == "after"]
    assert f"worst {max(ratios):.3f}" in done.stdout


def test_fail_above(tmp_path):
    a, b = (
        result(tmp_path, [row(median=1.0)], "a.json"),
        result(tmp_path, [row(median=1.2)], "b.json"),
    )
    assert run_binary("compare", a.name, b.name, cwd=tmp_path).returncode == 0
    assert run_binary("compare", a.name, b.name, "--fail_above=1.3", cwd=tmp_path).returncode == 0
    done = run_binary("compare", a.name, b.name, "--fail_above=1.1", cwd=tmp_path)
    assert done.returncode == 1
    assert "1 ratios are above 1.1" in done.stderr


def test_bad_commands_and_files(tmp_path):
    good = result(tmp_path, [row()], "good.json")
    assert run_binary("compare", good.name, cwd=tmp_path).returncode == 2
    done = run_binary("compare", good.name, f"{good.name}:color=red", cwd=tmp_path)
    assert done.returncode == 2 and "color=red" in done.stderr
    done = run_binary("compare", good.name, good.name, "--fail_above=x", cwd=tmp_path)
    assert done.returncode == 2 and "--fail_above" in done.stderr
    (tmp_path / "cut.json").write_text(json.dumps({"schema": 1})[:-3])
    done = run_binary("compare", good.name, "cut.json", cwd=tmp_path)
    assert done.returncode == 1
    assert "cut.json: truncated" in done.stderr and "no configuration is in both" in done.stderr
    done = run_binary("compare", good.name, f"{good.name}:tag=x", cwd=tmp_path)
    assert done.returncode == 1 and "no row is selected" in done.stderr
