# SPDX-License-Identifier: Apache-2.0
"""Which implementation runs a call: capability and cost, as pure functions of the problem.

'auto' takes, on each platform, the first implementation of `candidates` that supports the call.
The choice is made once when the call is traced for a device, never from values. An implementation
that is named is used or raises; it never falls back.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jax_ops import _jax, _libraries, _plan
from jax_ops._errors import UnsupportedError, argument_error
from jax_ops._spec import AttentionSpec, Operands, sizes_of

# Implementations of this package, and the peers that calls can be delegated to.
OWN = ("cuda", "cpu", "xla", "emulated")
PEERS = ("jax_xla", "jax_cudnn")
IMPLEMENTATIONS = ("auto", *OWN, *PEERS)
_ALIASES = {None: "auto", "cudnn": "jax_cudnn"}

_FUSED_DTYPES = ("float32", "bfloat16", "float16")
# The platform, in JAX's lowering names, on which each native library runs.
_PLATFORM_OF = {"cpu": "cpu", "emulated": "cpu", "cuda": "cuda"}
_MAX_LENGTH = 2**31 - 1


def canonical_implementation(name: str | None) -> str:
    """Resolves aliases (None, 'cudnn'); refuses unknown names."""
    canonical = _ALIASES.get(name, name) if name is None or isinstance(name, str) else name
    if not isinstance(canonical, str) or canonical not in IMPLEMENTATIONS:
        allowed = ", ".join(repr(i) for i in (None, *IMPLEMENTATIONS, "cudnn"))
        raise argument_error("implementation", repr(name), allowed)
    return canonical


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation that runs, and why each of the others does not."""

    implementation: str | None  # None: nothing can run this
    reasons: dict[str, str]


def candidates(platform: str) -> tuple[str, ...]:
    """What 'auto' tries on a platform, in order of expected speed.

    On the CPU the order has no crossing point worth a rule: measured on two cores with jit, the
    fused kernels are ahead from B = 1, L = 16, H = 4, D = 32 on, and below that the compiled XLA
    loop saves at most 10 microseconds a call, less than its longer compilation costs.
    """
    if platform == "cpu":
        return ("cpu", "xla")
    if platform in ("cuda", "gpu"):
        return ("cuda", "xla")
    return ("xla",)


def refusal(
    implementation: str, spec: AttentionSpec, operands: Operands, operation: str = "fwd"
) -> str:
    """Why an implementation of this package cannot run a call on its own platform; '' if it can.

    `operands` may be arrays, avals or ShapeDtypeStructs; `operation` is 'fwd' or 'bwd'.
    """
    if implementation == "xla":
        return ""
    sizes = sizes_of(operands)
    dtype = str(np.dtype(operands.query.dtype))
    if dtype not in _FUSED_DTYPES:
        return f"dtype {dtype} (it takes {', '.join(_FUSED_DTYPES)})"
    if max(sizes.lq, sizes.lkv) > _MAX_LENGTH:
        return f"length {max(sizes.lq, sizes.lkv)} (at most {_MAX_LENGTH})"
    if any(not isinstance(size, int) for size in sizes.lead[1:]):
        return f"symbolic batch axes {sizes.lead} behind the first"
    library = _libraries.load(implementation)
    if library.handle is None:
        return library.reason
    try:
        _plan.make(library, spec, operands, operation)
    except _plan.PlanError as error:
        return str(error)
    return ""


def choose(
    platform: str, spec: AttentionSpec, operands: Operands, operation: str = "fwd"
) -> Choice:
    """Picks the implementation of a call on a platform ('cpu', 'cuda', or another of JAX's)."""
    platform = "cuda" if platform == "gpu" else platform
    asked = spec.implementation
    order = candidates(platform) if asked == "auto" else (asked,)
    reasons: dict[str, str] = {}
    chosen = None
    for name in OWN:
        home = _PLATFORM_OF.get(name, platform)
        if home != platform:
            reasons[name] = f"runs on {home} only, and this call is for {platform}"
        elif reason := refusal(name, spec, operands, operation):
            reasons[name] = f"does not support this call: {reason}"
        elif name not in order:
            reasons[name] = (
                "'auto' does not take it: only an explicit choice does"
                if asked == "auto"
                else f"is not what was asked for ({asked!r})"
            )
    for name in order:
        if chosen is None and name not in reasons:
            chosen = name
        elif chosen is not None and name not in reasons:
            reasons[name] = f"comes after {chosen!r} on {platform}"
    return Choice(chosen, reasons)


def implementation_for(
    platform: str, spec: AttentionSpec, operands: Operands, operation: str
) -> str:
    """The implementation that a lowering uses.

    Raises:
      UnsupportedError: with every reason.
    """
    choice = choose(platform, spec, operands, operation)
    if choice.implementation is None:
        raise UnsupportedError(
            f"implementation={spec.implementation!r}: {choice.reasons[spec.implementation]}"
        )
    return choice.implementation


def require_support(spec: AttentionSpec, operands: Operands) -> None:
    """Refuses, before anything is traced, an explicit implementation that cannot run the call.

    Whether the call then runs on that implementation's platform is known, and checked, only when
    it is lowered.
    """
    name = spec.implementation
    if name != "auto" and (reason := refusal(name, spec, operands)):
        raise UnsupportedError(f"implementation={name!r}: {reason}")


def available_implementations() -> dict[str, str]:
    """What can be passed as `implementation` here.

    Returns:
      For each implementation '' if calls can run on this process's default devices, else the
      reason why they cannot.
    """
    platforms = {d.platform for d in jax.local_devices()} | {"cpu"}
    has_cuda = bool(platforms & {"gpu", "cuda"})
    result = {}
    for name in (*OWN, *PEERS):
        if name == "jax_cudnn":
            result[name] = "" if has_cuda else "JAX has no CUDA device"
        elif name in ("xla", "jax_xla"):
            result[name] = ""
        elif name == "cuda" and not has_cuda:
            result[name] = "JAX has no CUDA device"
        else:
            result[name] = _libraries.load(name).reason
    return result


def default_platform() -> str:
    """The platform that un-jitted calls run on."""
    device = _jax.setting("jax_default_device")
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else str(getattr(device, "platform", device))
