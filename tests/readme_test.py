# SPDX-License-Identifier: Apache-2.0
"""The README's example runs as it is printed, and its links lead to files."""

import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import support_matrix

_TEXT = (support_matrix.ROOT / "README.md").read_text()


def test_the_example_runs_and_gives_finite_results():
    code = _TEXT.split("<!-- example: begin")[1].split("```python\n")[1].split("```")[0]
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["out"].shape == (2, 512, 8, 64) and names["out"].dtype == jnp.bfloat16
    assert names["token"].shape == (2, 1, 8, 64)
    assert np.isfinite(names["loss"])
    for g in names["grads"]:
        assert np.isfinite(np.asarray(g, np.float32)).all() and (g != 0).any()


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#:]+)\)", _TEXT))
def test_links_lead_to_files_of_the_tree(target):
    assert not pathlib.PurePath(target).is_absolute()
    assert (support_matrix.ROOT / target).exists(), target
