# SPDX-License-Identifier: Apache-2.0
"""How a benchmark goes wrong: each mistake is planted, and the harness must expose it."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.harness import inputs, prepare, program, rows, timing
from benchmarks.harness.case import Case
from benchmarks.harness.errors import WrongResultError
from benchmarks.harness.suites import Contender
from tests.benchmarks.support import NO_CEILING, TINY, attention, measure, planted

CASE = Case("gqa", "float32", "fwd", 1, 32, 32, 4, 2, 16)
BOTH_MODES = dataclasses.replace(TINY, modes=("fwd", "fwd_bwd"))


def error_of(build, settings=TINY, **options):
    """The error text of the planted implementation's row; fails if there is none."""
    with planted(build):
        (row,) = measure(settings, **options)
    assert "error" in row, f"not exposed: {row}"
    assert "median_ms" not in row
    return row["error"]


def test_a_right_implementation_passes_with_numbers():
    with planted(lambda case, backend: attention(case)):
        forward, backward = measure(BOTH_MODES)
    for row, parts in ((forward, 1), (backward, 3)):
        assert "error" not in row
        assert 0 < row["q1_ms"] <= row["median_ms"] <= row["q3_ms"]
        assert 0 < row["rel_err"] < 1e-5
        assert len(row["rel_err_parts"]) == parts
        assert row["rel_err"] == max(row["rel_err_parts"])
        assert row["inner"] >= 1
    # q, k and v of 4 and 2 heads, 32 rows of 16 floats: 8 + 4 + 4 KiB; backward adds the cotangent.
    assert forward["xla_arg_mb"] * 1024 == pytest.approx(16)
    assert backward["xla_arg_mb"] * 1024 == pytest.approx(24)


def test_asynchronous_dispatch_is_waited_for():
    """The call returns at once and computes later; the clock must see the 30 ms."""

    def build(case, backend):
        def slow(x):
            time.sleep(0.03)
            return np.asarray(x)

        def call(q, k, v):
            out = attention(case)(q, k, v)
            return jax.pure_callback(slow, jax.ShapeDtypeStruct(out.shape, out.dtype), out)

        return call

    with planted(build):
        (row,) = measure()
    assert row["median_ms"] >= 30


def test_wait_returns_when_every_output_is_computed():
    """A computation long enough that XLA dispatches it asynchronously, with a control."""

    def long(q, k, v):
        x = jnp.broadcast_to(q.reshape(-1)[:1000], (1000, 1000))
        return jax.lax.fori_loop(0, 40, lambda _, a: jnp.tanh(a @ a.T), x) + k.sum() + v.sum()

    arrays = inputs.attention_inputs(CASE)[:3]
    compiled = program.JaxProgram(long, arrays, False, "cpu")
    staged = compiled.stage(arrays)
    outputs = compiled.run(staged)
    assert not outputs[0].is_ready(), "the control: dispatch was not asynchronous"
    compiled.wait(outputs)
    assert outputs[0].is_ready()


class LateProgram:
    """A program whose outputs exist only after `wait`, as on an accelerator's queue."""

    def __init__(self, seconds):
        self._seconds = seconds

    def stage(self, arrays):
        return list(arrays)

    def run(self, staged):
        return time.perf_counter() + self._seconds

    def wait(self, outputs):
        time.sleep(max(0.0, outputs - time.perf_counter()))


@pytest.mark.parametrize("queue_calls", [False, True])
def test_the_stopwatch_waits_for_queued_work(queue_calls):
    watch = timing.Stopwatch(LateProgram(0.01), (np.ones(4),), 1, queue_calls)
    assert watch.sample() >= 10


def test_an_op_that_returns_early_is_wrong():
    """Returning the right shape without the work is what a missed launch looks like."""
    error = error_of(lambda case, backend: lambda q, k, v: q)
    assert error.startswith("wrong")


def test_compile_time_is_outside_the_clock():
    def build(case, backend):
        def call(q, k, v):
            time.sleep(0.5)  # While tracing: never while running.
            return attention(case)(q, k, v)

        return call

    with planted(build):
        (row,) = measure()
    assert row["compile_s"] >= 0.5
    assert row["q3_ms"] < 100


