# SPDX-License-Identifier: Apache-2.0
"""Choosing an implementation: what 'auto' takes, what an explicit choice refuses, what is said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops
from jax_ops import dispatch
from jax_ops._primitive import local
from jax_ops.explanation import explain


def shapes(d=64, dv=None, dtype=jnp.float32, lq=32, b=2):
    heads = ((lq, 4, d), (48, 2, d), (48, 2, dv or d))
    return [jax.ShapeDtypeStruct((b, length, h, w), dtype) for length, h, w in heads]


def test_auto_takes_the_cpu_kernels_on_a_cpu():
    told = explain(*shapes(), is_causal=True, platform="cpu")
    assert (told.implementation, told.backward) == ("cpu", "cpu")
    assert told.reasons["xla"] == "comes after 'cpu' on cpu"
    assert "cuda only" in told.reasons["cuda"]


@pytest.mark.parametrize(
    "changes, reason",
    [({"d": 257, "dv": 64}, "257"), ({"dv": 300}, "300"), ({"dtype": jnp.float64}, "float64")],
)
def test_auto_falls_back_to_equal_semantics(changes, reason):
    with jax.enable_x64(True):
        told = explain(*shapes(**changes), platform="cpu")
    assert told.implementation == told.backward == "xla"
    assert reason in told.reasons["cpu"]


def test_another_platform_gets_xla():
    told = explain(*shapes(), platform="tpu")
    assert told.implementation == "xla"
    assert "runs on cpu only" in told.reasons["cpu"]


def test_explanation_is_told_in_words():
    text = str(explain(*shapes(d=300), implementation="cpu"))
    assert text.startswith("On cpu: no implementation can run this")
    assert "300" in text


def test_explain_agrees_with_the_compiled_program():
    for d in (64, 300):
        hlo = jax.jit(jax_ops.dot_product_attention).lower(*shapes(d=d)).compile().as_text()
        fused = "attention_fwd_cpu" in hlo
        assert fused == (explain(*shapes(d=d)).implementation == "cpu")


def test_explain_takes_every_argument_of_the_function():
    q, k, v = shapes(lq=48)
    told = explain(
        q,
        k,
        v,
        jax.ShapeDtypeStruct((4, 48, 1), jnp.bfloat16),
        mask=jax.ShapeDtypeStruct((48, 48), np.bool_),
        scale=jax.ShapeDtypeStruct((), jnp.float32),
        query_seq_lengths=jax.ShapeDtypeStruct((2,), jnp.int32),
        query_segment_ids=jax.ShapeDtypeStruct((2, 48), jnp.int32),
        local_window_size=(3, None),
        logits_soft_cap=5.0,
        alibi_slopes=jax.ShapeDtypeStruct((4,), jnp.float32),
        dropout_rate=0.1,
        dropout_key=jax.random.key(0),
        alignment="bottom_right",
        precision="highest",
        return_residual=True,
    )
    assert told.implementation == told.backward == "cpu"


def test_an_explicit_choice_never_falls_back():
    arrays = [jnp.zeros(s.shape, s.dtype) for s in shapes(d=300)]
    with pytest.raises(jax_ops.UnsupportedError, match=r"implementation='cpu'.*300"):
        jax_ops.dot_product_attention(*arrays, implementation="cpu")
    if dispatch.available_implementations()["cuda"]:
        with pytest.raises(jax_ops.UnsupportedError, match="implementation='cuda'"):
            jax_ops.dot_product_attention(*map(jnp.zeros_like, arrays), implementation="cuda")


def test_unsupported_is_a_value_error_and_not_implemented():
    assert issubclass(jax_ops.UnsupportedError, ValueError)
    assert issubclass(jax_ops.UnsupportedError, NotImplementedError)


def test_available_implementations_say_why_not():
    told = jax_ops.available_implementations()
    assert set(told) == {"cuda", "cpu", "xla", "emulated", "jax_xla", "jax_cudnn"}
    assert told["cpu"] == told["xla"] == told["jax_xla"] == ""
    if all(d.platform == "cpu" for d in jax.devices()):
        assert told["cuda"] == told["jax_cudnn"] == "JAX has no CUDA device"


def test_every_implementation_of_our_own_has_its_programs():
    assert local.PROGRAMS.keys() == set(dispatch.OWN)


@pytest.mark.parametrize(
    "name, canonical", [(None, "auto"), ("cudnn", "jax_cudnn"), ("xla", "xla")]
)
def test_aliases(name, canonical):
    assert dispatch.canonical_implementation(name) == canonical


PEER_LACKS = {
    "logits_soft_cap": {"logits_soft_cap": 2.0},
    "alignment='bottom_right'": {"alignment": "bottom_right"},
    "alibi_slopes": {"alibi_slopes": jnp.ones(4)},
    "query_segment_ids": {
        "query_segment_ids": jnp.zeros((2, 32), int),
        "key_value_segment_ids": jnp.zeros((2, 48), int),
    },
    "dropout_rate": {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)},
    "unbounded side": {"local_window_size": (3, None)},
}


@pytest.mark.parametrize("name", PEER_LACKS)
@pytest.mark.parametrize("peer", ["jax_xla", "cudnn"])
def test_peers_refuse_the_options_that_they_lack(peer, name):
    arrays = [jnp.zeros(s.shape, s.dtype) for s in shapes()]
    with pytest.raises(jax_ops.UnsupportedError) as caught:
        jax_ops.dot_product_attention(*arrays, implementation=peer, **PEER_LACKS[name])
    assert name in str(caught.value)


def test_jax_xla_is_jax_nn():
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal(s.shape), s.dtype) for s in shapes()]
    options = {
        "is_causal": True,
        "local_window_size": (5, 1),
        "key_value_seq_lengths": jnp.array([40, 3]),
        "scale": 0.2,
        "return_residual": True,
    }
    bias = jnp.asarray(rng.standard_normal((1, 4, 32, 48)), np.float32)
    got = jax_ops.dot_product_attention(*arrays, bias, implementation="jax_xla", **options)
    wanted = jax.nn.dot_product_attention(*arrays, bias, implementation="xla", **options)
    for g, w in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(g, w)


def test_cudnn_without_a_gpu_is_refused_in_words():
    if any(d.platform != "cpu" for d in jax.devices()):
        pytest.skip("this machine has a GPU")
    arrays = [jnp.zeros(s.shape, jnp.bfloat16) for s in shapes()]
    with pytest.raises(jax_ops.UnsupportedError, match="jax_cudnn"):
        jax_ops.dot_product_attention(*arrays, implementation="cudnn")


def test_default_precision_follows_the_configuration():
    from jax_ops._problem import make_problem

    arrays = [jnp.zeros(s.shape, s.dtype) for s in shapes()]

    def precision(dtype=jnp.float32, **options):
        return make_problem(*(x.astype(dtype) for x in arrays), **options).spec.precision

    assert precision() == "default"
    with jax.default_matmul_precision("highest"):
        assert precision() == precision(precision="default") == "highest"
        assert precision(dtype=jnp.bfloat16) == "default"
    with jax.default_matmul_precision("bfloat16"):
        assert precision() == "default"
        assert precision(precision="highest") == "highest"
