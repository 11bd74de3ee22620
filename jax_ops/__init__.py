# SPDX-License-Identifier: Apache-2.0
"""Fused attention for JAX on GPUs and CPUs."""

from jax_ops import _libraries
from jax_ops._errors import DtypeError, UnsupportedError
from jax_ops._primitive import CHECKPOINT_NAMES
from jax_ops.attention import dot_product_attention
from jax_ops.biases import (
    AlibiBias,
    Bias,
    ConstantBias,
    DenseBias,
    DistanceDecayBias,
    SoftCap,
)
from jax_ops.block_mask import create_block_mask
from jax_ops.decode import decode_attention
from jax_ops.dispatch import available_implementations
from jax_ops.explanation import Explanation, explain
from jax_ops.exporting import disabled_export_checks
from jax_ops.flax_adaptor import flax_attention_fn
from jax_ops.flex import flex_attention
from jax_ops.masks import (
    BlockMask,
    CausalMask,
    DenseMask,
    FunctionMask,
    KeyPaddingMask,
    LocalWindowMask,
    Mask,
    PrefixLMMask,
    SegmentMask,
)
from jax_ops.merge import merge_attention
from jax_ops.mha import mha
from jax_ops.version import __version__

__all__ = [
    "CHECKPOINT_NAMES",
    "AlibiBias",
    "Bias",
    "BlockMask",
    "CausalMask",
    "ConstantBias",
    "DenseBias",
    "DenseMask",
    "DistanceDecayBias",
    "DtypeError",
    "Explanation",
    "FunctionMask",
    "KeyPaddingMask",
    "LocalWindowMask",
    "Mask",
    "PrefixLMMask",
    "SegmentMask",
    "SoftCap",
    "UnsupportedError",
    "__version__",
    "available_implementations",
    "create_block_mask",
    "decode_attention",
    "disabled_export_checks",
    "dot_product_attention",
    "explain",
    "flax_attention_fn",
    "flex_attention",
    "merge_attention",
    "mha",
]

_libraries.load_at_import()
