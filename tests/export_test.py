# SPDX-License-Identifier: Apache-2.0
"""jax.export: round trips, symbolic batches, several platforms, another process."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ops
from tests.cases import plain

Q, K, V, W = plain.inputs(b=4, hq=8, hkv=4)


def checks(backend):
    """The helper's checks; the emulated library is for tests, so its targets are added here."""
    return jax_ops.disabled_export_checks() + [
        export.DisabledSafetyCheck.custom_call(f"attention_{operation}_emulated_v1")
        for operation in ("fwd", "bwd")
        if backend.name == "emulated"
    ]


def gradient_of(backend):
    def loss(q, k, v, w):
        out = jax_ops.dot_product_attention(q, k, v, is_causal=True, implementation=backend.name)
        return (out * w).sum()

    return jax.grad(loss, (0, 1, 2))


def test_round_trip(backend):
    gradient = jax.jit(gradient_of(backend))
    data = export.export(gradient, disabled_checks=checks(backend))(Q, K, V, W).serialize()
    got = export.deserialize(bytearray(data)).call(Q, K, V, W)
    for g, w in zip(got, gradient(Q, K, V, W), strict=True):
        np.testing.assert_array_equal(g, w)


def test_the_helper_is_needed(backend):
    if backend.target is None:
        pytest.skip("a program without custom calls needs no checks disabled")
    with pytest.raises(ValueError, match="attention_fwd"):
        export.export(jax.jit(gradient_of(backend)))(Q, K, V, W)


@pytest.mark.parametrize("b", [1, 3, 40])
def test_symbolic_batch(backend, b):
    (symbol,) = export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((symbol, *x.shape[1:]), x.dtype) for x in (Q, K, V, W)]
    exported = export.export(jax.jit(gradient_of(backend)), disabled_checks=checks(backend))(
        *shapes
    )
    args = [np.resize(x, (b, *x.shape[1:])) for x in (Q, K, V, W)]
    got = export.deserialize(exported.serialize()).call(*args)

    def reference(q, k, v, w):
        return (plain.attention(q, k, v, causal=True)[0] * w).sum()

    wanted = plain.in_float64(jax.grad(reference, (0, 1, 2)), *args)
    plain.assert_close(got, wanted, backend)


def test_symbolic_batch_of_a_split_call():
    """The workspace of a split call grows with the batch, so it is exported as an expression."""
    (symbol,) = export.symbolic_shape("b")
    rng = np.random.default_rng(0)
    shapes = [(1, 8, 32), (4096, 2, 32), (4096, 2, 32)]

    def decode(q, k, v):
        return jax_ops.mha(q, k, v, num_splits=8, implementation="cpu")

    exported = export.export(jax.jit(decode), disabled_checks=jax_ops.disabled_export_checks())(
        *(jax.ShapeDtypeStruct((symbol, *s), np.float32) for s in shapes)
    )
    args = [rng.standard_normal((5, *s)).astype(np.float32) for s in shapes]
    np.testing.assert_array_equal(exported.call(*args), decode(*args))


def test_several_platforms():
    """'auto' is resolved for each platform: the CPU kernels there, equal semantics elsewhere."""
    function = jax.jit(jax_ops.dot_product_attention)
    exported = export.export(
        function,
        disabled_checks=jax_ops.disabled_export_checks(),
        platforms=("cpu", "cuda", "tpu"),
    )(Q, K, V)
    assert exported.platforms == ("cpu", "cuda", "tpu")
    assert "attention_fwd_cpu_v1" in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(Q, K, V), function(Q, K, V))


def test_inside_shard_map(backend):
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
    spec = P("b", None, "h")

    def attend(q, k, v):
        return jax_ops.dot_product_attention(q, k, v, implementation=backend.name)

    mapped = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec))
    args = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in (Q, K, V)]
    exported = export.export(mapped, disabled_checks=checks(backend))(*args)
    got = export.deserialize(exported.serialize()).call(*args)
    np.testing.assert_allclose(got, attend(Q, K, V), atol=1e-6)


RUNNER = """
import sys
import jax
import numpy as np
import jax_ops
folder = sys.argv[1]
with open(folder + "/program", "rb") as f:
    program = jax.export.deserialize(bytearray(f.read()))
args = np.load(folder + "/args.npz")
np.save(folder + "/out.npy", program.call(*(args[name] for name in "qkv")))
"""


def test_a_fresh_process_runs_an_exported_program(tmp_path):
    function = jax.jit(lambda *a: jax_ops.dot_product_attention(*a, implementation="cpu"))
    exported = export.export(function, disabled_checks=jax_ops.disabled_export_checks())(Q, K, V)
    (tmp_path / "program").write_bytes(exported.serialize())
    np.savez(tmp_path / "args.npz", q=Q, k=K, v=V)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    subprocess.run(
        [sys.executable, "-c", RUNNER, str(tmp_path)], check=True, env=environment, timeout=300
    )
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), function(Q, K, V), atol=1e-6)


def test_an_edited_program_meets_an_error_in_words():
    """A program that claims other sizes than it passes is refused by the library, not misread."""
    wrong = jax.ffi.ffi_call(
        "attention_fwd_cpu_v1",
        (
            jax.ShapeDtypeStruct((4, 19, 8, 8), jnp.float32),
            jax.ShapeDtypeStruct((4, 19, 8), jnp.float32),
            jax.ShapeDtypeStruct((0,), jnp.uint8),
        ),
    )
    with pytest.raises(Exception, match="attention_fwd_cpu_v1: attribute features"):
        jax.block_until_ready(wrong(Q, K, V))
