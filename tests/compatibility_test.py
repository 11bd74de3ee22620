# SPDX-License-Identifier: Apache-2.0
"""docs/compatibility.md, jax.nn and libraries that are not at hand: each difference, by its value.

Where the peer can run here, its side is asserted too, so that the page says when it has changed.
tests/compatibility_peers_test.py does the same for PyTorch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops
from tests.cases.uniform import means, uniform

_THEIRS = jax.nn.dot_product_attention
_OURS = jax_ops.dot_product_attention


def _arrays(lq, lkv, **options):
    problem = uniform(lq, lkv, **options)
    return problem.query, problem.key, problem.value


class TestJaxNn:
    def test_residual_dtype(self):
        x = jnp.ones((1, 2, 1, 4), jnp.bfloat16)
        assert _THEIRS(x, x, x, return_residual=True)[1].dtype == jnp.bfloat16
        assert _OURS(x, x, x, return_residual=True)[1].dtype == jnp.float32

    def test_residual_gradient(self):
        """The gradient of lse for q = [1], k = [0, ln 3] is ln 3 * 3 / 4; jax.nn's is 0."""
        key = jnp.array([0, jnp.log(3.0)]).reshape(1, 2, 1, 1)

        def lse(fn):
            return lambda q: fn(q, key, key, scale=1.0, return_residual=True)[1].sum()

        query = jnp.ones((1, 1, 1, 1))
        np.testing.assert_array_equal(jax.grad(lse(_THEIRS))(query), 0)
        np.testing.assert_allclose(jax.grad(lse(_OURS))(query).item(), 0.823959, rtol=1e-5)

    def test_empty_rows(self):
        """A row whose mask is all False: jax.nn gives the mean of all values."""
        arrays, mask = _arrays(1, 4), np.zeros((1, 1, 1, 4), bool)
        assert _THEIRS(*arrays, mask=mask).item() == 1.5
        out, lse = _OURS(*arrays, mask=mask, return_residual=True)
        assert (out.item(), lse.item()) == (0.0, -np.inf)

    def test_empty_key_length(self):
        arrays, lengths = _arrays(1, 4), jnp.array([0])
        assert _THEIRS(*arrays, key_value_seq_lengths=lengths).item() == 1.5
        assert _OURS(*arrays, key_value_seq_lengths=lengths).item() == 0.0

    @pytest.mark.parametrize("dtype", [np.float32, np.int32])
    def test_mask_dtypes(self, dtype):
        """Both refuse; ours says where additive values belong, and is a TypeError too."""
        arrays, mask = _arrays(1, 4), np.ones((1, 1, 1, 4), dtype)
        with pytest.raises(ValueError, match="mask dtype should be bool"):
            _THEIRS(*arrays, mask=mask)
        with pytest.raises(TypeError, match="additive values belong in `bias`") as error:
            _OURS(*arrays, mask=mask)
        assert isinstance(error.value, ValueError)

    def test_negative_windows(self):
        arrays = _arrays(4, 4)
        assert _THEIRS(*arrays, local_window_size=(-1, 2)).shape == (1, 4, 1, 1)
        with pytest.raises(ValueError, match="local_window_size: got -1"):
            _OURS(*arrays, local_window_size=(-1, 2))

    def test_unbounded_windows(self):
        """Ours takes None for a side without a bound."""
        out = _OURS(*_arrays(3, 3), local_window_size=(None, 0))
        np.testing.assert_allclose(means(out), [[0, 0.5, 1]])

    def test_float64(self):
        """jax.nn's softmax is in float32 whatever the inputs are; ours is in float64."""
        with jax.enable_x64(True):
            x = np.random.default_rng(0).normal(size=(1, 20, 1, 16))
            s = np.einsum("bqhd,bkhd->bhqk", x, x) / 4
            p = np.exp(s - s.max(-1, keepdims=True))
            exact = np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), x)
            assert np.abs(_THEIRS(x, x, x) - exact).max() > 1e-8
            assert np.abs(_OURS(x, x, x) - exact).max() < 1e-14

    @pytest.mark.parametrize("dtype", [np.int32, np.complex64])
    def test_operand_dtypes(self, dtype):
        x = np.ones((1, 2, 1, 1), dtype)
        assert _THEIRS(x, x, x).dtype == dtype
        with pytest.raises(TypeError, match="query: got dtype"):
            _OURS(x, x, x)

    def test_value_head_dim(self):
        """The head dim of value may differ from that of query."""
        x, value = np.ones((1, 2, 1, 4), np.float32), np.ones((1, 2, 1, 3), np.float32)
        with pytest.raises(ValueError, match="value shape"):
            _THEIRS(x, x, value)
        assert _OURS(x, x, value).shape == (1, 2, 1, 3)

    def test_rows_past_the_query_length(self):
        """Both give 0 there; our lse is -inf, theirs a number."""
        arrays, lengths = _arrays(2, 4), jnp.array([1])
        theirs = _THEIRS(*arrays, query_seq_lengths=lengths, return_residual=True)
        ours = _OURS(*arrays, query_seq_lengths=lengths, return_residual=True)
        np.testing.assert_array_equal(np.ravel(theirs[0]), np.ravel(ours[0]))
        assert np.isfinite(theirs[1][0, 1, 0])
        assert ours[1][0, 1, 0] == -np.inf

    def test_values_of_masked_keys(self):
        """A NaN behind the key length reaches jax.nn's output, not ours."""
        query, key, value = _arrays(1, 4)
        value[0, 2:] = np.nan
        lengths = jnp.array([2])
        assert np.isnan(_THEIRS(query, key, value, key_value_seq_lengths=lengths).item())
        assert _OURS(query, key, value, key_value_seq_lengths=lengths).item() == 0.5

    def test_everything_else_is_equal(self):
        """One call with every option that the two share and that has one meaning."""
        rng = np.random.default_rng(0)
        query = rng.normal(size=(2, 9, 4, 8)).astype(np.float32)
        key, value = (rng.normal(size=(2, 9, 2, 8)).astype(np.float32) for _ in range(2))
        options = {
            "bias": rng.normal(size=(1, 4, 9, 9)).astype(np.float32),
            "mask": rng.random((2, 1, 9, 9)) < 0.8,
            "scale": 0.3,
            "is_causal": True,
            "key_value_seq_lengths": jnp.array([9, 7]),
            "local_window_size": (6, 0),
        }
        options["mask"] |= np.eye(9, dtype=bool)
        theirs, ours = (fn(query, key, value, **options) for fn in (_THEIRS, _OURS))
        np.testing.assert_allclose(ours[0], theirs[0], rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(ours[1, :7], theirs[1, :7], rtol=2e-5, atol=2e-5)


def _tokamax(query, key, value, *, bias=0.0, mask=True, cap=None):
    """Tokamax 0.0.12's meaning as its documentation has it, for one head and scale 1.

    Not the library itself: it brings a dozen packages for one function, which would all be locked.
    """
    s = np.einsum("bqhd,bkhd->bhqk", query, key) + bias
    if cap is not None:
        s = cap * np.tanh(s / cap)
    # Masked scores are the smallest number, so that a row of them alone has equal weights.
    s = np.where(mask, s, np.finfo(np.float32).min)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), value)


