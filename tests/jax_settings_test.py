# SPDX-License-Identifier: Apache-2.0
"""JAX's strict and checking settings: code that uses them can use this package too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops
from tests.cases import run
from tests.cases.backends import CPU, XLA
from tests.cases.check import check
from tests.cases.features import FEATURES

_SETTINGS = {
    "jax_check_tracer_leaks": True,
    "jax_debug_nans": True,
    "jax_enable_checks": True,
    "jax_legacy_prng_key": "error",
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
}


@pytest.fixture(params=list(_SETTINGS))
def setting(request):
    """One of the settings, switched on."""
    before = getattr(jax.config, request.param)
    run.forget()
    jax.config.update(request.param, _SETTINGS[request.param])
    yield request.param
    jax.config.update(request.param, before)
    run.forget()


@pytest.mark.parametrize("feature", ["flex_everything", "decode_everything"])
@pytest.mark.parametrize("implementation", [CPU, XLA], ids=str)
def test_every_option_at_once(setting, feature, implementation):
    feature = FEATURES[feature]
    extra = dict(feature.options, entry=feature.entry)
    check(feature.problem("float32"), implementation, feature.case.cotangents(), **extra)


def test_masks_and_merging(setting):
    ids = (np.arange(2 * 70, dtype=np.int32) // 20).reshape(2, 70)
    mask = (
        jax_ops.SegmentMask(jnp.asarray(ids), jnp.asarray(ids)) | jax_ops.PrefixLMMask(3)
    ) & ~jax_ops.KeyPaddingMask(jnp.asarray([2, 5], jnp.int32))
    made = jax_ops.create_block_mask(mask, 2, None, 70, 70)
    i, j = np.arange(70)[:, None], np.arange(70)
    for b, padding in enumerate((2, 5)):
        expected = ((ids[b][:, None] == ids[b]) | (j <= i) | (j < 3)) & (j >= padding)
        np.testing.assert_array_equal(made.to_dense()[b, 0], expected)
        np.testing.assert_array_equal(mask(b, 0, i, j), expected)
    out, lse = jax_ops.merge_attention(jnp.ones((3, 2, 4, 8)), jnp.zeros((3, 2, 4)))
    np.testing.assert_allclose(out, 1, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(3), rtol=1e-6)
