# SPDX-License-Identifier: Apache-2.0
"""Blockwise attention in jax.numpy: the portable path and the readable specification.

`blockwise` holds the public functions; `tile` says what one (query block, key block) tile sees and
scores; `dropout` is the counter generator that all backends share.
"""
