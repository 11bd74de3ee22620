# SPDX-License-Identifier: Apache-2.0
"""Tests run with the locked packages, and with nothing that the machine happens to have."""

import importlib.metadata
import os
import pathlib
import site
import sys

import jax
import jaxlib
import pytest


def test_jax_is_the_locked_one():
    runfiles = pathlib.Path(os.environ["TEST_SRCDIR"])
    for module in (jax, jaxlib, pytest):
        assert str(module.__file__).startswith(str(runfiles)), module.__file__


def test_installed_packages_of_the_machine_are_not_on_the_path():
    installed = {os.path.realpath(p) for p in site.getsitepackages()}
    assert not installed & {os.path.realpath(p) for p in sys.path}
    assert not site.ENABLE_USER_SITE


def test_plugins_can_be_found_by_their_metadata():
    assert importlib.metadata.version("jax") == jax.__version__
