# SPDX-License-Identifier: Apache-2.0
"""A real Bazel stops early on a bad setting or a wrong hash, and says what is allowed.

A manual, local test: it runs Bazel in a copy of the workspace. settings_test.py checks the same
rules without.
"""

import re

import pytest

from tests.build import nested


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    made = nested.Checkout(tmp_path_factory.mktemp("refusals"), "checkout", jobs=1)
    made.poison()
    yield made
    made.close()


def _refusal(checkout, *arguments: str, **variables: str) -> str:
    process = checkout.bazel("build", "--nobuild", *arguments, **variables)
    assert process.returncode != 0
    return process.stderr


@pytest.mark.parametrize(
    "variable,value,words",
    [
        ("HERMETIC_PYTHON_VERSION", "3.9", "versions with a lock file: 3.11, 3.12, 3.13"),
        ("HERMETIC_CUDA_VERSION", "13.0", "it must be written x.y.z, one of: 13.0.2"),
        ("HERMETIC_CUDA_VERSION", "11.8.0", "versions with a lock file: 13.0.2"),
        ("HERMETIC_CUDA_COMPUTE_CAPABILITIES", "sm_81", "this nvcc allows: sm_75, sm_80"),
        ("PYTHON_BIN_PATH", "/nowhere/python", "does not run as CPython"),
        ("HERMETIC_WHEELHOUSE", "/nowhere/wheels", "is no folder"),
    ],
)
def test_a_bad_variable(checkout, variable, value, words):
    flag = f"--repo_env={variable}={value}"
    message = _refusal(checkout, "//tests/build:libfixture.so", flag)
    assert f"{variable} is '{value}'" in message or f"{variable} has '{value}'" in message
    assert words in message


def test_a_bad_architecture_flag(checkout):
    message = _refusal(
        checkout, "//tests/build:libfixture.so", "--//bazel/cuda:architectures=sm_999"
    )
    assert "--//bazel/cuda:architectures has 'sm_999'" in message


def test_a_bad_choice(checkout):
    message = _refusal(checkout, "//tests/build:site_test", "--//bazel/python:jax=oldest")
    assert "'oldest'; allowed: cpu, cuda, floor" in message


@pytest.mark.parametrize(
    "option", ["-arch=sm_90", "-gencode=arch=compute_90,code=sm_90", "-rdc=true"]
)
def test_an_option_that_a_target_must_not_set(checkout, option):
    build = checkout.folder / "tests/build/BUILD.bazel"
    before = build.read_text()
    build.write_text(
        before.replace('name = "saxpy",', f'name = "saxpy",\n    copts = ["{option}"],')
    )
    try:
        message = _refusal(checkout, "//tests/build:saxpy")
    finally:
        build.write_text(before)
    assert f"copts: got '{option}'; not allowed" in message


@pytest.mark.parametrize("lock", ["bazel/python/locks/test-*.txt", "bazel/cuda/locks/13.0.2.txt"])
def test_a_wrong_hash(checkout, lock):
    before = {path: path.read_text() for path in checkout.folder.glob(lock)}
    for path, text in before.items():
        path.write_text(re.sub(r"sha256:[0-9a-f]{8}", "sha256:00000000", text, count=1))
    try:
        message = _refusal(checkout, "//tests/build:site_test", "//tests/build:saxpy")
    finally:
        for path, text in before.items():
            path.write_text(text)
    assert "DO NOT MATCH THE HASHES" in message
    assert "sha256:00000000" in message.replace("sha256 00000000", "sha256:00000000")


def test_a_build_does_not_look_at_the_cuda_of_the_machine(checkout):
    """The checkout is offered a broken one; see `Checkout.poison`."""
    built = checkout.build("//tests/build:libfixture.so") / "tests/build/libfixture.so"
    assert b"fixture_" in built.read_bytes()
    actions = checkout.bazel("aquery", "//tests/build:saxpy").stdout
    assert "CudaCompile" in actions
    for word in ("poison", "/usr/local/cuda", "CUDA_HOME", "CUDA_PATH", "NVCC_"):
        assert word not in actions
