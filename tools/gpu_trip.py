# SPDX-License-Identifier: Apache-2.0
"""Tests and measures the CUDA kernels on a machine with a GPU, without Bazel or a network.

Where the project is built, once:

    bazel run //tools:gpu_trip -- pack --into FOLDER

fills FOLDER with the wheel (CUDA kernels for one architecture, sm_90, so that it is small) and the
conformance libraries. On the machine with the GPU, which needs Python, JAX with CUDA, pytest,
hypothesis and absl, from a copy of the repository:

    python3 tools/gpu_trip.py run --files FOLDER --out OUT

Steps, each with a time limit of its own: conformance of each tile primitive (a wrong fragment
layout makes everything after it meaningless), tests on the `cuda` backend, tests on the `cpu`
backend, the two forms of the gradient kernels timed against each other, benchmark suites. Step by
step OUT gets trip.json (what ran, exit codes, seconds, the end of the output), trip.log, and the
JSON files of the forms and the suites. Exit code 0: every step passed; 1: one failed or ran out of
time; 2: something is missing, and nothing was run.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

_PACKAGES = ("jax", "numpy", "pytest", "hypothesis", "absl", "pip")
_CONFORMANCE = ("libconformance_gpu.so", "libconformance_emulated.so")
# What a step prints last says why it failed; the whole output is in the log.
_TAIL_CHARACTERS = 4000

# One file for each kind of claim: accuracy of every feature, the semantics, bits, memory.
_CUDA_TESTS = (
    "accuracy_test.py",
    "closed_forms_test.py",
    "features_test.py",
    "backward_forms_test.py",
    "semantics_rows_test.py",
    "semantics_masks_test.py",
    "semantics_scores_test.py",
    "semantics_splits_test.py",
    "determinism_test.py",
    "decode_test.py",
    "memory_test.py",
)
_CPU_TESTS = ("accuracy_test.py", "closed_forms_test.py", "features_test.py")
_SUITES = ("decode", "gqa", "dispatch")


@dataclasses.dataclass(frozen=True)
class Step:
    """One command of the trip."""

    name: str
    command: list[str]
    limit_s: float


def missing(files: pathlib.Path) -> list[str]:
    """Returns, in words, everything that a run needs and does not find here."""
    problems = [
        f"Python package {name}: not installed for {sys.executable}"
        for name in _PACKAGES
        if importlib.util.find_spec(name) is None
    ]
    wheels = list(files.glob("*.whl")) if files.is_dir() else []
    if len(wheels) != 1:
        problems.append(f"--files {files}: holds {len(wheels)} wheels; one is needed (see `pack`)")
    problems += [
        f"--files {files}: {name} is not there (see `pack`)"
        for name in _CONFORMANCE
        if not (files / name).is_file()
    ]
    if not problems:
        # In a process of its own: JAX here would keep the GPU's memory from the steps.
        probe = subprocess.run(
            [sys.executable, "-c", "import jax; print(jax.devices('gpu')[0].device_kind)"],
            capture_output=True,
            text=True,
            check=False,
        )
        if probe.returncode != 0:
            lines = probe.stderr.strip().splitlines() or ["no message"]
            problems.append(f"JAX finds no GPU: {lines[-1]}")
    return problems


def steps(files: pathlib.Path, out: pathlib.Path, suite_s: float) -> list[Step]:
    """Returns the commands of the trip, in order."""
    python = sys.executable
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    conformance = [
        python,
        "-m",
        "tests.native.tile.conformance",
        "--gpu",
        str(files / _CONFORMANCE[0]),
        "--emulated",
        str(files / _CONFORMANCE[1]),
        "--json",
        str(out / "conformance.json"),
    ]
    return [
        Step("conformance", conformance, 60),
        Step("cuda_tests", [*pytest, "--backends=cuda", *(f"tests/{t}" for t in _CUDA_TESTS)], 360),
        Step("cpu_tests", [*pytest, "--backends=cpu", *(f"tests/{t}" for t in _CPU_TESTS)], 120),
        Step(
            "backward_forms",
            [
                python,
                "-m",
                "benchmarks.backward_forms",
                f"--time_budget_s={suite_s:g}",
                f"--output={out / 'backward_forms.json'}",
            ],
            # Two programs a case are compiled and checked whatever the budget.
            suite_s + 90,
        ),
        *(
            Step(
                f"suite_{suite}",
                [
                    python,
                    "-m",
                    f"benchmarks.{suite}",
                    f"--time_budget_s={suite_s:g}",
                    f"--output={out / suite}.json",
                ],
                # The budget bounds the measuring, not start-up and the first compile.
                suite_s + 60,
            )
            for suite in _SUITES
        ),
    ]


def stage(files: pathlib.Path, out: pathlib.Path) -> dict[str, str]:
    """Installs the wheel and lays out a folder to run in; returns the environment of the steps.

    The repository's own jax_ops has no libraries and would hide the wheel's, because Python looks
    into the current folder first. So steps run in a folder with tests and benchmarks alone.
    """
    repository = pathlib.Path(__file__).resolve().parent.parent
    root = out / "stage"
    shutil.rmtree(root, ignore_errors=True)
    (root / "site").mkdir(parents=True)
    for folder in ("tests", "benchmarks"):
        (root / folder).symlink_to(repository / folder)
    (wheel,) = files.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*install, "--target", str(root / "site"), str(wheel)], check=True)
    path = os.pathsep.join([str(root / "site"), str(root), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path.rstrip(os.pathsep), "PYTHONUNBUFFERED": "1"}


def run_step(
    step: Step, environment: dict[str, str], cwd: pathlib.Path, log: pathlib.Path, limit_s: float
) -> dict:
    """Runs one step and returns its entry of trip.json."""
    began = time.monotonic()
    start = log.stat().st_size if log.exists() else 0
    with log.open("ab") as stream:
        stream.write(f"==== {step.name}: {' '.join(step.command)}\n".encode())
        stream.flush()
        process = subprocess.Popen(
            step.command, cwd=cwd, env=environment, stdout=stream, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(timeout=limit_s)
            timed_out = False
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
            timed_out = True
    text = log.read_bytes()[start:].decode(errors="replace")
    return {
        "step": step.name,
        "exit_code": code,
        "timed_out": timed_out,
        "limit_s": round(limit_s, 1),
        "seconds": round(time.monotonic() - began, 1),
        "output_tail": text[-_TAIL_CHARACTERS:],
    }


def run(arguments: argparse.Namespace) -> int:
    """The `run` command; returns the exit code."""
    files, out = arguments.files.resolve(), arguments.out.resolve()
    problems = missing(files)
    if problems:
        for problem in problems:
            print(f"gpu_trip: missing: {problem}", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    environment = stage(files, out)
    ends = time.monotonic() + arguments.budget_s
    entries = []
    for step in steps(files, out, arguments.suite_s):
        if arguments.steps and step.name not in arguments.steps:
            continue
        left = ends - time.monotonic()
        if left < 10:
            entries.append({"step": step.name, "skipped": "the trip's time is used up"})
        else:
            limit_s = min(step.limit_s, left)
            entries.append(run_step(step, environment, out / "stage", out / "trip.log", limit_s))
        entry = entries[-1]
        result = entry.get("skipped") or f"exit code {entry['exit_code']} in {entry['seconds']} s"
        print(f"gpu_trip: {step.name}: {result}", flush=True)
        # After each step: a trip that is cut off still brings back what it had.
        (out / "trip.json").write_text(json.dumps(entries, indent=1) + "\n")
    shutil.rmtree(out / "stage", ignore_errors=True)
    return 0 if entries and all(e.get("exit_code") == 0 for e in entries) else 1


def pack(arguments: argparse.Namespace) -> int:
    """The `pack` command: copies what was built to a folder."""
    workspace = os.environ.get("BUILD_WORKING_DIRECTORY")
    if workspace is None:
        print("gpu_trip: pack runs under Bazel: bazel run //tools:gpu_trip -- pack ...")
        return 2
    into = pathlib.Path(workspace, arguments.into)
    into.mkdir(parents=True, exist_ok=True)
    built = pathlib.Path(__file__).parent.parent
    wheels = list(built.glob("jax_ops/wheel/*.whl"))
    libraries = [built / "tests/native/tile" / name for name in _CONFORMANCE]
    for source in wheels + libraries:
        target = into / source.name
        target.unlink(missing_ok=True)
        shutil.copy(source, target)
        print(f"{target}: {target.stat().st_size / 2**20:.1f} MiB")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    packer = commands.add_parser("pack", help="copy the wheel and the libraries to a folder")
    packer.add_argument("--into", type=pathlib.Path, required=True)
    packer.set_defaults(command=pack)
    runner = commands.add_parser("run", help="test and measure on this machine's GPU")
    runner.add_argument("--files", type=pathlib.Path, required=True, help="what `pack` filled")
    runner.add_argument("--out", type=pathlib.Path, required=True, help="where results go")
    runner.add_argument("--budget_s", type=float, default=570, help="seconds for all steps")
    runner.add_argument(
        "--suite_s", type=float, default=90, help="seconds for the forms, and for each suite"
    )
    names = [s.name for s in steps(pathlib.Path(), pathlib.Path(), 0)]
    runner.add_argument("--steps", nargs="*", choices=names, help="only these")
    runner.set_defaults(command=run)
    return parser.parse_args(argv)


def main() -> None:
    """Runs the command that was given."""
    arguments = parse(sys.argv[1:])
    sys.exit(arguments.command(arguments))


if __name__ == "__main__":
    main()
