# SPDX-License-Identifier: Apache-2.0
"""Every argument of every public function, given every kind of wrong thing.

A call is accepted, or raises a ValueError, TypeError or NotImplementedError that begins with the
name of the argument and says what is allowed: before anything is compiled, and the same on each
implementation.
"""

import contextlib
import decimal
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops

_Q = np.zeros((2, 5, 4, 8), np.float32)
_K = np.zeros((2, 7, 2, 8), np.float32)
_V = np.zeros((2, 7, 2, 6), np.float32)
_INPUTS = {"query": _Q, "key": _K, "value": _V}


class _Thing:
    """No array, no number."""


# Values that some argument must refuse. What one argument takes, another must not crash on.
_VALUES = {
    "None": None,
    "True": True,
    "np.bool_": np.True_,
    "0": 0,
    "1": 1,
    "-1": -1,
    "2**31": 2**31,
    "2**63": 2**63,
    "2**70": 2**70,
    "-2**70": -(2**70),
    "10**400": 10**400,
    "0.5": 0.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "complex": 1j,
    "str": "a",
    "bytes": b"x",
    "list": [1, 2],
    "()": (),
    "ragged": [[1], [1, 2]],
    "dict": {},
    "set": {1},
    "object": _Thing(),
    "np.int64": np.int64(3),
    "np.float64": np.float64(2.5),
    "np nan": np.float32("nan"),
    "0-d int": np.array(2),
    "0-d float": np.array(2.0),
    "object array": np.array([None, 1], object),
    "string array": np.array(["a"]),
    "bool array": np.ones((2, 5), bool),
    "int array": np.ones(2, np.int32),
    "float array": np.ones((2, 7)),
    "complex array": np.ones(_Q.shape, np.complex64),
    "float8": jnp.ones(4, jnp.float8_e4m3fn),
    "jax scalar": jnp.float32(1),
    "jax int": jnp.int32(2),
    "key": jax.random.key(0),
    "keys": jax.random.split(jax.random.key(0), 2),
    "rank 6": np.ones((1,) * 6, np.float32),
    "empty": np.ones(0, np.float32),
    "struct": jax.ShapeDtypeStruct((2,), np.int32),
    "dates": np.array(["2020-01-01"], "M8[D]"),
    "decimal": decimal.Decimal("0.5"),
    "...": ...,
    "float pair": (1.0, 2.0),
    "pair": (-1, 2),
    "wide pair": (2**70, None),
    "bool pair": (True, False),
    "records": np.zeros(2, [("x", "f4")]),
    "longdouble": np.ones(4, np.longdouble),
    "masked": np.ma.array([1, 2], mask=[0, 1]),
}
_CALLS = {
    "dot_product_attention": _INPUTS,
    "flex_attention": _INPUTS,
    "mha": _INPUTS,
    "decode_attention": {
        "query": _Q,
        "key_cache": _K,
        "value_cache": _V,
        "key_value_seq_lengths": np.array([3, 7], np.int32),
    },
    "merge_attention": {
        "outs": np.zeros((2, 3, 4), np.float32),
        "residuals": np.zeros((2, 3), np.float32),
    },
    "create_block_mask": {
        "mask_mod": jax_ops.CausalMask(),
        "batch": 1,
        "num_heads": 1,
        "query_length": 5,
        "key_length": 7,
    },
    "explain": _INPUTS,
}
# What an error calls an argument where it is not the argument's own name.
_ALSO_CALLED = {
    "key_cache": ("key",),
    "value_cache": ("value",),
    "causal": ("is_causal",),
    "block_sizes": ("block_q", "block_k"),
    # A rate of more than 0 is fine, but then the key is missing.
    "dropout_rate": ("dropout_key",),
    "query_segment_ids": ("key_value_segment_ids",),
    "outs": ("residuals",),
}


def _arguments(function):
    if function == "explain":
        return [*inspect.signature(jax_ops.dot_product_attention).parameters, "platform"]
    return list(inspect.signature(getattr(jax_ops, function)).parameters)


def _outcome(function, argument, value, **options):
    """None, or the exception of a call that is traced, not compiled."""
    call = getattr(jax_ops, function)
    arguments = {**_CALLS[function], **options, argument: value}
    try:
        if function in ("explain", "create_block_mask"):
            call(**arguments)
        else:
            jax.eval_shape(lambda: call(**arguments))
    except (ValueError, TypeError, NotImplementedError) as error:
        return error
    return None


