# SPDX-License-Identifier: Apache-2.0
"""Help for `jax.export`: the custom calls of this package, declared stable."""

from __future__ import annotations

import jax.export

from jax_ops import _schema

_LIBRARIES = ("cpu", "cuda")


def disabled_export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The `disabled_checks` that `jax.export.export` needs for programs with attention in them.

    JAX refuses to export custom calls that it does not know to be stable. The targets' names here
    carry the number of their interface, and a library checks every call, so a program meets the
    library that it was made for or an error in words, never a misread operand. A process that runs
    an exported program must have imported `jax_ops`.

    Example:
      exported = jax.export.export(jax.jit(f), disabled_checks=disabled_export_checks())(*args)
    """
    return [
        jax.export.DisabledSafetyCheck.custom_call(_schema.target(operation, library))
        for operation in ("fwd", "bwd")
        for library in _LIBRARIES
    ]
