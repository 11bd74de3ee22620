# SPDX-License-Identifier: Apache-2.0
"""The primitives on the emulator give what the PTX ISA says; and the check itself can fail."""

import pathlib

import numpy as np
import pytest

from tests.native.tile import conformance
from tests.native.tile.conformance_reference import PRIMITIVES

_LIBRARY = pathlib.Path(__file__).parent / "libconformance_emulated.so"


@pytest.fixture(scope="module")
def library() -> conformance.Library:
    return conformance.Library(str(_LIBRARY))


def test_library_and_reference_know_the_same_primitives(library):
    assert sorted(library.names) == sorted(PRIMITIVES)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(PRIMITIVES))
def test_emulator(library, name, seed):
    assert conformance.check(library, name, seed) == ""


@pytest.mark.parametrize("name", sorted(PRIMITIVES))
def test_a_wrong_word_is_found(library, name):
    """Every output word of some thread, one at a time, with its sign or lowest bits turned."""
    threads, blocks, in_words, out_words = library.shape(name)
    words = PRIMITIVES[name][0](np.random.default_rng(1), (blocks, in_words, threads))
    got = library.run(name, words)
    assert conformance.differences(name, words, got) == ""
    for i in range(out_words):
        wrong = got.copy()
        thread = (7 * i + 3) % threads
        wrong[blocks // 2, i, thread] ^= np.uint32(0x80000001)
        assert f"word {i}" in conformance.differences(name, words, wrong)


def test_swapped_lanes_are_found(library):
    """What a wrong fragment layout looks like."""
    for name in ("mma_bf16", "mma_f16", "mma_tf32", "mma_tf32x3", "ldmatrix", "load_b_16"):
        threads, blocks, in_words, _ = library.shape(name)
        words = PRIMITIVES[name][0](np.random.default_rng(2), (blocks, in_words, threads))
        got = library.run(name, words)
        order = np.arange(32)
        order[[1, 4]] = order[[4, 1]]
        assert "words differ" in conformance.differences(name, words, got[:, :, order])


def test_a_failed_run_is_reported(library):
    words = np.zeros((2, 1, 64), np.uint32)
    words[0, 0, 5] = 99  # valid bytes of a 16-byte copy
    with pytest.raises(RuntimeError, match="99 valid bytes of 16"):
        library.run("async_copy_16", words)
