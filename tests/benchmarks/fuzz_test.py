# SPDX-License-Identifier: Apache-2.0
"""Readers of result files get anything: rows come out, or a message with file, row and field.

Seeds are pinned; NIGHTLY=1 (--config=nightly) takes 20 times as many examples.
"""

import contextlib
import copy
import functools
import gzip
import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.analysis import comparing, reading
from benchmarks.harness import schema, store
from benchmarks.page import payload, render
from tests.benchmarks.reading_test import DISPATCH, GQA_DECODE
from tests.benchmarks.timing_test import row

_FACTOR = 20 if os.environ.get("NIGHTLY") == "1" else 1


def pinned(examples):
    return settings(max_examples=examples * _FACTOR, derandomize=True, deadline=None, database=None)


class Raw(str):
    """Text that goes into a file as it is: what no Python value spells."""


class Pairs(list):
    """An object as its (name, value) pairs: names may repeat."""


def dump(value):
    """JSON of values, Raw and Pairs."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ", ".join(f"{json.dumps(k)}: {dump(v)}" for k, v in value) + "}"
    if isinstance(value, dict):
        return dump(Pairs(value.items()))
    if isinstance(value, list):
        return "[" + ", ".join(map(dump, value)) + "]"
    return json.dumps(value)


RAW = st.sampled_from(
    [
        *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "-0", "-0.0", "1.0", "0"),
        *("9" * 16, "9" * 19, "9" * 30, "9" * 400, "9" * 5000, "-" + "9" * 5000, "1e308", "5e-324"),
        *("[" * 40 + "]" * 40, "[" * 100_000 + "]" * 100_000, "[" * 100_000),
        *('{"a":' * 5000 + "1" + "}" * 5000, '"\\ud800"', '"\\u0000"', '"</script>"', "nul", ""),
    ]
).map(Raw)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "every", "gqa", "dispatch", "float32", "fwd", "probjax_default"])
)
VALUES = (
    SCALARS
    | RAW
    | st.lists(SCALARS | RAW, max_size=3)
    | st.dictionaries(st.text(max_size=4), SCALARS, max_size=3)
)
NAMES = st.sampled_from(
    [*sorted(schema.FIELDS), "seq", "heads", "device_arg", "rel_vs_x", "rel_vs_", "", "\ud800"]
)


def good_rows():
    """A valid row of every kind of suite, of the current format and of the reference data's."""
    timed = [row(), row(round_index=1), row() | {"impl": "jax_xla"}]
    timed += [row() | {"suite": "layer", "model_dim": 64, "rel_err": 1e-6}]
    peak = {k: v for k, v in row().items() if not k.endswith("_ms")}
    peak |= {"suite": "peak", "peak_mb": 3.0, "inputs_mb": 1.0}
    search = peak | {"suite": "max_seq", "longest_seq": 128, "limit": "memory"}
    failed = {k: v for k, v in row().items() if not k.endswith("_ms")} | {"error": "skipped: x"}
    return [*timed, peak, search, failed]


@functools.cache
def old_rows():
    return [
        one
        for path in (DISPATCH, GQA_DECODE)
        for one in json.loads(gzip.decompress(path.read_bytes()))["results"][::150]
    ]


@st.composite
def documents(draw):
    """A good file in which a few things are wrong."""
    version = draw(st.sampled_from([0, 1, 1]))
    rows = [Pairs(one.items()) for one in (good_rows() if version else old_rows())]
    for _ in range(draw(st.integers(0, 4))):
        index = draw(st.integers(0, len(rows) - 1))
        if not isinstance(rows[index], Pairs) or draw(st.integers(0, 9)) == 0:
            rows[index] = draw(VALUES)
            continue
        change = draw(st.sampled_from(["set", "add", "drop", "twice"]))
        place = draw(st.integers(0, len(rows[index]) - 1)) if rows[index] else 0
        if change == "add" or not rows[index]:
            rows[index].append((draw(NAMES), draw(VALUES)))
        elif change == "set":
            rows[index][place] = (rows[index][place][0], draw(VALUES))
        elif change == "drop":
            del rows[index][place]
        else:
            rows[index].append((rows[index][place][0], draw(VALUES)))
    ceilings = {"method": "m", "gflops": {"float32": 3.0}, "read_gb_s": 2.0}
    runs = {"gqa_1": {"suite": "gqa", "ceilings": ceilings}}
    head = {"schema": 1} if version else {}
    head |= {"device": {"backend": "cpu"}, "config": {"runs": runs}, "results": rows}
    if draw(st.integers(0, 2)) == 0:
        value = draw(VALUES)
        where = draw(st.sampled_from(["schema", "device", "config", "results", "runs", "run"]))
        where = draw(st.sampled_from([where, "ceilings", "gflops", "float32", "read_gb_s"]))
        holder = {"runs": head["config"], "run": runs, "ceilings": runs["gqa_1"]}
        holder |= {"gflops": ceilings, "float32": ceilings["gflops"], "read_gb_s": ceilings}
        holder.get(where, head)["gqa_1" if where == "run" else where] = value
    pairs = Pairs(head.items())
    if draw(st.integers(0, 19)) == 0:
        pairs.append(draw(st.sampled_from(list(head.items()))))
    return dump(pairs).encode()


