"""Cut a step plan into the parts of its ranks.

The routes of the whole step are computed once and sliced for each replica. Ranks of one
replica get the same microbatches; what differs is which of their bytes each may fetch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.layout import sample_starts
from dataservice.core.orders import (
    EVERYTHING,
    FeatureRoutes,
    ItemsOfPack,
    Microbatch,
    PackKey,
    PartSpec,
    WantedParts,
)
from dataservice.core.plan import StepPlan
from dataservice.core.sample import Modality
from dataservice.planning.routes import Runs, encode_order, feature_runs, item_places


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """A plan with its exchange, ready to be cut.

    `encode_*` list the items in encoding order; `runs_by_source` is sorted by (wave,
    modality, source, target), `runs_by_target` by (wave, modality, target, source).
    """

    plan: StepPlan
    encode_bucket: NDArray[np.int64]
    encode_pack: NDArray[np.int32]
    encode_place: NDArray[np.int32]
    runs_by_source: Runs
    source_bucket: NDArray[np.int64]
    runs_by_target: Runs
    target_bucket: NDArray[np.int64]
    modalities: tuple[frozenset[Modality], ...]


def cut_step(plan: StepPlan) -> StepParts:
    """Prepare a plan for `microbatches_of`. O(k log k) in runs of feature rows."""
    places = item_places(plan)
    order = encode_order(plan, places)
    runs = feature_runs(plan, places)
    by_target = np.lexsort((runs.source_row, runs.source, runs.target, runs.modality, runs.wave))
    wave = plan.pack_wave[places.pack]
    present: list[set[Modality]] = [set() for _ in range(plan.waves)]
    for seen in np.unique(wave.astype(np.int64) * 2 + plan.item_modality).tolist():
        present[seen // 2].add(Modality(seen % 2))
    received = _take(runs, by_target)
    return StepParts(
        plan=plan,
        encode_bucket=_bucket(plan, wave, plan.item_modality, plan.item_replica)[order],
        encode_pack=places.pack[order],
        encode_place=places.place[order],
        runs_by_source=runs,
        source_bucket=_bucket(plan, runs.wave, runs.modality, runs.source),
        runs_by_target=received,
        target_bucket=_bucket(plan, received.wave, received.modality, received.target),
        modalities=tuple(frozenset(kinds) for kinds in present),
    )


def microbatches_of(
    parts: StepParts, replica: int, wanted: WantedParts = EVERYTHING
) -> tuple[Microbatch, ...]:
    """One replica's microbatches, wave by wave; idle waves included.

    A rank that wants neither tokens nor media has no part in the encoders and their exchange:
    its microbatches leave them out.
    """
    plan = parts.plan
    seat = np.flatnonzero(plan.pack_replicas == replica)
    pack_of_seat = np.searchsorted(plan.replica_offsets, seat, side="right") - 1
    pack_of_wave = dict(
        zip(plan.pack_wave[pack_of_seat].tolist(), pack_of_seat.tolist(), strict=True)
    )
    padded_starts = sample_starts(plan.padded_sample_tokens)
    return tuple(
        _microbatch(
            parts,
            replica,
            wave,
            pack_of_wave.get(wave, -1),
            padded_starts,
            sorted(parts.modalities[wave]) if wanted.tokens or wanted.media else [],
        )
        for wave in range(plan.waves)
    )


def part_specs(
    microbatches: Sequence[Microbatch], keys: Sequence[PackKey], wanted: WantedParts
) -> dict[int, list[PartSpec]]:
    """What a rank is to fetch, by pack: its sequences' tensors, and the items it encodes.

    `keys[p]` names pack p. Empty when nothing is wanted.
    """
    tensors = () if wanted.tokens and wanted.labels else wanted.sequence
    parts: dict[int, list[PartSpec]] = {}
    for microbatch in microbatches:
        if microbatch.pack >= 0 and wanted.sequence:
            pack = microbatch.pack
            spec = PartSpec(key=keys[pack], cp_rank=microbatch.cp_rank, tensors=tensors)
            parts.setdefault(pack, []).append(spec)
        for encodes in microbatch.encodes.values() if wanted.media else ():
            for chosen in encodes:
                spec = PartSpec(key=keys[chosen.pack], items=chosen.items)
                parts.setdefault(chosen.pack, []).append(spec)
    return parts


def _microbatch(
    parts: StepParts,
    replica: int,
    wave: int,
    pack: int,
    padded_starts: NDArray[np.int64],
    modalities: Sequence[Modality],
) -> Microbatch:
    plan = parts.plan
    group = plan.replicas_of(pack) if pack >= 0 else (replica,)
    samples = plan.samples_of(pack) if pack >= 0 else np.zeros(0, dtype=np.int32)
    bounds = np.zeros(1, dtype=np.int64)
    if pack >= 0:
        first, last = plan.pack_offsets[pack : pack + 2]
        bounds = padded_starts[first : last + 1] - padded_starts[first]
    return Microbatch(
        wave=wave,
        pack=pack,
        cp_group=group,
        cp_rank=group.index(replica),
        seconds=float(plan.pack_seconds[pack]) if pack >= 0 else 0.0,
        sample_ids=plan.sample_ids[samples],
        cu_seqlens=bounds.astype(np.int32),
        lengths=plan.sample_tokens[samples],
        encodes={m: _encodes(parts, wave, m, replica) for m in modalities},
        routes={m: _routes(parts, wave, m, replica) for m in modalities},
    )


def _encodes(
    parts: StepParts, wave: int, modality: Modality, replica: int
) -> tuple[ItemsOfPack, ...]:
    rows = _rows(parts.encode_bucket, parts.plan, wave, modality, replica)
    packs = parts.encode_pack[rows]
    return tuple(
        ItemsOfPack(pack=int(pack), items=tuple(parts.encode_place[rows][packs == pack].tolist()))
        for pack in np.unique(packs)
    )


def _routes(parts: StepParts, wave: int, modality: Modality, replica: int) -> FeatureRoutes:
    plan = parts.plan
    sent = _take(parts.runs_by_source, _rows(parts.source_bucket, plan, wave, modality, replica))
    got = _take(parts.runs_by_target, _rows(parts.target_bucket, plan, wave, modality, replica))
    return FeatureRoutes(
        modality=modality,
        send_rows=_expand(sent.source_row, sent.rows),
        send_splits=_splits(sent.target, sent.rows, plan.replicas),
        recv_splits=_splits(got.source, got.rows, plan.replicas),
        recv_positions=_expand(got.target_row, got.rows),
    )


def _bucket(
    plan: StepPlan,
    wave: NDArray[np.int32],
    modality: NDArray[np.int8],
    replica: NDArray[np.int32],
) -> NDArray[np.int64]:
    return (wave.astype(np.int64) * 2 + modality) * plan.replicas + replica


def _rows(
    buckets: NDArray[np.int64], plan: StepPlan, wave: int, modality: Modality, replica: int
) -> slice:
    wanted = (wave * 2 + modality) * plan.replicas + replica
    return slice(*np.searchsorted(buckets, [wanted, wanted + 1]))


def _take(runs: Runs, rows: NDArray[np.int64] | slice) -> Runs:
    return Runs(**{name: getattr(runs, name)[rows] for name in Runs.__dataclass_fields__})


def _expand(first: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int32]:
    """Runs (first, rows) as single row numbers: int32[sum(rows)]."""
    before = np.cumsum(rows) - rows
    total = int(rows.sum())
    return (np.repeat(first - before, rows) + np.arange(total)).astype(np.int32)


def _splits(replicas: NDArray[np.int32], rows: NDArray[np.int64], count: int) -> NDArray[np.int32]:
    return np.bincount(replicas, weights=rows, minlength=count).astype(np.int32)
