# SPDX-License-Identifier: Apache-2.0
"""What every primitive of the tile layer must give, computed with numpy.

Written from the formulas of the PTX ISA and independently of the C++ code, so that a fragment
layout which kernels and emulator both get wrong does not pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

Words = np.ndarray  # uint32 [blocks, words, threads]


@dataclasses.dataclass(frozen=True)
class Expected:
    """What must come out.

    bits: exact words, or None where `values` rules.
    values: float64, of words that are f32.
    tolerance: allowed |f32 - values|, of the shape of values.
    """

    bits: Words | None = None
    values: np.ndarray | None = None
    tolerance: np.ndarray | float = 0.0


# ---- number formats ----


def _f32(words: Words) -> np.ndarray:
    return np.ascontiguousarray(words, np.uint32).view(np.float32)


def _bits(x: np.ndarray) -> Words:
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def _from_bf16(h: np.ndarray) -> np.ndarray:
    return _f32(h.astype(np.uint32) << 16)


def _from_f16(h: np.ndarray) -> np.ndarray:
    return h.astype(np.uint16).view(np.float16).astype(np.float32)


def _to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even, in integers."""
    b = _bits(x).astype(np.uint64)
    rounded = ((b + 0x7FFF + ((b >> 16) & 1)) >> 16) & 0xFFFF
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint32)