@st.composite
def contents(draw):
    """The bytes of a file: a document, packed or not, whole, cut or damaged; or something else."""
    kind = draw(st.sampled_from(["document"] * 6 + ["bytes", "value"]))
    if kind == "bytes":
        return draw(st.binary(max_size=64))
    data = draw(documents()) if kind == "document" else dump(draw(VALUES)).encode()
    if draw(st.integers(0, 3)) == 0:
        data = gzip.compress(data, mtime=0)
    damage = draw(st.sampled_from(["none"] * 5 + ["cut", "flip", "tail"]))
    place = draw(st.integers(0, len(data)))
    if damage == "cut":
        return data[:place]
    if damage == "flip" and place < len(data):
        return (
            data[:place] + bytes([data[place] ^ (1 << draw(st.integers(0, 7)))]) + data[place + 1 :]
        )
    return data + draw(st.binary(max_size=9)) if damage == "tail" else data


def bomb(levels):
    return gzip.compress(b"[" * levels + b"]" * levels, mtime=0)


@contextlib.contextmanager
def files(*contents):
    """Files with these contents, in a folder of their own."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"file{n}.json" for n in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
        yield paths


GOOD = dump({"schema": 1, "device": {}, "config": {}, "results": good_rows()}).encode()


@pinned(400)
@given(contents())
@example(b"")
@example(b"\x1f\x8b")
@example(bomb(10**6))
@example(GOOD)
def test_a_file_gives_rows_or_messages_and_other_files_are_still_read(content):
    with files(content, GOOD) as (path, good):
        read = [reading.read(path), reading.read(good)]
    assert not read[1].problems and len(read[1].rows) == len(good_rows())
    first = read[0]
    assert first.rows or first.problems
    for problem in first.problems:
        assert "file0.json: " in problem
        assert "\n" not in problem and len(problem) < 500
        problem.encode()
    for one in first.rows:
        assert schema.row_problem(one) is None
    # What was read can be shown and compared, and the page's data is JSON to every reader.
    built = json.loads(json.dumps(payload.build(read), allow_nan=False))
    assert built["files"][0]["rows"] == len(first.rows)
    render.render(built, "title").encode()
    outcome = comparing.compare(first.rows, read[1].rows)
    comparing.render(outcome).encode()


@pinned(400)
@given(contents())
@example(b"")
@example(b"[" * 10**6)
@example(dump({"schema": 1, "device": {"backend": "cpu"}}).encode())
@example(GOOD)
def test_a_store_extends_a_file_or_refuses_it_and_leaves_it_as_it_was(content):
    with files(content) as (path,):
        try:
            opened = store.Store(path, {"backend": "cpu"})
            opened.load()
            had = copy.deepcopy(opened.rows)
            opened.begin_run("gqa", {"suite": "gqa"}, resume=True)
        except store.StoreError as error:
            assert "\n" not in str(error) and str(path) in str(error)
            str(error).encode()
            assert path.read_bytes() == content
            return
        opened.add([row(run=opened.run)])
        read = reading.read(path)
        assert not read.problems
        assert read.rows == [*had, row(run=opened.run)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("median_ms", Raw("NaN")), "row 1: field 'median_ms': nan is no positive number"),
        (("median_ms", Raw("9" * 5000)), "row 1: field 'median_ms': inf is no positive number"),
        (("lq", Raw("9" * 30)), "row 1: field 'lq': 1e+30 is no positive integer"),
        (("dtype", []), "row 1: field 'dtype': [] is none of float32"),
        (("impl", {"a": 1}), "row 1: field 'impl': {'a': 1} is no name"),
        (("tag", Raw('"\\udc00"')), "row 1: field 'tag': '\\udc00' is no text"),
        (("\ud800", 1), "row 1: field '\\ud800': unknown field"),
        (("rel_err_parts", [Raw("NaN")]), "row 1: field 'rel_err_parts': [nan] is no list of"),
        (("suite", "gqa"), "row 1: field 'suite' is given twice"),
    ],
)
def test_the_message_names_file_row_and_field(change, words):
    twice = change[0] == "suite"
    broken = Pairs([*(p for p in row().items() if twice or p[0] != change[0]), change])
    text = dump({"schema": 1, "device": {}, "config": {}, "results": [row(), broken, row()]})
    with files(text.encode()) as (path,):
        read = reading.read(path)
    assert len(read.rows) == 2
    (problem,) = read.problems
    assert problem.startswith(f"{path}: {words}")


def test_a_packed_bomb_is_not_unpacked(monkeypatch):
    monkeypatch.setattr(reading, "LARGEST_BYTES", 2**20)
    with files(bomb(2**22), b" " * (2**20 + 1)) as paths:
        for path in paths:
            assert reading.read(path).problems == [f"{path}: holds more than 1 MiB"]


def test_nesting_is_bounded():
    deep = 40
    text = dump({"schema": 1, "results": [row()], "config": {"a": Raw("[" * deep + "]" * deep)}})
    with files(text.encode()) as (path,):
        assert reading.read(path).problems == [f"{path}: nested deeper than 32 levels"]


def test_the_fuzzer_would_notice(monkeypatch):
    """Without the check of a row, what follows raises: the property above can fail."""
    monkeypatch.setattr(schema, "row_problem", lambda row: None)
    broken = row() | {"median_ms": "fast"}
    text = dump({"schema": 1, "results": [broken]})
    with files(text.encode()) as (path,), pytest.raises(TypeError):
        payload.build([reading.read(path)])
