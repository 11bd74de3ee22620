# SPDX-License-Identifier: Apache-2.0
"""The clock: rotated inputs, enough calls per sample, samples of all implementations interleaved.

A sample is `inner` calls divided by `inner`. On a GPU the calls of a sample are queued and waited
for once; on a CPU each call is waited for, because XLA would otherwise run them at the same time.

The first call after another implementation's is not timed: it pays for what the other left behind.
Measured on two cores, a call of 52 ms took 56 ms after torch and 70 ms after a program that had
freed 384 MiB; the second one took 52 ms again.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.harness.program import Program

# At least this many milliseconds a sample, so that the clock's own cost does not show.
MIN_SAMPLE_MS = 20.0
MAX_INNER = 200
SAMPLES_PER_ROUND = 5
# A call slower than this is sampled less often: quartiles of 3 are what a run can afford.
SLOW_CALL_MS = 400.0
SLOW_SAMPLES = 3
# Inputs are rotated through buffers of at least this many times the last-level cache.
CACHE_FACTOR = 2
MAX_ROTATION = 64


def sampling_configuration(cache_bytes: int) -> dict[str, Any]:
    """The constants above, for a result file's header."""
    return {
        "min_sample_ms": MIN_SAMPLE_MS,
        "max_inner": MAX_INNER,
        "samples_per_round": SAMPLES_PER_ROUND,
        "slow_call_ms": SLOW_CALL_MS,
        "samples_per_round_slow": SLOW_SAMPLES,
        "untimed_call_after_another": True,
        "inputs_rotated_over_bytes": CACHE_FACTOR * cache_bytes,
    }


def rotation_length(input_bytes: int, cache_bytes: int) -> int:
    """How many copies of the inputs make a warm cache impossible (bounded by MAX_ROTATION)."""
    if input_bytes <= 0:
        return 1
    return max(1, min(MAX_ROTATION, math.ceil(CACHE_FACTOR * cache_bytes / input_bytes)))


class Stopwatch:
    """Times one program on rotated copies of its inputs."""

    def __init__(
        self,
        program: Program,
        arrays: Sequence[np.ndarray],
        cache_bytes: int,
        queue_calls: bool,
    ):
        self._program = program
        self._queue_calls = queue_calls
        input_bytes = sum(array.nbytes for array in arrays)
        self._staged = [
            program.stage(arrays) for _ in range(rotation_length(input_bytes, cache_bytes))
        ]
        self._next: Iterator[Any] = itertools.cycle(self._staged)
        self.inner = 1

    @property
    def rotation(self) -> int:
        return len(self._staged)

    def calibrate(self) -> float:
        """Warms up and sets `inner`; returns the milliseconds of one call."""
        self.sample()
        call_ms = self.sample()
        while self.inner < MAX_INNER and call_ms * self.inner < MIN_SAMPLE_MS:
            self.inner = min(MAX_INNER, max(2 * self.inner, math.ceil(MIN_SAMPLE_MS / call_ms)))
            call_ms = self.sample()
        return call_ms

    def settle(self) -> None:
        """One call that is not timed."""
        self._program.wait(self._program.run(next(self._next)))

    def sample(self) -> float:
        """Milliseconds per call, over `inner` calls whose outputs are all computed."""
        program = self._program
        inputs = [next(self._next) for _ in range(self.inner)]
        started = time.perf_counter()
        if self._queue_calls:
            for staged in inputs:
                outputs = program.run(staged)
            program.wait(outputs)
        else:
            for staged in inputs:
                program.wait(program.run(staged))
        elapsed = time.perf_counter() - started
        return max(elapsed * 1e3 / self.inner, 1e-9)


def samples_for(call_ms: float) -> int:
    """Samples per round for a call that takes this long."""
    return SLOW_SAMPLES if call_ms > SLOW_CALL_MS else SAMPLES_PER_ROUND


@dataclasses.dataclass(frozen=True)
class Quartiles:
    """The three numbers of one round, in milliseconds per call."""

    q1_ms: float
    median_ms: float
    q3_ms: float

    @staticmethod
    def of(samples: Sequence[float]) -> Quartiles:
        q1, median, q3 = np.percentile(np.asarray(samples), (25, 50, 75))
        return Quartiles(float(q1), float(median), float(q3))


def changing_order(names: Sequence[str], turn: int) -> list[str]:
    """The order of turn `turn`: rotated every turn and reversed every other full rotation.

    Each implementation stands at every place equally often and follows different neighbours, so
    neither a drifting machine nor a neighbour's leftovers favour one of them.
    """
    if not names:
        return []
    shift = turn % len(names)
    order = list(names[shift:]) + list(names[:shift])
    return order[::-1] if (turn // len(names)) % 2 else order


def interleaved_round(
    stopwatches: dict[str, Stopwatch], samples: dict[str, int], round_index: int
) -> dict[str, list[float]]:
    """One round: every implementation's samples, alternating, in an order that changes.

    Slow calls (SLOW_SAMPLES of them) do without an untimed one: it would cost much, and what is
    left behind is a small part of them.
    """
    most = max(samples.values(), default=0)
    taken: dict[str, list[float]] = {name: [] for name in stopwatches}
    before = None
    for turn in range(most):
        for name in changing_order(list(stopwatches), round_index * most + turn):
            if turn < samples[name]:
                if name != before and samples[name] > SLOW_SAMPLES:
                    stopwatches[name].settle()
                before = name
                taken[name].append(stopwatches[name].sample())
    return taken
