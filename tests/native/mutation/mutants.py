# SPDX-License-Identifier: Apache-2.0
"""Mutants of C++ source, made by rule: one small, plausible mistake each."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import random
import re


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one line.

    file: path from the workspace's root. line: number from 1. before, after: the line's text.
    occurrence: how many equal lines come before it in the file.
    """

    file: str
    line: int
    rule: str
    before: str
    after: str
    occurrence: int = 0

    @property
    def name(self) -> str:
        """Stays the same when other lines of the file come or go."""
        parts = (self.file, self.rule, self.before.strip(), self.after.strip(), self.occurrence)
        text = "\n".join(map(str, parts))
        return f"{self.file.rsplit('/', 1)[-1]}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    def apply(self, source: str) -> str:
        """The mutated source."""
        lines = source.split("\n")
        if lines[self.line - 1] != self.before:
            raise ValueError(f"{self.file}:{self.line} is not what the mutant was made from")
        lines[self.line - 1] = self.after
        return "\n".join(lines)


# (rule, pattern, replacement). Operators stand between blanks, so that template brackets, pointers
# and references are left alone.
_SWAPS = [
    ("relation", r" < ", " <= "),
    ("relation", r" <= ", " < "),
    ("relation", r" > ", " >= "),
    ("relation", r" >= ", " > "),
    ("relation", r" == ", " != "),
    ("relation", r" != ", " == "),
    ("arithmetic", r" \+ (?!$)", " - "),
    ("arithmetic", r" - (?!$)", " + "),
    ("arithmetic", r" \* (?!$)", " + "),
    ("arithmetic", r" / ", " * "),
    ("arithmetic", r" % ", " / "),
    ("assignment", r" \+= ", " -= "),
    ("logic", r" && (?!$)", " || "),
    ("logic", r" \|\| (?!$)", " && "),
    ("negation", r"\bif \((?=\w)", "if (!"),
    ("choice", r"\bmin_of\b", "max_of"),
    ("choice", r"\bmax_of\b", "min_of"),
    ("choice", r"\bmax_f32\b", "min_f32"),
    ("constant", r"(?<![\w.<(])(\d+)(?![\w.>x])", lambda m: str(int(m[1]) + 1)),
    ("constant", r"\b0\.f\b", "1.f"),
    ("constant", r"\btrue\b", "false"),
    ("wait", r"\basync_wait<(\w+)>\(\)", r"async_wait<\1 + 1>()"),
    ("sign", r"(?<=[=(,] )-(?=[\w])", ""),
]
# Statements that can be left out whole.
_STATEMENT = re.compile(r"^\s*(?:tile::)?(?:sync_\w+|async_\w+(?:<\w+>)?|named_\w+)\(.*\);$")
# Declarations and the compile-time part: a mutant there does not compile, or is another kernel.
_SKIP = re.compile(
    r"^\s*(?://|#|template\b|static_assert|using\b|struct\b|class\b|namespace\b|enum\b|ATTENTION_UNROLL"
    r"|static constexpr|constexpr)|\bif constexpr\b|^\s*$"
)


def all_mutants(file: str, source: str) -> list[Mutant]:
    """Every mutant that the rules give for a file."""
    found: list[Mutant] = []
    seen: collections.Counter[str] = collections.Counter()
    for number, line in enumerate(source.split("\n"), 1):
        if _SKIP.search(line):
            continue
        occurrence = seen[line.strip()]
        seen[line.strip()] += 1
        code = line.split("//")[0].rstrip()
        if _STATEMENT.match(code):
            found.append(Mutant(file, number, "omission", line, "", occurrence))
        for rule, pattern, replacement in _SWAPS:
            for m in re.finditer(pattern, code):
                after = (
                    code[: m.start()] + m.expand(replacement) + code[m.end() :]
                    if isinstance(replacement, str)
                    else code[: m.start()] + replacement(m) + code[m.end() :]
                )
                found.append(Mutant(file, number, rule, line, after, occurrence))
    return found


def sample(sources: dict[str, str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants, spread evenly over the files, in an order that depends on seed alone."""
    rng = random.Random(seed)
    queues = []
    for file in sorted(sources):
        mutants = all_mutants(file, sources[file])
        rng.shuffle(mutants)
        queues.append(mutants)
    chosen: list[Mutant] = []
    lines: set[tuple[str, int]] = set()
    while len(chosen) < count and any(queues):
        for queue in queues:
            # One mutant a line: two in one place say little more than one.
            while queue and (queue[-1].file, queue[-1].line) in lines:
                queue.pop()
            if queue and len(chosen) < count:
                chosen.append(queue.pop())
                lines.add((chosen[-1].file, chosen[-1].line))
    return chosen
