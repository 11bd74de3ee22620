# SPDX-License-Identifier: Apache-2.0
"""The report in a real browser: drawn without an error, readable wide, narrow and on paper.

Manual: needs Debian's chromium, which .ci/run installs. bazel test //tests/benchmarks:browser_test
"""

import html.parser
import os
import re
import shutil
import struct
import subprocess
import zlib

import pytest

from benchmarks.analysis import reading
from benchmarks.page import payload, render
from tests.benchmarks.reading_test import DISPATCH, GQA_DECODE, result
from tests.benchmarks.timing_test import row

# Presses every control once, waits for redraws, and leaves what it saw on the root element.
PROBE = """<script>
window.addEventListener('load', () => {
  const root = document.documentElement;
  const views = [...document.querySelectorAll('section')].map((s) => s.id);
  let presses = 0;
  for (const id of views) {
    const count = document.querySelectorAll(`#${id} .control button`).length;
    for (let i = 0; i < count; i++) {
      const button = document.querySelectorAll(`#${id} .control button`)[i];
      if (button) { button.click(); presses++; }
    }
  }
  document.querySelectorAll('th').forEach((head) => head.click());
  root.dataset.presses = presses;
  root.dataset.overflow = root.scrollWidth - window.innerWidth;
  const bad = [...document.querySelectorAll('svg *')].filter((node) =>
    [...node.attributes].some((a) => /NaN|undefined|Infinity/.test(a.value))
      || /NaN|undefined/.test(node.textContent));
  root.dataset.bad = bad.length;
});
</script></body>"""


class Page(html.parser.HTMLParser):
    """Marks, table rows and charts per section of a dumped page."""

    def __init__(self, text):
        super().__init__()
        self.root = {}
        self.sections = {}
        self._section = None
        self._row = None
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if tag == "html":
            self.root = attributes
        if tag == "section":
            self._section = {"charts": 0, "marks": [], "rows": {}}
            self.sections[attributes["id"]] = self._section
        if self._section is None:
            return
        classes = (attributes.get("class") or "").split()
        if tag == "svg" and "chart" in classes:
            self._section["charts"] += 1
        if "data-row" in attributes:
            self._section["marks"].append((attributes["data-row"], attributes["aria-label"]))
        if tag == "tr" and "data-id" in attributes:
            self._row = self._section["rows"].setdefault(attributes["data-id"], [])
        self._cell = tag == "td"

    def handle_data(self, data):
        if self._cell and self._row is not None:
            self._row.append(data)

    def handle_endtag(self, tag):
        if tag == "tr":
            self._row = None
        if tag == "td":
            self._cell = False


@pytest.fixture(scope="module")
def chromium():
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.fail("chromium is not installed: this test is manual; apt-get install chromium")
    return program


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The plain page and the same with the probe, over the reference data and every own suite."""
    folder = tmp_path_factory.mktemp("report")
    ceilings = {"method": "m", "gflops": {"float32": 90.0}, "read_gb_s": 15.0}
    own = [
        row("splitsweep", "splitkv", 1.1, num_splits="auto"),
        row("splitsweep", "splitkv", 1.0, num_splits=4),
        row("splitsweep", "splitkv", 3.0, num_splits=1),
        row("layer", "default", 2.0, model_dim=64),
        row("layer", "flax", 3.0, model_dim=64),
        row("gqa", "flex_native", 0.5),
        row("gqa", "jax_xla", error="unsupported: something"),
        {k: v for k, v in row("max_seq", "default").items() if k != "round"}
        | {"longest_seq": 4096, "limit": "memory"},
    ]
    path = result(folder, own, "own.json", config={"runs": {"r": {"ceilings": ceilings}}})
    files = [reading.read(path) for path in (DISPATCH, GQA_DECODE, path)]
    assert not any(file.problems for file in files)
    text = render.render(payload.build(files), "Report")
    (folder / "plain.html").write_text(text)
    (folder / "probe.html").write_text(text.replace("</body>", PROBE))
    return folder


def browse(chromium, page, *options, size="1280,1600"):
    """Runs headless; returns (stdout, console lines of the page)."""
    done = subprocess.run(
        [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            "--virtual-time-budget=8000", f"--window-size={size}", *options, f"file://{page}",
        ],
        capture_output=True, text=True, timeout=240, check=True,
        env=dict(os.environ, HOME=str(page.parent)),
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    # On a slow machine the browser's own pages complain there too.
    return done.stdout, [line for line in console if not re.search(r"source: chrome[\w-]*:", line)]


def test_a_broken_page_would_be_noticed(chromium, pages):
    """The control of the next test: an uncaught error in a page is a console line."""
    page = pages / "broken.html"
    page.write_text("<script>undefinedName.call()</script>")
    _, console = browse(chromium, page, "--dump-dom")
    assert len(console) == 1 and "undefinedName is not defined" in console[0]


@pytest.mark.parametrize("size", ["1280,1600", "500,900"])
def test_charts_are_drawn_without_an_error(chromium, pages, size):
    dom, console = browse(chromium, pages / "probe.html", "--dump-dom", size=size)
    assert console == []
    page = Page(dom)
    assert page.root["data-ready"] == "yes"
    assert page.root["data-bad"] == "0"
    assert int(page.root["data-presses"]) > 20
    assert int(page.root["data-overflow"]) <= 0, "the page is wider than the window"
    expected = {"gqa", "dispatch", "decode", "splitsweep", "blockk", "peak", "max_seq", "layer",
                "roofline", "before-after"}  # fmt: skip
    assert expected <= page.sections.keys()
    for name in expected:
        assert page.sections[name]["charts"] >= 1, name
        assert page.sections[name]["marks"], name
    assert len(page.sections["errors"]["rows"]) == 8


def test_every_number_in_a_chart_is_in_the_table_below(chromium, pages):
    dom, _ = browse(chromium, pages / "plain.html", "--dump-dom")
    checked = 0
    for name, section in Page(dom).sections.items():
        for identity, label in section["marks"]:
            assert identity in section["rows"], f"{name}: {label}"
            value = re.match(r"[^:]+: ([^ ,]+)", label).group(1)
            assert value in section["rows"][identity], f"{name}: {label}"
            checked += 1
    assert checked > 500


def pixels(path):
    """Size and the number of different bytes of a PNG: blank pages have next to none."""
    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    chunks, at = b"", 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            chunks += data[at + 8 : at + 8 + length]
        at += 12 + length
    return width, height, len(set(zlib.decompress(chunks)))


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("wide", "1280,1800", ()),
        ("narrow", "500,1800", ()),
        ("dark", "1280,1800", ("--blink-settings=preferredColorScheme=0",)),
    ],
)
def test_screenshots(chromium, pages, name, size, options):
    picture = pages / f"{name}.png"
    browse(chromium, pages / "plain.html", f"--screenshot={picture}", *options, size=size)
    width, height, colours = pixels(picture)
    assert f"{width},{height}" == size
    assert colours > 100
    kept = os.environ.get("TEST_UNDECLARED_OUTPUTS_DIR")
    if kept:
        shutil.copy(picture, kept)


def test_paper(chromium, pages):
    paper = pages / "report.pdf"
    browse(chromium, pages / "plain.html", f"--print-to-pdf={paper}")
    assert paper.read_bytes().startswith(b"%PDF")
    assert paper.stat().st_size > 100_000
