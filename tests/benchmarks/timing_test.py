# SPDX-License-Identifier: Apache-2.0
"""The clock's arithmetic: order, quartiles, calibration, budget, pooling and summaries."""

import collections
import io
import itertools

import numpy as np
import pytest

from benchmarks.harness import pool, summaries, table, timing
from benchmarks.harness.budget import Budget
from benchmarks.harness.progress import Progress


def test_every_implementation_stands_at_every_place_equally_often():
    names = ["a", "b", "c"]
    places = collections.Counter()
    followers = collections.Counter()
    for turn in range(6):
        order = timing.changing_order(names, turn)
        assert sorted(order) == names
        places.update(enumerate(order))
        followers.update(itertools.pairwise(order))
    assert set(places.values()) == {2}
    # Reversal: b follows a as often as a follows b.
    assert followers[("a", "b")] == followers[("b", "a")]


class Counting:
    """A stopwatch that says when it was asked."""

    def __init__(self, name, log):
        self.name, self.log, self.settled = name, log, []

    def settle(self):
        self.settled.append(len(self.log))

    def sample(self):
        self.log.append(self.name)
        return float(len(self.log))


def test_rounds_interleave_the_implementations():
    log = []
    watches = {name: Counting(name, log) for name in "abc"}
    taken = timing.interleaved_round(watches, {"a": 5, "b": 5, "c": 3}, 0)
    assert {name: len(samples) for name, samples in taken.items()} == {"a": 5, "b": 5, "c": 3}
    # No implementation is sampled twice before the others had their turn.
    for start in range(0, 9, 3):
        assert set(log[start : start + 3]) == set("abc")
    # What another one left behind is not charged: an untimed call comes first, but for slow calls.
    for name in "ab":
        turns = [
            at
            for at, (before, now) in enumerate(itertools.pairwise(["", *log]))
            if now == name != before
        ]
        assert watches[name].settled == turns
    assert watches["c"].settled == []
    first = list(log)
    log.clear()
    timing.interleaved_round(watches, {"a": 5, "b": 5, "c": 3}, 1)
    assert log != first


def test_nothing_is_left_behind_by_the_same_implementation():
    watch = Counting("a", [])
    timing.interleaved_round({"a": watch}, {"a": 5}, 0)
    assert watch.settled == [0]


class Littering:
    """A program that leaves work for whoever runs next, on the clock of a list."""

    def __init__(self, now, litter):
        self.now, self.litter = now, litter

    def stage(self, arrays):
        return arrays

    def run(self, staged):
        self.now[0] += 0.05 + self.now[1]
        self.now[1] = self.litter

    def wait(self, outputs):
        pass