def _to_f16(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        half = np.asarray(x, np.float32).astype(np.float16)
    return half.view(np.uint16).astype(np.uint32)


def _to_tf32(x: np.ndarray) -> np.ndarray:
    """Round to 10 mantissa bits, ties away from zero."""
    b = _bits(x)
    finite = (b & 0x7F800000) != 0x7F800000
    return _f32(np.where(finite, (b + np.uint32(0x1000)) & np.uint32(0xFFFFE000), b))


# ---- fragment layouts: PTX ISA, "Matrix Fragments for mma.m16n8k16 / mma.m16n8k8" ----


def _a_16(lane: int, i: int) -> tuple[int, int]:
    group, in_group = lane >> 2, lane % 4
    row = group if (0 <= i < 2 or 4 <= i < 6) else group + 8
    col = in_group * 2 + (i & 1) + (0 if i < 4 else 8)
    return row, col


def _b_16(lane: int, i: int) -> tuple[int, int]:
    group, in_group = lane >> 2, lane % 4
    return in_group * 2 + (i & 1) + (0 if i < 2 else 8), group


def _a_tf32(lane: int, i: int) -> tuple[int, int]:
    group, in_group = lane >> 2, lane % 4
    return (group if i in (0, 2) else group + 8), (in_group if i in (0, 1) else in_group + 4)


def _b_tf32(lane: int, i: int) -> tuple[int, int]:
    group, in_group = lane >> 2, lane % 4
    return (in_group if i == 0 else in_group + 4), group


def _c(lane: int, i: int) -> tuple[int, int]:
    group, in_group = lane >> 2, lane % 4
    return (group if i < 2 else group + 8), in_group * 2 + (i & 1)


def _unpack(words: Words, position: Callable, shape: tuple[int, int], wide: bool) -> np.ndarray:
    """Matrix of raw elements from registers [words, 32]."""
    matrix = np.zeros(shape, np.uint32)
    per = 1 if wide else 2
    for lane in range(32):
        for i in range(words.shape[0] * per):
            word = words[i // per, lane]
            matrix[position(lane, i)] = word if wide else (word >> (16 * (i % 2))) & 0xFFFF
    return matrix


def _pack(matrix: np.ndarray, position: Callable, registers: int, wide: bool) -> Words:
    """The reverse of _unpack."""
    words = np.zeros((registers, 32), np.uint32)
    per = 1 if wide else 2
    for lane in range(32):
        for i in range(registers * per):
            words[i // per, lane] |= np.uint32(matrix[position(lane, i)]) << np.uint32(
                0 if wide else 16 * (i % 2)
            )
    return words


# ---- the primitives ----


def _each_block(words: Words, f: Callable[[Words], Words]) -> Words:
    return np.stack([f(block) for block in words])


def _mma(kind: str) -> Callable[[Words], Expected]:
    wide = kind.startswith("tf32")
    decode = {
        "bf16": _from_bf16,
        "f16": _from_f16,
        "tf32": lambda x: _to_tf32(_f32(x)),
        "tf32x3": _f32,
    }[kind]
    depth = 8 if wide else 16

    def expected(words: Words) -> Expected:
        values, sizes = [], []
        for block in words:
            a = decode(_unpack(block[:4], _a_tf32 if wide else _a_16, (16, depth), wide))
            a = a.astype(np.float64)
            d, size = [], []
            for j in range(2):
                b = _unpack(
                    block[4 + 2 * j : 6 + 2 * j], _b_tf32 if wide else _b_16, (depth, 8), wide
                )
                b = decode(b).astype(np.float64)
                c = _f32(_unpack(block[8 + 4 * j : 12 + 4 * j], _c, (16, 8), True))
                result = a @ b + c
                magnitude = np.abs(a) @ np.abs(b) + np.abs(c)
                lanes = [[_c(lane, i) for lane in range(32)] for i in range(4)]
                d += [[result[p] for p in row] for row in lanes]
                size += [[magnitude[p] for p in row] for row in lanes]
            values.append(d)
            sizes.append(size)
        # A tensor core may align and cut its addends; a wrong layout is wrong by the size itself.
        tolerance = 2.0**-19 if kind == "tf32x3" else 2.0**-20
        return Expected(values=np.array(values), tolerance=np.array(sizes) * tolerance)

    return expected


def _mma_input(kind: str) -> Callable:
    def make(rng: np.random.Generator, shape: tuple[int, int, int]) -> Words:
        words = _bits(rng.standard_normal(shape).astype(np.float32))
        if kind in ("bf16", "f16"):
            encode = _to_bf16 if kind == "bf16" else _to_f16
            low = encode(rng.standard_normal(shape).astype(np.float32))
            high = encode(rng.standard_normal(shape).astype(np.float32))
            words[:, :8] = (low | (high << np.uint32(16)))[:, :8]
        return words

    return make


def _ldmatrix(transposed: bool) -> Callable[[Words], Expected]:
    def block(words: Words) -> Words:
        # 64 rows of 16 bytes = 8 elements of 16 bits.
        memory = words[:8].T.reshape(-1).view(np.uint16).reshape(64, 8).astype(np.uint32)
        rows = words[8]
        out = np.zeros((4, 32), np.uint32)
        for i in range(4):
            matrix = memory[rows[8 * i : 8 * i + 8]]
            if transposed:
                matrix = matrix.T
            for lane in range(32):
                row, col = lane // 4, 2 * (lane % 4)
                out[i, lane] = matrix[row, col] | (matrix[row, col + 1] << np.uint32(16))
        return out

    return lambda words: Expected(bits=_each_block(words, block))


def _ldmatrix_input(rng: np.random.Generator, shape: tuple[int, int, int]) -> Words:
    words = rng.integers(0, 2**32, shape, np.uint32)
    words[:, 8] = rng.integers(0, 64, (shape[0], shape[2]))
    return words


def _operand(which: str, wide: bool) -> Callable[[Words], Expected]:
    depth = 8 if wide else 16
    # Paired order: slot t of the reduction axis holds k = 2t, slot t + 4 holds k = 2t + 1.
    paired = [2 * k if k < 4 else 2 * (k - 4) + 1 for k in range(8)]
    order = paired if wide and which not in ("a", "b") else list(range(depth))
    position = {
        "a": _a_tf32 if wide else _a_16,
        "b": _b_tf32 if wide else _b_16,
    }[which[0]]

    def block(words: Words) -> Words:
        flat = words.reshape(-1)  # word i of thread t at 32 i + t
        tile = flat if wide else flat.view(np.uint16)
        tile = tile.reshape(32, -1).astype(np.uint32)
        at = tile[16:, 16:]
        if which in ("a", "a_packed"):
            return _pack(at[:16, order], position, 4, wide)
        if which == "a_transposed":
            return _pack(at[order, :16].T, position, 4, wide)
        k_by_n = at[order, :16] if which == "b_transposed" else at[:16, order].T
        return np.concatenate(
            [_pack(k_by_n[:, 8 * j : 8 * j + 8], position, 2, wide) for j in range(2)]
        )

    return lambda words: Expected(bits=_each_block(words, block))


def _pack_store(kind: str) -> Callable[[Words], Expected]:
    wide = kind == "f32"
    encode = {"bf16": _to_bf16, "f16": _to_f16, "f32": _bits}[kind]

    def block(words: Words) -> Words:
        acc = np.zeros((16, 16), np.float32)
        # Slot (r, c): row group + 8 r; column 2 (lane % 4) + c % 2 + 8 (c // 2).
        for lane in range(32):
            for i in range(8):
                r, c = i // 4, i % 4
                acc[lane // 4 + 8 * r, 2 * (lane % 4) + c % 2 + 8 * (c // 2)] = _f32(words[i])[lane]
        raw = encode(acc)
        if wide:
            paired = [2 * k if k < 4 else 2 * (k - 4) + 1 for k in range(8)]
            operand = _pack(raw[:, paired], _a_tf32, 4, True)
            tile = raw.reshape(-1)
        else:
            operand = _pack(raw, _a_16, 4, False)
            tile = raw.astype(np.uint16).reshape(-1).view(np.uint32)
        return np.concatenate([operand, tile.reshape(-1, 32)])

    return lambda words: Expected(bits=_each_block(words, block))


def _async_copy(size: int) -> Callable[[Words], Expected]:
    source = (
        (np.arange(1, 17, dtype=np.uint32) * np.uint32(0x01010101)).view(np.uint8).reshape(4, 16)
    )

    def block(words: Words) -> Words:
        threads = words.shape[1]
        memory = np.full((threads, 4), 7, np.uint32)
        for t in range(threads):
            valid = int(words[0, t])
            landed = source[t % 4].copy()
            landed[valid:] = 0
            memory[t, : size // 4] = landed.view(np.uint32)[: size // 4]
            if size < 16:
                memory[t, 3] = 0
        return memory[np.arange(threads) ^ 1].T

    return lambda words: Expected(bits=_each_block(words, block))


def _async_copy_input(size: int) -> Callable:
    def make(rng: np.random.Generator, shape: tuple[int, int, int]) -> Words:
        return rng.integers(0, size + 1, shape).astype(np.uint32)

    return make


def _vector_access(words: Words) -> Expected:
    return Expected(bits=words[:, :, np.arange(32) ^ 2])


def _warp_functions(words: Words) -> Expected:
    def warp(w: Words) -> Words:
        x, source = w
        lanes = np.arange(32)
        out = [x[lanes ^ (1 << i)] for i in range(5)] + [x[source]]
        ballot = sum(int(b) << i for i, b in enumerate(x & 1))
        out.append(np.full(32, ballot, np.uint32))
        out.append(np.full(32, np.any(x % 37 == 0)))
        out.append(np.full(32, np.all(x % 37 != 0)))
        f = (x % 2001).astype(np.float32) - 1000
        quads = f.reshape(8, 4)
        out.append(_bits(np.repeat(quads.sum(1), 4)))
        out.append(_bits(np.repeat(quads.max(1), 4)))
        out.append(_bits(np.full(32, f.sum())))
        out.append(_bits(np.full(32, f.max())))
        out.append(_bits(np.tile(quads.sum(0), 8)))
        return np.stack([np.asarray(o, np.uint32) for o in out])

    def block(w: Words) -> Words:
        return np.concatenate([warp(w[:, :32]), warp(w[:, 32:])], axis=1)

    return Expected(bits=_each_block(words, block))


def _warp_functions_input(rng: np.random.Generator, shape: tuple[int, int, int]) -> Words:
    words = rng.integers(0, 2**32, shape, np.uint32)
    words[:, 1] = rng.integers(0, 32, (shape[0], shape[2]))
    return words


def _barriers(words: Words) -> Expected:
    out = np.zeros((words.shape[0], 6, 64), np.uint32)
    threads = np.arange(64)
    for b, block in enumerate(words):
        w = block[0]
        seen = w.copy()
        for i in range(3):
            with np.errstate(over="ignore"):
                step = seen[32:] * np.uint32(3) + w[:32][np.arange(32) ^ 3] + np.uint32(i)
            seen[32:] = step
        out[b] = [
            np.full(64, np.any(w == 5)),
            threads,
            threads // 32,
            np.full(64, b),
            np.full(64, words.shape[0]),
            seen,
        ]
    return Expected(bits=out)


def _barriers_input(rng: np.random.Generator, shape: tuple[int, int, int]) -> Words:
    words = rng.integers(6, 2**32, shape, np.uint32)
    words[0, 0, 37] = 5
    words[3, 0, 2] = 5
    return words


def _between_blocks(words: Words) -> Expected:
    chain = 0
    for ticket in range(words.shape[0]):
        chain = (chain * 3 + ticket) % 2**32
    sums = words[:, 0].astype(np.uint64).sum(0) % 2**32
    last = np.zeros((3, 64), np.uint32)
    last[0] = 1
    last[1] = chain
    last[2, :8] = sums[:8]
    # Which block arrives last is the machine's choice: `check` sorts blocks by their first word.
    out = np.zeros((words.shape[0], 3, 64), np.uint32)
    out[-1] = last
    return Expected(bits=out)


def _conversions(words: Words) -> Expected:
    x, y = _f32(words[:, 0]), _f32(words[:, 1])
    raw = words[:, 0]
    shift = np.uint32(16)
    out = np.stack(
        [
            _to_bf16(x),
            _to_f16(x),
            _to_bf16(x) | (_to_bf16(y) << shift),
            _to_f16(x) | (_to_f16(y) << shift),
            _bits(_from_bf16(raw & 0xFFFF)),
            _bits(_from_f16(raw & 0xFFFF)),
            _bits(_from_f16(raw >> shift)),
            _bits(_to_tf32(x)),
        ],
        axis=1,
    )
    return Expected(bits=out)


def _conversions_input(rng: np.random.Generator, shape: tuple[int, int, int]) -> Words:
    """Any bits, with many ties and f16 subnormals; no NaN, whose payload nobody promises."""
    words = rng.integers(0, 2**32, shape, np.uint32)
    kind = rng.integers(0, 4, shape)
    near_one = (words & np.uint32(0x807FFFFF)) | (
        rng.integers(100, 145, shape).astype(np.uint32) << np.uint32(23)
    )
    words = np.where(kind >= 1, near_one, words)
    words = np.where(kind == 2, (words & np.uint32(0xFFFF0000)) | np.uint32(0x8000), words)
    words = np.where(kind == 3, (words & np.uint32(0xFFFFE000)) | np.uint32(0x1000), words)
    special = (words & np.uint32(0x7F800000)) == 0x7F800000
    subnormal = (words & np.uint32(0x7F800000)) == 0
    words = np.where(special | subnormal, np.uint32(0x3F800000), words)
    # The halves are read as f16 too.
    for half in (np.uint32(0x7C00), np.uint32(0x7C000000)):
        words = np.where(
            (words & half) == half, words & ~half | (half & (half >> np.uint32(1))), words
        )
    return words.astype(np.uint32)


def _functions(words: Words) -> Expected:
    x, y, z = (_f32(words[:, i]).astype(np.float64) for i in range(3))
    ax = np.abs(x)
    values = np.stack(
        [
            np.exp2(x),
            np.log2(ax),
            np.tanh(x),
            x * y + z,
            np.maximum(x, y),
            np.minimum(x, y),
            ax,
        ],
        axis=1,
    )
    relative = np.array([2.0**-21, 2.0**-21, 2.0**-19, 2.0**-23, 0, 0, 0])
    tolerance = np.abs(values) * relative[None, :, None]
    tolerance[:, 1] += 2.0**-21
    return Expected(values=values, tolerance=tolerance)


def _functions_input(rng: np.random.Generator, shape: tuple[int, int, int]) -> Words:
    size = np.exp2(rng.uniform(-12, 5, shape))
    return _bits((size * rng.choice([-1.0, 1.0], shape)).astype(np.float32))


def _any_bits(rng: np.random.Generator, shape: tuple[int, int, int]) -> Words:
    return rng.integers(0, 2**32, shape, np.uint32)


def _normals(rng: np.random.Generator, shape: tuple[int, int, int]) -> Words:
    return _bits(rng.standard_normal(shape).astype(np.float32))


# name: (input, expected)
PRIMITIVES: dict[str, tuple[Callable, Callable[[Words], Expected]]] = {
    **{f"mma_{k}": (_mma_input(k), _mma(k)) for k in ("bf16", "f16", "tf32", "tf32x3")},
    "ldmatrix": (_ldmatrix_input, _ldmatrix(False)),
    "ldmatrix_trans": (_ldmatrix_input, _ldmatrix(True)),
    **{
        f"load_{which}_{size}": (_any_bits, _operand(which, size == 32))
        for which in ("a", "b", "a_transposed", "b_transposed", "a_packed")
        for size in (16, 32)
    },
    **{f"pack_store_{k}": (_normals, _pack_store(k)) for k in ("bf16", "f16", "f32")},
    **{f"async_copy_{n}": (_async_copy_input(n), _async_copy(n)) for n in (16, 8, 4)},
    "vector_access": (_any_bits, _vector_access),
    "warp_functions": (_warp_functions_input, _warp_functions),
    "barriers": (_barriers_input, _barriers),
    "between_blocks": (_any_bits, _between_blocks),
    "conversions": (_conversions_input, _conversions),
    "functions": (_functions_input, _functions),
}
