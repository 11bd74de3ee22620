# SPDX-License-Identifier: Apache-2.0
"""The backends that have test targets are those that tests know."""

import ast
import pathlib

from tests.cases import backends

_TARGETS = pathlib.Path(__file__).with_name("backends.bzl")


def test_every_backend_has_targets_and_every_target_a_backend():
    # The list's Starlark is Python too.
    (listed,) = (
        ast.literal_eval(statement.value)
        for statement in ast.parse(_TARGETS.read_text()).body
        if isinstance(statement, ast.Assign) and statement.targets[0].id == "BACKENDS"
    )
    assert sorted(listed) == sorted(backends.BACKENDS)
    assert len(set(listed)) == len(listed)