class TestTokamax:
    def test_soft_cap_comes_before_the_bias(self):
        """Tokamax caps the sum, and so the bias: ln 3 becomes 0.5 tanh(2 ln 3)."""
        arrays = _arrays(1, 2)
        bias = np.array([[0, np.log(3)]], np.float32)
        theirs = _tokamax(*arrays, bias=bias, cap=0.5).item()
        capped = np.exp(0.5 * np.tanh(2 * np.log(3)))
        assert theirs == pytest.approx(capped / (1 + capped))
        ours = _OURS(*arrays, bias=bias, logits_soft_cap=0.5, scale=1.0)
        assert ours.item() == pytest.approx(0.75)

    def test_rows_without_keys_of_tokamax(self):
        """By a mask or past the query length: the mean of all values there, 0 here."""
        arrays = _arrays(2, 4)
        mask = np.array([[True], [False]])
        np.testing.assert_allclose(means(_tokamax(*arrays, mask=mask)), [[1.5, 1.5]])
        for options in ({"mask": mask}, {"query_seq_lengths": jnp.array([1])}):
            np.testing.assert_allclose(means(_OURS(*arrays, **options)), [[1.5, 0]])

    def test_values_of_masked_keys_of_tokamax(self):
        query, key, value = _arrays(1, 4)
        value[0, 2:] = np.nan
        mask = np.arange(4) < 2
        assert np.isnan(_tokamax(query, key, value, mask=mask).item())
        assert _OURS(query, key, value, mask=mask).item() == 0.5

    def test_windows_of_unequal_lengths(self):
        """Tokamax makes a window's bounds for as many rows as there are keys."""
        out = _OURS(*_arrays(2, 5), local_window_size=(1, 1))
        np.testing.assert_allclose(means(out), [[0.5, 1]])

    def test_leading_axes(self):
        """Any number of batch axes there; here that is what vmap is for, and nothing is copied."""
        x = np.ones((2, 3, 4, 1, 8), np.float32)
        with pytest.raises(ValueError, match="query: got shape"):
            _OURS(x, x, x)
        assert jax.vmap(_OURS)(x, x, x).shape == x.shape

    def test_an_implementation_is_one_name(self):
        """A sequence there, of which the first that can run does; here 'auto' or one name."""
        with pytest.raises(ValueError, match="implementation: got"):
            _OURS(*_arrays(1, 2), implementation=("cuda", "xla"))


class TestFlashAttention:
    def test_causal_alignment(self):
        """flash-attention lines up the last query with the last key; here that is an option."""
        arrays = _arrays(2, 5)
        np.testing.assert_allclose(means(_OURS(*arrays, is_causal=True)), [[0, 0.5]])
        out = _OURS(*arrays, is_causal=True, alignment="bottom_right")
        np.testing.assert_allclose(means(out), [[1.5, 2]])

    def test_alibi_alignment(self):
        """The lse of row 0 of 2, 3 keys: its distances are 0, 1, 2, or 1, 0, 1 from below."""
        slopes, expected = (
            np.ones(1, np.float32),
            {"top_left": (0, 1, 2), "bottom_right": (1, 0, 1)},
        )
        for alignment, distances in expected.items():
            options = {"alibi_slopes": slopes, "alignment": alignment, "return_residual": True}
            _, lse = _OURS(*_arrays(2, 3), **options)
            exact = np.log(np.exp(-np.array(distances)).sum())
            np.testing.assert_allclose(lse[0, 0, 0], exact, rtol=1e-6)

    def test_window_without_bound(self):
        """Its -1 is None here, so that a miscalculated width is an error."""
        with pytest.raises(ValueError, match="local_window_size: got -1"):
            _OURS(*_arrays(2, 2), local_window_size=(-1, -1))
        out = _OURS(*_arrays(2, 2), local_window_size=(None, None))
        np.testing.assert_allclose(means(out), [[0.5, 0.5]])

    def test_lse_of_empty_rows(self):
        """Its lse is +inf there; ours is the logarithm of an empty sum, neutral for merging."""
        mask = np.zeros((1, 1, 1, 2), bool)
        _, lse = _OURS(*_arrays(1, 2), mask=mask, return_residual=True)
        assert lse.item() == -np.inf
