# SPDX-License-Identifier: Apache-2.0
"""The native libraries: finding, loading, checking, and registering their FFI targets.

Each is one shared object without Python in it. The CPU library is loaded at import, so that a
program exported elsewhere finds its targets; the CUDA one too, but only where JAX has a CUDA
plugin; the emulated one (the CUDA kernels on the host, for tests) only where somebody put it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import os
import pathlib

import jax

from jax_ops import _schema

# Environment variable that names another folder of libraries.
DIRECTORY_VARIABLE = "JAX_OPS_LIBRARY_DIR"

_PLATFORMS = {"cpu": "cpu", "cuda": "CUDA", "emulated": "cpu"}
_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin", "jaxlib.cuda._versions")


@dataclasses.dataclass(frozen=True)
class Library:
    """A loaded library, or the reason why there is none."""

    name: str
    handle: ctypes.CDLL | None
    reason: str = ""


def directory() -> pathlib.Path:
    """The folder that libraries are loaded from."""
    given = os.environ.get(DIRECTORY_VARIABLE)
    return pathlib.Path(given) if given else pathlib.Path(__file__).parent / "_lib"


def has_cuda_plugin() -> bool:
    """Whether JAX can have CUDA devices in this process; does not initialise any."""

    def found(module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            return False

    return any(found(module) for module in _CUDA_PLUGINS)


@functools.cache
def load(name: str) -> Library:
    """Loads library `name` ('cpu', 'cuda' or 'emulated') once and registers its targets.

    Raises:
      ImportError: the file is there but was built for another version of this package.
    """
    path = directory() / f"libattention_{name}.so"
    if not path.exists():
        return Library(name, None, f"{path.name} is not in {path.parent}")
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        return Library(name, None, f"{path.name} cannot be loaded: {error}")
    try:
        schema_function = handle.attention_schema
    except AttributeError:
        raise ImportError(f"{path} is not a library of jax_ops: no attention_schema") from None
    schema_function.restype = ctypes.c_char_p
    found = schema_function().decode()
    if found != _schema.description():
        raise ImportError(
            f"{path} does not fit this jax_ops. The library has:\n{found}\n"
            f"jax_ops has:\n{_schema.description()}"
        )
    for operation in ("fwd", "bwd"):
        target = _schema.target(operation, name)
        capsule = jax.ffi.pycapsule(getattr(handle, target))
        jax.ffi.register_ffi_target(target, capsule, platform=_PLATFORMS[name], api_version=1)
    return Library(name, handle)


def load_at_import() -> None:
    """Loads what exported programs may need: their targets must exist before they run."""
    load("cpu")
    if has_cuda_plugin():
        load("cuda")
    if (directory() / "libattention_emulated.so").exists():
        load("emulated")
