# SPDX-License-Identifier: Apache-2.0
"""Makes docs/api.md: every public name of jax_ops with its signature and docstring."""

import inspect
import re

import jax_ops

_HEAD = """# API of jax_ops

Made from the docstrings by `bazel run //docs:write`; do not edit. Shapes: B batch, L length,
H heads, D head dim; Hq query heads share Hkv key/value heads.
"""

# Public names in the order in which a reader needs them; `page` refuses to leave one out.
_CHAPTERS = {
    "Attention": (
        "dot_product_attention",
        "flex_attention",
        "decode_attention",
        "merge_attention",
        "mha",
        "flax_attention_fn",
    ),
    "Masks": (
        "Mask",
        "CausalMask",
        "LocalWindowMask",
        "PrefixLMMask",
        "SegmentMask",
        "KeyPaddingMask",
        "DenseMask",
        "FunctionMask",
        "BlockMask",
        "create_block_mask",
    ),
    "Biases": ("Bias", "AlibiBias", "DistanceDecayBias", "ConstantBias", "DenseBias", "SoftCap"),
}
_LAST_CHAPTER = "Choice of an implementation, errors, export"

_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):$")
_ITEM = re.compile(r"^  (\S[^:]*): (.*)$")


def page() -> str:
    """The text of docs/api.md."""
    listed = [name for names in _CHAPTERS.values() for name in names]
    rest = tuple(n for n in jax_ops.__all__ if n not in listed and n != "__version__")
    parts = [_HEAD]
    for chapter, names in (_CHAPTERS | {_LAST_CHAPTER: rest}).items():
        parts.append(f"## {chapter}\n")
        parts.extend(_entry(name, getattr(jax_ops, name)) for name in names)
    return "\n".join(parts)


def _entry(name: str, item: object) -> str:
    if not (inspect.isclass(item) or callable(item)):
        return f"### {name}\n\n`{item!r}`\n"
    parts = [f"### {name}\n"]
    if (
        not (inspect.isclass(item) and issubclass(item, Exception))
        and item.__init__ is not object.__init__
    ):
        parts.append(f"```python\n{_signature(name, item)}\n```\n")
    parts.append(_markdown(inspect.getdoc(item) or ""))
    methods = [
        (member, value)
        for member, value in vars(item).items()
        if inspect.isclass(item) and not member.startswith("_") and inspect.isfunction(value)
    ]
    for member, value in methods:
        text = inspect.getdoc(value) or ""
        # Overridden methods point to the one that describes them.
        if not text.startswith("See `"):
            parts.append(f"`{_signature(member, value)}`: {_markdown(text)}")
    return "\n".join(parts)


def _signature(name: str, item: object) -> str:
    """name(arguments) without annotations, which stand in the text with more detail."""
    parameters = [
        p.replace(annotation=inspect.Parameter.empty)
        for p in inspect.signature(item).parameters.values()
        if p.name != "self"
    ]
    signature = inspect.Signature(parameters)
    line = f"{name}{signature}"
    if len(line) <= 88:
        return line
    pieces, is_keyword_only = [], False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not is_keyword_only:
            pieces.append("*")
            is_keyword_only = True
        pieces.append(str(p))
    return f"{name}(\n" + "".join(f"    {piece},\n" for piece in pieces) + ")"


def _markdown(doc: str) -> str:
    """A Google style docstring as Markdown: sections become lists."""
    lines, section = [], None
    for line in doc.splitlines():
        if match := _SECTION.match(line):
            section = match[1]
            lines.append(f"**{section}**\n")
        elif section and (match := _ITEM.match(line)) and section != "Returns":
            lines.append(f"- `{match[1]}`: {match[2]}")
        elif section and line.startswith("  "):
            lines.append(line[2:])
        else:
            if line:
                section = None
            lines.append(line)
    return "\n".join(lines) + "\n"