def test_what_another_implementation_left_behind_is_not_timed(monkeypatch):
    now = [0.0, 0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    watches = {
        name: timing.Stopwatch(Littering(now, litter), (np.ones(1),), 1, False)
        for name, litter in (("clean", 0.0), ("littering", 0.02))
    }
    taken = timing.interleaved_round(watches, {"clean": 5, "littering": 5}, 0)
    assert taken["clean"] == pytest.approx([50.0] * 5)
    assert taken["littering"] == pytest.approx([70.0] * 5)  # it litters for itself too


def test_quartiles_lie_within_the_round():
    quartiles = timing.Quartiles.of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (quartiles.q1_ms, quartiles.median_ms, quartiles.q3_ms) == (2.0, 3.0, 4.0)


class Clockwork:
    """A program of a fixed duration on a clock of its own."""

    def __init__(self, seconds, monkeypatch):
        self.seconds, self.now = seconds, 0.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def stage(self, arrays):
        return arrays

    def run(self, staged):
        self.now += self.seconds

    def wait(self, outputs):
        pass


@pytest.mark.parametrize(("ms", "inner"), [(1.0, 20), (0.05, 200), (3.0, 7), (50.0, 1)])
def test_inner_makes_a_sample_long_enough(ms, inner, monkeypatch):
    """20 ms a sample, at most 200 calls."""
    watch = timing.Stopwatch(Clockwork(ms / 1e3, monkeypatch), (np.ones(1),), 1, False)
    assert watch.calibrate() == pytest.approx(ms)
    assert watch.inner == inner


def test_slow_calls_are_sampled_less():
    assert timing.samples_for(1.0) == timing.SAMPLES_PER_ROUND
    assert timing.samples_for(1e4) == timing.SLOW_SAMPLES


def test_budget_drops_rounds_and_never_the_first():
    now = [0.0]
    budget = Budget(10.0, groups=2, clock=lambda: now[0])
    budget.start_group()
    assert budget.affords(0, 1e9)
    now[0] = 3.0
    assert budget.affords(1, 1.5)
    assert not budget.affords(1, 2.5)
    budget.drop(4)
    now[0] = 12.0
    budget.start_group()
    assert budget.affords(0, 1.0)
    assert not budget.affords(1, 0.1)
    assert "4 rounds were dropped" in budget.summary()
    assert "took 12 s of 10 s" in budget.summary()
    assert Budget(None, 1).summary() is None


def row(suite="gqa", impl="a", median=2.0, round_index=0, **more):
    return {
        "suite": suite, "dtype": "float32", "mode": "fwd", "batch": 1, "lq": 8, "lkv": 8, "hq": 1,
        "hkv": 1, "head_dim": 8, "causal": False, "impl": impl, "precision": "float32",
        "round": round_index, "inner": 1, "median_ms": median, "q1_ms": median * 0.9,
        "q3_ms": median * 1.2, "tag": None, "run": "r",
    } | more  # fmt: skip


def test_rounds_are_pooled_by_the_median():
    (one,) = pool.pool([row(median=m, round_index=i) for i, m in enumerate((5.0, 1.0, 2.0))])
    assert (one.median_ms, one.rounds) == (2.0, 3)
    assert (one.q1_ms, one.q3_ms) == (pytest.approx(1.8), pytest.approx(2.4))


def test_automatic_choices_are_measured_against_the_best():
    rows = [
        row("splitsweep", "splitkv", 3.0, num_splits="auto"),
        row("splitsweep", "splitkv", 2.0, num_splits=4),
        row("splitsweep", "splitkv", 8.0, num_splits=1),
        row("dispatch", "default", 1.0),
        row("dispatch", "jax_xla", 4.0),
    ]
    (split,) = summaries.choices(pool.pool(rows), "splitsweep")
    assert split.distance == pytest.approx(1.5)
    assert split.best.key == "splitkv splits=4"
    (choice,) = summaries.choices(pool.pool(rows), "dispatch")
    assert choice.distance == 1.0
    assert summaries.record(rows, "splitsweep") == {
        "geometric_mean": pytest.approx(1.5), "median": 1.5, "worst": 1.5,
        "problems": [
            {"problem": "float32 fwd B1 L8 H1 D8", "distance": 1.5, "best": "splitkv splits=4"}
        ],
    }  # fmt: skip
    others = [row("gqa", "default", 1.0), row("gqa", "jax_xla", 4.0)]
    assert summaries.record(others, "gqa") is None
    text = "\n".join(summaries.lines(rows))
    assert "1.500" in text and "best: splitkv splits=4" in text


def test_another_precision_is_no_alternative():
    rows = [row("dispatch", "default", 2.0), row("dispatch", "jax_xla", 1.0, precision="tf32")]
    assert summaries.choices(pool.pool(rows), "dispatch") == []


def test_the_table_fits_a_terminal_and_says_what_the_numbers_are():
    ceilings = {"method": "m", "gflops": {"float32": 2e-3}, "read_gb_s": 1e-2}
    rows = [
        row(impl="jax_xla", median=2.0, rel_err=1.23e-7, xla_temp_mb=3.0),
        row(impl="mha", median=1.0),
        row(impl="torch_sdpa", median=3.0, precision="tf32"),
        row(impl="default", error="unsupported: " + "a long reason " * 40),
    ]
    lines = table.render(rows, {"r": "jax_xla"}, ceilings).splitlines()
    assert lines[1] == "gqa float32 fwd B1 L8 H1 D8"
    told = {line.split()[0]: line.split() for line in lines[2:7]}
    names = ["impl", "ms", "+-%", "ratio", "TFLOP/s", "%peak", "GB/s", "%read", "rel_err", "temp"]
    assert told["impl"][:-1] == names
    # 2 products of 64 pairs and 8 dimensions; q, k, v and out once: 2048 FLOPs, 1 KiB, in 2 ms.
    assert told["jax_xla"][1:] == [
        "2.000", "15.0", "1.000", "1.0e-06", "51", "0.000512", "5", "1.2e-07", "3.0",
    ]  # fmt: skip
    assert told["mha"][3] == "0.500" and told["torch_sdpa"][3] == "1.500*"
    assert told["default"][1] == "unsupported:" and told["default"][-1] == "..."
    assert max(map(len, lines)) <= 100
    assert "different precisions" in lines[-1]
    assert "TFLOP/s" not in table.render(rows[3:], {"r": "jax_xla"}, ceilings)


def test_progress_says_what_runs_and_what_is_left():
    stream = io.StringIO()
    progress = Progress(4, stream)
    progress.start_group("gqa L64")
    progress.finish_group()
    progress.start_group("gqa L128")
    text = stream.getvalue()
    assert "[1/4] time left not known yet: gqa L64\n" in text
    assert "[2/4] about 0m00s left: gqa L128\n" in text


class Terminal(io.StringIO):
    """A terminal of unknown width: 80 columns are assumed."""

    def isatty(self):
        return True


def test_on_a_terminal_one_line_is_redrawn_and_never_wraps():
    stream = Terminal()
    progress = Progress(4, stream)
    progress.start_group("gqa " + "L64 " * 30)
    progress.step("flex_native: compiling")
    drawn = stream.getvalue().split("\r\x1b[K")
    assert len(drawn) == 3 and drawn[0] == ""
    assert all(len(line) == 79 and "\n" not in line for line in drawn[1:])
    progress.note("a failure")
    assert stream.getvalue().endswith("\r\x1b[Ka failure\n")
