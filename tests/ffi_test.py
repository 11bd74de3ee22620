# SPDX-License-Identifier: Apache-2.0
"""The border to the native libraries: schema, hostile calls, threads, workspace, small cases."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops
from jax_ops import _libraries, _schema
from jax_ops._primitive import native
from jax_ops._problem import make_problem

NATIVE = ("cpu", "emulated")
COUNT = len(_schema.OPERANDS)


@pytest.fixture(params=NATIVE)
def library(request):
    """Each native library that runs on a host; the emulated one where it was built."""
    found = _libraries.load(request.param)
    if found.handle is None and request.param == "emulated":
        pytest.skip(f"emulated: {found.reason}")
    assert found.handle is not None, found.reason
    return found


def arrays(b=2, lq=3, lkv=4, hq=4, hkv=2, d=8):
    rng = np.random.default_rng(0)
    shapes = [(b, lq, hq, d), (b, lkv, hkv, d), (b, lkv, hkv, d)]
    return [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]


def test_schema_of_the_library_is_pythons(library):
    function = library.handle.attention_schema
    function.restype = ctypes.c_char_p
    assert function().decode() == _schema.description()


def test_schema_names_every_operand_once():
    text = _schema.description()
    assert text.startswith(f"abi {_schema.ABI}\n")
    for names in (_schema.OPERANDS, _schema.FEATURES):
        assert len(set(names)) == len(names) > 10
    assert f"want_dscale:{len(_schema.FEATURES) - 1}\n" in text


def test_a_library_of_another_interface_is_refused(monkeypatch, tmp_path):
    source = _libraries.directory() / "libattention_cpu.so"
    (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setenv(_libraries.DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(_schema, "ABI", _schema.ABI + 1)
    with pytest.raises(ImportError, match="does not fit this jax_ops"):
        _libraries.load.__wrapped__("cpu")


def test_a_missing_or_broken_library_is_a_reason_not_a_crash(monkeypatch, tmp_path):
    monkeypatch.setenv(_libraries.DIRECTORY_VARIABLE, str(tmp_path))
    assert "is not in" in _libraries.load.__wrapped__("cpu").reason
    (tmp_path / "libattention_cpu.so").write_text("no library")
    assert "cannot be loaded" in _libraries.load.__wrapped__("cpu").reason


# Calls that no honest program makes. `change` alters (operands, results, attributes) of a good one.


def good_call(name, operation="fwd", **options):
    """(operands, results, attributes) of a call that works."""
    problem = make_problem(*arrays(), implementation=name, is_causal=True, **options)
    captured = {}

    def ffi_call(target, results):
        def call(*operands, **attributes):
            captured.update(operands=list(operands), results=list(results), attributes=attributes)
            return [jnp.zeros(r.shape, r.dtype) for r in results]

        return call

    original = jax.ffi.ffi_call
    jax.ffi.ffi_call = ffi_call
    try:
        if operation == "fwd":
            native.forward(name, problem.spec, problem.operands)
        else:
            out, lse = jnp.zeros((2, 3, 4, 8)), jnp.zeros((2, 3, 4))
            native.backward(name, problem.spec, problem.operands, out, lse, out, lse)
    finally:
        jax.ffi.ffi_call = original
    return captured


def run(name, operation, call):
    target = _schema.target(operation, name)
    results = jax.ffi.ffi_call(target, call["results"])(*call["operands"], **call["attributes"])
    return jax.block_until_ready(results)


def operand(name):
    return _schema.OPERANDS.index(name)


def _set_operand(name, value):
    def change(call):
        call["operands"][operand(name)] = value

    return change


def _set_result(position, shape, dtype=jnp.float32):
    def change(call):
        call["results"][position] = jax.ShapeDtypeStruct(shape, dtype)

    return change


def _set_attribute(name, value):
    def change(call):
        call["attributes"][name] = value

    return change


def _feature(name):
    def change(call):
        bit = 1 << _schema.FEATURES.index(name)
        call["attributes"]["features"] = np.int64(call["attributes"]["features"] | bit)

    return change


def _both(*changes):
    def change(call):
        for c in changes:
            c(call)

    return change


HOSTILE = {
    "too few operands": lambda call: call["operands"].pop(),
    "too many results": lambda call: call["results"].append(call["results"][-1]),
    "missing attribute": lambda call: call["attributes"].pop("scale"),
    "attribute of another type": _set_attribute("scale", np.int64(1)),
    "query of another rank": _set_operand("query", jnp.zeros((2, 3, 4))),
    "query of another dtype": _set_operand("query", jnp.zeros((2, 3, 4, 8), np.int32)),
    "key of another dtype": _set_operand("key", jnp.zeros((2, 4, 2, 8), jnp.bfloat16)),
    "key of another length": _set_operand("key", jnp.zeros((2, 5, 2, 8))),
    "key of another head dim": _set_operand("key", jnp.zeros((2, 4, 2, 9))),
    "heads that do not divide": _both(
        _set_operand("key", jnp.zeros((2, 4, 3, 8))), _set_operand("value", jnp.zeros((2, 4, 3, 8)))
    ),
    "no KV heads": _both(
        _set_operand("key", jnp.zeros((2, 4, 0, 8))), _set_operand("value", jnp.zeros((2, 4, 0, 8)))
    ),
    "batch that does not divide": _set_operand("query", jnp.zeros((3, 3, 4, 8))),
    "empty query batch": _set_operand("query", jnp.zeros((0, 3, 4, 8))),
    "out of another shape": _set_result(0, (2, 3, 4, 7)),
    "lse of another shape": _set_result(1, (2, 3, 3)),
    "lse of another dtype": _set_result(1, (2, 3, 4), jnp.int32),
    "workspace of another dtype": _set_result(2, (64,), jnp.float32),
    "unknown feature": _set_attribute("features", np.int64(1 << 40)),
    "negative features": _set_attribute("features", np.int64(-1)),
    "feature without its operand": _feature("bias"),
    "block mask without tiles": _feature("block_mask"),
    "dropout without a seed": _feature("dropout"),
    "segments without ids": _feature("segments"),
    "operand without its feature": _set_operand("mask", jnp.ones((1, 1, 3, 4), bool)),
    "lengths of another dtype": _both(
        _feature("kv_lengths"), _set_operand("kv_lengths", jnp.zeros(2, jnp.float32))
    ),
    "bias axis neither 1 nor full": _both(
        _feature("bias"), _set_operand("bias", jnp.zeros((1, 2, 3, 4)))
    ),
    "tile number beyond the tiles": _both(
        _feature("block_mask"),
        _set_operand("block_index", jnp.full((1, 1, 1, 1), 7, jnp.int32)),
        _set_operand("block_bits", jnp.zeros((2, 64, 2), jnp.uint32)),
    ),
    "tile state below all states": _both(
        _feature("block_mask"),
        _set_operand("block_index", jnp.full((1, 1, 1, 1), -9, jnp.int32)),
        _set_operand("block_bits", jnp.zeros((2, 64, 2), jnp.uint32)),
    ),
    "scale that is no number": _set_attribute("scale", np.float32("nan")),
    "soft cap without its feature": _set_attribute("soft_cap", np.float32(2)),
    "soft cap of zero": _feature("soft_cap"),
    "window below -1": _both(_feature("window"), _set_attribute("window_left", np.int64(-2))),
    "window without its feature": _set_attribute("window_left", np.int64(2)),
    "unknown precision": _set_attribute("precision", np.int32(9)),
    "negative block": _set_attribute("block_q", np.int64(-64)),
    "negative splits": _set_attribute("num_splits", np.int64(-1)),
    "no threads": _set_attribute("threads", np.int64(0)),
    "dropout threshold": _set_attribute("dropout_threshold", np.int64(65537)),
    "short batch_div": _set_attribute("batch_div", np.ones(3, np.int64)),
    "batch_div of zero": _set_attribute("batch_div", np.zeros(COUNT, np.int64)),
    "negative batch_div": _set_attribute("batch_div", np.full(COUNT, -1, np.int64)),
    "huge batch_div": _set_attribute("batch_div", np.full(COUNT, 2**62, np.int64)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_forward_call_is_an_error(library, name):
    call = good_call(library.name)
    run(library.name, "fwd", call)  # the control
    HOSTILE[name](call)
    with pytest.raises(Exception, match="attention_fwd_"):
        run(library.name, "fwd", call)


HOSTILE_BACKWARD = {
    "lse of another shape": lambda call: call["operands"].__setitem__(18, jnp.zeros((2, 3, 5))),
    "dout of another dtype": lambda call: call["operands"].__setitem__(
        19, jnp.zeros((2, 3, 4, 8), jnp.bfloat16)
    ),
    "dq of another shape": _set_result(0, (2, 3, 4, 9)),
    "dk of another length": _set_result(1, (2, 5, 2, 8)),
    "gradient of an absent bias": _feature("want_dbias"),
    "gradient of an absent scale": _feature("want_dscale"),
    "dslopes that nobody wants": _set_result(4, (2, 3, 4)),
    "workspace too small": _set_result(6, (0,), jnp.uint8),
}


@pytest.mark.parametrize("name", HOSTILE_BACKWARD)
def test_a_hostile_backward_call_is_an_error(library, name):
    call = good_call(library.name, "bwd")
    run(library.name, "bwd", call)  # the control
    HOSTILE_BACKWARD[name](call)
    with pytest.raises(Exception, match="attention_bwd_"):
        run(library.name, "bwd", call)


def test_random_attributes_and_shapes_never_crash(library):
    """Whatever numbers stand in a call, it ends with a result or an error."""
    rng = np.random.default_rng(0)
    interesting = [-(2**63), -(2**31), -1, 0, 1, 2, 63, 2**16, 2**31, 2**62, 2**63 - 1]
    refused = 0
    for _ in range(60):
        call = good_call(library.name)
        for name in rng.choice(list(call["attributes"]), 2, replace=False):
            old = call["attributes"][name]
            if isinstance(old, np.ndarray):
                call["attributes"][name] = rng.choice(interesting, rng.integers(0, 20)).astype(
                    np.int64
                )
            elif isinstance(old, np.floating):
                call["attributes"][name] = np.float32(rng.choice([np.nan, np.inf, -1, 0, 1e38]))
            else:
                info = np.iinfo(old.dtype)
                value = int(np.clip(int(rng.choice(interesting)), info.min, info.max))
                call["attributes"][name] = old.dtype.type(value)
        at = rng.integers(len(call["operands"]))
        if rng.random() < 0.5:
            shape = tuple(rng.integers(0, 5, rng.integers(0, 5)))
            call["operands"][at] = jnp.zeros(shape, call["operands"][at].dtype)
        try:
            run(library.name, "fwd", call)
        except Exception as error:
            assert "attention_fwd_" in str(error)  # ours, not another failure
            refused += 1
    assert refused > 30


def test_zero_sizes_are_identities(backend):
    for b, lq, lkv in ((0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)):
        q, k, v = arrays(b, lq, lkv)

        def call(*args):
            return jax_ops.dot_product_attention(
                *args, implementation=backend.name, return_residual=True
            )

        (out, lse), vjp = jax.vjp(call, q, k, v)
        assert out.shape == (b, lq, 4, 8)
        np.testing.assert_array_equal(out, 0)
        np.testing.assert_array_equal(lse, -np.inf)
        for gradient, x in zip(vjp((out, jnp.ones_like(lse))), (q, k, v), strict=True):
            np.testing.assert_array_equal(gradient, np.zeros(x.shape, np.float32))


def test_many_calls_at_once_do_not_deadlock():
    """Handlers run on the pool that they use; each must make progress alone."""
    q, k, v = arrays(4, 130, 130, 8, 2, 32)

    @jax.jit
    def many(q, k, v):
        outs = [
            jax_ops.dot_product_attention(q * i, k, v, implementation="cpu") for i in range(1, 17)
        ]
        return sum(outs)

    first = many(q, k, v)
    for _ in range(10):
        np.testing.assert_array_equal(many(q, k, v), first)
