# SPDX-License-Identifier: Apache-2.0
"""Rule 3: one alignment governs causal, window and ALiBi; windows are inclusive."""

import dataclasses

import numpy as np
import pytest

from tests.cases import run
from tests.cases.case import Case
from tests.cases.check import check
from tests.cases.uniform import means, uniform

_CASE = Case(b=2, lq=35, lkv=50, hq=4, hkv=2, d=16)


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": (4, 7)},
        {"window": (0, 0)},
        {"window": (None, 3)},
        {"causal": True, "window": (4, None)},
        {"slopes": True, "causal": True, "window": (9, 9)},
    ],
    ids=str,
)
def test_alignment_governs_every_positional_term(backend, options, bottom_right):
    """With lengths: bottom right means each row's own kv_len - q_len."""
    case = dataclasses.replace(
        _CASE, bottom_right=bottom_right, query_lengths=(35, 20), key_lengths=(50, 11), **options
    )
    # Different lengths are data, so one program serves several.
    for q_len, kv_len in [((35, 20), (50, 11)), ((3, 35), (40, 50))]:
        problem = case.problem().with_arrays(
            query_lengths=np.array(q_len, np.int32), key_lengths=np.array(kv_len, np.int32)
        )
        check(problem, backend, case.cotangents())


def test_bottom_right_uses_array_sizes_where_no_lengths_are_given(backend):
    lengths = {"key_lengths": np.array([6], np.int32)}
    for options, shift in [({}, 4), (lengths, 2)]:
        problem = uniform(4, 8, causal=True, bottom_right=True, **options)
        got = means(run.forward(problem, backend)["out"])[0]
        # Row i sees keys 0 .. i + shift: their mean index is (i + shift) / 2.
        np.testing.assert_allclose(got, (np.arange(4) + shift) / 2, rtol=1e-6)


def test_an_integer_window_means_both_sides(backend):
    pair = run.forward(uniform(9, 9, window=(2, 2)), backend)
    number = run.forward(uniform(9, 9, window=2), backend)
    np.testing.assert_array_equal(pair["out"], number["out"])
    np.testing.assert_allclose(means(pair["out"])[0], [1, 1.5, 2, 3, 4, 5, 6, 6.5, 7], rtol=1e-6)


def test_a_window_is_intersected_with_causal(backend):
    got = run.forward(uniform(6, 6, causal=True, window=(1, 5)), backend)
    np.testing.assert_allclose(means(got["out"])[0], [0, 0.5, 1.5, 2.5, 3.5, 4.5], rtol=1e-6)


def test_a_window_wider_than_the_sequences_masks_nothing(backend):
    wide = run.forward(uniform(5, 7, window=(2**40, 2**31 - 1)), backend)
    np.testing.assert_allclose(means(wide["out"])[0], [3] * 5, rtol=1e-6)