def test_captured_inputs_are_refused():
    """Inputs as constants let the compiler compute the answer before the clock starts."""

    def build(case, backend):
        q0, k0, v0, _ = inputs.attention_inputs(case)
        return lambda q, k, v: attention(case)(jnp.asarray(q0), jnp.asarray(k0), jnp.asarray(v0))

    error = error_of(build)
    assert error.startswith("wrong")
    assert "captured" in error


def test_a_folded_result_is_refused_even_without_memory_analysis():
    """A program that reads its arguments' shapes only gives one answer to all of them."""
    (expected,) = (np.ones((1, 32, 4, 16), np.float32),)

    class Folded(LateProgram):
        memory: dict = {}  # noqa: RUF012

        def to_numpy(self, outputs):
            return [expected]

    arrays = inputs.attention_inputs(CASE)[:3]
    with pytest.raises(WrongResultError, match="same for different inputs"):
        prepare.check_program(Folded(0), Contender("mha", CASE), arrays, None, "float32")


def test_missing_outputs_are_wrong_also_without_a_reference():
    class Empty(LateProgram):
        def to_numpy(self, outputs):
            return []

    arrays = inputs.attention_inputs(CASE)[:3]
    with pytest.raises(WrongResultError, match="returned 0 outputs, expected out"):
        prepare.check_program(Empty(0), Contender("mha", CASE), arrays, None, "float32")


def test_an_unread_input_is_refused():
    def build(case, backend):
        return lambda q, k, v: attention(case)(q, k, k)

    assert error_of(build).startswith("wrong")


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_gradient_that_the_compiler_may_drop_is_wrong(lost):
    """stop_gradient on one input: its gradient is a constant, its work disappears."""

    def build(case, backend):
        def call(*qkv):
            parts = list(qkv)
            parts[lost] = jax.lax.stop_gradient(parts[lost])
            return attention(case)(*parts)

        return call

    error = error_of(build, dataclasses.replace(TINY, modes=("fwd_bwd",)))
    assert error.startswith("wrong")
    assert ("dq", "dk", "dv")[lost] in error


def test_every_gradient_is_an_output_of_the_compiled_program():
    case = dataclasses.replace(CASE, mode="fwd_bwd")
    arrays = inputs.attention_inputs(case)
    compiled = program.JaxProgram(attention(case), arrays, True, "cpu")
    outputs = compiled.run(compiled.stage(arrays))
    assert [x.shape for x in outputs] == [x.shape for x in arrays[:3]]
    assert compiled.memory["xla_out_mb"] * 1024 >= 16


def test_inputs_are_seeded_normals_and_never_zero():
    first, again = inputs.attention_inputs(CASE), inputs.attention_inputs(CASE)
    for x, y in zip(first, again, strict=True):
        assert np.array_equal(x, y)
        assert abs(float(x.std()) - 1) < 0.1
        assert abs(float(x.mean())) < 0.1
    assert not np.array_equal(first[0], first[3])
    other = inputs.attention_inputs(dataclasses.replace(CASE, lkv=33))
    assert not np.array_equal(first[0], other[0])


@pytest.mark.parametrize("bad", [np.zeros(1000), np.full(1000, 3.0), np.full(1000, np.nan)])
def test_zeros_constants_and_nan_are_refused_as_inputs(bad):
    with pytest.raises(ValueError, match="input 1"):
        inputs.check_inputs((np.random.default_rng(0).normal(size=1000), bad))


def test_a_wrong_result_is_an_error_row_without_numbers():
    def build(case, backend):
        return lambda q, k, v: attention(case)(q, k, v) * 1.01

    error = error_of(build)
    assert error.startswith("wrong: out: relative error 0.01")


def test_a_small_but_systematic_error_is_caught_in_bfloat16():
    """One lost key block of 32 is far above rounding and far below what a loose rtol allows."""

    def build(case, backend):
        def call(q, k, v):
            keep = (jnp.arange(k.shape[1]) >= 2)[None, None, None, :]
            return jax.nn.dot_product_attention(q, k, v, mask=keep, implementation="xla")

        return call

    error = error_of(build, dataclasses.replace(TINY, dtypes=("bfloat16",), seq_lens=(512,)))
    assert error.startswith("wrong")


def test_nan_is_wrong():
    def build(case, backend):
        return lambda q, k, v: attention(case)(q, k, v) * jnp.nan

    assert error_of(build).startswith("wrong")


