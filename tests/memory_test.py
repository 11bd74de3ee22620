# SPDX-License-Identifier: Apache-2.0
"""Memory and trace cost: no O(Lq * Lkv) buffer, no repeated K or V, programs that do not grow.

Programs are compiled for long sequences but not run; XLA's own accounting is read.
"""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import jax_ops
from tests.cases import run
from tests.cases.accuracy import DTYPES
from tests.cases.case import Case

MIB = 2**20
_L = 4096


def _arguments(case):
    """ShapeDtypeStructs of a case: nothing is allocated for 128k positions."""
    dtype = DTYPES[case.dtype]
    return (
        jax.ShapeDtypeStruct((case.b, case.lq, case.hq, case.d), dtype),
        jax.ShapeDtypeStruct((case.b, case.lkv, case.hkv, case.d), dtype),
        jax.ShapeDtypeStruct((case.b, case.lkv, case.hkv, case.d), dtype),
    )


def _attend(backend, with_ids, **options):
    def attend(q, k, v, *ids):
        return jax_ops.dot_product_attention(
            q,
            k,
            v,
            implementation=backend.name,
            query_segment_ids=ids[0] if with_ids else None,
            key_value_segment_ids=ids[1] if with_ids else None,
            **options,
        )

    return attend


def _lowered(case, backend, gradient, **options):
    with_ids = bool(case.segments)
    attend = _attend(backend, with_ids, **options)
    args = _arguments(case)
    ids = ()
    if with_ids:
        ids = tuple(jax.ShapeDtypeStruct((case.b, n), jnp.int32) for n in (case.lq, case.lkv))
    if not gradient:
        return jax.jit(attend).lower(*args, *ids)

    def vjp(q, k, v, dout, *ids):
        return jax.vjp(lambda q, k, v: attend(q, k, v, *ids), q, k, v)[1](dout)

    dout = jax.ShapeDtypeStruct(args[0].shape, args[0].dtype)
    return jax.jit(vjp).lower(*args, dout, *ids)


def _temp_bytes(case, backend, gradient, **options):
    compiled = _lowered(case, backend, gradient, **options).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def _bytes(*arrays):
    return sum(x.size * x.dtype.itemsize for x in arrays)


_OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (256, 0), "is_causal": True},
    "soft_cap": {"logits_soft_cap": 20.0},
    "dropout": {"dropout_rate": 0.1, "dropout_key": jax.random.PRNGKey(0)},
}


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("name", _OPTIONS)
def test_no_buffer_grows_with_lq_times_lkv(backend, name, gradient):
    """Doubling both lengths doubles the temporaries; a score matrix would quadruple them."""
    sizes = []
    for length in (_L, 2 * _L):
        case = Case(b=1, lq=length, lkv=length, hq=4, hkv=4, d=64)
        sizes.append(_temp_bytes(case, backend, gradient, **_OPTIONS[name]))
    scores = 4 * _L * _L * 4
    assert sizes[0] < scores / 4, f"{sizes[0] / MIB:.1f} MiB of temporaries"
    assert sizes[1] <= 2.2 * sizes[0] + MIB, f"{sizes[0] / MIB:.2f} -> {sizes[1] / MIB:.2f} MiB"


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_a_broadcast_bias_gradient_is_summed_without_the_full_matrix(backend, gradient):
    def loss(bias, q, k, v):
        out = jax_ops.dot_product_attention(q, k, v, bias, implementation=backend.name)
        return out.sum()

    case = Case(b=2, lq=_L, lkv=_L, hq=8, hkv=8, d=64)
    bias = jax.ShapeDtypeStruct((1, 1, 1, _L), jnp.float32)
    function = jax.grad(loss) if gradient else loss
    compiled = jax.jit(function).lower(bias, *_arguments(case)).compile()
    temp = compiled.memory_analysis().temp_size_in_bytes
    assert temp < 2 * 8 * _L * _L * 4 / 8, f"{temp / MIB:.1f} MiB of temporaries"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_keys_and_values_are_never_repeated(backend, gradient, dtype):
    """MQA with 16 query heads: repeated K and V alone would be 16 times K and V.

    Few queries and many keys, so that what belongs to queries does not hide them.
    """
    case = Case(b=1, lq=64, lkv=8 * _L, hq=16, hkv=1, d=64, dtype=dtype)
    kv = _bytes(*_arguments(case)[1:])
    temp = _temp_bytes(case, backend, gradient)
    # Room for one float32 copy of K, V, dK and dV, and for tiles; not for 16 of anything.
    assert temp < 8 * kv * (2 if dtype == "bfloat16" else 1), (
        f"{temp / MIB:.1f} MiB of temporaries for {kv / MIB:.1f} MiB of K and V"
    )


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_programs_have_the_same_size_at_any_length(backend, gradient):
    """Causal + window + segments at 1k, 16k and 128k: the same HLO but for the numbers in it."""
    texts = []
    for length in (1024, 16 * 1024, 128 * 1024):
        case = Case(b=1, lq=length, lkv=length, hq=4, hkv=2, d=64, segments=2)
        lowered = _lowered(case, backend, gradient, is_causal=True, local_window_size=(512, None))
        texts.append(lowered.as_text())
    operations = [re.findall(r"\b(?:stablehlo|func|call)\.?[\w.]*", text) for text in texts]
    assert len(operations[0]) > 3
    assert operations[0] == operations[1] == operations[2]
    assert max(map(len, texts)) < 1.02 * min(map(len, texts))


def test_gradient_residuals_are_only_what_the_inputs_and_results_are(backend):
    """Between forward and backward: q, k, v, out and lse live on, nothing else."""
    case = Case(b=1, lq=1024, lkv=1024, hq=4, hkv=4, d=64)
    attend = _attend(backend, False, is_causal=True)
    q, k, v = _arguments(case)
    residuals = jax.eval_shape(lambda *x: jax.vjp(attend, *x)[1], q, k, v)
    out_and_lse = _bytes(q) + 4 * case.lq * case.hq
    total = _bytes(*jax.tree.leaves(residuals))
    assert total <= _bytes(q, k, v) + out_and_lse + 1024, f"{total / MIB:.2f} MiB"


def test_one_program_serves_new_values(backend):
    case = dataclasses.replace(Case(), key_lengths=(65, 2), segments=2)
    run._compiled.cache_clear()
    for seed in range(3):
        run.forward(dataclasses.replace(case, seed=seed).problem(), backend)
    assert run._compiled.cache_info().misses == 1


def _asked_for_in_huge_pages(address):
    """Whether the mapping at an address of this process has the flag of MADV_HUGEPAGE."""
    here = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(mapping[1], 16) <= address < int(mapping[2], 16)
        elif here and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_large_cpu_results_are_asked_for_in_huge_pages():
    cpu = jax.devices("cpu")[0]
    q = jax.device_put(jnp.ones((2, 2048, 8, 128)), cpu)  # 16 MiB
    kv = jax.device_put(jnp.ones((2, 8, 1, 128)), cpu)
    attend = jax.jit(lambda q, k, v: jax_ops.dot_product_attention(q, k, v, implementation="cpu"))
    dq = jax.jit(jax.grad(lambda q, k, v: attend(q, k, v).sum()))
    exist = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()
    for x in (attend(q, kv, kv), dq(q, kv, kv)):
        middle = x.unsafe_buffer_pointer() + x.nbytes // 2
        assert _asked_for_in_huge_pages(middle) == exist
