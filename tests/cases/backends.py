# SPDX-License-Identifier: Apache-2.0
"""The backends under test, and the one table of what a backend declares that it lacks.

A feature is either tested on a backend, or stands in MISSING and is then tested to be refused in
words. There is no third way.
"""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Backend:
    """One value of the `implementation` argument.

    name: the argument. title: the column of the support matrix. tf32: float32 products may be
    formed in tf32 at default precision. target: what its custom-call targets are called; None where
    it compiles to plain XLA operations.
    """

    name: str
    title: str
    tf32: bool = False
    target: str | None = None

    def __str__(self):
        return self.name

    def missing(self, feature: str) -> str | None:
        """Why the backend lacks the feature, or None when it has it."""
        return MISSING.get(feature, {}).get(self.name)

    def assert_ran(self, hlo: str):
        """Fails unless the compiled program calls this backend's kernels and no other's."""
        targets = set(re.findall(r'custom_call_target="(attention_[a-z]+_([a-z]+)_v\d+)"', hlo))
        kinds = {kind for _, kind in targets}
        expected = {self.target} if self.target else set()
        assert kinds == expected, (
            f"implementation {self.name!r} compiled to attention calls {sorted(targets)}; "
            f"expected {'calls of ' + self.target if self.target else 'none'}"
        )


XLA = Backend("xla", "`xla`")
CPU = Backend("cpu", "`cpu`", target="cpu")
EMULATED = Backend("emulated", "`emulated`", tf32=True, target="emulated")
CUDA = Backend("cuda", "`cuda`", tf32=True, target="cuda")
BACKENDS = {b.name: b for b in (XLA, CPU, EMULATED, CUDA)}

_FUSED = ("cpu", "emulated", "cuda")


def _not_fused(reason):
    return dict.fromkeys(_FUSED, reason)


# feature -> {backend: reason}. The feature names are those of cases/features.py.
MISSING: dict[str, dict[str, str]] = {
    "float64": _not_fused("fused kernels accumulate in float32"),
    "head_dim_over_256": _not_fused("fused kernels end at 256"),
    "score_mod": _not_fused("an arbitrary score function is not fused"),
}
