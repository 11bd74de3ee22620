# SPDX-License-Identifier: Apache-2.0
"""Packs a wheel with equal bytes for equal inputs: fixed times and modes, sorted entries.

The platform tag is read from the libraries themselves: the newest glibc symbol version that any of
them asks for. So the wheel never promises a system that its own libraries refuse.
"""

import argparse
import base64
import hashlib
import pathlib
import re
import struct
import sys
import zipfile

DISTRIBUTION = "jax-ops-attention"
SUMMARY = "Fused attention for JAX, on CPUs and NVIDIA GPUs"
_EPOCH = (1980, 1, 1, 0, 0, 0)

METADATA = """\
Metadata-Version: 2.4
Name: {distribution}
Version: {version}
Summary: {summary}
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.11
Requires-Dist: jax>={jax}
Requires-Dist: jaxlib>={jaxlib}
Requires-Dist: numpy
Provides-Extra: cuda13
Requires-Dist: jax[cuda13]>={jax}; extra == "cuda13"
Provides-Extra: export
Requires-Dist: flatbuffers; extra == "export"
Description-Content-Type: text/markdown
"""

WHEEL = """\
Wheel-Version: 1.0
Generator: bazel
Root-Is-Purelib: false
Tag: {tag}
"""


def needed_glibc(data: bytes, name: str) -> tuple[int, int]:
    """Returns the newest glibc version that a 64-bit little-endian ELF file asks for.

    Raises:
      ValueError: it is another kind of file, or for another machine than x86-64.
    """
    if data[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", data, 18)[0] != 62:
        raise ValueError(
            f"{name}: got no ELF file for x86-64; allowed: shared libraries for Linux x86-64"
        )
    section_table = struct.unpack_from("<Q", data, 40)[0]
    entry_size, count = struct.unpack_from("<HH", data, 58)
    sections = []
    for i in range(count):
        _, kind, _, _, offset, size, link, _, _, _ = struct.unpack_from(
            "<IIQQQQIIQQ", data, section_table + i * entry_size
        )
        sections.append((kind, offset, size, link))
    newest = (2, 5)
    for kind, offset, _, link in sections:
        if kind != 0x6FFFFFFE:  # SHT_GNU_verneed
            continue
        strings = sections[link][1]
        need = offset
        while True:
            _, aux_count, _, aux, next_need = struct.unpack_from("<HHIII", data, need)
            entry = need + aux
            for _ in range(aux_count):
                _, _, _, string, next_aux = struct.unpack_from("<IHHII", data, entry)
                end = data.index(b"\0", strings + string)
                match = re.fullmatch(rb"GLIBC_(\d+)\.(\d+)(\.\d+)?", data[strings + string : end])
                if match:
                    newest = max(newest, (int(match[1]), int(match[2])))
                entry += next_aux
            if next_need == 0:
                break
            need += next_need
    return newest


def platform_tag(libraries: dict[str, bytes]) -> str:
    """Returns the manylinux tag that fits every library."""
    if not libraries:
        raise ValueError("the wheel holds no library; its platform tag would be a guess")
    major, minor = max(needed_glibc(data, name) for name, data in libraries.items())
    return f"manylinux_{major}_{minor}_x86_64"


def read_version(text: str) -> str:
    """Reads `__version__` from the text of a Python module."""
    match = re.search(r'^__version__(?:\s*:\s*str)?\s*=\s*"([^"]+)"', text, re.MULTILINE)
    if match is None:
        raise ValueError('the version file has no line `__version__ = "X.Y.Z"`')
    return match[1]


def read_floor(text: str, package: str) -> str:
    """Reads the oldest supported version of a package from the requirements of the `floor` lock."""
    match = re.search(rf"^{package}==(\S+)$", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"the floor requirements do not pin {package}")
    return match[1]


def record_line(name: str, data: bytes) -> str:
    """Returns one line of RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def main() -> None:
    """Entry point: the arguments are written by wheel.bzl."""
    parser = argparse.ArgumentParser(fromfile_prefix_chars="@")
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--version_file", type=pathlib.Path, required=True)
    parser.add_argument("--floor", type=pathlib.Path, required=True)
    parser.add_argument("--readme", type=pathlib.Path, required=True)
    parser.add_argument("--license", type=pathlib.Path, required=True)
    parser.add_argument("--file", action="append", default=[], help="NAME_IN_WHEEL=PATH")
    args = parser.parse_args()

    entries = {}
    for item in args.file:
        name, _, path = item.partition("=")
        entries[name] = pathlib.Path(path).read_bytes()
    libraries = {name: data for name, data in entries.items() if name.endswith(".so")}
    tag = f"py3-none-{platform_tag(libraries)}"
    version = read_version(args.version_file.read_text())
    floor = args.floor.read_text()

    stem = f"{DISTRIBUTION.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = METADATA.format(
        distribution=DISTRIBUTION,
        version=version,
        summary=SUMMARY,
        jax=read_floor(floor, "jax"),
        jaxlib=read_floor(floor, "jaxlib"),
    )
    entries[f"{info}/METADATA"] = (metadata + "\n" + args.readme.read_text()).encode()
    entries[f"{info}/WHEEL"] = WHEEL.format(tag=tag).encode()
    entries[f"{info}/licenses/LICENSE"] = args.license.read_bytes()
    record = "".join(record_line(name, data) for name, data in sorted(entries.items()))
    record += f"{info}/RECORD,,\n"

    args.output.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(args.output / f"{stem}-{tag}.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        # RECORD comes last, as installers that stream expect.
        for name, data in [*sorted(entries.items()), (f"{info}/RECORD", record.encode())]:
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            wheel.writestr(entry, data)


if __name__ == "__main__":
    sys.exit(main())
