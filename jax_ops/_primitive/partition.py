# SPDX-License-Identifier: Apache-2.0
"""How an attention call is split over devices under jit: batch-like and head axes, no gather.

`global_function` is what the primitives of differentiable.py lower to: a function of whole arrays
that wraps one shard's work (local.py) in custom_partitioning. Shardings arrive as tilings without
axis names; they are read back on a mesh whose axes are the prime factors of the user's, in the same
device order, on which every tiling that the partitioner makes has names. A shard's work is a block
of [batch-like axes, query heads]. K and V are split the same way where their heads divide; where
they do not (GQA with fewer KV heads than devices), each shard takes the KV heads that its query
heads read, and their gradients are summed over the devices that share them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ops import _jax
from jax_ops._primitive import avals, local
from jax_ops._spec import TAIL_RANK, AttentionSpec, Operands, Sizes

_Axes = tuple[str, ...]
_KV_FIELDS = (Operands._fields.index("key"), Operands._fields.index("value"))


@dataclasses.dataclass(frozen=True)
class _Slot:
    """What the axes of one argument or result mean."""

    shape: tuple[int, ...]
    lead_rank: int  # 0 for an array without lead axes
    head: int | None  # position of the head axis; None: none, or one head for all
    is_kv: bool


def _operand_slot(field: int, shape: Sequence[int]) -> _Slot:
    tail = TAIL_RANK[field]
    lead_rank = 0 if tail is None else len(shape) - tail
    head = avals.head_axis(field)
    if head is not None:
        head += lead_rank
        head = None if shape[head] == 1 and field not in _KV_FIELDS and field != 0 else head
    return _Slot(tuple(shape), lead_rank, head, field in _KV_FIELDS)


def _full_slot(shape: Sequence[int], tail: int) -> _Slot:
    """Slot of out ([*lead, Lq, Hq, Dv], tail 3) or lse ([*lead, Lq, Hq], tail 2)."""
    return _Slot(tuple(shape), len(shape) - tail, len(shape) - tail + 1, False)


def _slots(
    kind: str, fields: Sequence[int], chosen: Sequence[int], args: Sequence[Any], sizes: Sizes
) -> tuple[list[_Slot], list[_Slot]]:
    """Slots of the arguments and of the results of one kind of call."""
    shapes = [x.shape for x in args]
    operands = [_operand_slot(f, s) for f, s in zip(fields, shapes, strict=False)]
    by_field = dict(zip(fields, operands, strict=True))
    pair = [_full_slot(sizes.out_shape, 3), _full_slot(sizes.lse_shape, 2)]
    moving = [by_field[field] for field in chosen]
    if kind == "forward":
        return operands, pair
    if kind == "tangent":
        return operands + pair + moving, pair
    return operands + pair + pair, moving


def global_function(
    kind: str,
    avals_in: Sequence[Any],
    avals_out: Sequence[Any],
    *,
    distributed: bool,
    spec: AttentionSpec,
    fields: tuple[int, ...],
    moving: tuple[int, ...] = (),
    wanted: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """The function of whole arrays for one call; `distributed` wraps it for the partitioner."""
    chosen = moving or wanted
    work = local.local_function(kind, spec, fields, chosen)
    sizes = avals.sizes(fields, avals_in)

    def call(*args: Any) -> Any:
        count = len(fields)
        full = [sizes.out_shape, sizes.lse_shape] * 2
        last = count + {"forward": 0, "tangent": 2, "backward": 4}[kind]
        args = (
            *args[:count],
            *(jnp.broadcast_to(x, s) for x, s in zip(args[count:last], full, strict=False)),
            *args[last:],
        )
        if not distributed:
            return work(*args)
        slots = _slots(kind, fields, chosen, args, sizes)
        if any(not isinstance(size, int) for slot in slots[0] for size in slot.shape):
            return work(*args)  # symbolic sizes: exported for one device
        plan = _Plan(work, *slots, sizes)
        wrapped = custom_partitioning(_variadic(work))
        wrapped.def_partition(
            partition=plan.partition,
            decode_shardings=False,
            sharding_rule=plan.rule(),
            need_replication_factors=plan.whole_factors(),
        )
        return wrapped(*args)

    return call


def _variadic(work: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> tuple[Any, ...]:
        return tuple(work(*args))

    return call


class _Plan:
    """The sharding rule of one call, and its partitioning."""

    def __init__(
        self,
        work: Callable[..., Any],
        arguments: Sequence[_Slot],
        results: Sequence[_Slot],
        sizes: Sizes,
    ):
        self.work = work
        self.arguments = arguments
        self.results = results
        self.sizes = sizes

    # The rule, for propagation: one factor for each batch-like axis, one for query heads (h) and
    # one for KV heads (k). Every other axis stays whole. Writing query heads as a product of KV
    # heads and group would tie the two, and split a replicated K over part of a mesh axis: its
    # gradient would then need a gather.

    def rule(self) -> str:
        alone = iter(range(10**9))

        def side(slots: Sequence[_Slot]) -> str:
            return ", ".join(" ".join(self._factors(slot, alone)) for slot in slots)

        return f"{side(self.arguments)} -> {side(self.results)}"

    def _factors(self, slot: _Slot, alone: Any) -> list[str]:
        factors = []
        for axis, size in enumerate(slot.shape):
            if axis < slot.lead_rank and size == self.sizes.lead[axis]:
                factors.append(f"b{axis}")
            elif axis == slot.head:
                factors.append("k" if slot.is_kv else "h")
            else:
                factors.append(f"w{next(alone)}")
        return factors

    def whole_factors(self) -> tuple[str, ...]:
        words = self.rule().replace(",", " ").split()
        return tuple(dict.fromkeys(w for w in words if w.startswith("w")))

    # Partitioning.

    def partition(self, mesh: Any, arg_shapes: Any, result_shapes: Any) -> Any:
        shapes = [*jax.tree.leaves(arg_shapes), *jax.tree.leaves(result_shapes)]
        slots = [*self.arguments, *self.results]
        fine = _prime_mesh(mesh, shapes)
        tilings = [_tiling(fine, x.sharding, x.shape) for x in shapes]
        lead, head = self._work_axes(fine, slots, tilings)
        kv = self._kv_axes(fine, slots, tilings, head)

        specs = [self._slot_spec(slot, lead, head, kv) for slot in slots]
        shardings = [NamedSharding(fine, PartitionSpec(*spec)) for spec in specs]
        count = len(self.arguments)
        shard = functools.partial(self._shard, fine, specs, lead, head, kv)
        return fine, shard, tuple(shardings[count:]), tuple(shardings[:count])

    def _work_axes(
        self, mesh: Mesh, slots: Sequence[_Slot], tilings: Sequence[Sequence[_Axes]]
    ) -> tuple[list[_Axes], _Axes]:
        """Mesh axes that split the batch-like axes, and those that split the query heads."""
        used: set[str] = set()

        def claim(size: int, found: Sequence[_Axes]) -> _Axes:
            for axes in found:
                if axes and not used & set(axes) and size % _count(mesh, axes) == 0:
                    used.update(axes)
                    return axes
            return ()

        lead = []
        pairs = list(zip(slots, tilings, strict=True))
        for axis, size in enumerate(self.sizes.lead):
            found = [t[axis] for s, t in pairs if axis < s.lead_rank and s.shape[axis] == size]
            lead.append(claim(size, found))
        heads = [t[s.head] for s, t in pairs if s.head is not None and not s.is_kv]
        kv_heads = [t[s.head] for s, t in pairs if s.head is not None and s.is_kv]
        return lead, claim(self.sizes.hq, heads) or claim(self.sizes.hkv, kv_heads)

    def _kv_axes(
        self,
        mesh: Mesh,
        slots: Sequence[_Slot],
        tilings: Sequence[Sequence[_Axes]],
        head: _Axes,
    ) -> _Axes:
        """Mesh axes that split the KV heads: K's or V's, if they are a leading part of `head`."""
        for slot, tiling in zip(slots, tilings, strict=True):
            axes = tiling[slot.head] if slot.is_kv and slot.head is not None else ()
            if axes and axes == head[: len(axes)] and self.sizes.hkv % _count(mesh, axes) == 0:
                return axes
        return ()

    def _slot_spec(
        self, slot: _Slot, lead: Sequence[_Axes], head: _Axes, kv: _Axes
    ) -> list[_Axes | None]:
        spec: list[_Axes | None] = [None] * len(slot.shape)
        for axis in range(slot.lead_rank):
            if slot.shape[axis] == self.sizes.lead[axis]:
                spec[axis] = lead[axis] or None
        if slot.head is not None:
            spec[slot.head] = (kv if slot.is_kv else head) or None
        return spec

    def _shard(self, *args: Any) -> Any:
        """`_work_of_shard`, traced for one device, whatever mesh is set where it is compiled.

        With explicit axes, results would be given shardings that a part does not have.
        """
        with _jax.without_mesh():
            return self._work_of_shard(*args)

    def _work_of_shard(
        self,
        mesh: Mesh,
        specs: Sequence[Sequence[_Axes | None]],
        lead: Sequence[_Axes],
        head: _Axes,
        kv: _Axes,
        *args: Any,
    ) -> Any:
        """One device's work, on its part of the arguments."""
        window = self._kv_window(mesh, head, kv)
        args = tuple(
            window.take(x, slot.head) if slot.is_kv and window else x
            for x, slot in zip(args, self.arguments, strict=True)
        )
        results = []
        work_axes = (*(a for axes in lead for a in axes), *head)
        result_specs = specs[len(self.arguments) :]
        for x, slot, spec in zip(self.work(*args), self.results, result_specs, strict=True):
            if slot.is_kv and window:
                x = window.put(x, slot.head)
            own = {a for axes in spec if axes for a in axes}
            shared = tuple(a for a in work_axes if a not in own)
            if shared:
                # Devices that share an operand each hold a part of its gradient.
                wide = jnp.promote_types(x.dtype, jnp.float32)
                x = jax.lax.psum(x.astype(wide), shared).astype(x.dtype)
            results.append(x)
        return tuple(results)

    def _kv_window(self, mesh: Mesh, head: _Axes, kv: _Axes) -> _KvWindow | None:
        """Which of its KV heads a device reads; None: all of them, in whole groups."""
        if kv == head:
            return None
        local_heads = self.sizes.hq // _count(mesh, head)
        held = self.sizes.hkv // _count(mesh, kv)
        first_query = jax.lax.axis_index(head) * local_heads
        first_held = jax.lax.axis_index(kv) * held if kv else 0
        group = self.sizes.group
        if local_heads % group == 0 or group % local_heads == 0:
            count = max(1, local_heads // group)
            heads = first_query // group - first_held + jnp.arange(count)
        else:
            # Query heads of one device begin or end inside a group: one KV head for each.
            heads = (first_query + jnp.arange(local_heads)) // group - first_held
        return _KvWindow(heads, held)


@dataclasses.dataclass(frozen=True)
class _KvWindow:
    """The KV heads, of the `held` ones of a device, that its query heads read."""

    heads: Any
    held: int

    def take(self, x: Any, axis: int | None) -> Any:
        return jnp.take(x, self.heads, axis=axis)

    def put(self, x: Any, axis: int | None) -> Any:
        """The transpose of `take`."""
        assert axis is not None, "K and V always have a head axis"
        shape = list(x.shape)
        shape[axis] = self.held
        at = (slice(None),) * axis + (self.heads,)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return jnp.zeros(shape, wide).at[at].add(x.astype(wide)).astype(x.dtype)


def _count(mesh: Mesh, axes: _Axes) -> int:
    return math.prod(mesh.shape[a] for a in axes)


def _prime_factors(n: int) -> list[int]:
    factors, p = [], 2
    while n > 1:
        while n % p == 0:
            factors.append(p)
            n //= p
        p += 1
    return factors


def _prime_mesh(mesh: Any, shapes: Sequence[Any]) -> Mesh:
    """The devices of a call in their order, on one axis for each prime factor of a mesh axis."""
    if mesh.empty:
        x = shapes[0]
        devices = np.array(list(x.sharding.devices_indices_map(tuple(x.shape))), dtype=object)
    else:
        devices = mesh.devices
    factors = [p for size in devices.shape for p in _prime_factors(size)]
    names = tuple(f"p{i}" for i in range(len(factors)))
    return Mesh(devices.reshape(factors), names)


def _tiling(mesh: Mesh, sharding: Any, shape: Sequence[int]) -> list[_Axes]:
    """For each axis of an array, the mesh axes that split it, major first; () where none do.

    An axis that is split in a way that the mesh cannot name counts as not split: the partitioner
    then gathers it, which is slower, not wrong.
    """
    nothing: list[_Axes] = [()] * len(shape)
    if sharding is None or sharding.is_fully_replicated:
        return nothing
    try:
        indices = sharding.devices_indices_map(tuple(shape))
    except ValueError:  # an axis that does not divide evenly
        return nothing
    result = []
    for axis, size in enumerate(shape):
        starts = np.array([(indices[d][axis].start or 0) for d in mesh.devices.flat])
        result.append(_axes_of_starts(mesh, starts.reshape(mesh.devices.shape), size))
    return result


def _axes_of_starts(mesh: Mesh, starts: np.ndarray, size: int) -> _Axes:
    parts = len(np.unique(starts))
    if parts == 1 or size % parts:
        return ()
    rank = starts // (size // parts)
    origin = (0,) * rank.ndim
    strides = {}
    for dim, name in enumerate(mesh.axis_names):
        step = np.take(rank, 1, axis=dim)[origin[1:]] - rank[origin]
        if step > 0:
            strides[name] = (int(step), dim)
    expected = np.full(rank.shape, rank[origin])
    for stride, dim in strides.values():
        reach = np.arange(rank.shape[dim]).reshape(
            [-1 if d == dim else 1 for d in range(rank.ndim)]
        )
        expected = expected + stride * reach
    if rank[origin] != 0 or not np.array_equal(expected, rank):
        return ()
    return tuple(sorted(strides, key=lambda name: -strides[name][0]))
