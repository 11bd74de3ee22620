# SPDX-License-Identifier: Apache-2.0
"""Every public function and class with valid and invalid arguments, from pinned seeds.

The only outcomes: a right result, or an exception of a documented kind that names an argument.
`properties_test.py` does the same for `dot_product_attention` with traced arrays.
"""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import jax_ops
from tests.cases.check import check_case
from tests.properties_test import cases, pinned

# What the docstrings promise. UnsupportedError is both a ValueError and a NotImplementedError.
DOCUMENTED = (ValueError, TypeError)

B, LQ, LKV, HQ, HKV, D = 2, 3, 5, 4, 2, 8

_DTYPES = ("float32", "float32", "bfloat16", "float16", "int32", "bool", "complex64", "uint8")


def _pinned(examples):
    """As found: making a failing call of this many parts smaller takes minutes."""
    return settings(pinned(examples), phases=[Phase.explicit, Phase.generate])


def _filled(shape, dtype):
    """Small values of any dtype, the same for every call."""
    values = np.arange(int(np.prod(shape))).reshape(shape) % 3
    return np.asarray(values).astype(jnp.dtype(dtype))


@st.composite
def array(draw, *shape, dtype="float32"):
    """An array of this shape and dtype; at times with another axis, rank or dtype; or none."""
    shape = list(shape)
    kind = draw(st.integers(0, 19))
    if kind == 0:
        dtype = draw(st.sampled_from(_DTYPES))
    elif kind == 1 and shape:
        shape[draw(st.integers(0, len(shape) - 1))] = draw(st.sampled_from([0, 1, 2, 3, 5, 7]))
    elif kind == 2:
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 5]), max_size=6))
    elif kind == 3:
        return draw(GARBAGE)
    made = _filled(tuple(shape), dtype)
    return draw(st.sampled_from([made, jnp.asarray(made), made.tolist()])) if kind == 4 else made


class Thing:
    """What nobody would pass."""

    def __repr__(self):
        return "a thing"


GARBAGE = st.sampled_from(
    [
        *(None, "text", b"bytes", 0, -1, 2**70, 1.5, float("nan"), float("inf"), 1j, True, ...),
        *((), [], {}, [1, [2]], [None], {"query"}, range(3), slice(3), Thing(), Thing, len, object),
        *(np.float32(2), np.bool_(1), np.datetime64("2020"), np.zeros((), object), np.array(["a"])),
    ]
)


def mostly(*good):
    """One of the good values; at times anything."""
    return st.integers(0, 9).flatmap(lambda n: GARBAGE if n == 0 else st.sampled_from(good))


NUMBERS = mostly(None, 1, 0.5, np.float32(2), 0, -1.0, 1e39)
LENGTHS = array(B, dtype="int32")
IMPLEMENTATIONS = mostly(None, "auto", "xla", "cpu", "xla", "cudnn", "CPU", "")
ALIGNMENTS = mostly("top_left", "bottom_right")
BOOLS = mostly(True, False)
SPLITS = mostly("auto", 1, 2, 3, 0, -1, 2**40)
BLOCKS = mostly(None, "auto", 16, 64, 0, -3, 2**40)
WINDOWS = mostly(None, 0, 2, (1, None), (2, 3), [0, 0], (1,), (-1, 2))
OPERANDS = {
    "query": array(B, LQ, HQ, D),
    "key": array(B, LKV, HKV, D),
    "value": array(B, LKV, HKV, D),
}
DROPOUT = {
    "dropout_rate": mostly(0.0, 0.5, 1.0, 2),
    "dropout_key": st.sampled_from([jax.random.key(0), jax.random.PRNGKey(1)]) | GARBAGE,
    "dropout_batch_indices": array(B, dtype="int32"),
    "dropout_head_indices": array(HQ, dtype="int32"),
}


@st.composite
def built(draw, cls, *fields):
    """An object of the API from drawn fields, or the exception of its constructor."""
    values = [draw(field) for field in fields]
    return lambda: cls(*values)


def _window(b, h, i, j):
    return (i + h) % 3 != j % 2


