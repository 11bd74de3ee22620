# SPDX-License-Identifier: Apache-2.0
"""docs/compatibility.md, PyTorch: each difference from SDPA and FlexAttention, both sides."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import jax_ops
from tests.cases.uniform import means, uniform

_SDPA = torch.nn.functional.scaled_dot_product_attention


def _arrays(lq, lkv, **options):
    problem = uniform(lq, lkv, **options)
    return problem.query, problem.key, problem.value


def _torch(*arrays):
    """[B, L, H, D] to PyTorch's [B, H, L, D]."""
    return [torch.tensor(np.swapaxes(x, 1, 2)) for x in arrays]


class TestSdpa:
    def test_layout(self):
        rng = np.random.default_rng(0)
        arrays = [rng.normal(size=(2, 5, 3, 4)).astype(np.float32) for _ in range(3)]
        ours = jax_ops.dot_product_attention(*arrays)
        theirs = _SDPA(*_torch(*arrays)).numpy()
        np.testing.assert_allclose(ours, np.swapaxes(theirs, 1, 2), rtol=2e-5, atol=2e-6)

    def test_additive_masks(self):
        """A floating attn_mask is added there; here that is what `bias` is for."""
        arrays, bias = _arrays(1, 2), np.array([[0, np.log(3)]], np.float32)
        assert _SDPA(*_torch(*arrays), attn_mask=torch.tensor(bias)).item() == pytest.approx(0.75)
        with pytest.raises(TypeError, match="bias"):
            jax_ops.dot_product_attention(*arrays, mask=bias)
        out = jax_ops.dot_product_attention(*arrays, bias=bias)
        assert out.item() == pytest.approx(0.75)

    def test_grouped_heads(self):
        """Fewer key/value heads need enable_gqa there; here they are always fine."""
        arrays = _arrays(1, 3, hq=4, hkv=2)
        with pytest.raises(RuntimeError):
            _SDPA(*_torch(*arrays))
        theirs = _SDPA(*_torch(*arrays), enable_gqa=True).ravel().numpy()
        ours = jax_ops.dot_product_attention(*arrays)
        np.testing.assert_allclose(np.ravel(ours), theirs)

    def test_dropout_pattern(self):
        """Equal rates, other entries: here they depend on the key and the indices alone."""
        value = np.eye(64, dtype=np.float32)[None, :, None]
        query = np.zeros((1, 64, 1, 8), np.float32)
        options = {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}
        ours = [jax_ops.dot_product_attention(query, query, value, **options) for _ in range(2)]
        np.testing.assert_array_equal(*ours)
        theirs = [_SDPA(*_torch(query, query, value), dropout_p=0.5).numpy() for _ in range(2)]
        assert not np.array_equal(*theirs)
        for weights in (np.asarray(ours[0]), theirs[0]):
            assert abs((weights > 0).mean() - 0.5) < 0.05


class TestFlexAttention:
    def test_block_size(self):
        """Tiles of 64 here, of 128 there."""
        ours = jax_ops.create_block_mask(jax_ops.CausalMask(), None, None, 128, 128)
        theirs = torch_flex.create_block_mask(
            lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 128, 128, device="cpu"
        )
        assert theirs.BLOCK_SIZE == (128, 128)
        assert ours.index.shape == (1, 1, 2, 2)

    def test_score_mod_may_mask_but_mask_mod_should(self):
        """A score of -inf masks in both; rows without any other score give (0, -inf) in both."""
        arrays = _arrays(2, 2)
        theirs = torch_flex.flex_attention(
            *_torch(*arrays),
            score_mod=lambda s, b, h, q_idx, kv_idx: torch.where(q_idx < 1, s, -float("inf")),
            return_lse=True,
        )
        ours = jax_ops.flex_attention(
            *arrays,
            score_mod=lambda s, b, h, q_idx, kv_idx: jnp.where(q_idx < 1, s, -jnp.inf),
            return_residual=True,
        )
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(np.ravel(a), b.ravel().numpy())
        np.testing.assert_array_equal(np.ravel(ours[1]), [np.float32(np.log(2)), -np.inf])

    def test_masks_are_objects_too(self):
        """mask_mod functions work in both; objects say more, and fuse without a block mask."""
        arrays = _arrays(3, 3)

        def causal(b, h, q_idx, kv_idx):
            return q_idx >= kv_idx

        block_mask = torch_flex.create_block_mask(causal, None, None, 3, 3, device="cpu")
        theirs = torch_flex.flex_attention(*_torch(*arrays), block_mask=block_mask)
        np.testing.assert_allclose(theirs.ravel(), [0, 0.5, 1])
        for options in ({"mask_mod": causal}, {"mask": jax_ops.CausalMask()}):
            out = jax_ops.flex_attention(*arrays, **options)
            np.testing.assert_allclose(means(out), [[0, 0.5, 1]])


def test_page_names_each_test_and_only_tests_that_exist():
    here = Path(__file__).parent
    names = set()
    for file in ("compatibility_test.py", "compatibility_peers_test.py"):
        names |= set(re.findall(r"    def (test_\w+)\(self", (here / file).read_text()))
    page = (here.parent / "docs" / "compatibility.md").read_text()
    assert set(re.findall(r"`(test_\w+)`", page)) == names
