"""Cut a step plan into the parts of its ranks.

The routes of the whole step are computed once and sliced for each replica. Ranks of one
replica get the same microbatches; what differs is which of their bytes each may fetch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.core.layout import sample_starts
from dataservice.core.orders import (
    EVERYTHING,
    FeatureRoutes,
    ItemsOfPack,
    Microbatch,
    PackItems,
    PackKey,
    PartSpec,
    UnitRange,
    WantedParts,
)
from dataservice.core.plan import StepPlan
from dataservice.core.sample import ItemNotes, Modality
from dataservice.planning.kernels.sort import group_stable
from dataservice.planning.pieces import item_numbers, unit_counts
from dataservice.planning.routes import (
    ItemPlaces,
    Runs,
    buckets,
    encode_order,
    feature_runs,
    item_places,
    phase_bucket,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """A plan with its exchange, ready to be cut.

    `encode_*` [k] list what is encoded, items or pieces of them, in encoding order;
    `runs_by_source` is sorted by (wave, modality, source, target), `runs_by_target` by (wave,
    modality, target, source).
    `padded_starts` int64[n+1] are the sequence offsets of all packs end to end; `pack_at`
    int32[waves, replicas] is the pack of each replica in each wave, -1 where it is idle.
    `encode_range` int32[k, 3] are first, stop and number of units of what is encoded of each item,
    None where no item is cut, and `encode_notes` are of that.
    `items` are of the plan's items as they were drawn, by pack, from `pack_item_offsets`
    int64[P+1] on.
    """

    plan: StepPlan
    encode_bucket: NDArray[np.int64]
    encode_pack: NDArray[np.int32]
    encode_place: NDArray[np.int32]
    encode_range: NDArray[np.int32] | None
    encode_notes: ItemNotes
    runs_by_source: Runs
    source_bucket: NDArray[np.int64]
    runs_by_target: Runs
    target_bucket: NDArray[np.int64]
    modalities: tuple[frozenset[Modality], ...]
    padded_starts: NDArray[np.int64]
    pack_at: NDArray[np.int32]
    items: PackItems
    pack_item_offsets: NDArray[np.int64]


def cut_step(plan: StepPlan, notes: ItemNotes | None = None) -> StepParts:
    """Prepare a plan for `microbatches_of`. O(n + k + W·N) for n samples, k runs of feature
    rows. `notes` are of the plan's items as they were drawn, in its order."""
    places = item_places(plan)
    order = encode_order(plan, places)
    runs = feature_runs(plan, places)
    target_bucket = phase_bucket(plan, runs.wave, runs.modality, runs.target)
    # Runs are sorted by source and row already, and the sort is stable.
    by_target, _ = group_stable(target_bucket, np.arange(len(runs.item)), buckets(plan))
    wave = plan.pack_wave[places.pack]
    seen = np.zeros((plan.waves, len(Modality)), dtype=bool)
    seen[wave, plan.item_modality] = True
    pack_at = np.full((plan.waves, plan.replicas), -1, dtype=np.int32)
    member = np.repeat(np.arange(plan.packs, dtype=np.int32), plan.pack_degree)
    pack_at[plan.pack_wave[member], plan.pack_replicas] = member
    padded_starts = sample_starts(plan.padded_sample_tokens)
    sample_start = np.empty(len(plan.sample_ids), dtype=np.int64)
    sample_start[plan.pack_samples] = padded_starts[:-1]
    drawn = _drawn_items(plan, places)
    first = drawn.rows
    start = sample_start[plan.item_sample[first]] + plan.item_position[first]
    pack_start = padded_starts[plan.pack_offsets[:-1]]
    notes = notes if notes is not None else ItemNotes.unknown(len(drawn.rows))
    return StepParts(
        plan=plan,
        encode_bucket=phase_bucket(plan, wave, plan.item_modality, plan.item_replica)[order],
        encode_pack=places.pack[order],
        encode_place=drawn.place[order],
        encode_range=None if drawn.ranges is None else drawn.ranges[order],
        encode_notes=_encode_notes(notes, drawn).take(order),
        runs_by_source=runs,
        source_bucket=phase_bucket(plan, runs.wave, runs.modality, runs.source),
        runs_by_target=runs.take(by_target),
        target_bucket=target_bucket[by_target],
        modalities=tuple(
            frozenset(modality for modality in Modality if kinds[modality]) for kinds in seen
        ),
        padded_starts=padded_starts,
        pack_at=pack_at,
        items=PackItems(
            modality=plan.item_modality[first],
            start=(start - pack_start[places.pack[first]]).astype(np.int32),
            tokens=drawn.llm_tokens,
            notes=notes.take(drawn.item[first]),
        ),
        pack_item_offsets=sample_starts(np.bincount(places.pack[first], minlength=plan.packs)),
    )


class _DrawnItems(NamedTuple):
    """The items of a plan that may have cut some of them, [m] rows: `rows` int64[items] are those
    of the items' first pieces, by pack, and `llm_tokens` int32[items] are of those items; `item`
    int64[m] is the item that a row is of, `place` int32[m] its place in its pack, and `ranges`
    int32[m, 3] the units of it that the row has, None where all have all."""

    rows: NDArray[np.int64]
    llm_tokens: NDArray[np.int32]
    item: NDArray[np.int64]
    place: NDArray[np.int32]
    ranges: NDArray[np.int32] | None


