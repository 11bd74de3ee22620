# SPDX-License-Identifier: Apache-2.0
"""Results are bit-identical from run to run, for any number of threads, forward and backward."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.cases import run
from tests.cases.case import Case

# Big enough for several tiles and tasks; every gradient that is a sum over many rows is there.
_CASE = Case(
    b=2,
    lq=200,
    lkv=260,
    hq=4,
    hkv=2,
    d=32,
    causal=True,
    bottom_right=True,
    bias="1h1k",
    slopes=True,
    scale="array",
    dropout=0.1,
)
_CASES = {
    "float32": _CASE,
    "bfloat16": Case(b=1, lq=130, lkv=300, hq=6, hkv=2, d=64, dtype="bfloat16", window=(90, 40)),
}


def digest(name, backend):
    """A hash of every result and gradient."""
    case = _CASES[name]
    results, gradients = run.vjp(case.problem(), backend, *case.cotangents())
    total = hashlib.sha256()
    for key, x in sorted((results | gradients).items()):
        total.update(key.encode())
        total.update(np.ascontiguousarray(x).tobytes())
    return total.hexdigest()


@pytest.mark.parametrize("name", _CASES)
def test_two_runs_agree_in_every_bit(backend, name):
    first = digest(name, backend)
    assert all(digest(name, backend) == first for _ in range(3))


_CHILD = """
import sys
from tests.cases.backends import BACKENDS
from tests import determinism_test
print(determinism_test.digest(sys.argv[1], BACKENDS[sys.argv[2]]))
"""


def _digest_with_threads(name, backend, threads):
    # XLA sizes its CPU thread pool by NPROC where that is set.
    env = dict(os.environ, NPROC=str(threads), PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, name, backend.name],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return child.stdout.split()[-1]


def test_the_number_of_threads_changes_no_bit(backend):
    if backend.name == "xla":
        pytest.skip("XLA's own CPU matrix products are not ours to promise for")
    results = {t: _digest_with_threads("float32", backend, t) for t in (1, 2, 7)}
    assert len(set(results.values())) == 1, results
