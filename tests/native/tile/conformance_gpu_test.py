# SPDX-License-Identifier: Apache-2.0
"""The primitives on the GPU give what the PTX ISA says: the first of all tests on a GPU."""

import pathlib

import pytest

from tests.native.tile import conformance
from tests.native.tile.conformance_reference import PRIMITIVES

_LIBRARY = pathlib.Path(__file__).parent / "libconformance_gpu.so"


@pytest.fixture(scope="module")
def library() -> conformance.Library:
    return conformance.Library(str(_LIBRARY))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(PRIMITIVES))
def test_gpu(library, name, seed):
    assert conformance.check(library, name, seed) == ""
