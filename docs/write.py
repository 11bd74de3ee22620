# SPDX-License-Identifier: Apache-2.0
"""Writes the generated pages: docs/api.md, docs/masks.md and docs/masks/*.svg.

`bazel run //docs:write` writes them into the source tree; with a folder as its argument, into that.
"""

import os
import sys
from pathlib import Path

from docs import api_page, mask_gallery


def files() -> dict[str, str]:
    """Path below docs/ -> text."""
    pictures = {f"masks/{name}": text for name, text in mask_gallery.pictures().items()}
    return {"api.md": api_page.page(), "masks.md": mask_gallery.page(), **pictures}


def main() -> None:
    """Writes every file."""
    if len(sys.argv) > 1:
        target = Path(sys.argv[1])
    else:
        target = Path(os.environ["BUILD_WORKSPACE_DIRECTORY"]) / "docs"
    for name, text in files().items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
