# SPDX-License-Identifier: Apache-2.0
"""What is known of compiled kernels without running them: registers, local memory, instructions."""

import collections
import json
import pathlib
import re
import struct
import subprocess
import tempfile

# The low 12 bits of a 128-bit SASS instruction are its operation (sm_80 to sm_90; checked against
# nvdisasm, which is not among the locked packages).
_OPERATIONS = {
    0x23C: "mma",  # HMMA, 16-bit operands and tf32 alike
    0x83B: "ldmatrix",  # LDSM
    0xFAE: "async_copies",  # LDGSTS
    0xB1D: "barriers",  # BAR
    0x983: "local_loads",  # LDL
    0x387: "local_stores",  # STL
}
_INSTRUCTION_BYTES = 16
_ATTRIBUTE_MAX_THREADS = 0x05
_FORMAT_WITH_DATA = 0x04


def kernels(library: pathlib.Path, cuobjdump: str) -> dict[str, dict[str, int]]:
    """Returns, for each kernel of a library with code for one architecture, its numbers.

    Args:
      library: a shared library or object file.
      cuobjdump: the program.

    Returns:
      By demangled name: registers, threads (largest block), stack (bytes of local memory a
      thread), instructions, and the count of each operation above.
    """
    usage = subprocess.run(
        [cuobjdump, "--dump-resource-usage", str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = {
        name: {"registers": int(registers), "stack": int(stack)}
        for name, registers, stack in re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", usage)
    }
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [cuobjdump, "--extract-elf", "all", str(library.resolve())],
            cwd=folder,
            capture_output=True,
            check=True,
        )
        for cubin in pathlib.Path(folder).iterdir():
            for section, data in _sections(cubin.read_bytes()):
                if section.startswith(".text."):
                    found[section.removeprefix(".text.")] |= _count(data)
                elif section.startswith(".nv.info."):
                    found[section.removeprefix(".nv.info.")]["threads"] = _max_threads(data)
    names = _demangled(list(found))
    return {name: dict(sorted(found[mangled].items())) for mangled, name in names.items()}


def to_text(table: dict[str, dict[str, int]]) -> str:
    """The table as JSON with one line a kernel, so that a change of one shows as one line."""
    lines = [f"  {json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _sections(elf: bytes):
    """Yields name and contents of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]
    names_start = headers[names_index][4]
    for header in headers:
        start = names_start + header[0]
        name = elf[start : elf.index(b"\0", start)].decode()
        yield name, elf[header[4] : header[4] + header[5]]


def _count(code: bytes) -> dict[str, int]:
    counts = collections.Counter(
        struct.unpack_from("<Q", code, i)[0] & 0xFFF
        for i in range(0, len(code), _INSTRUCTION_BYTES)
    )
    operations = {name: counts[code] for code, name in _OPERATIONS.items()}
    return {"instructions": counts.total()} | operations


def _max_threads(info: bytes) -> int:
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if form == _FORMAT_WITH_DATA:
            if attribute == _ATTRIBUTE_MAX_THREADS:
                return struct.unpack_from("<I", info, at + 4)[0]
            at += size
        at += 4
    return 0


def _demangled(names: list[str]) -> dict[str, str]:
    """Short names of kernels, as 'Forward<bf16, 128, 128, 64, false>', by mangled name."""
    output = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout
    result = {}
    for mangled, full in zip(names, output.splitlines(), strict=True):
        match = re.search(r"entry<attention::(\w+)<(.*)> ?>\(", full)
        if match is None:
            continue  # device_gpu.cu's empty probe, no kernel of the tile layer
        kind, arguments = match.groups()
        words = []
        for word in arguments.split(", "):
            word = word.split("::")[-1]
            if "F32Products" in arguments and re.fullmatch(r"\(?.*F32Products\)\d", word):
                word = "tf32x3" if word.endswith("1") else ""
            if "float" in arguments:
                word = word.replace("float", "f32")
            words.append(word)
        result[mangled] = f"{kind}<{', '.join(w for w in words if w)}>"
    return result
