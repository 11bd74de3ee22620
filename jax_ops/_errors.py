# SPDX-License-Identifier: Apache-2.0
"""Exceptions of this package. Every message names the argument, what it got and what is allowed."""

from __future__ import annotations

from typing import Any


class DtypeError(TypeError, ValueError):
    """An array has the wrong dtype. Both a TypeError and a ValueError: libraries disagree."""


class UnsupportedError(ValueError, NotImplementedError):
    """The implementation that was asked for cannot run this call; the message says why."""


def _message(name: str, got: Any, allowed: str) -> str:
    return f"{name}: got {got}; allowed: {allowed}"


def argument_error(name: str, got: Any, allowed: str) -> ValueError:
    """A ValueError for argument `name`."""
    return ValueError(_message(name, got, allowed))


def type_error(name: str, got: Any, allowed: str) -> TypeError:
    """A TypeError for argument `name`."""
    return TypeError(_message(name, got, allowed))


def dtype_error(name: str, got: Any, allowed: str) -> DtypeError:
    """An error for an array argument `name` of a dtype that is not allowed."""
    return DtypeError(_message(name, got, allowed))
