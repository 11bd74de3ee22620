# SPDX-License-Identifier: Apache-2.0
"""The pages that are made from the code are those in the tree, and show every mask."""

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import jax_ops
from docs import api_page, mask_gallery, write

_DOCS = Path(__file__).parent.parent / "docs"


def test_generated_pages_are_up_to_date():
    made = write.files()
    stale = [name for name, text in made.items() if (_DOCS / name).read_text() != text]
    assert not stale, f"run `bazel run //docs:write`: {stale} differ from what the code says"
    assert {p.name for p in (_DOCS / "masks").iterdir()} == set(mask_gallery.pictures())


def test_api_page_holds_every_public_name():
    page = api_page.page()
    missing = [n for n in jax_ops.__all__ if f"### {n}\n" not in page and n != "__version__"]
    assert not missing


def test_every_mask_class_is_drawn():
    drawn = " ".join(repr(p.mask) for p in mask_gallery.PICTURES)
    classes = [
        name
        for name in jax_ops.__all__
        if isinstance(item := getattr(jax_ops, name), type)
        and issubclass(item, jax_ops.Mask)
        and item is not jax_ops.Mask
    ]
    assert len(classes) > 5
    assert [name for name in classes if name not in drawn] == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("causal", np.tril(np.ones((16, 16)))),
        ("causal_bottom_right", np.tril(np.ones((16, 16)))[10:]),
        ("key_padding", np.broadcast_to(np.arange(16) < 11, (16, 16))),
    ],
)
def test_pictures_show_what_is_allowed(name, expected):
    root = ElementTree.fromstring(mask_gallery.pictures()[f"{name}.svg"])
    cells = root.findall(".//{http://www.w3.org/2000/svg}rect")
    fills = {c.get("fill") for c in cells}
    assert len(fills) == 2
    allowed = [c.get("fill") == "#2f6db3" for c in cells]
    np.testing.assert_array_equal(np.reshape(allowed, expected.shape), expected)
