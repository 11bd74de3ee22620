# SPDX-License-Identifier: Apache-2.0
"""The wheel builder: equal bytes, a truthful tag, full metadata, and pip installs the result."""

import base64
import hashlib
import pathlib
import subprocess
import sys
import zipfile

import pytest

from bazel.python.private import wheel_builder

_ROOT = pathlib.Path(__file__).parents[2]
_LIBRARY = pathlib.Path(__file__).parent / "libfixture.so"


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Packs a package of two files, and returns the wheel's path."""

    def build_wheel(name: str, version: str = "1.2.3", library: pathlib.Path = _LIBRARY):
        source = tmp_path / "source"
        source.mkdir(exist_ok=True)
        (source / "version.py").write_text(f'"""Version."""\n\n__version__ = "{version}"\n')
        (source / "README.md").write_text("# Title\n\nText.\n")
        output = tmp_path / name
        arguments = [
            f"--output={output}",
            f"--version_file={source / 'version.py'}",
            f"--floor={_ROOT / 'bazel/python/requirements/floor.in'}",
            f"--readme={source / 'README.md'}",
            f"--license={_ROOT / 'LICENSE'}",
            f"--file=fixture_package/_lib/libfixture.so={library}",
            f"--file=fixture_package/__init__.py={source / 'version.py'}",
        ]
        monkeypatch.setattr(sys, "argv", ["wheel_builder", *arguments])
        wheel_builder.main()
        (wheel,) = output.iterdir()
        return wheel

    return build_wheel


def test_equal_inputs_give_equal_bytes(build):
    first, second = build("first"), build("second")
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()


def test_name_and_metadata_agree(build):
    wheel = build("out", version="4.5.6")
    name, version, python, abi, platform = wheel.stem.split("-")
    assert (name, version, python, abi) == ("jax_ops_attention", "4.5.6", "py3", "none")
    with zipfile.ZipFile(wheel) as archive:
        info = f"{name}-{version}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        tags = archive.read(f"{info}/WHEEL").decode()
    assert "\nName: jax-ops-attention\nVersion: 4.5.6\n" in metadata
    assert "\nRequires-Dist: jaxlib>=0.10.0\n" in metadata
    assert "\nRequires-Python: >=3.11\n" in metadata
    assert metadata.endswith("\n\n# Title\n\nText.\n")
    assert f"\nTag: py3-none-{platform}\n" in tags


def test_the_tag_names_the_glibc_that_the_library_needs(build):
    platform = build("out").stem.split("-")[-1]
    symbols = subprocess.run(
        ["objdump", "-T", str(_LIBRARY)], capture_output=True, text=True, check=True
    ).stdout
    versions = {
        tuple(map(int, word.strip("()").split("_")[1].split(".")[:2]))
        for word in symbols.split()
        if word.strip("()").startswith("GLIBC_2")
    }
    major, minor = max(versions)
    assert platform == f"manylinux_{major}_{minor}_x86_64"


def test_record_lists_every_file_with_its_hash(build):
    with zipfile.ZipFile(build("out")) as archive:
        names = archive.namelist()
        assert names[-1].endswith(".dist-info/RECORD")
        assert names[:-1] == sorted(names[:-1])
        lines = archive.read(names[-1]).decode().splitlines()
        assert [line.split(",")[0] for line in lines] == names
        for line in lines[:-1]:
            name, digest, size = line.split(",")
            data = archive.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
            assert (digest, size) == (f"sha256={expected.decode()}", str(len(data)))


def test_pip_installs_it(build, tmp_path):
    target = tmp_path / "installed"
    command = [sys.executable, "-I", "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*command, f"--target={target}", str(build("out"))], check=True)
    assert (target / "fixture_package/_lib/libfixture.so").read_bytes() == _LIBRARY.read_bytes()
    assert (target / "jax_ops_attention-1.2.3.dist-info/RECORD").exists()


def test_a_library_for_something_else_is_refused(build, tmp_path):
    other = tmp_path / "other.so"
    other.write_bytes(b"\x7fELF\x01\x01" + bytes(100))
    with pytest.raises(ValueError, match="Linux x86-64"):
        build("out", library=other)


def test_a_wheel_without_library_is_refused():
    with pytest.raises(ValueError, match="would be a guess"):
        wheel_builder.platform_tag({})


@pytest.mark.parametrize("text", ["", "version = '1.0'", "__version__ = read()"])
def test_a_version_file_without_version_is_refused(text):
    with pytest.raises(ValueError, match="__version__"):
        wheel_builder.read_version(text)
