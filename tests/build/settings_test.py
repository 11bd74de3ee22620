# SPDX-License-Identifier: Apache-2.0
"""Bad values of the HERMETIC_* variables are refused with the list of what is allowed.

The functions that decide are Starlark; the part of the language that they use is Python too, so
they run here as they are, without a Bazel inside Bazel.
"""

import pathlib
import types

import pytest

_BAZEL = pathlib.Path(__file__).parents[2] / "bazel"
_KNOWN = ["80", "86", "89", "90", "90a", "100"]


def _load(path: str) -> dict:
    """Runs a .bzl file that loads no other one."""
    names: dict = {"struct": types.SimpleNamespace}
    exec(compile((_BAZEL / path).read_text(), path, "exec"), names)
    return names


@pytest.fixture(scope="module")
def architectures() -> types.SimpleNamespace:
    return types.SimpleNamespace(**_load("cuda/private/architectures.bzl"))


def _parse(architectures, text):
    return architectures.parse_architectures(text, _KNOWN, "HERMETIC_CUDA_COMPUTE_CAPABILITIES")


def test_default_architectures_give_machine_code_and_one_ptx(architectures):
    parsed = _parse(architectures, architectures.DEFAULT_ARCHITECTURES)
    assert architectures.gencode_options(parsed) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=[compute_90,sm_90]",
    ]


def test_order_spaces_and_repeats_do_not_matter(architectures):
    first = _parse(architectures, "sm_90, compute_90,sm_80,sm_80")
    second = _parse(architectures, "sm_80,compute_90")
    assert architectures.gencode_options(first) == architectures.gencode_options(second)


def test_feature_specific_architecture(architectures):
    parsed = _parse(architectures, "sm_90a")
    assert architectures.gencode_options(parsed) == ["-gencode=arch=compute_90a,code=sm_90a"]


@pytest.mark.parametrize("text", ["sm_81", "80", "compute_", "sm80", "native", "sm_80;sm_90"])
def test_unknown_architecture_is_refused_with_the_list(architectures, text):
    problem = _parse(architectures, text)
    assert isinstance(problem, str)
    assert "HERMETIC_CUDA_COMPUTE_CAPABILITIES" in problem
    assert f"'{text}'" in problem
    assert "sm_80, sm_86, sm_89, sm_90, sm_90a, sm_100, compute_80" in problem


def test_empty_list_of_architectures_is_refused(architectures):
    assert "is empty" in _parse(architectures, " , ")


@pytest.mark.parametrize("version", ["13", "13.0", "13.0.2.1", "latest", "13.x.2", ""])
def test_cuda_version_must_be_three_numbers(version):
    problem = _load("cuda/private/versions.bzl")["cuda_version_problem"](version)
    assert problem == (
        f"HERMETIC_CUDA_VERSION is '{version}'; it must be written x.y.z, one of: 13.0.2"
    )


def test_cuda_version_without_lock_is_refused_with_the_list():
    problem = _load("cuda/private/versions.bzl")["cuda_version_problem"]("12.4.1")
    assert problem == "HERMETIC_CUDA_VERSION is '12.4.1'; versions with a lock file: 13.0.2"


def test_every_allowed_cuda_version_passes():
    names = _load("cuda/private/versions.bzl")
    assert names["DEFAULT_CUDA_VERSION"] in names["CUDA_VERSIONS"]
    for version in names["CUDA_VERSIONS"]:
        assert names["cuda_version_problem"](version) is None


@pytest.mark.parametrize("version", ["3.10", "3", "3.11.7", "python3.11"])
def test_python_without_lock_is_refused_with_the_list(version):
    problem = _load("python/private/versions.bzl")["python_version_problem"](version)
    assert problem == (
        f"HERMETIC_PYTHON_VERSION is '{version}'; versions with a lock file: 3.11, 3.12, 3.13"
    )


@pytest.mark.parametrize("version", ["", "3.11", "3.12", "3.13"])
def test_allowed_python_versions_pass(version):
    assert _load("python/private/versions.bzl")["python_version_problem"](version) is None
