"""A replica's columns as the objects that explain them: microbatches, wave by wave.

What is sent to ranks stays columns; tests, the demo and benchmarks look at it through these.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from dataservice_proto.columns import SHARD, read_all
from numpy.typing import NDArray

from dataservice.core.layout import sample_starts
from dataservice.core.orders import (
    FeatureRoutes,
    ItemsOfPack,
    Microbatch,
    PackItems,
    ShardColumns,
    UnitRange,
)
from dataservice.core.sample import ItemNotes, Modality

Arrays = Mapping[str, NDArray[Any]]


def microbatches(shard: ShardColumns) -> tuple[Microbatch, ...]:
    """The microbatches of a replica, idle waves included. Raises ValueError where the columns
    contradict each other."""
    given = {"waves": shard.waves, "phases": len(Modality) * shard.waves, "rings": shard.rings}
    of = read_all(SHARD, shard.columns, given)
    phases = _phases(of, shard.replicas)
    members, samples, items = (
        _cuts(of[name]) for name in ("wave_degree", "wave_samples", "wave_items")
    )
    return tuple(
        Microbatch(
            wave=wave,
            pack=int(of["wave_pack"][wave]),
            cp_group=tuple(of["group"][members[wave]].tolist()),
            cp_rank=int(of["wave_member"][wave]),
            seconds=float(of["wave_seconds"][wave]),
            sample_ids=of["sample_id"][samples[wave]],
            cu_seqlens=sample_starts(of["sample_padded"][samples[wave]]).astype(np.int32),
            lengths=of["sample_tokens"][samples[wave]].astype(np.int32),
            encodes={each.modality: each.encodes for each in phases.get(wave, ())},
            routes={each.modality: each.routes for each in phases.get(wave, ())},
            encode_notes={each.modality: each.notes for each in phases.get(wave, ())},
            items=PackItems(
                modality=of["item_modality"][items[wave]].astype(np.int8),
                start=of["item_start"][items[wave]].astype(np.int32),
                tokens=of["item_tokens"][items[wave]].astype(np.int32),
                notes=_notes(of, "item", items[wave]),
            ),
            loss_weights=of["sample_weight"][samples[wave]],
        )
        for wave in range(shard.waves)
    )


class _Phase(NamedTuple):
    modality: Modality
    encodes: tuple[ItemsOfPack, ...]
    notes: ItemNotes
    routes: FeatureRoutes


def _phases(of: Arrays, replicas: int) -> dict[int, list[_Phase]]:
    """What the replica encodes, sends and receives in each wave that has such a phase."""
    parts, places = _cuts(of["phase_parts"]), _cuts(of["part_items"])
    sends, receives = _cuts(of["phase_sends"]), _cuts(of["phase_receives"])
    found: dict[int, list[_Phase]] = {}
    for phase in np.flatnonzero(of["phase_parts"] >= 0).tolist():
        wave, modality = divmod(phase, len(Modality))
        own = range(*parts[phase].indices(len(places)))
        rows = slice(places[own[0]].start, places[own[-1]].stop) if own else slice(0, 0)
        found.setdefault(wave, []).append(
            _Phase(
                modality=Modality(modality),
                encodes=tuple(_encodes(of, part, places[part]) for part in own),
                notes=_notes(of, "place", rows),
                routes=_routes(of, Modality(modality), sends[phase], receives[phase], replicas),
            )
        )
    return found


def _encodes(of: Arrays, part: int, rows: slice) -> ItemsOfPack:
    units = [of[name][rows].tolist() for name in ("place_first", "place_stop", "place_of")]
    ranges = tuple(map(UnitRange, *units))
    whole = all(each.stop - each.first == each.of for each in ranges)
    return ItemsOfPack(
        pack=int(of["part_pack"][part]),
        items=tuple(of["place"][rows].tolist()),
        ranges=() if whole else ranges,
    )


def _routes(
    of: Arrays, modality: Modality, sends: slice, receives: slice, replicas: int
) -> FeatureRoutes:
    sent, got = of["send_rows"][sends], of["receive_rows"][receives]
    return FeatureRoutes(
        modality=modality,
        send_rows=expanded(of["send_row"][sends], sent).astype(np.int32),
        send_splits=_splits(of["send_target"][sends], sent, replicas),
        recv_splits=_splits(of["receive_source"][receives], got, replicas),
        recv_positions=expanded(of["receive_row"][receives], got).astype(np.int32),
    )


def expanded(first: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Runs (first, rows) as single row numbers: int64[sum(rows)]."""
    before = np.cumsum(rows) - rows
    return np.repeat(first - before, rows) + np.arange(int(rows.sum()))


def _splits(replicas: NDArray[np.int64], rows: NDArray[np.int64], count: int) -> NDArray[np.int32]:
    return np.bincount(replicas, weights=rows, minlength=count).astype(np.int32)


def _notes(of: Arrays, kind: str, rows: slice) -> ItemNotes:
    notes = ItemNotes.unknown(rows.stop - rows.start)
    for name, column in (
        ("kind", notes.kind),
        ("grid", notes.grid),
        ("seconds", notes.seconds_per_patch),
    ):
        if of[f"{kind}_{name}"].size:
            column[:] = of[f"{kind}_{name}"][rows]
    return notes


def _cuts(counts: NDArray[np.int64] | Sequence[int]) -> list[slice]:
    """The rows of each of those counted; a count below 0 has none."""
    ends = sample_starts(np.maximum(counts, 0)).tolist()
    return [slice(start, stop) for start, stop in pairwise(ends)]
