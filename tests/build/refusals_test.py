# SPDX-License-Identifier: Apache-2.0
"""A real Bazel stops early on a bad setting or a wrong hash, and says what is allowed.

A manual, local test: it runs Bazel in a copy of the workspace. settings_test.py checks the same
rules without.
"""

import contextlib
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


@contextlib.contextmanager
def _changed(checkout, pattern: str, old: str, new: str):
    """Replaces the first match of a regular expression in each of the files, for a while."""
    before = {path: path.read_text() for path in checkout.folder.glob(pattern)}
    assert before
    for path, text in before.items():
        assert re.search(old, text), path
        path.write_text(re.sub(old, new, text, count=1))
    try:
        yield
    finally:
        for path, text in before.items():
            path.write_text(text)


_SITES = ["runtime", "floor", "test", "peers", "cuda", "lint"]
_FIRST_HASH = r"sha256:[0-9a-f]{8}"
_WRONG = "sha256:00000000"


def _says_that_a_hash_is_wrong(message: str, what: str) -> None:
    assert f"pip could not fetch {what}" in message
    assert "DO NOT MATCH THE HASHES" in message
    assert re.search("sha256[: ]00000000", message)


@pytest.mark.parametrize("site", _SITES)
def test_a_wrong_hash_of_a_python_package(checkout, site):
    with _changed(checkout, f"bazel/python/locks/{site}-*.txt", _FIRST_HASH, _WRONG):
        message = _refusal(checkout, f"@pip_{site}//:files")
    _says_that_a_hash_is_wrong(message, f"the Python packages of {site}-")


def test_every_site_is_tried(checkout):
    locks = checkout.folder.glob("bazel/python/locks/*.txt")
    assert {path.stem.split("-")[0] for path in locks} == {
        *_SITES,
        "peers_torch_cpu",
        "peers_torch_cuda",
    }


def test_a_wrong_hash_of_the_cuda_compiler(checkout):
    with _changed(checkout, "bazel/cuda/locks/13.0.2.txt", _FIRST_HASH, _WRONG):
        message = _refusal(checkout, "//tests/build:saxpy")
    _says_that_a_hash_is_wrong(message, "the CUDA 13.0.2 compiler")


def test_a_wrong_hash_of_the_wheel_whose_headers_the_kernels_use(checkout):
    old = r"(jaxlib==[^\n]*\n *--hash=)sha256:[0-9a-f]{8}"
    with _changed(checkout, "bazel/python/locks/floor-*.txt", old, r"\1sha256:00000000"):
        message = _refusal(checkout, "@xla_ffi//:headers")
    _says_that_a_hash_is_wrong(message, "the XLA FFI headers in jaxlib")


def test_a_wrong_hash_of_the_cuda_build_of_torch(checkout):
    lock = "bazel/python/locks/peers_torch_cuda-*.txt"
    with _changed(checkout, lock, _FIRST_HASH, _WRONG):
        message = _refusal(checkout, "@pip_peers//:files", "--repo_env=HERMETIC_TORCH_BUILD=cuda")
    _says_that_a_hash_is_wrong(message, "the CUDA build of torch in peers_torch_cuda-")


def test_another_cpu_build_of_torch_than_the_locked_one(checkout, tmp_path):
    """A wheel of that name is refused, and the CUDA build is not taken instead."""
    (lock,) = checkout.folder.glob("bazel/python/locks/peers_torch_cpu-*.txt")
    minor = lock.stem.rpartition("-")[2]
    version = re.search(r"torch==(\S+)", lock.read_text())[1]
    python = f"cp{minor.replace('.', '')}"
    (tmp_path / f"torch-{version}-{python}-{python}-linux_x86_64.whl").write_bytes(b"no torch")
    message = _refusal(
        checkout,
        "@pip_peers//:files",
        f"--repo_env=HERMETIC_PYTHON_VERSION={minor}",
        PIP_FIND_LINKS=str(tmp_path),
    )
    assert "pip could not fetch the CPU build of torch in peers_torch_cpu-" in message
    assert "DO NOT MATCH THE HASHES" in message and "CUDA build" not in message


def test_another_buildifier_than_the_locked_one(checkout):
    rule = "bazel/lint/repositories.bzl"
    with _changed(checkout, rule, r'_INTEGRITY = "sha512-.{8}', '_INTEGRITY = "sha512-AAAAAAAA'):
        message = _refusal(checkout, "@buildifier//:buildifier")
    assert re.search(r"bazel-buildifier.*Checksum was \w+ but wanted 0{12}", message)


def test_a_build_does_not_look_at_the_cuda_of_the_machine(checkout):
    """The checkout is offered a broken one; see `Checkout.poison`."""
    built = checkout.build("//tests/build:libfixture.so") / "tests/build/libfixture.so"
    assert b"fixture_" in built.read_bytes()
    actions = checkout.bazel("aquery", "//tests/build:saxpy").stdout
    assert "CudaCompile" in actions
    for word in ("poison", "/usr/local/cuda", "CUDA_HOME", "CUDA_PATH", "NVCC_"):
        assert word not in actions
