# SPDX-License-Identifier: Apache-2.0
"""Mutation test of the CUDA kernels: do the tests notice a mistake?

    bazel run //tests/native/mutation:mutate -- [--count 60] [--seed 1] [--report FILE]

Builds the oracle (oracle.cc) with the host's C++ compiler, first from the unchanged sources, which
must pass, then once for each mutant. Exit code 1 when a mutant survives that survivors.json does
not explain, or when the control fails. A mutant that does not compile, or whose object code is
that of the unchanged sources, is no mutant: another one takes its place. CXX names the compiler
(default g++).
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable

from tests.native.mutation import mutants as rules

ROOT = pathlib.Path(__file__).absolute().parents[3]
HERE = pathlib.Path(__file__).parent
FILES = [
    "kernels/cuda/backward_dq.h",
    "kernels/cuda/backward_kv.h",
    "kernels/cuda/backward_q.h",
    "kernels/cuda/combine.h",
    "kernels/cuda/forward.h",
    "kernels/cuda/rows.h",
    "kernels/cuda/scan.h",
    "kernels/cuda/score.h",
    "kernels/cuda/softmax.h",
    "kernels/cuda/stream.h",
]
# The oracle's sources: the kernels of one dtype and bucket, and what is not mutated.
_SOURCES = [
    "tests/native/mutation/forward.cc",
    "tests/native/mutation/backward.cc",
    "tests/native/mutation/oracle.cc",
    *(f"kernels/cuda/{name}.cc" for name in ("dispatch", "plan", "device_emulated")),
]
_TESTS = [
    "lean",
    "general",
    "backward_forms",
    "batch_maps",
    "decode",
    "poison",
    "no_bank_conflicts",
]
_FLAGS = [
    "-std=c++17",
    "-O1",
    "-w",
    # An index past an array of registers often changes nothing that a test could see.
    "-fsanitize=bounds",
    "-fsanitize-undefined-trap-on-error",
    "-DATTENTION_PLAN_FUNCTION=attention_plan_emulated",
]
# The oracle takes a few seconds; a mutant that loops for ever is a mutant that is noticed.
_TIMEOUT_S = 180


def load_sources() -> dict[str, str]:
    """The text of the files that are mutated."""
    return {f: (ROOT / f).read_text(encoding="utf-8") for f in FILES}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a mutant: killed, survived, equivalent or uncompiled, and by what or why."""

    outcome: str
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class _Source:
    """A source of the oracle with its unchanged object, and the files of the tree that it reads."""

    path: pathlib.Path
    control: pathlib.Path
    reads: frozenset[str]


