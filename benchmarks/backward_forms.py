# SPDX-License-Identifier: Apache-2.0
"""Times the two forms of the CUDA gradient kernels, and says what the planner's choice costs.

usage: bazel run --config=cuda //benchmarks:backward_forms -- [--output=FILE] [--time_budget_s=60]

Each form is asked for by the block_q of its plan (docs/kernels.md, "Backward"). The backward pass
alone is timed, both forms in turns on the same inputs. First it is checked that the program holds
the form that was asked for, that a second call gives the same bits, and that both forms agree to
rounding. --output is written after each case; a case that fails is an entry with its reason. A
budget drops rounds, never checks. Exit code: 0; 1 when a case is wrong
or crashed; 2 for a bad command.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from absl import flags

from benchmarks.harness import device, errors, timing, usage, work
from benchmarks.harness.budget import Budget
from benchmarks.harness.case import Case
from benchmarks.harness.errors import WrongResultError
from benchmarks.harness.flags import FlagError, check_writable, exit_with, run_app, typed_path
from benchmarks.harness.inputs import attention_inputs
from benchmarks.harness.program import JaxProgram
from benchmarks.harness.store import replace_file

# Query rows of a tile that tell the forms apart, by head dim (backward_block_q in
# kernels/common/planner.h, which refuses any other number).
FORMS = {
    64: {"two_kernels": 128, "one_kernel": 64},
    128: {"two_kernels": 128, "one_kernel": 32},
}
# Matrix products of a backward pass that forms nothing twice.
_PRODUCTS = 5


def _case(batch: int, lq: int, lkv: int, hq: int, hkv: int, d: int, causal: bool) -> Case:
    return Case("backward_forms", "bfloat16", "fwd_bwd", batch, lq, lkv, hq, hkv, d, causal=causal)


# Training shapes, long and short, both head dims; then few queries against many keys, where the
# planner turns to two kernels (backward_form).
PRESETS = {
    "gpu": [
        *(
            _case(batch, length, length, hq, hkv, d, causal)
            for batch, length, hq, hkv, d in (
                (1, 8192, 32, 8, 128),
                (4, 2048, 32, 8, 128),
                (1, 8192, 32, 32, 64),
                (16, 512, 16, 16, 64),
                (64, 64, 8, 8, 64),
                (1, 16384, 8, 1, 128),
            )
            for causal in (True, False)
        ),
        *(_case(1, lq, 16384, 32, 8, d, False) for lq in (128, 512, 1024, 2048) for d in (64, 128)),
    ],
    "tiny": [_case(1, 70, 300, 2, 1, d, d == 64) for d in FORMS],
}


@dataclasses.dataclass(frozen=True)
class _Call:
    """How the kernels are called on a case."""

    case: Case
    implementation: str

    def spec(self) -> Any:
        from jax_ops._spec import AttentionSpec

        return AttentionSpec(
            causal=self.case.causal, bottom_right=True, scale=self.case.head_dim**-0.5
        )

    def saved(self) -> tuple[np.ndarray, ...]:
        """q, k, v, out, lse and the cotangent of out."""
        import jax

        from jax_ops._primitive import native
        from jax_ops._spec import Operands

        q, k, v, dout = attention_inputs(self.case)

        @jax.jit
        def forward(q: Any, k: Any, v: Any) -> Any:
            return native.forward(self.implementation, self.spec(), Operands(q, k, v))

        out, lse = forward(q, k, v)
        return q, k, v, np.asarray(out), np.asarray(lse), dout

    def backward(self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any) -> Any:
        import jax.numpy as jnp

        from jax_ops._primitive import native
        from jax_ops._spec import Operands

        gradients = native.backward(
            self.implementation,
            self.spec(),
            Operands(q, k, v),
            out,
            lse,
            dout,
            jnp.zeros_like(lse),
        )
        return gradients.query, gradients.key, gradients.value

    def planned_rows(self, arrays: tuple[np.ndarray, ...]) -> int:
        """The block_q that the planner chooses."""
        from jax_ops import _libraries, _plan
        from jax_ops._spec import Operands

        library = _libraries.load(self.implementation)
        return _plan.make(library, self.spec(), Operands(*arrays[:3]), "bwd").block_q


class FormProgram(JaxProgram):
    """One form's backward pass: (q, k, v, out, lse, dout) -> (dq, dk, dv)."""

    def __init__(self, call: _Call, rows: int, arrays: tuple[np.ndarray, ...], backend: str):
        import jax

        from jax_ops import _plan

        self._device = jax.devices(backend)[0]
        self.memory: dict[str, Any] = {}
        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        started = time.perf_counter()
        with _plan.backward_block_q(rows), jax.default_device(self._device):
            self._compiled = jax.jit(call.backward).lower(*shapes).compile()
        self.compile_s = time.perf_counter() - started
        if f"block_q = {rows} :" not in self._compiled.as_text():
            raise WrongResultError(f"the program has no gradient kernel with block_q {rows}")


