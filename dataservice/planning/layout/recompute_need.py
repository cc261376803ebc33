"""What recomputation is chosen from: bytes and seconds of a device's layers, equal ones together.

And, where nothing fits, the error that says by how much and what would.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.layout.in_flight import held_counts
from dataservice.planning.layout.recompute_search import (
    CHOICES,
    LayerGroups,
    least_counts,
    peak_bytes,
)
from dataservice.planning.pipeline_parallel.simulator import Program, make_program


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Checked input, by device.

    `groups`: its layers, equal ones together; `members`: which layers of the model those are;
    `held`: what it holds at once, int32[row, chunk, class of microbatches]. `added_s`
    float64[microbatch, layer, choice].
    """

    groups: list[LayerGroups]
    members: list[list[NDArray[np.int64]]]
    held: list[NDArray[np.int32]]
    added_s: NDArray[np.float64]
    memory_bytes: NDArray[np.float64]
    fixed_bytes: NDArray[np.float64]
    equal_microbatches: bool


def device_needs(
    kept_bytes: ArrayLike,
    recompute_s: ArrayLike,
    working_bytes: ArrayLike | None,
    *,
    memory_bytes: ArrayLike,
    fixed_bytes: ArrayLike,
    bounds: NDArray[np.int64],
    program: Program,
    stages: int,
    microbatches: int,
) -> Need:
    """Arguments as for `choose_recompute`. Bytes are rounded up to whole ones."""
    layers = int(bounds[-1])
    kept = np.ceil(_by_choice(kept_bytes, "kept_bytes", microbatches, layers))
    added = _by_choice(recompute_s, "recompute_s", microbatches, layers)
    working = np.zeros((1, layers, CHOICES))
    if working_bytes is not None:
        working = np.ceil(_by_choice(working_bytes, "working_bytes", microbatches, layers))
    classes, class_of = np.unique(kept.reshape(len(kept), -1), axis=0, return_inverse=True)
    kept = classes.reshape(len(classes), layers, CHOICES)
    class_of = np.broadcast_to(class_of.reshape(-1), (microbatches,))
    chunks = bounds.size - 1
    held = held_counts(program, stages, chunks // stages, class_of)
    groups, members = [], []
    for device in range(stages):
        found = _device_groups(device, stages, bounds, kept, added, working.max(axis=0), held)
        groups.append(found[0])
        members.append(found[1])
    return Need(
        groups=groups,
        members=members,
        held=held,
        added_s=np.broadcast_to(added, (microbatches, layers, CHOICES)),
        memory_bytes=_by_device(memory_bytes, "memory_bytes", stages),
        fixed_bytes=_by_device(fixed_bytes, "fixed_bytes", stages),
        equal_microbatches=len(added) == 1,
    )


def _by_choice(values: ArrayLike, name: str, microbatches: int, layers: int) -> NDArray[np.float64]:
    """float64[microbatch or 1, layer, choice]."""
    table = np.asarray(values, dtype=np.float64)
    shapes = (layers, CHOICES), (microbatches, layers, CHOICES)
    if table.shape not in shapes:
        raise PlanningError(
            f"{name} has shape {table.shape}; give {shapes[0]}, or {shapes[1]}: by layer, with no, "
            "selective and full recomputation"
        )
    if not (table.min() >= 0 and table.max() < np.inf):
        raise PlanningError(
            f"{name} spans {table.min()}..{table.max()}; it is ≥ 0 and finite: a layer without a "
            "selective way repeats another of its choices"
        )
    return table.reshape(-1, layers, CHOICES)


def _by_device(values: ArrayLike, name: str, stages: int) -> NDArray[np.float64]:
    table = np.asarray(values, dtype=np.float64)
    if table.shape not in ((), (stages,)):
        raise PlanningError(f"{name} has shape {table.shape}; give one number, or one a device")
    if not (table.min() >= 0 and table.max() < np.inf):
        raise PlanningError(f"{name} spans {table.min()}..{table.max()}; bytes are ≥ 0 and finite")
    return np.array(np.broadcast_to(table, (stages,)))


def _device_groups(
    device: int,
    stages: int,
    bounds: NDArray[np.int64],
    kept: NDArray[np.float64],
    added: NDArray[np.float64],
    working: NDArray[np.float64],
    held: list[NDArray[np.int32]],
) -> tuple[LayerGroups, list[NDArray[np.int64]]]:
    """Layers of a chunk that keep, add and need the same are a group."""
    members: list[NDArray[np.int64]] = []
    used = []
    for local, chunk in enumerate(range(device, bounds.size - 1, stages)):
        layers = np.arange(bounds[chunk], bounds[chunk + 1])
        alike = np.concatenate(
            [
                table[:, layers].transpose(1, 0, 2).reshape(layers.size, -1)
                for table in (kept, added, working[None])
            ],
            axis=1,
        )
        _, first, group_of = np.unique(alike, axis=0, return_index=True, return_inverse=True)
        order = np.argsort(first, kind="stable")
        members += [layers[group_of.reshape(-1) == group] for group in order]
        # [row, class] · [class, group · choice], one product a chunk
        of_heads = kept[:, layers[first[order]]].reshape(len(kept), -1)
        sums = held[device][:, local].astype(np.float64) @ of_heads
        used.append(sums.reshape(len(sums), -1, CHOICES))
    heads = np.array([group[0] for group in members])
    groups = LayerGroups(
        layers=np.array([group.size for group in members]),
        used=np.concatenate(used, axis=1),
        working=working[heads],
        cost=added[:, heads].mean(axis=0),
    )
    return groups, members


def does_not_fit(
    need: Need, device: int, bounds: NDArray[np.int64], program: Program
) -> PlanningError:
    """The error of a device on which no choice fits: by how much, and what would."""
    groups, fixed = need.groups[device], float(need.fixed_bytes[device])
    memory = float(need.memory_bytes[device])
    counts = least_counts(groups)
    least = peak_bytes(groups, counts)
    what = (
        f"stage {device} holds at least {fixed + least:,.0f} bytes with its layers recomputed, "
        f"{fixed:,.0f} of them fixed, and has {memory:,.0f}: {fixed + least - memory:,.0f} bytes "
        "too much"
    )
    room = memory - fixed
    if room <= 0:
        return PlanningError(
            f"{what}. Its fixed bytes alone fill it: split the weights over more tensor parallel "
            "ranks or stages, shard the optimizer, or give it fewer layers"
        )
    helps = [f"microbatches of at most {room / least:.0%} of their tokens"]
    limit = _limit_that_fits(need, device, room, bounds, program)
    if limit:
        helps.insert(0, f"activation_limit={limit}, which holds fewer microbatches at once")
    fewer = _layers_too_many(groups, counts, room)
    if fewer:
        helps.append(f"{fewer} of its {int(groups.layers.sum())} layers on other stages")
    return PlanningError(f"{what}. What would fit: {'; or '.join(helps)}")


def _limit_that_fits(
    need: Need, device: int, room: float, bounds: NDArray[np.int64], program: Program
) -> int:
    """The largest activation_limit with which the device fits; 0 if there is none."""
    stages = len(need.groups)
    virtual = (bounds.size - 1) // stages
    microbatches = int(program.position.max()) + 1
    held = need.held[device]
    used = need.groups[device].used
    if used.shape[0] > 1 or virtual > 1 or held.shape[2] > 1:
        return _tried_limit(need, device, room, microbatches, stages, virtual)
    one = used / max(1, int(held.sum()))
    for limit in range(int(held.sum()) - 1, 0, -1):
        groups = need.groups[device]._replace(used=one * limit)
        if peak_bytes(groups, least_counts(groups)) <= room:
            return limit
    return 0


def _tried_limit(
    need: Need, device: int, room: float, microbatches: int, stages: int, virtual: int
) -> int:
    """The same where several chunks or unequal microbatches are held: by the schedule itself, with
    as many bytes each as the largest takes."""
    groups, held = need.groups[device], need.held[device]
    most = int(held.sum(axis=(1, 2)).max())
    largest = groups.used.max(axis=0) / most
    alike = np.zeros(microbatches, np.int64)
    for limit in range(most - 1, 0, -1):
        try:
            program = make_program(microbatches, stages, virtual, limit)
        except PlanningError:
            return 0
        count = int(held_counts(program, stages, virtual, alike)[device].sum(axis=(1, 2)).max())
        fewer = groups._replace(used=(largest * count)[None])
        if peak_bytes(fewer, least_counts(fewer)) <= room:
            return limit
    return 0


def _layers_too_many(groups: LayerGroups, counts: NDArray[np.int64], room: float) -> int:
    """How many layers fewer would fit, those that hold most first; 0 if that takes all of them."""
    left = counts.copy()
    each = groups.used.max(axis=0)
    total = int(left.sum())
    for gone in range(1, total):
        heaviest = np.where(left > 0, each, -1.0).argmax()
        left[np.unravel_index(heaviest, left.shape)] -= 1
        if peak_bytes(groups, left) <= room:
            return gone
    return 0
