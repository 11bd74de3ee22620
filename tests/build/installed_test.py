# SPDX-License-Identifier: Apache-2.0
"""The wheel, installed by plain pip, gives the same results as the source checkout.

On the newest locked JAX and on the oldest that is supported.
"""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

import jax_ops

_ROOT = pathlib.Path(__file__).parents[2]

# Prints digests of the results of forward and backward passes, and where the package came from.
_PROGRAM = """
import hashlib
import json
import jax
import jax.numpy as jnp
import numpy as np
import jax_ops

def loss(q, k, v, **options):
    out = jax_ops.dot_product_attention(q, k, v, implementation="cpu", **options)
    return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

# Every bit of every result: float32 is multiplied by one kernel, bfloat16 by another.
results = {}
for dtype in (jnp.float32, jnp.bfloat16):
    generator = np.random.default_rng(0)
    args = [jnp.asarray(generator.standard_normal((2, 128, h, 64)), dtype) for h in (4, 2, 2)]
    for name, options in {
        "causal": {"is_causal": True},
        "dropout": {"dropout_rate": 0.25, "dropout_key": jax.random.key(0)},
    }.items():
        both = jax.value_and_grad(lambda *x: loss(*x, **options), argnums=(0, 1, 2), has_aux=True)
        (_, out), gradients = jax.jit(both)(*args)
        results[f"{name} {jnp.dtype(dtype)}"] = [
            [x.shape, hashlib.sha256(np.asarray(x).tobytes()).hexdigest(), float(jnp.abs(x).max())]
            for x in (out, *gradients)
        ]
print(json.dumps({
    "file": jax_ops.__file__,
    "version": jax_ops.__version__,
    "jax": jax.__version__,
    "implementations": [n for n, why in jax_ops.available_implementations().items() if not why],
    "results": results,
}))
"""


def _run(first: str, site: str) -> dict:
    """Runs the program with `first` in front of the locked packages of one site."""
    packages = str(_ROOT.parent / f"pip_{site}/packages")
    environ = {k: v for k, v in os.environ.items() if not k.startswith("JAX_OPS")}
    environ["PYTHONPATH"] = os.pathsep.join([first, packages])
    output = subprocess.run(
        [sys.executable, "-S", "-c", _PROGRAM],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=os.environ["TEST_TMPDIR"],
    ).stdout
    return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> pathlib.Path:
    """Installs the wheel into an empty folder."""
    (wheel,) = (_ROOT / "jax_ops/wheel").iterdir()
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-I", "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*pip, f"--target={target}", str(wheel)], check=True)
    # A second time over the first, as an upgrade would.
    subprocess.run([*pip, "--upgrade", f"--target={target}", str(wheel)], check=True)
    return target


@pytest.fixture(scope="module", params=["runtime", "floor"])
def site(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def installed(target, site) -> dict:
    result = _run(str(target), site)
    assert result["file"].startswith(str(target))
    return result


def test_the_installed_package_is_the_one_of_the_source(installed):
    assert installed["version"] == jax_ops.__version__


def test_the_cpu_kernels_are_there(installed):
    assert {"cpu", "xla"} <= set(installed["implementations"])


def test_results_equal_those_of_the_source(installed, site):
    source = _run(str(_ROOT), site)
    assert source["file"].startswith(str(_ROOT))
    assert len(source["results"]) == 4
    assert all(largest > 0 for one in source["results"].values() for _, _, largest in one)
    assert installed["results"] == source["results"]


def test_it_ran_on_the_jax_that_was_meant(installed, site):
    if site == "floor":
        requirements = (_ROOT / "bazel/python/requirements/floor.in").read_text()
        assert f"\njax=={installed['jax']}\n" in requirements
    else:
        assert installed["jax"] == jax.__version__