MASKS = st.one_of(
    built(jax_ops.CausalMask),
    built(jax_ops.LocalWindowMask, mostly(None, 0, 2, -1), mostly(None, 1, 3)),
    built(jax_ops.PrefixLMMask, LENGTHS),
    built(jax_ops.KeyPaddingMask, LENGTHS),
    built(jax_ops.SegmentMask, array(B, LQ, dtype="int32"), array(B, LKV, dtype="int32")),
    built(jax_ops.DenseMask, array(1, HQ, LQ, LKV, dtype="bool")),
    built(jax_ops.FunctionMask, mostly(_window, lambda b, h, i, j: i >= j, lambda *x: 1 / 0)),
    built(
        jax_ops.BlockMask,
        array(1, 1, 1, 1, dtype="int32"),
        array(1, 64, 2, dtype="uint32"),
        mostly(LQ, LKV),
        mostly(LKV, LQ),
    ),
)
BIASES = st.one_of(
    built(jax_ops.AlibiBias, array(HQ)),
    built(jax_ops.DistanceDecayBias, NUMBERS | array()),
    built(jax_ops.ConstantBias, NUMBERS | array()),
    built(jax_ops.DenseBias, array(HQ, LQ, LKV)),
)


def combined(parts, operators):
    """Objects, what operators make of two of them, and what is no such object."""

    @st.composite
    def any_of(draw):
        one, two = draw(parts), draw(parts | GARBAGE.map(lambda x: lambda: x))
        operator = draw(st.sampled_from([lambda a, b: a, *operators]))
        return lambda: operator(one(), two())

    return any_of()


MASK = combined(
    MASKS, [lambda a, b: a & b, lambda a, b: b | a, lambda a, b: a ^ b, lambda a, b: ~a]
)
BIAS = combined(BIASES, [lambda a, b: a + b, lambda a, b: b + a])

# Name -> (function, arguments that it needs, those that may be left out). A callable that `lazy`
# marks is made inside the call: its constructor may refuse.
FUNCTIONS = {
    "dot_product_attention": (
        OPERANDS,
        {
            "bias": array(1, HQ, LQ, LKV),
            "mask": array(B, 1, LQ, LKV, dtype="bool"),
            "scale": NUMBERS | array(),
            "is_causal": BOOLS,
            "query_seq_lengths": LENGTHS,
            "key_value_seq_lengths": LENGTHS,
            "local_window_size": WINDOWS,
            "implementation": IMPLEMENTATIONS,
            "return_residual": BOOLS,
            "query_segment_ids": array(B, LQ, dtype="int32"),
            "key_value_segment_ids": array(B, LKV, dtype="int32"),
            "logits_soft_cap": NUMBERS,
            "alibi_slopes": array(HQ),
            "alignment": ALIGNMENTS,
            "precision": mostly(None, "default", "highest", jax.lax.Precision.HIGH),
            **DROPOUT,
        },
    ),
    "flex_attention": (
        OPERANDS,
        {
            "score_mod": mostly(lambda s, b, h, i, j: s * 2, lambda s: s, lambda *x: "text"),
            "mask_mod": mostly(_window, lambda b: b, lambda *x: None, lambda *x: x[0]),
            "mask": MASK,
            "bias": BIAS,
            "scale": NUMBERS | array(),
            "logits_soft_cap": NUMBERS,
            "alignment": ALIGNMENTS,
            "precision": mostly(None, "highest"),
            "num_splits": SPLITS,
            "block_sizes": mostly(None, (16, 16), (0, 1), (1,), ("a", "b"), 16),
            "implementation": IMPLEMENTATIONS,
            "return_residual": BOOLS,
            **DROPOUT,
        },
    ),
    "decode_attention": (
        {
            "query": OPERANDS["query"],
            "key_cache": OPERANDS["key"],
            "value_cache": OPERANDS["value"],
            "key_value_seq_lengths": LENGTHS,
        },
        {
            "local_window_size": WINDOWS,
            "scale": NUMBERS,
            "logits_soft_cap": NUMBERS,
            "alibi_slopes": array(HQ),
            "precision": mostly(None, "highest"),
            "num_splits": SPLITS,
            "block_k": BLOCKS,
            "implementation": IMPLEMENTATIONS,
            "return_residual": BOOLS,
        },
    ),
    "mha": (
        OPERANDS,
        {
            "causal": BOOLS,
            "scale": NUMBERS,
            "block_q": BLOCKS,
            "block_k": BLOCKS,
            "num_splits": SPLITS,
            "implementation": IMPLEMENTATIONS,
            "return_residual": BOOLS,
        },
    ),
    "merge_attention": (
        {"outs": array(3, B, LQ, HQ, D), "residuals": array(3, B, LQ, HQ)},
        {},
    ),
    "create_block_mask": (
        {
            "mask_mod": MASK,
            "batch": mostly(None, B, 1, 0, -1),
            "num_heads": mostly(None, HQ, 1, 0),
            "query_length": mostly(LQ, 0, 70),
            "key_length": mostly(LKV, 0, 130),
        },
        {},
    ),
    "explain": (
        OPERANDS,
        {
            "platform": mostly("cpu", "cuda", "tpu"),
            "is_causal": BOOLS,
            "implementation": IMPLEMENTATIONS,
            "bias": array(HQ, LQ, LKV),
            "unknown": GARBAGE,
        },
    ),
}
_LAZY = ("mask", "bias", "mask_mod")