class Oracle:
    """The oracle program, of which only what a mutant changes is compiled anew."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._compiler = os.environ.get("CXX", "g++")
        if shutil.which(self._compiler) is None:
            raise SystemExit(f"mutation test: no C++ compiler {self._compiler!r}; set CXX")
        self._kills: collections.Counter[tuple[str, str]] = collections.Counter()
        paths = [ROOT / name for name in _SOURCES]
        paths += sorted((ROOT / "kernels/emulator").glob("*.cc"))
        self._sources = []
        for path in paths:
            wrong, compiled = self._compile(path, folder, [])
            if wrong:
                raise SystemExit(f"mutation test: {path.name} does not compile:\n{wrong}")
            self._sources.append(_Source(path, compiled, self._reads(path)))

    def _command(self, includes: list[str]) -> list[str]:
        return [self._compiler, *_FLAGS, *includes, f"-I{ROOT}"]

    def _reads(self, source: pathlib.Path) -> frozenset[str]:
        """What the compiler says that a source includes, as paths from the workspace's root."""
        done = subprocess.run(
            [*self._command([]), "-MM", str(source)], capture_output=True, text=True, check=True
        )
        words = done.stdout.replace("\\\n", " ").split()[1:]
        return frozenset(w.removeprefix(f"{ROOT}/") for w in words)

    def _compile(
        self, source: pathlib.Path, to: pathlib.Path, includes: list[str]
    ) -> tuple[str, pathlib.Path]:
        out = to / (source.stem + ".o")
        command = [*self._command(includes), "-c", str(source), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return (done.stderr[:2000] or "failed") if done.returncode else "", out

    def sources_of(self, files: Iterable[str]) -> list[str]:
        """Names of the oracle's sources that read at least one of `files`."""
        changed = set(files)
        return [s.path.name for s in self._sources if changed & s.reads]

    def judge(self, changed: dict[str, str]) -> Verdict:
        """Runs the tests with the files in `changed` in place of those in the tree.

        Raises:
          ValueError: a changed file is read by no source, so that no test could notice.
        """
        for file in changed:
            if not self.sources_of([file]):
                raise ValueError(f"mutation test: no source of the oracle reads {file}")
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            folder = pathlib.Path(name)
            for file, text in changed.items():
                path = folder / "changed" / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            includes = [f"-I{folder / 'changed'}"]
            objects = []
            for source in self._sources:
                compiled = source.control
                if changed.keys() & source.reads:
                    wrong, compiled = self._compile(source.path, folder, includes)
                    if wrong:
                        return Verdict("uncompiled", wrong.split("\n", 1)[0])
                    if compiled.read_bytes() == source.control.read_bytes():
                        compiled = source.control
                objects.append(compiled)
            if changed and objects == [source.control for source in self._sources]:
                return Verdict("equivalent", "the object code is that of the unchanged sources")
            program = folder / "oracle"
            link = [self._compiler, *map(str, objects), "-o", str(program), "-lpthread"]
            subprocess.run(link, check=True, capture_output=True)
            return self._run(program, sorted(changed))

    def _run(self, program: pathlib.Path, files: list[str]) -> Verdict:
        # First what has most often killed mutants of these files: most runs end with their first
        # test. A mutant that survives meets them all.
        kills = self._kills.copy()
        tests = sorted(_TESTS, key=lambda test: -sum(kills[file, test] for file in files))
        for test in tests:
            try:
                done = subprocess.run(
                    [str(program), test],
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=_TIMEOUT_S,
                    check=False,
                )
                found = (done.stderr.strip() or f"exit code {done.returncode}").split("\n")[0]
                killed = done.returncode != 0
            except subprocess.TimeoutExpired:
                found, killed = f"still running after {_TIMEOUT_S} s", True
            if killed:
                self._kills.update((file, test) for file in files)
                return Verdict("killed", f"{test}: {found[:300]}")
        return Verdict("survived")


def explained() -> dict[str, str]:
    """Survivors with the reason why no test can or need notice them."""
    return json.loads((HERE / "survivors.json").read_text(encoding="utf-8"))


def main(argv: list[str] | None = None) -> int:
    """Command line; see the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60, help="mutants to judge")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--report", type=pathlib.Path, help="JSON file for all verdicts")
    args = parser.parse_args(argv)
    sources = load_sources()
    reasons = explained()
    report = []
    unexplained = 0
    counts = {"killed": 0, "survived": 0, "equivalent": 0, "uncompiled": 0}
    with tempfile.TemporaryDirectory() as name:
        oracle = Oracle(pathlib.Path(name))
        control = oracle.judge({})
        if control.outcome != "survived":
            print(f"control: the unchanged kernels fail: {control.detail}")
            return 1
        print("control: the unchanged kernels pass", flush=True)
        # More candidates than needed: some do not compile, some change nothing.
        candidates = iter(rules.sample(sources, 2 * args.count, args.seed))
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            while (missing := args.count - counts["killed"] - counts["survived"]) > 0:
                batch = list(itertools.islice(candidates, min(missing, args.jobs)))
                if not batch:
                    print("the rules give no more mutants")
                    return 1
                started = time.monotonic()
                verdicts = pool.map(
                    lambda m: oracle.judge({m.file: m.apply(sources[m.file])}), batch
                )
                for mutant, verdict in zip(batch, verdicts, strict=True):
                    counts[verdict.outcome] += 1
                    reason = reasons.get(mutant.name, "")
                    new = verdict.outcome == "survived" and not reason
                    unexplained += new
                    seconds = time.monotonic() - started
                    print(
                        f"{verdict.outcome:10} {mutant.name} {mutant.file}:{mutant.line} "
                        f"[{mutant.rule}] ({seconds:.0f} s) {verdict.detail or reason}"
                    )
                    if new:
                        print(f"    - {mutant.before.strip()}\n    + {mutant.after.strip()}")
                    sys.stdout.flush()
                    report.append(
                        {
                            **dataclasses.asdict(mutant),
                            "name": mutant.name,
                            **dataclasses.asdict(verdict),
                            "reason": reason,
                        }
                    )
    print(
        f"{counts['killed']} killed, {counts['survived']} survived, of which {unexplained} are not "
        f"explained in survivors.json; {counts['equivalent']} gave the unchanged object code, "
        f"{counts['uncompiled']} did not compile"
    )
    if args.report:
        args.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
