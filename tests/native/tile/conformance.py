# SPDX-License-Identifier: Apache-2.0
"""Checks the tile layer's primitives against conformance_reference.py, emulated and on the GPU.

The two libraries (conformance_abi.h) hold the same small kernels. Inputs are random words.

    python -m tests.native.tile.conformance [--emulated LIBRARY] [--gpu LIBRARY] [--json FILE]

needs numpy and, for --gpu, a GPU; exit code 1 when a primitive differs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys

import numpy as np

from tests.native.tile.conformance_reference import PRIMITIVES, Words


class Library:
    """A conformance library, loaded."""

    def __init__(self, path: str) -> None:
        self._lib = ctypes.CDLL(path)
        self._lib.attention_conformance_name.restype = ctypes.c_char_p
        self.names = [
            self._lib.attention_conformance_name(i).decode()
            for i in range(self._lib.attention_conformance_count())
        ]

    def shape(self, name: str) -> tuple[int, int, int, int]:
        """Threads of a block, blocks, words in and words out of a thread."""
        shape = (ctypes.c_int * 4)()
        self._lib.attention_conformance_shape(self.names.index(name), shape)
        return tuple(shape)

    def run(self, name: str, words: Words) -> Words:
        """Runs a primitive; raises RuntimeError with the report when the run fails."""
        threads, blocks, _, out_words = self.shape(name)
        words = np.ascontiguousarray(words, np.uint32)
        out = np.zeros((blocks, out_words, threads), np.uint32)
        message = ctypes.create_string_buffer(4096)
        pointer = ctypes.POINTER(ctypes.c_uint)
        failed = self._lib.attention_conformance_run(
            self.names.index(name),
            words.ctypes.data_as(pointer),
            out.ctypes.data_as(pointer),
            message,
            len(message),
        )
        if failed:
            raise RuntimeError(f"{name}: {message.value.decode()}")
        return out


def differences(name: str, words: Words, got: Words) -> str:
    """Empty when `got` is what the primitive must give for `words`, else what is wrong first."""
    expected = PRIMITIVES[name][1](words)
    if name == "between_blocks":
        got = got[np.argsort(got[:, 0, 0], kind="stable")]
    if expected.bits is not None:
        wrong = got != expected.bits
        want: np.ndarray = expected.bits
        have: np.ndarray = got
    else:
        have, want = np.ascontiguousarray(got).view(np.float32).astype(np.float64), expected.values
        wrong = ~(np.abs(have - want) <= expected.tolerance)
    if not wrong.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    form = (lambda v: hex(int(v))) if expected.bits is not None else repr
    return (
        f"{name}: {int(wrong.sum())} of {wrong.size} words differ; first block {at[0]}, "
        f"word {at[1]}, thread {at[2]}: got {form(have[at])}, must be {form(want[at])}"
    )


def check(library: Library, name: str, seed: int = 0) -> str:
    """Runs a primitive on random words; empty when all is well, else what is wrong."""
    if name not in PRIMITIVES:
        return f"{name}: conformance.py has no reference for it"
    threads, blocks, in_words, _ = library.shape(name)
    words = PRIMITIVES[name][0](np.random.default_rng(seed), (blocks, in_words, threads))
    try:
        got = library.run(name, words)
    except RuntimeError as error:
        return str(error)
    return differences(name, words, got)


def main() -> int:
    """Command line; see the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--emulated", help="the library for the emulator")
    parser.add_argument("--gpu", help="the library for the GPU")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", help="where to write the results")
    args = parser.parse_args()
    if not (args.emulated or args.gpu):
        parser.error("nothing to do: give --emulated, --gpu or both")
    results = {}
    for device in ("emulated", "gpu"):
        path = getattr(args, device)
        if not path:
            continue
        library = Library(path)
        missing = sorted(set(PRIMITIVES) - set(library.names))
        for name in library.names + missing:
            if name in missing:
                wrong = f"{name}: the library lacks it"
            else:
                wrong = next(filter(None, (check(library, name, s) for s in range(args.seeds))), "")
            results[f"{device}/{name}"] = wrong or "ok"
            print(f"{device:9} {name:24} {wrong or 'ok'}", flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump(results, f, indent=1)
    return int(any(r != "ok" for r in results.values()))


if __name__ == "__main__":
    sys.exit(main())