@st.composite
def calls(draw, name):
    """(keyword arguments, whether arrays are traced)."""
    needed, optional = FUNCTIONS[name]
    chosen = {argument: draw(strategy) for argument, strategy in needed.items()}
    for argument, strategy in optional.items():
        if not draw(st.integers(0, 4)):
            chosen[argument] = draw(strategy)
    return chosen, draw(st.booleans())


def _made(name, chosen):
    """The arguments with the objects of the API among them built."""
    lazy = _LAZY if name in ("flex_attention", "create_block_mask") else ()
    return {n: x() if n in lazy and inspect.isfunction(x) and _is_lazy(x) else x
            for n, x in chosen.items()}  # fmt: skip


def _is_lazy(x):
    return not inspect.signature(x).parameters


def _call(name, chosen, traced):
    """The abstract result; arrays become arguments of a traced function where that is asked for."""
    function = getattr(jax_ops, name)
    made = _made(name, chosen)
    if name in ("explain", "create_block_mask"):
        return function(**made)
    arrays = {n: x for n, x in made.items() if isinstance(x, np.ndarray) and x.dtype != object
              and jnp.issubdtype(x.dtype, jnp.number)}  # fmt: skip
    arrays = arrays if traced else {}
    rest = {n: x for n, x in made.items() if n not in arrays}
    return jax.eval_shape(lambda a: function(**a, **rest), arrays)


def _check(name, chosen, result):
    """The result has the shapes and dtypes that the docstring promises."""
    if name == "explain":
        assert isinstance(result, jax_ops.Explanation) and str(result)
        return
    if name == "create_block_mask":
        dense = result.to_dense()
        assert dense.shape[2:] == (chosen["query_length"], chosen["key_length"])
        assert dense.dtype == bool
        return
    if name == "merge_attention":
        outs = np.asarray(chosen["outs"])
        assert [x.shape for x in result] == [outs.shape[1:], outs.shape[1:-1]]
        return
    q = jnp.asarray(chosen["query"])
    v = jnp.asarray(chosen.get("value", chosen.get("value_cache")))
    lse = None
    if chosen.get("return_residual", False):
        result, lse = result
        assert lse.shape == q.shape[:-1] and lse.dtype == np.float32
    assert result.shape == (*q.shape[:-1], v.shape[-1]) and result.dtype == q.dtype


def _names(name):
    """What an error may name: an argument of the function or of what it is made of."""
    names = set(inspect.signature(getattr(jax_ops, name)).parameters) | {"mask", "bias", "score"}
    for public in jax_ops.__all__:
        thing = getattr(jax_ops, public)
        if inspect.isclass(thing):
            names |= {public, *getattr(thing, "__dataclass_fields__", ())}
    return names | set(inspect.signature(jax_ops.dot_product_attention).parameters)


