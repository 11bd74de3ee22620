# SPDX-License-Identifier: Apache-2.0
"""The lock files are complete and agree with each other and with their requirements."""

import itertools
import pathlib
import re

import pytest

from tools import lock

_ROOT = pathlib.Path(__file__).parents[2]
_LOCKS = _ROOT / "bazel/python/locks"
_EXTRA = ("test", "peers", "peers_torch_cuda", "cuda")
_ALL = ("runtime", "floor", "lint", *_EXTRA)


def _read(site: str, version: str) -> lock.Lock:
    path = _LOCKS / f"{site}-{version}.txt"
    assert path.exists(), f"{path.name} is missing; run `bazel run //tools:lock`"
    return lock.read_lock(path)


@pytest.mark.parametrize("site,version", itertools.product(_ALL, lock.PYTHON_VERSIONS))
def test_every_wheel_has_a_hash(site, version):
    pins = _read(site, version)
    assert pins
    for name, pin in pins.items():
        assert pin.hashes, name
        for value in pin.hashes:
            assert re.fullmatch(r"sha256:[0-9a-f]{64}", value), name


@pytest.mark.parametrize("site,version", itertools.product(_EXTRA, lock.PYTHON_VERSIONS))
def test_an_extra_site_repeats_nothing_of_the_base(site, version):
    assert not _read(site, version).keys() & _read("runtime", version).keys()


@pytest.mark.parametrize("version", lock.PYTHON_VERSIONS)
def test_sites_that_are_used_together_agree(version):
    seen: dict[str, str] = {}
    for site in ("runtime", "test", "peers"):
        for name, pin in _read(site, version).items():
            assert seen.setdefault(name, pin.version) == pin.version, name


@pytest.mark.parametrize("version", lock.PYTHON_VERSIONS)
@pytest.mark.parametrize("site", ["runtime", "floor", "test", "peers", "lint"])
def test_every_requirement_is_locked(site, version):
    pins = lock.pins(_read(site, version))
    if site == "peers":
        pins |= lock.pins(_read("peers_torch_cuda", version))
    for line in lock.read_requirements(_ROOT / f"bazel/python/requirements/{site}.in"):
        name, _, wanted = line.partition("==")
        assert lock.canonical(name) in pins
        assert wanted in ("", pins[lock.canonical(name)])


def test_torch_is_one_version_in_every_lock():
    versions = set()
    for path in _LOCKS.glob("peers_torch_*.txt"):
        versions.add(lock.pins(lock.read_lock(path))["torch"])
    assert len(versions) == 1


def test_one_cuda_lock_for_every_cuda_version():
    folder = _ROOT / "bazel/cuda"
    versions = {p.stem for p in (folder / "requirements").glob("*.in")}
    assert versions == {p.stem for p in (folder / "locks").glob("*.txt")}
    for version in versions:
        pins = lock.pins(lock.read_lock(folder / "locks" / f"{version}.txt"))
        for line in lock.read_requirements(folder / "requirements" / f"{version}.in"):
            name, _, wanted = line.partition("==")
            assert pins[name] == wanted


def test_a_lock_survives_writing_and_reading(tmp_path):
    pins = _read("peers", lock.PYTHON_VERSIONS[0])
    path = tmp_path / "lock.txt"
    path.write_text(lock.format_lock(pins, "source.in", "Python 3.11"))
    assert lock.read_lock(path) == pins


def test_a_local_build_keeps_only_its_public_version():
    pins = {"torch": lock.Pin("2.13.0+cpu", {"sha256:" + "0" * 64})}
    assert lock.pins(pins) == {"torch": "2.13.0"}