@contextlib.contextmanager
def _plain_tracebacks():
    """JAX takes longer to shorten a traceback than a refused call takes."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


@pytest.mark.parametrize(
    ("function", "argument"), [(f, a) for f in _CALLS for a in _arguments(f)], ids=str
)
def test_wrong_values_are_refused_by_name(function, argument):
    known = inspect.signature(getattr(jax_ops, function)).parameters
    names = (argument, *_ALSO_CALLED.get(argument, ()))
    refused = 0
    with _plain_tracebacks():
        for label, value in _VALUES.items():
            if function == "create_block_mask" and label == "2**31" and "length" in argument:
                continue  # Refused by size alone, as 2**63 is.
            error = _outcome(function, argument, value)
            if error is None:
                continue
            refused += 1
            message = str(error)
            assert message.startswith(names), f"{label}: {type(error).__name__}: {message}"
            assert "; allowed: " in message, f"{label}: {message}"
            if argument != "implementation" and "implementation" in known:
                other = _outcome(function, argument, value, implementation="xla")
                assert (type(other), str(other)) == (type(error), message), label
    assert refused > 10


def test_options_that_explain_does_not_know_are_refused():
    with pytest.raises(TypeError, match="colour"):
        jax_ops.explain(**_INPUTS, colour="blue")


@pytest.mark.parametrize("size", [2**31, 2**63, 2**64, 2**70])
@pytest.mark.parametrize("name", ["block_q", "block_k", "num_splits"])
def test_sizes_that_planners_cannot_hold_are_refused(name, size):
    """2**64 would reach a planner as 0, 'auto'."""
    with pytest.raises(ValueError, match=rf"{name}: got {size}; allowed: .*2\^31 - 1"):
        jax_ops.mha(**_INPUTS, **{name: size})


def _traced(option, value, **options):
    jax.eval_shape(
        lambda x: jax_ops.flex_attention(**_INPUTS, **{option: x}, **options), jnp.asarray(value)
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("logits_soft_cap", 2.0),
        ("dropout_rate", 0.5),
        ("num_splits", 2),
        ("return_residual", True),
    ],
)
def test_traced_values_of_static_options_are_refused_by_name(option, value):
    """So no derivative with respect to them is a silent zero."""
    with pytest.raises(TypeError, match=f"{option}: got a traced value"):
        _traced(option, value)


@pytest.mark.parametrize("make", [jax_ops.SoftCap, jax_ops.LocalWindowMask])
def test_traced_numbers_in_objects_are_refused_when_those_are_made(make):
    with pytest.raises(TypeError, match="got a traced value"):
        jax.eval_shape(lambda x: make(x).cap, jnp.float32(1))


# Every way for a floating value to get into a call, beside query, key and value: name -> a
# function of that value to the options of flex_attention.
_FLOATING = {
    "scale": lambda x: {"scale": x},
    "ConstantBias": lambda x: {"bias": jax_ops.ConstantBias(x)},
    "DistanceDecayBias": lambda x: {"bias": jax_ops.DistanceDecayBias(x)},
    "AlibiBias": lambda x: {"bias": jax_ops.AlibiBias(x * jnp.arange(1.0, 5))},
    "DenseBias": lambda x: {"bias": jax_ops.DenseBias(x * jnp.arange(7.0))},
    "array as bias": lambda x: {"bias": x * jnp.arange(7.0)},
    "sum that only functions hold": lambda x: {
        "bias": jax_ops.DenseBias(x * jnp.ones((5, 1))) + x * jnp.arange(7.0)
    },
    "captured by score_mod": lambda x: {"score_mod": lambda s, b, h, i, j: s * x + x * j},
    "captured by score_mod, with a mask": lambda x: {
        "score_mod": lambda s, b, h, i, j: s + jnp.sin(x * i),
        "mask": jax_ops.CausalMask(),
    },
}


@pytest.mark.parametrize("transform", ["grad", "jit of grad", "jvp"])
@pytest.mark.parametrize("name", _FLOATING)
def test_every_floating_value_has_its_true_derivative(name, transform):
    """Against central differences in float64, eager and jitted, in both modes."""
    rng = np.random.default_rng(0)
    inputs = {n: rng.normal(size=x.shape) for n, x in _INPUTS.items()}

    def function(x):
        out, lse = jax_ops.flex_attention(**inputs, **_FLOATING[name](x), return_residual=True)
        return (out * out).sum() + (lse * lse).sum()

    with jax.enable_x64(True):
        x, step = jnp.float64(0.37), 1e-5
        value = jax.jit(function)
        slope = float(value(x + step) - value(x - step)) / (2 * step)
        if transform == "jvp":
            got = jax.jvp(function, (x,), (jnp.ones_like(x),))[1]
        else:
            gradient = jax.grad(function)
            got = (jax.jit(gradient) if transform == "jit of grad" else gradient)(x)
    assert abs(slope) > 1e-3
    np.testing.assert_allclose(got, slope, rtol=1e-6)
