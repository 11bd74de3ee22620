# SPDX-License-Identifier: Apache-2.0
"""One mistake in each kernel is noticed; and the mutants are what they claim to be.

The full mutation test is //tests/native/mutation:mutate.
"""

import pytest

from tests.native.mutation import mutants, mutate

# One plausible slip for each kernel: (file, text that occurs in it, what it becomes).
_SAMPLE = {
    "forward": (
        "kernels/cuda/forward.h",
        "return q_rows.row(i, ctx.head(row));",
        "return q_rows.row(i > 0 ? i - 1 : i, ctx.head(row));",
    ),
    "backward": (
        "kernels/cuda/backward_kv.h",
        "score_gradient(s.at(r, c + 1), dp.at(r, c + 1), terms[3])",
        "score_gradient(s.at(r, c + 1), dp.at(r, c + 1), terms[1])",
    ),
    "one kernel": (
        "kernels/cuda/backward_dq.h",
        "const i32 turn = key_tile - visible.begin / kKeys;",
        "const i32 turn = key_tile;",
    ),
    "combine": (
        "kernels/cuda/combine.h",
        "(s * params.rows + row) * params.dv",
        "(s * params.rows) * params.dv",
    ),
    "pipeline": (
        "kernels/cuda/stream.h",
        "tile::async_wait<0>();\n      }",
        "tile::async_wait<1>();\n      }",
    ),
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> mutate.Oracle:
    return mutate.Oracle(tmp_path_factory.mktemp("oracle"))


def test_unchanged_kernels_pass(oracle):
    verdict = oracle.judge({})
    assert verdict.outcome == "survived", verdict.detail


@pytest.mark.parametrize("name", sorted(_SAMPLE))
def test_a_mistake_is_noticed(oracle, name):
    file, before, after = _SAMPLE[name]
    source = mutate.load_sources()[file]
    assert source.count(before) == 1, f"{file} has changed: choose another line for this mutant"
    verdict = oracle.judge({file: source.replace(before, after)})
    assert verdict.outcome == "killed", verdict


def test_equal_object_code_is_equivalent_and_no_survivor(oracle):
    file = "kernels/cuda/combine.h"
    source = mutate.load_sources()[file]
    verdict = oracle.judge({file: source.replace("#pragma once", "#pragma once  // changed")})
    assert verdict.outcome == "equivalent", verdict


def test_only_the_sources_that_read_a_file_are_compiled_anew(oracle):
    assert oracle.sources_of(["kernels/cuda/forward.h"]) == ["forward.cc"]
    assert oracle.sources_of(["kernels/cuda/backward_dq.h"]) == ["backward.cc"]
    assert oracle.sources_of(["kernels/cuda/score.h"]) == ["forward.cc", "backward.cc"]
    assert "dispatch.cc" in oracle.sources_of(["kernels/common/planner.h"])
    assert all(oracle.sources_of([file]) for file in mutate.FILES)


def test_a_file_that_no_source_reads_is_refused(oracle):
    with pytest.raises(ValueError, match=r"no source of the oracle reads kernels/cuda/none\.h"):
        oracle.judge({"kernels/cuda/none.h": ""})


_CODE = """\
// a < b && c in a comment
template <typename T>
static constexpr int kSize = 4;
  if (a < b && c) x = y + 1;
  tile::sync_block();
  tile::async_wait<1>();
  const f32* p = from - 2;
"""


def _changes() -> set[tuple[str, str]]:
    return {(m.rule, m.after.strip()) for m in mutants.all_mutants("f.h", _CODE)}


def test_rules():
    changes = _changes()
    assert ("relation", "if (a <= b && c) x = y + 1;") in changes
    assert ("logic", "if (a < b || c) x = y + 1;") in changes
    assert ("negation", "if (!a < b && c) x = y + 1;") in changes
    assert ("arithmetic", "if (a < b && c) x = y - 1;") in changes
    assert ("constant", "if (a < b && c) x = y + 2;") in changes
    assert ("omission", "") in changes
    assert ("wait", "tile::async_wait<1 + 1>();") in changes
    assert all("template" not in m.before for m in mutants.all_mutants("f.h", _CODE))


def test_comments_and_declarations_are_left_alone():
    assert {m.line for m in mutants.all_mutants("f.h", _CODE)} == {4, 5, 6, 7}


def test_every_mutant_changes_its_line_only():
    lines = _CODE.split("\n")
    for m in mutants.all_mutants("f.h", _CODE):
        changed = m.apply(_CODE).split("\n")
        assert [i for i in range(len(lines)) if lines[i] != changed[i]] == [m.line - 1]


def test_samples_depend_on_the_seed_alone_and_reach_every_file():
    sources = mutate.load_sources()
    first = mutants.sample(sources, 60, 1)
    assert first == mutants.sample(sources, 60, 1)
    assert first != mutants.sample(sources, 60, 2)
    assert len(first) == 60
    assert {m.file for m in first} == set(sources)
    assert len({(m.file, m.line) for m in first}) == 60


def test_names_survive_moves():
    moved = mutants.all_mutants("f.h", "\n\n" + _CODE)
    assert [m.name for m in moved] == [m.name for m in mutants.all_mutants("f.h", _CODE)]


def test_survivors_have_reasons():
    for name, reason in mutate.explained().items():
        assert len(reason) > 20, name