def _outcome(name, chosen, traced):
    """True for a right result, False for a documented exception; anything else raises."""
    try:
        result = _call(name, chosen, traced)
    except ZeroDivisionError:
        # Raised by a function that the test itself passes: it must come out as it is.
        return False
    except DOCUMENTED as error:
        assert any(word in str(error) for word in _names(name)), f"{type(error).__name__}: {error}"
        return False
    _check(name, chosen, result)
    return True


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_call_is_right_or_refused(name):
    outcomes = []

    # Each block mask is a program of its own to compile.
    @_pinned(40 if name == "create_block_mask" else 120)
    @given(calls(name))
    def collect(call):
        outcomes.append(_outcome(name, *call))

    collect()
    # A mixture: else this would say little.
    assert 0.02 < np.mean(outcomes) < 0.98, np.mean(outcomes)


CLASSES = {
    "AlibiBias": [array(HQ)],
    "BlockMask": [
        array(1, 1, 1, 1, dtype="int32"),
        array(1, 64, 2, dtype="uint32"),
        NUMBERS,
        SPLITS,
    ],
    "ConstantBias": [NUMBERS],
    "DenseBias": [array(HQ, LQ, LKV)],
    "DenseMask": [array(HQ, LQ, LKV, dtype="bool")],
    "DistanceDecayBias": [NUMBERS],
    "FunctionMask": [mostly(_window)],
    "KeyPaddingMask": [LENGTHS],
    "LocalWindowMask": [SPLITS, SPLITS],
    "PrefixLMMask": [LENGTHS],
    "SegmentMask": [array(B, LQ, dtype="int32"), array(B, LKV, dtype="int32")],
    "SoftCap": [NUMBERS],
}


@pytest.mark.parametrize("name", CLASSES)
def test_an_object_is_made_or_refused(name):
    """Made, it can be printed, flattened and put together again."""
    cls = getattr(jax_ops, name)

    @_pinned(40)
    @given(st.tuples(*CLASSES[name]))
    def one(fields):
        try:
            made = cls(*fields)
        except DOCUMENTED as error:
            assert any(f in str(error) for f in (*_names("flex_attention"), name)), error
            return
        assert name in repr(made)
        leaves, structure = jax.tree.flatten(made)
        assert type(jax.tree.unflatten(structure, leaves)) is cls

    one()


def test_every_public_name_is_fuzzed_or_has_no_arguments():
    covered = {*FUNCTIONS, *CLASSES, "flax_attention_fn"}
    for name in set(jax_ops.__all__) - covered:
        thing = getattr(jax_ops, name)
        if inspect.isclass(thing) and (
            issubclass(thing, Exception)
            or thing in (jax_ops.Mask, jax_ops.Bias, jax_ops.Explanation)
        ):
            continue
        parameters = inspect.signature(thing).parameters if callable(thing) else {}
        assert not parameters, name


@_pinned(60)
@given(options=st.dictionaries(st.sampled_from(sorted(_names("explain"))), GARBAGE, max_size=3))
def test_options_of_the_flax_adaptor(options):
    try:
        attend = jax_ops.flax_attention_fn(**options)
        result = jax.eval_shape(
            attend, *(_filled(s, "float32") for s in ((B, LQ, HQ, D), *[(B, LKV, HKV, D)] * 2))
        )
    except DOCUMENTED as error:
        assert any(word in str(error) for word in _names("dot_product_attention")), error
        return
    assert result.shape == (B, LQ, HQ, D)


@_pinned(4)
@given(case=cases())
def test_mha_and_decode_give_right_results_for_any_sizes(backend, case):
    """The other entry points on random problems, against the float64 reference."""
    plain = {f.name: f.default for f in dataclasses.fields(case)}
    sizes = {n: getattr(case, n) for n in ("b", "lq", "lkv", "hq", "hkv", "d", "dv", "dtype")}
    shared = type(case)(**{**plain, **sizes, "seed": case.seed})
    scale = case.scale if isinstance(case.scale, float) else None
    check_case(dataclasses.replace(shared, causal=case.causal, scale=scale), backend, entry="mha")
    lengths = case.key_lengths or (case.lkv,) * case.b
    decode = dataclasses.replace(
        shared, causal=True, bottom_right=True, key_lengths=lengths, window=case.window, scale=scale
    )
    check_case(decode, backend, entry="decode_attention")
