# SPDX-License-Identifier: Apache-2.0
"""The report: complete, self-contained, honest about what it could not read."""

import json
import re
import time

import pytest

from benchmarks.analysis import reading
from benchmarks.page import payload, render
from tests.benchmarks.reading_test import DISPATCH, GQA_DECODE, result
from tests.benchmarks.support import run_binary
from tests.benchmarks.timing_test import row


def embedded(text):
    """The data inside a page."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(found)


@pytest.fixture(scope="module")
def page():
    files = [reading.read(DISPATCH), reading.read(GQA_DECODE)]
    return render.render(payload.build(files), "A <title> & more")


def test_reference_data_makes_a_page_within_ten_seconds(tmp_path):
    own = result(tmp_path, [row(), row(round_index=1)], "own.json")
    started = time.monotonic()
    done = run_binary(
        "report", str(DISPATCH), str(GQA_DECODE), own.name, "--output=r.html", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 10
    assert "2779 rows of 3 files" in done.stdout
    assert len(embedded((tmp_path / "r.html").read_text())["files"]) == 3


def test_page_needs_nothing_from_outside(page):
    addresses = set(re.findall(r"https?://[^\s'\"<)]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(script|img|link|iframe)[^>]*\s(src|href)=", page)
    assert "@import" not in page and "url(" not in page
    assert "A &lt;title&gt; &amp; more" in page
    assert not re.search(r"@[A-Z]+@", page)


def test_every_measurement_is_in_the_page(page):
    data = embedded(page)
    assert sum(file["rows"] for file in data["files"]) == 2777
    rows = data["rows"]
    assert [one["id"] for one in rows] == list(range(len(rows)))
    timed = {
        (one["impl"], one["dtype"], one["mode"], one["lq"], one["head_dim"], one["causal"],
         one["tag"]): one["median_ms"]
        for one in rows if one["suite"] == "dispatch"
    }  # fmt: skip
    for one in reading.read(DISPATCH).rows:
        key = tuple(one[n] for n in ("impl", "dtype", "mode", "lq", "head_dim", "causal", "tag"))
        assert timed[key] == one["median_ms"]
    assert sum("error" in one for one in rows) == 7
    kinds = {one["error_kind"] for one in rows if "error" in one}
    assert kinds == {"skipped", "out of memory"}


def test_rows_without_a_reference_tell_their_distance_from_the_baseline(page):
    rows = [one for one in embedded(page)["rows"] if one["suite"] == "decode" and "rel_vs" in one]
    assert {one["baseline"] for one in rows} == {"nosplit"}
    assert all(0 <= one["rel_vs"] < 0.02 for one in rows)
    assert not any("rel_vs" in one for one in embedded(page)["rows"] if one["impl"] == "nosplit")


def test_figures_of_merit(page):
    figures = {(f["suite"], f["label"]): f["value"] for f in embedded(page)["figures"]}
    assert figures["decode", "split-KV over one split"] == pytest.approx(0.340, abs=5e-4)
    assert figures["gqa", "native GQA over repeated K and V"] == pytest.approx(0.969, abs=5e-4)


def test_percentages_refer_to_the_ceilings_of_the_file(tmp_path):
    ceilings = {"method": "m", "gflops": {"float32": 10.0}, "read_gb_s": 5.0}
    path = result(tmp_path, [row()], config={"runs": {"r": {"ceilings": ceilings}}})
    (one,) = payload.build([reading.read(path)])["rows"]
    assert one["peak_percent"] == pytest.approx(100 * one["tflops"] * 1e3 / 10.0)
    assert one["read_percent"] == pytest.approx(100 * one["gb_s"] / 5.0)


def test_text_in_the_data_cannot_end_the_script(tmp_path):
    path = result(tmp_path, [row(note="</script><b>")])
    text = render.render(payload.build([reading.read(path)]), "t")
    assert embedded(text)["rows"][0]["note"] == "</script><b>"


def test_what_cannot_be_read_is_said_and_the_rest_is_shown(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    result(tmp_path, [row()], "good.json")
    done = run_binary("report", "bad.json", "good.json", "--output=r.html", cwd=tmp_path)
    assert done.returncode == 1
    assert "bad.json: truncated" in done.stderr
    data = embedded((tmp_path / "r.html").read_text())
    assert len(data["rows"]) == 1
    assert "bad.json" in data["files"][0]["problems"][0]


def test_nothing_to_show_is_an_error(tmp_path):
    result(tmp_path, [], "empty.json")
    done = run_binary("report", "empty.json", "--output=r.html", cwd=tmp_path)
    assert done.returncode == 1
    assert "no file holds a row" in done.stderr
    assert not (tmp_path / "r.html").exists()
    assert run_binary("report", cwd=tmp_path).returncode == 2
    done = run_binary("report", "empty.json", "--output=no/r.html", cwd=tmp_path)
    assert done.returncode == 2 and "--output" in done.stderr
