# SPDX-License-Identifier: Apache-2.0
"""Properties over random problems, with pinned seeds: `derandomize` makes every run the same.

NIGHTLY=1 (--config=nightly) takes 20 times as many; ATTENTION_TEST_EXAMPLES sets another factor.
"""

import dataclasses
import inspect
import os

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jax_ops
from tests.cases import accuracy, run
from tests.cases.case import Case
from tests.cases.check import check_case
from tests.cases.problem import DIFFERENTIABLE

_FACTOR = int(
    os.environ.get("ATTENTION_TEST_EXAMPLES") or (20 if os.environ.get("NIGHTLY") == "1" else 1)
)


def pinned(examples):
    return settings(
        max_examples=examples * _FACTOR,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def _maybe(strategy):
    return st.none() | strategy


@st.composite
def cases(draw, longest=(90, 150)):
    """Any combination of sizes, up to (Lq, Lkv) `longest`, and options that the op accepts."""
    b = draw(st.integers(1, 3))
    hkv = draw(st.integers(1, 3))
    lq, lkv = (draw(st.integers(1, n)) for n in longest)
    windows = st.tuples(_maybe(st.integers(0, 60)), _maybe(st.integers(0, 60)))

    def axes(full="bhqk"):
        return "".join(draw(st.sampled_from([c, "1"])) for c in full[draw(st.integers(0, 3)) :])

    def lengths(limit):
        return tuple(draw(st.integers(0, limit)) for _ in range(b))

    return Case(
        b=b,
        lq=lq,
        lkv=lkv,
        hq=hkv * draw(st.integers(1, 3)),
        hkv=hkv,
        d=draw(st.integers(1, 72)),
        dv=draw(_maybe(st.integers(1, 72))),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        scale=draw(st.none() | st.just("array") | st.floats(0.05, 1.0)),
        causal=draw(st.booleans()),
        bottom_right=draw(st.booleans()),
        window=draw(_maybe(windows)),
        soft_cap=draw(_maybe(st.floats(0.5, 30.0))),
        bias=axes() if draw(st.booleans()) else None,
        bias_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        mask=axes() if draw(st.booleans()) else None,
        slopes=draw(st.booleans()),
        segments=draw(st.sampled_from([0, 0, 2, -3])),
        query_lengths=lengths(lq) if draw(st.booleans()) else None,
        key_lengths=lengths(lkv) if draw(st.booleans()) else None,
        dropout=draw(st.sampled_from([0.0, 0.0, 0.25])),
        seed=draw(st.integers(0, 1000)),
    )


@pinned(40)
@given(case=cases())
def test_any_problem_obeys_the_accuracy_rule(backend, case):
    check_case(case, backend)


# What a call may be wrapped in, from the inside out. vmap and map take a leading axis of two away.
_WRAPPERS = ("jit", "remat", "vmap", "map")


@st.composite
def wrapped_cases(draw):
    """(case, names of the operands that are mapped, wrappers, direction)."""
    case = draw(cases(longest=(40, 70)))
    names = sorted(run.split(case.problem())[0])
    mapped = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    wrappers = draw(st.lists(st.sampled_from(_WRAPPERS), min_size=1, unique=True))
    return case, mapped, wrappers, draw(st.sampled_from(["vjp", "jvp"]))


@pinned(10)
@given(wrapped=wrapped_cases())
def test_any_problem_under_any_transforms_obeys_the_accuracy_rule(backend, wrapped):
    """Each element of a mapped call and of its derivative is that of the call alone."""
    case, mapped, wrappers, direction = wrapped
    problems = [dataclasses.replace(case, seed=case.seed + i).problem() for i in range(2)]
    (arrays, static), (others, _) = (run.split(p) for p in problems)
    axes = sum(w in ("vmap", "map") for w in wrappers)
    call = {n: jnp.asarray(x) for n, x in arrays.items()}
    for n in mapped if axes else ():
        # The problems differ along the innermost axis; the outer one repeats them.
        pair = jnp.stack([call[n], jnp.asarray(others[n])])
        call[n] = jnp.broadcast_to(pair, (2,) * axes + pair.shape[1:])
    function = _derivative(case, backend, static, direction)
    for wrapper in wrappers:
        function = _wrap(function, wrapper, mapped)
    got = jax.tree.map(np.asarray, function(call))
    for element in np.ndindex((2,) * axes):
        own = {_field(n): getattr(problems[element[-1]], _field(n)) for n in mapped if axes}
        _check_derivative(
            case,
            problems[0].with_arrays(**own),
            backend,
            direction,
            jax.tree.map(lambda x, element=element: x[element], got),
        )


def _wrap(function, wrapper, mapped):
    """function(arrays by name) in one more transform."""

    def in_axes(arrays):
        return {n: 0 if n in mapped else None for n in arrays}

    def mapped_by_vmap(arrays):
        return jax.vmap(function, (in_axes(arrays),))(arrays)

    def mapped_by_loop(arrays):
        fixed = {n: x for n, x in arrays.items() if n not in mapped}
        slices = {n: x for n, x in arrays.items() if n in mapped}
        return jax.lax.map(lambda slices: function({**fixed, **slices}), slices)

    simple = {"jit": jax.jit, "remat": jax.checkpoint}
    if wrapper in simple:
        return simple[wrapper](function)
    return mapped_by_vmap if wrapper == "vmap" else mapped_by_loop


def _field(name):
    return "dropout_seed" if name == "dropout_key" else name


def _tangents(case, problem):
    rng = np.random.default_rng([case.seed, 3])
    floating = {n: getattr(problem, n) for n in DIFFERENTIABLE}
    return {
        n: np.asarray(rng.normal(size=x.shape)).astype(x.dtype)
        for n, x in floating.items()
        if isinstance(x, np.ndarray)
    }


def _derivative(case, backend, static, direction):
    """Arrays by name -> (results, gradients or tangents), of one problem."""
    tangents = _tangents(case, case.problem())

    def function(arrays):
        moving = {n: arrays[n] for n in tangents}

        def forward(moving):
            out, lse = run.call(backend, {**arrays, **moving}, static)
            return {"out": out, "lse": lse}

        if direction == "jvp":
            return jax.jvp(forward, (moving,), (tangents,))
        results, pullback = jax.vjp(forward, moving)
        dout, dlse = case.cotangents()
        return results, pullback({"out": jnp.asarray(dout), "lse": jnp.asarray(dlse)})[0]

    return function


def _check_derivative(case, problem, backend, direction, got):
    results, derivatives = got
    options = {"tf32": backend.tf32}
    if direction == "jvp":
        expected = accuracy.expected_jvp(problem, _tangents(case, problem), **options)
    else:
        expected = accuracy.expected_backward(problem, *case.cotangents(), **options)
    capped = problem.soft_cap is not None
    wanted = accuracy.expected_forward(problem, **options)
    accuracy.assert_all_accurate(results, wanted, soft_cap=capped)
    accuracy.assert_all_accurate(derivatives, expected, soft_cap=capped)


# One shape for the properties below: the values vary, the program is compiled once.
_SHAPE = Case(b=1, lq=20, lkv=70, hq=4, hkv=2, d=24)


@pinned(15)
@given(seed=st.integers(0, 10**6))
def test_permuting_the_keys_changes_nothing_but_rounding(backend, seed):
    problem = dataclasses.replace(_SHAPE, seed=seed, mask="11qk", bias="1hqk").problem()
    order = np.random.default_rng(seed).permutation(70)
    permuted = problem.with_arrays(
        key=problem.key[:, order],
        value=problem.value[:, order],
        mask=problem.mask[..., order],
        bias=problem.bias[..., order],
    )
    expected = accuracy.expected_forward(problem, tf32=backend.tf32)
    accuracy.assert_all_accurate(run.forward(permuted, backend), expected)


@pinned(15)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_masked_keys_do_not_matter_by_a_bit(backend, seed, data):
    problem = dataclasses.replace(_SHAPE, seed=seed, mask="11qk", causal=True).problem()
    row = data.draw(st.integers(0, 19))
    masked = ~problem.allowed()[0, 0, row]
    key, value = problem.key.copy(), problem.value.copy()
    noise = np.random.default_rng(seed).normal(size=key.shape).astype(key.dtype) * 10
    key[:, masked], value[:, masked] = noise[:, masked], -noise[:, masked]
    before = run.forward(problem, backend)
    after = run.forward(problem.with_arrays(key=key, value=value), backend)
    for name in ("out", "lse"):
        np.testing.assert_array_equal(after[name][:, row], before[name][:, row])


@pinned(15)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_merging_parts_of_any_length_equals_the_whole(backend, seed, data):
    """Parts as key lengths and masks of one shape, some of them empty."""
    problem = dataclasses.replace(_SHAPE, seed=seed).problem()
    cuts = sorted(data.draw(st.lists(st.integers(0, 70), min_size=2, max_size=2)))
    outs, lses = [], []
    for begin, end in zip([0, *cuts], [*cuts, 70], strict=True):
        inside = ((np.arange(70) >= begin) & (np.arange(70) < end))[None, None, None]
        got = run.forward(problem.with_arrays(mask=inside), backend)
        outs.append(got["out"])
        lses.append(got["lse"])
    out, lse = jax_ops.merge_attention(jnp.stack(outs), jnp.stack(lses))
    expected = accuracy.expected_forward(problem, tf32=backend.tf32)
    accuracy.assert_all_accurate({"out": np.asarray(out), "lse": np.asarray(lse)}, expected)


@pinned(15)
@given(seed=st.integers(0, 10**6))
def test_gradients_are_linear_in_the_cotangent(backend, seed):
    """Doubling (a power of two: exact) the cotangents doubles every gradient, bit for bit."""
    case = dataclasses.replace(_SHAPE, seed=seed, causal=True, bottom_right=True)
    dout, dlse = case.cotangents()
    _, once = run.vjp(case.problem(), backend, dout, dlse)
    _, twice = run.vjp(case.problem(), backend, 2 * dout, 2 * dlse)
    for name, g in once.items():
        np.testing.assert_array_equal(twice[name], 2 * g, err_msg=name)


# Fuzzing of the arguments: right or documented, nothing else.

_SIZES = st.sampled_from([0, 1, 2, 3, 4, 8])
_DTYPES = st.sampled_from(
    ["float32"] * 4 + ["bfloat16", "float16", "int32", "bool", "complex64", "float8_e4m3fn"]
)


@st.composite
def arrays(draw, like=None):
    """Shape and dtype of any small array; often `like`, sometimes with one axis changed."""
    if like is not None and draw(st.integers(0, 3)):
        shape, dtype = list(like.shape), like.dtype
        if shape and not draw(st.integers(0, 5)):
            shape[draw(st.integers(0, len(shape) - 1))] = draw(_SIZES)
        return jax.ShapeDtypeStruct(tuple(shape), dtype)
    shape = draw(st.lists(_SIZES, min_size=0, max_size=5))
    return jax.ShapeDtypeStruct(tuple(shape), draw(_DTYPES))


@st.composite
def calls(draw):
    """(arrays by name, options by name), valid or not."""
    b, lq, lkv, hkv, d = (draw(st.sampled_from([1, 2, 4])) for _ in range(5))
    hq = hkv * draw(st.sampled_from([1, 2]))

    def struct(*shape, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, dtype)

    likely = {
        "query": struct(b, lq, hq, d),
        "key": struct(b, lkv, hkv, d),
        "value": struct(b, lkv, hkv, d),
    }
    optional = {
        "bias": struct(b, hq, lq, lkv),
        "mask": struct(b, hq, lq, lkv, dtype="bool"),
        "query_seq_lengths": struct(b, dtype="int32"),
        "key_value_seq_lengths": struct(b, dtype="int32"),
        "query_segment_ids": struct(b, lq, dtype="int32"),
        "key_value_segment_ids": struct(b, lkv, dtype="int32"),
        "alibi_slopes": struct(hq),
        "dropout_key": struct(2, dtype="uint32"),
    }
    chosen = {n: draw(arrays(like)) for n, like in likely.items()}
    for name, like in optional.items():
        if not draw(st.integers(0, 3)):
            chosen[name] = draw(arrays(like))
    numbers = st.sampled_from([None, 0, 1, 0.5, -1, 1e30, float("nan"), float("inf"), "a", True])
    options = {
        "scale": numbers,
        "is_causal": st.sampled_from([True, False, 1, None, "yes"]),
        "local_window_size": st.sampled_from(
            [None, 0, 3, -1, (1, 2), (None, 2), (1,), (1, 2, 3), (-1, 0), 1.5, "w", (1, "a")]
        ),
        "logits_soft_cap": numbers,
        "dropout_rate": numbers,
        "alignment": st.sampled_from(["top_left", "bottom_right", "centre", None, 3]),
        "precision": st.sampled_from([None, "default", "highest", "low", 7]),
        "return_residual": st.sampled_from([True, False, 2, "x"]),
        "implementation": st.sampled_from([None, "auto", "xla", "cpu", "gpu", 5]),
    }
    chosen_options = {n: draw(s) for n, s in options.items() if not draw(st.integers(0, 3))}
    return chosen, chosen_options


_ARGUMENTS = tuple(inspect.signature(jax_ops.dot_product_attention).parameters)


@pinned(400)
@given(call=calls())
def test_arguments_are_accepted_or_refused_by_name(call):
    """A right shape, or an exception of a documented kind whose text names an argument."""
    structs, options = call
    try:
        result = jax.eval_shape(lambda a: jax_ops.dot_product_attention(**a, **options), structs)
    except (ValueError, TypeError, NotImplementedError) as e:
        assert any(name in str(e) for name in _ARGUMENTS), f"{type(e).__name__}: {e}"
        return
    q, v = structs["query"], structs["value"]
    shape = (*q.shape[:-1], v.shape[-1])
    if options.get("return_residual"):
        result, lse = result
        assert lse.shape == q.shape[:-1] and lse.dtype == np.float32
    assert result.shape == shape and result.dtype == q.dtype


def test_the_fuzzed_calls_are_mixed():
    """Neither all accepted nor all refused: else the test above would say little."""
    outcomes = []

    @pinned(150)
    @given(call=calls())
    def collect(call):
        structs, options = call
        try:
            jax.eval_shape(lambda a: jax_ops.dot_product_attention(**a, **options), structs)
            outcomes.append(True)
        except (ValueError, TypeError, NotImplementedError):
            outcomes.append(False)

    collect()
    assert 0.03 < np.mean(outcomes) < 0.97, np.mean(outcomes)