def test_a_speed_beyond_the_machine_is_wrong(monkeypatch):
    """Nothing computed, or not waited for: the rate gives it away."""
    slow = NO_CEILING | {"gflops": {"float32": 1e-6}}
    monkeypatch.setattr("benchmarks.harness.ceilings.measure", lambda backend: slow)
    error = error_of(lambda case, backend: attention(case), ceilings=slow)
    assert error.startswith("wrong")
    assert "impossible" in error


def test_a_busy_moment_while_measuring_the_ceiling_accuses_nobody(monkeypatch):
    busy = NO_CEILING | {"gflops": {"float32": 1e-6}}
    monkeypatch.setattr("benchmarks.harness.ceilings.measure", lambda backend: NO_CEILING)
    with planted(lambda case, backend: attention(case)):
        (row,) = measure(ceilings=busy)
    assert "error" not in row


def test_a_warm_cache_is_impossible():
    """Successive calls get different buffers, together larger than the cache."""
    seen = []

    class Recorder(LateProgram):
        def stage(self, arrays):
            return [array.copy() for array in arrays]

        def run(self, staged):
            seen.append(staged[0].ctypes.data)
            return 0.0

    array = np.ones(1000, np.float64)
    cache = 20 * array.nbytes
    watch = timing.Stopwatch(Recorder(0), (array,), cache, queue_calls=True)
    watch.inner = watch.rotation
    watch.sample()
    assert len(set(seen)) == len(seen) == watch.rotation
    assert watch.rotation * array.nbytes >= 2 * cache


def test_rotated_inputs_of_a_jax_program_are_separate_buffers():
    arrays = inputs.attention_inputs(CASE)[:3]
    compiled = program.JaxProgram(attention(CASE), arrays, False, "cpu")
    staged = [compiled.stage(arrays) for _ in range(4)]
    pointers = {x.unsafe_buffer_pointer() for one in staged for x in one}
    pointers |= {array.ctypes.data for array in arrays}
    assert len(pointers) == 15


def test_nothing_timed_is_an_error_row():
    row = rows.timed({"impl": "x"}, {}, 0, 1, [], "x")
    assert row["error"] == "crashed: nothing was timed in round 0"


def test_a_slow_implementation_shows_as_slow():
    def sleepy(case, backend):
        def nap(x):
            time.sleep(0.02)
            return np.asarray(x)

        def call(q, k, v):
            out = attention(case)(q, k, v)
            return jax.pure_callback(nap, jax.ShapeDtypeStruct(out.shape, out.dtype), out)

        return call

    settings = dataclasses.replace(TINY, impls=("planted", "sleepy"), repeats=2)
    with planted(lambda case, backend: attention(case)), planted(sleepy, "sleepy"):
        result = measure(settings)
    medians = {
        name: [r["median_ms"] for r in result if r["impl"] == name] for name in settings.impls
    }
    assert min(medians["sleepy"]) - max(medians["planted"]) > 10
    assert [row["round"] for row in result] == [0, 0, 1, 1]


def test_a_crash_is_a_row_and_the_others_go_on():
    def broken(case, backend):
        raise RuntimeError("the library is broken")

    def lacking(case, backend):
        raise NotImplementedError("no GQA")

    settings = dataclasses.replace(TINY, impls=("broken", "lacking", "planted"))
    with (
        planted(broken, "broken"),
        planted(lacking, "lacking"),
        planted(lambda case, backend: attention(case)),
    ):
        result = {row["impl"]: row for row in measure(settings)}
    assert result["broken"]["error"] == "crashed: RuntimeError: the library is broken"
    assert result["lacking"]["error"] == "unsupported: no GQA"
    assert "error" not in result["planted"]


def test_a_peer_less_exact_than_our_rule_is_noted_and_a_wrong_peer_is_not_measured():
    def off_by(factor):
        return lambda case, backend: lambda q, k, v: attention(case)(q, k, v) * (1 + factor)

    with planted(off_by(1e-6), strict=False):
        (row,) = measure()
    assert "less exact" in row["note"]
    with planted(off_by(1e-4), strict=False):
        (row,) = measure()
    assert row["error"].startswith("wrong")
    with planted(off_by(1e-6), strict=True):
        (row,) = measure()
    assert row["error"].startswith("wrong")
