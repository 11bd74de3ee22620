# SPDX-License-Identifier: Apache-2.0
"""The progress line: what is measured now and how long the rest will take."""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO


class Progress:
    """On a terminal one line that is redrawn; elsewhere one line per group."""

    def __init__(self, groups: int, stream: TextIO | None = None):
        self._stream = sys.stderr if stream is None else stream
        self._groups = groups
        self._done = 0
        self._started = time.monotonic()
        self._live = self._stream.isatty()
        self._label = ""

    def start_group(self, label: str) -> None:
        self._label = label
        self._show("preparing", new_group=True)

    def step(self, what: str) -> None:
        """Something inside the group changed: the implementation or the round."""
        self._show(what, new_group=False)

    def finish_group(self) -> None:
        self._done += 1

    def note(self, text: str) -> None:
        """A line that stays, for failures and other events."""
        self._clear()
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        self._clear()

    def _left(self) -> str:
        if not self._done:
            return "time left not known yet"
        seconds = (time.monotonic() - self._started) / self._done * (self._groups - self._done)
        minutes, seconds = divmod(int(seconds + 0.5), 60)
        return f"about {minutes}m{seconds:02d}s left"

    def _show(self, what: str, new_group: bool) -> None:
        text = f"[{self._done + 1}/{self._groups}] {self._left()}: {self._label}"
        if self._live:
            # What does not fit is cut: a line that wraps could not be redrawn.
            self._stream.write("\r\x1b[K" + f"{text}: {what}"[: self._columns() - 1])
            self._stream.flush()
        elif new_group:
            print(text, file=self._stream, flush=True)

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except OSError:
            return 80

    def _clear(self) -> None:
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
