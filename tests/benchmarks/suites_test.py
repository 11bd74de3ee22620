# SPDX-License-Identifier: Apache-2.0
"""What the suites measure: grids, and the preset `reference` against the reference data itself."""

import dataclasses
import json

import pytest

from benchmarks.analysis import reading
from benchmarks.harness import presets, rows, schema, suites
from benchmarks.harness.implementations import IMPLEMENTATIONS
from benchmarks.harness.settings import Settings
from tests.benchmarks.reading_test import DISPATCH, GQA_DECODE

# What identifies a measurement in the reference data; tags and rounds aside.
FIELDS = (
    "suite", "impl", "dtype", "mode", "batch", "lq", "lkv", "hq", "hkv", "head_dim", "causal",
    "num_splits", "block_k",
)  # fmt: skip


def identities(found):
    return {tuple(one.get(name) for name in FIELDS) for one in found}


def preset_rows(preset, suite, backend="gpu"):
    """Bare rows of everything that a preset would measure."""
    return [
        contender.case.row_fields() | {"impl": contender.impl}
        for run in presets.runs_of(preset, suite, backend)
        for group in suites.groups_of(run)
        for contender in group.contenders
    ]


@pytest.fixture(scope="module")
def reference():
    return reading.read(DISPATCH).rows + reading.read(GQA_DECODE).rows


@pytest.mark.parametrize("suite", ["dispatch", "gqa", "decode", "splitsweep", "blockk", "peak"])
def test_reference_preset_measures_every_configuration_of_the_data(suite, reference):
    measured = [one for one in reference if one["suite"] == suite and one["impl"] != "every"]
    ours = identities(preset_rows("reference", suite))
    theirs = identities(measured)
    assert not theirs - ours
    # Beyond the data there is only what that library could not do (cuDNN in float32), the
    # automatic split count, and cases it skipped for their size.
    extra = {
        one
        for one in ours - theirs
        if one[1] != "jax_cudnn" and one[11] != "auto" and not (one[4] == 8 and one[6] == 65536)
    }
    assert not extra, sorted(extra, key=str)[:3]


@pytest.mark.parametrize(
    ("suite", "rounds"), [("gqa", 3), ("decode", 3), ("splitsweep", 2), ("blockk", 3)]
)
def test_reference_preset_has_the_rounds_of_the_data(suite, rounds, reference):
    assert {one["round"] for one in reference if one["suite"] == suite and "round" in one} == set(
        range(rounds)
    )
    assert {run.repeats for run in presets.runs_of("reference", suite, "gpu")} == {rounds}


@pytest.mark.parametrize("preset", presets.PRESETS)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_every_suite_has_cases_in_every_preset(preset, platform):
    runs = presets.runs_of(preset, "all", platform)
    assert {run.suite for run in runs} == set(schema.SUITES)
    for run in runs:
        groups = suites.groups_of(run)
        assert groups, run
        for group in groups:
            assert group.contenders
            keys = [contender.key for contender in group.contenders]
            assert len(set(keys)) == len(keys)
            assert all(
                contender.impl in IMPLEMENTATIONS and contender.case.problem == group.problem
                for contender in group.contenders
            )


def test_default_gqa_on_a_cpu_covers_what_it_promises():
    (run,) = presets.runs_of("auto", "gqa", "cpu")
    assert set(run.dtypes) == {"float32", "bfloat16"}
    assert set(run.modes) == {"fwd", "fwd_bwd"}
    assert len(run.kv_heads) >= 2
    assert min(run.seq_lens) >= 1024
    assert {"flex_native", "flex_repeat", "jax_xla"} <= set(run.impls)


def test_row_identities_are_unique_within_a_run():
    for run in presets.runs_of("reference", "all", "gpu"):
        found = [
            rows.identity(contender.case.row_fields() | {"impl": contender.impl})
            for group in suites.groups_of(run)
            for contender in group.contenders
        ]
        assert len(set(found)) == len(found)


def test_peak_measures_both_grids_and_the_cache_forward_only():
    run = Settings(
        "peak", heads=(2,), seq_lens=(64,), q_lens=(1,), kv_lens=(128,), modes=("fwd", "fwd_bwd"),
        impls=("mha",), dtypes=("float32",),
    )  # fmt: skip
    found = [(g.problem.lq, g.problem.lkv, g.problem.mode) for g in suites.groups_of(run)]
    assert found == [(64, 64, "fwd"), (64, 64, "fwd_bwd"), (1, 128, "fwd")]


def test_layer_splits_the_model_over_the_heads():
    run = Settings("layer", heads=(4,), model_dim=128, seq_lens=(8,), impls=("default",))
    assert {group.problem.head_dim for group in suites.groups_of(run)} == {32}


# Another value for every setting that decides what is measured.
OTHER = {
    "dtypes": ("float16",), "batches": (3,), "heads": (24,), "kv_heads": (3,), "head_dims": (96,),
    "seq_lens": (48,), "q_lens": (5,), "kv_lens": (80,), "splits": (3,), "block_ks": (16,),
    "modes": ("fwd_bwd",), "causal": (1,), "impls": ("planted",), "model_dim": 480, "max_seq": 77,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("suite", schema.SUITES)
def test_a_suite_reads_the_settings_that_it_says_and_no_others(suite, name):
    run = Settings(
        suite, heads=(12,), seq_lens=(64,), q_lens=(1,), kv_lens=(128,), splits=(1,),
        block_ks=(32,), impls=("mha",), kv_heads=(6,), model_dim=240,
    )  # fmt: skip
    changed = suites.groups_of(dataclasses.replace(run, **{name: OTHER[name]}))
    assert (changed != suites.groups_of(run)) == (name in suites.SETTINGS_OF[suite])


def test_every_setting_is_of_some_suite():
    fields = {field.name for field in dataclasses.fields(Settings)}
    assert frozenset().union(*suites.SETTINGS_OF.values()) == fields - {"suite", "name"}


def test_header_is_json_and_complete():
    header = Settings("gqa").header()
    assert json.loads(json.dumps(header)) == header
    missing = {field.name for field in dataclasses.fields(Settings)} - header.keys()
    assert missing == {"name"}
