# SPDX-License-Identifier: Apache-2.0
"""Puts the payload, the style and the scripts into one HTML file that needs nothing else."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

_ASSETS = Path(__file__).absolute().parent / "assets"
# In this order: each script uses what the earlier ones define.
_SCRIPTS = ("format.js", "charts.js", "table.js", "views.js", "compare.js", "main.js")


def render(payload: dict[str, Any], title: str) -> str:
    """The page as text."""
    style = (_ASSETS / "page.css").read_text()
    scripts = "\n".join(f"<script>\n{(_ASSETS / name).read_text()}</script>" for name in _SCRIPTS)
    # "</" inside a string would end the script element; "<\/" is the same string to JSON.
    data = json.dumps(payload, separators=(",", ":")).replace("</", "<\\/")
    template = (_ASSETS / "page.html").read_text()
    return (
        template.replace("@TITLE@", html.escape(title))
        .replace("@STYLE@", style)
        .replace("@SCRIPTS@", scripts)
        .replace("@DATA@", data)
    )
