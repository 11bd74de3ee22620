# SPDX-License-Identifier: Apache-2.0
"""Makes docs/masks.md and its pictures: each mask as the grid of (query, key) pairs it allows."""

import dataclasses

import numpy as np

import jax_ops

_CELL = 10  # pixels of a position
_MARGIN = 22
_COLORS = {"allowed": "#2f6db3", "masked": "#eceff3", "full": "#1f4e85", "line": "#ffffff"}

_IDS = np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, -1, -1])
_HEAD = """# Masks, drawn

Rows are queries, columns are keys; a blue cell is a pair that takes part. Made by
`bazel run //docs:write` from the masks themselves; do not edit. All of them are for
`flex_attention`; see [api.md](api.md#masks).
"""


@dataclasses.dataclass(frozen=True)
class Picture:
    """One mask of the gallery.

    name: of the file. code: how the mask is written. mask: the mask. text: what it is for. lq, lkv:
    sizes. shift: the alignment i' - i. tiles: draw a block mask, one cell per 64 x 64 entries.
    """

    name: str
    code: str
    mask: object
    text: str
    lq: int = 16
    lkv: int = 16
    shift: int = 0
    tiles: bool = False


def _dilated(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & ((q_idx - kv_idx) % 3 == 0)


_CAUSAL = jax_ops.CausalMask()
_SEGMENTS = jax_ops.SegmentMask(_IDS)
_DENSE = np.random.default_rng(4).random((16, 16)) < 0.6

PICTURES = (
    Picture("causal", "CausalMask()", _CAUSAL, "A query sees itself and what came before."),
    Picture(
        "causal_top_left",
        "CausalMask()",
        _CAUSAL,
        "Fewer queries than keys with alignment='top_left', the default: the first query stands at "
        "the first position.",
        lq=6,
    ),
    Picture(
        "causal_bottom_right",
        "CausalMask()",
        _CAUSAL,
        "The same with alignment='bottom_right': the last query stands at the last position, as in "
        "decoding.",
        lq=6,
        shift=10,
    ),
    Picture(
        "window",
        "LocalWindowMask(3, 1)",
        jax_ops.LocalWindowMask(3, 1),
        "Three positions back and one ahead.",
    ),
    Picture(
        "causal_window",
        "CausalMask() & LocalWindowMask(4, None)",
        _CAUSAL & jax_ops.LocalWindowMask(4, None),
        "Sliding window attention: None is a side without bound.",
    ),
    Picture(
        "prefix_lm",
        "PrefixLMMask(5)",
        jax_ops.PrefixLMMask(5),
        "Everybody sees the prefix; behind it, attention is causal.",
    ),
    Picture(
        "segments",
        "SegmentMask(ids)",
        _SEGMENTS,
        "Three packed sequences. The last two positions are padding (-1) and see nothing.",
    ),
    Picture(
        "causal_segments",
        "CausalMask() & SegmentMask(ids)",
        _CAUSAL & _SEGMENTS,
        "Training on packed sequences.",
    ),
    Picture(
        "key_padding",
        "KeyPaddingMask(11)",
        jax_ops.KeyPaddingMask(11),
        "Keys from the length on are seen by nobody.",
    ),
    Picture("dense", "DenseMask(array)", jax_ops.DenseMask(_DENSE), "Any bool array."),
    Picture(
        "or",
        "CausalMask() | KeyPaddingMask(5)",
        _CAUSAL | jax_ops.KeyPaddingMask(5),
        "Either one allows: the prefix-LM mask, put together.",
    ),
    Picture(
        "xor",
        "CausalMask() ^ LocalWindowMask(3, 3)",
        _CAUSAL ^ jax_ops.LocalWindowMask(3, 3),
        "Exactly one allows.",
    ),
    Picture("not", "~CausalMask()", ~_CAUSAL, "The future only; the last row is an empty one."),
    Picture(
        "function",
        "mask_mod=lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((q_idx - kv_idx) % 3 == 0)",
        jax_ops.FunctionMask(_dilated),
        "Any function of the indices; here every third key of the past.",
    ),
    Picture(
        "block",
        "create_block_mask(CausalMask() & LocalWindowMask(200, None), None, None, 1024, 1024)",
        jax_ops.create_block_mask(
            _CAUSAL & jax_ops.LocalWindowMask(200, None), None, None, 1024, 1024
        ),
        "One cell per tile of 64 x 64 entries: empty ones are skipped, full ones (dark) take no "
        "mask work, the others hold bits.",
        tiles=True,
    ),
)


def page() -> str:
    """The text of docs/masks.md."""
    parts = [_HEAD]
    for picture in PICTURES:
        title = picture.name.replace("_", " ").capitalize()
        image = f"![{title}](masks/{picture.name}.svg)"
        parts.append(f"## {title}\n\n`{picture.code}`\n\n{picture.text}\n\n{image}\n")
    return "\n".join(parts)


def pictures() -> dict[str, str]:
    """File name -> SVG text."""
    return {f"{p.name}.svg": _draw(p) for p in PICTURES}


def _cells(picture: Picture) -> np.ndarray:
    """0 masked, 1 allowed, 2 full tile."""
    if picture.tiles:
        index = np.asarray(picture.mask.index)[0, 0]
        return np.where(index == -1, 0, np.where(index == -2, 2, 1))
    i, j = np.arange(picture.lq)[:, None], np.arange(picture.lkv)
    allowed = picture.mask.allows(0, 0, i, j, picture.shift)
    return np.broadcast_to(np.asarray(allowed), (picture.lq, picture.lkv)).astype(int)


def _draw(picture: Picture) -> str:
    cells = _cells(picture)
    rows, cols = cells.shape
    width, height = _MARGIN + cols * _CELL + 2, _MARGIN + rows * _CELL + 2
    fills = (_COLORS["masked"], _COLORS["allowed"], _COLORS["full"])
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * width}" height="{2 * height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{picture.name}">',
        f'<g font-family="sans-serif" font-size="9" fill="#57606a">'
        f'<text x="{_MARGIN}" y="14">keys</text>'
        f'<text x="0" y="0" transform="translate(14 {_MARGIN}) rotate(90)">queries</text></g>',
        f'<g stroke="{_COLORS["line"]}" stroke-width="1">',
    ]
    for r, row in enumerate(cells):
        for c, cell in enumerate(row):
            x, y = _MARGIN + c * _CELL, _MARGIN + r * _CELL
            lines.append(
                f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" fill="{fills[cell]}"/>'
            )
    return "\n".join([*lines, "</g>", "</svg>", ""])