def _drawn_items(plan: StepPlan, places: ItemPlaces) -> _DrawnItems:
    item, first = item_numbers(plan), plan.item_first_unit
    if first is None:
        tokens = plan.item_llm_tokens[places.order]
        return _DrawnItems(places.order, tokens, item, places.place, None)
    rows = places.order[first[places.order] == 0]
    held = unit_counts(plan)
    of = np.bincount(item, weights=held).astype(np.int32)
    tokens = np.bincount(item, weights=plan.item_llm_tokens).astype(np.int32)
    begins = sample_starts(np.bincount(places.pack[rows], minlength=plan.packs))
    place = np.empty(len(rows), dtype=np.int32)
    place[item[rows]] = np.arange(len(rows)) - begins[places.pack[rows]]
    ranges = np.stack([first, first + held, of[item]], axis=1)
    return _DrawnItems(rows, tokens[item[rows]], item, place[item], ranges)


def _encode_notes(notes: ItemNotes, drawn: _DrawnItems) -> ItemNotes:
    """What is known of each row: of a piece as of its item, in a grid as long as the piece."""
    of_rows = notes.take(drawn.item)
    if drawn.ranges is None:
        return of_rows
    first, stop, of = drawn.ranges.T
    grid = of_rows.grid.copy()
    grid[:, 0] = grid[:, 0] // of * (stop - first)
    return replace(of_rows, grid=grid)


def microbatches_of(
    parts: StepParts, replica: int, wanted: WantedParts = EVERYTHING
) -> tuple[Microbatch, ...]:
    """One replica's microbatches, wave by wave; idle waves included.

    A rank that wants neither tokens nor media has no part in the encoders and their exchange:
    its microbatches leave them out.
    """
    plan = parts.plan
    return tuple(
        _microbatch(
            parts,
            replica,
            wave,
            int(parts.pack_at[wave, replica]),
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
                spec = PartSpec(key=keys[chosen.pack], items=chosen.items, ranges=chosen.ranges)
                parts.setdefault(chosen.pack, []).append(spec)
    return parts


def _microbatch(
    parts: StepParts,
    replica: int,
    wave: int,
    pack: int,
    modalities: Sequence[Modality],
) -> Microbatch:
    plan = parts.plan
    group = plan.replicas_of(pack) if pack >= 0 else (replica,)
    samples = plan.samples_of(pack) if pack >= 0 else np.zeros(0, dtype=np.int32)
    bounds = np.zeros(1, dtype=np.int64)
    if pack >= 0:
        first, last = plan.pack_offsets[pack : pack + 2]
        bounds = parts.padded_starts[first : last + 1] - parts.padded_starts[first]
    encoded = {m: _rows(parts.encode_bucket, plan, wave, m, replica) for m in modalities}
    return Microbatch(
        wave=wave,
        pack=pack,
        cp_group=group,
        cp_rank=group.index(replica),
        seconds=float(plan.pack_seconds[pack]) if pack >= 0 else 0.0,
        sample_ids=plan.sample_ids[samples],
        cu_seqlens=bounds.astype(np.int32),
        lengths=plan.sample_tokens[samples],
        encodes={m: _encodes(parts, encoded[m]) for m in modalities},
        routes={m: _routes(parts, wave, m, replica) for m in modalities},
        encode_notes={m: parts.encode_notes.take(encoded[m]) for m in modalities},
        items=_items(parts, pack) if pack >= 0 else PackItems.none(),
        loss_weights=(
            np.zeros(0) if plan.sample_loss_weights is None else plan.sample_loss_weights[samples]
        ),
    )


def _items(parts: StepParts, pack: int) -> PackItems:
    items, of_pack = parts.items, slice(*parts.pack_item_offsets[pack : pack + 2])
    return PackItems(
        modality=items.modality[of_pack],
        start=items.start[of_pack],
        tokens=items.tokens[of_pack],
        notes=items.notes.take(of_pack),
    )


def _encodes(parts: StepParts, rows: slice) -> tuple[ItemsOfPack, ...]:
    packs, places, ranges = parts.encode_pack[rows], parts.encode_place[rows], None
    if parts.encode_range is not None:
        ranges = parts.encode_range[rows]
    return tuple(
        ItemsOfPack(
            pack=int(pack),
            items=tuple(places[packs == pack].tolist()),
            ranges=() if ranges is None else _ranges(ranges[packs == pack]),
        )
        for pack in np.unique(packs)
    )


def _ranges(rows: NDArray[np.int32]) -> tuple[UnitRange, ...]:
    """The units [k, 3] of some items; empty where all of them are whole."""
    if (rows[:, 1] - rows[:, 0] == rows[:, 2]).all():
        return ()
    return tuple(UnitRange(*row) for row in rows.tolist())


def _routes(parts: StepParts, wave: int, modality: Modality, replica: int) -> FeatureRoutes:
    plan = parts.plan
    sent = parts.runs_by_source.take(_rows(parts.source_bucket, plan, wave, modality, replica))
    got = parts.runs_by_target.take(_rows(parts.target_bucket, plan, wave, modality, replica))
    return FeatureRoutes(
        modality=modality,
        send_rows=_expand(sent.source_row, sent.rows),
        send_splits=_splits(sent.target, sent.rows, plan.replicas),
        recv_splits=_splits(got.source, got.rows, plan.replicas),
        recv_positions=_expand(got.target_row, got.rows),
    )


def _rows(
    buckets: NDArray[np.int64], plan: StepPlan, wave: int, modality: Modality, replica: int
) -> slice:
    wanted = (wave * 2 + modality) * plan.replicas + replica
    return slice(*np.searchsorted(buckets, [wanted, wanted + 1]))


def _expand(first: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int32]:
    """Runs (first, rows) as single row numbers: int32[sum(rows)]."""
    before = np.cumsum(rows) - rows
    total = int(rows.sum())
    return (np.repeat(first - before, rows) + np.arange(total)).astype(np.int32)


def _splits(replicas: NDArray[np.int32], rows: NDArray[np.int64], count: int) -> NDArray[np.int32]:
    return np.bincount(replicas, weights=rows, minlength=count).astype(np.int32)