def check(case: Case, programs: dict[str, FormProgram], arrays: tuple[np.ndarray, ...]) -> None:
    """Raises WrongResultError unless each form repeats its bits and both agree to rounding."""
    results = {}
    for name, program in programs.items():
        calls = [program.to_numpy(program.run(program.stage(arrays))) for _ in range(2)]
        for gradient, once, again in zip(("dq", "dk", "dv"), *calls, strict=True):
            if not np.isfinite(once).all():
                raise WrongResultError(f"{name}: {gradient} is not finite")
            if not np.array_equal(once, again):
                raise WrongResultError(f"{name}: {gradient} differs from call to call")
        results[name] = calls[0]
    eps = float(ml_dtypes.finfo(case.dtype).eps)
    for gradient, one, two in zip(("dq", "dk", "dv"), *results.values(), strict=True):
        difference = float(np.abs(one - two).max()) / max(float(np.abs(one).max()), 1e-30)
        if difference > 4 * eps:
            raise WrongResultError(f"{gradient}: the forms differ by {difference:.3g} of its size")


def measure(
    case: Case, implementation: str, backend: str, rounds: int, budget: Budget
) -> dict[str, Any]:
    """Checks and times both forms; returns the case's entry of the output."""
    call = _Call(case, implementation)
    arrays = call.saved()
    forms = FORMS[case.head_dim]
    programs = {name: FormProgram(call, rows, arrays, backend) for name, rows in forms.items()}
    check(case, programs, arrays)
    cache = device.cache_bytes(backend)
    watches = {
        name: timing.Stopwatch(program, arrays, cache, queue_calls=backend == "gpu")
        for name, program in programs.items()
    }
    counts = {name: timing.samples_for(watch.calibrate()) for name, watch in watches.items()}
    samples: dict[str, list[float]] = {name: [] for name in watches}
    seconds = 0.0
    for number in range(rounds):
        if not budget.affords(number, seconds):
            budget.drop(1)
            continue
        started = time.monotonic()
        for name, taken in timing.interleaved_round(watches, counts, number).items():
            samples[name] += taken
        seconds = time.monotonic() - started
    pairs = work.allowed_pairs(case.lq, case.lkv, case.causal) * case.batch * case.hq
    flops = 2 * _PRODUCTS * pairs * case.head_dim
    times = {}
    for name in forms:
        quartiles = timing.Quartiles.of(samples[name])
        times[name] = dataclasses.asdict(quartiles) | {
            "block_q": forms[name],
            "tflop_per_s": flops / quartiles.median_ms / 1e9,
        }
    medians = {name: times[name]["median_ms"] for name in forms}
    rows = call.planned_rows(arrays)
    planned = next(name for name in forms if forms[name] == rows)
    return {
        "case": case.row_fields(),
        "forms": times,
        "one_to_two": medians["one_kernel"] / medians["two_kernels"],
        "planned": planned,
        "planned_to_best": medians[planned] / min(medians.values()),
    }


def _line(case: Case, entry: dict[str, Any]) -> str:
    parts = [
        f"{name} {form['median_ms']:.3f} ms ({form['tflop_per_s']:.1f} TFLOP/s)"
        for name, form in entry["forms"].items()
    ]
    return (
        f"{case.label()}: {', '.join(parts)}; one / two {entry['one_to_two']:.3f}; planned "
        f"{entry['planned']}, {entry['planned_to_best']:.3f} of the best"
    )


_IMPLEMENTATION = flags.DEFINE_enum(
    "implementation",
    "cuda",
    ["cuda", "emulated"],
    "whose kernels: the emulator's times mean little",
)
_PRESET = flags.DEFINE_enum("preset", "gpu", list(PRESETS), "which cases")
_REPEATS = flags.DEFINE_integer("repeats", 3, "rounds a case", lower_bound=1)
_BUDGET = flags.DEFINE_float("time_budget_s", None, "seconds: rounds are dropped, never checks")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file")


def main(argv: list[str]) -> int:
    """Measures every case; returns the exit code."""
    if len(argv) > 1:
        exit_with(f"unexpected argument {argv[1]!r}; every option is a --flag")
    output: Path | None = typed_path(_OUTPUT.value)
    try:
        check_writable("output", output)
    except FlagError as error:
        exit_with(str(error))
    implementation = _IMPLEMENTATION.value
    backend = "gpu" if implementation == "cuda" else "cpu"
    import jax_ops

    reason = jax_ops.available_implementations()[implementation]
    if reason:
        exit_with(f"--implementation={implementation}: {reason}")
    cases = PRESETS[_PRESET.value]
    budget = Budget(_BUDGET.value, len(cases))
    result: dict[str, Any] = {"device": device.describe_device(), "cases": []}
    failed = False
    for case in cases:
        budget.start_group()
        try:
            entry = measure(case, implementation, backend, _REPEATS.value, budget)
            print(_line(case, entry), flush=True)
        except Exception as error:  # A failed case is an entry, whatever failed.
            entry = {"case": case.row_fields(), "error": errors.describe(error)}
            failed |= errors.fails_run(entry["error"])
            print(f"{case.label()}: {entry['error']}", flush=True)
        result["cases"].append(entry)
        if output is not None:
            replace_file(output, json.dumps(result, indent=1) + "\n")
    losses = [entry["planned_to_best"] for entry in result["cases"] if "error" not in entry]
    if losses:
        print(f"the planner's choice takes up to {max(losses):.3f} of the better form's time")
    note = budget.summary()
    if note:
        print(note)
    return 1 if failed else 0


if __name__ == "__main__":
    every = (_IMPLEMENTATION, _PRESET, _REPEATS, _BUDGET, _OUTPUT)
    run_app(main, lambda: f"{__doc__}\n{usage.of_flags([flag.name for flag in every])}")
