# SPDX-License-Identifier: Apache-2.0
"""Reading result files: the reference data in full, and all that can be wrong with a file."""

import collections
import gzip
import json
from pathlib import Path

import pytest

from benchmarks.analysis import reading, selecting
from benchmarks.harness import schema
from tests.benchmarks.timing_test import row

REFERENCE = Path(__file__).absolute().parents[2] / "benchmarks" / "reference"
DISPATCH = REFERENCE / "rtx3090_dispatch.json.gz"
GQA_DECODE = REFERENCE / "rtx3090_gqa_decode.json.gz"


@pytest.fixture(scope="module")
def reference():
    return {path.name: reading.read(path) for path in (DISPATCH, GQA_DECODE)}


def test_every_reference_row_is_read(reference):
    files = list(reference.values())
    assert sum(len(file.rows) for file in files) == 2777
    assert [file.problems for file in files] == [[], []]
    assert {file.version for file in files} == {0}
    assert all(file.device["device_kind"] == "NVIDIA GeForce RTX 3090" for file in files)


def test_reference_rows_are_translated(reference):
    rows = [one for file in reference.values() for one in file.rows]
    suites = collections.Counter(one["suite"] for one in rows)
    assert suites == {
        "dispatch": 768, "gqa": 576, "decode": 705, "splitsweep": 612, "blockk": 96, "peak": 20,
    }  # fmt: skip
    assert not any("probjax" in str(value) for one in rows for value in [*one, one["impl"]])
    assert {one["impl"] for one in rows if one["suite"] == "splitsweep"} == {"splitkv"}
    assert {one["impl"] for one in rows if one["suite"] == "blockk"} == {"mha"}
    counts = {one["num_splits"] for one in rows if one["suite"] == "splitsweep"}
    assert counts == {1, 2, 4, 8, 16, 32, 64}
    assert sum(one.get("tag") == "after" for one in rows) == 240
    assert sum("error" in one for one in rows) == 15
    assert any("rel_vs_nosplit" in one for one in rows)


def test_precision_of_reference_float32_rows_is_inferred(reference):
    rows = [one for file in reference.values() for one in file.rows if one["dtype"] == "float32"]
    by_impl = collections.defaultdict(set)
    for one in rows:
        by_impl[one["impl"]].add(one["precision"])
    assert by_impl["torch_sdpa"] == {"float32"}
    assert by_impl["flex_native"] == {"tf32"}
    for one in rows:
        if "rel_err" in one:
            assert (one["rel_err"] > 1e-5) == (one["precision"] == "tf32")


def test_values_survive_translation(reference):
    raw = json.loads(gzip.decompress(DISPATCH.read_bytes()))["results"]
    for old, new in zip(raw, reference[DISPATCH.name].rows, strict=True):
        assert (new["lq"], new["lkv"], new["hq"]) == (old["seq"], old["seq"], old["heads"])
        for name in ("median_ms", "q1_ms", "q3_ms", "rel_err", "inner", "tag", "xla_temp_mb"):
            assert new[name] == old[name]


def result(tmp_path, rows, name="r.json", **head):
    path = tmp_path / name
    path.write_text(json.dumps({"schema": 1, "device": {}, "config": {}, "results": rows} | head))
    return path


def test_a_bad_row_is_named_and_the_rest_is_read(tmp_path):
    broken = row() | {"median_ms": -1.0}
    file = reading.read(result(tmp_path, [row(), broken, "text", row(round_index=1)]))
    assert [one["round"] for one in file.rows] == [0, 1]
    assert len(file.problems) == 2
    assert "r.json: row 1: field 'median_ms'" in file.problems[0]
    assert "r.json: row 2: expected an object" in file.problems[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"schema": 1, "results": [{"suite": "gqa", ', "truncated"),
        (b"hello", "no JSON"),
        (b"[1, 2]", "no result file"),
        (b'{"results": 7}', "no result file"),
        (b'{"schema": 2, "results": []}', "schema 2 is unknown"),
        (b'{"schema": 1, "results": []}', "holds no rows"),
        (b"\xff\xfe\x00", "no UTF-8"),
        (gzip.compress(b'{"schema": 1}' * 100)[:30], "gzip"),
        (b'{"schema": 1, "device": 3, "results": []}', "field 'device'"),
    ],
)
def test_a_bad_file_is_named(tmp_path, content, message):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    file = reading.read(path)
    assert not file.rows
    assert any(message in problem and "bad.json" in problem for problem in file.problems)


def test_a_missing_file_is_named(tmp_path):
    (problem,) = reading.read(tmp_path / "none.json").problems
    assert "none.json: cannot be read: No such file" in problem


def test_hand_edited_reference_rows_are_checked_too(tmp_path):
    raw = json.loads(gzip.decompress(DISPATCH.read_bytes()))
    raw["results"] = raw["results"][:3]
    raw["results"][1]["median_ms"] = None
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(raw))
    file = reading.read(path)
    assert len(file.rows) == 2
    assert "row 1: field 'median_ms'" in file.problems[0]


def test_selectors(reference):
    rows = reference[DISPATCH.name].rows

    def count(text):
        return sum(map(selecting.parse(f"x.json:{text}").keeps, rows))

    assert count("tag=after") == 240
    assert count("tag=none") == 528
    assert count("tag=after,dtype=bfloat16") == 144
    assert count("impl=probjax_default") == count("impl=default") == 192
    assert count("causal=true") == count("causal=1") == 384
    rows = reference[GQA_DECODE.name].rows
    assert count("num_splits=0") == count("num_splits=1") == 108
    assert selecting.parse("a:b/c.json").wanted == ()


@pytest.mark.parametrize("text", ["x.json:colour=red", "x.json:tag=a,lq", ":tag=after"])
def test_a_bad_selector_is_refused(text):
    with pytest.raises(selecting.SelectorError):
        selecting.parse(text)


def test_case_fields_are_row_fields():
    assert all(schema.is_field(name) for name in schema.CASE_FIELDS)
