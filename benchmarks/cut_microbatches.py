"""A replica's columns as the objects that explain them: microbatches, wave by wave.

What is sent to ranks are columns; tests, the demo's and benchmarks look at them through these.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from dataservice_proto.columns import SHARD, read_all
from numpy.typing import NDArray

from dataservice.core.layout import expanded, sample_starts
from dataservice.core.orders import EVERYTHING, ShardColumns, UnitRange, WantedParts
from dataservice.core.sample import ItemNotes, Modality
from dataservice.engine.shards import StepParts, columns_of

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureRoutes:
    """Rows of encoded features that one rank sends and receives in a wave, for one modality.

    The rank encodes its items in the order given by its parts; their features, end to end,
    are its rows. `send_rows` int32[s] are rows of those, in order of destination;
    `send_splits`, `recv_splits` int32[N] count rows per replica; `recv_positions` int32[r]
    are the local token positions of the rows received, in order of source.
    """

    modality: Modality
    send_rows: NDArray[np.int32]
    send_splits: NDArray[np.int32]
    recv_splits: NDArray[np.int32]
    recv_positions: NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemsOfPack:
    """Encoder items of one pack, as places in the pack's list of items; of each the units in
    `ranges`, or all of it where there are none."""

    pack: int
    items: tuple[int, ...]
    ranges: tuple[UnitRange, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PackItems:
    """The m encoder items of a pack, in sequence order: `modality` int8[m]; `start` int32[m], the
    place of an item's first token in the padded pack; `tokens` int32[m], how many it has."""

    modality: NDArray[np.int8]
    start: NDArray[np.int32]
    tokens: NDArray[np.int32]
    notes: ItemNotes

    def __len__(self) -> int:
        return len(self.modality)

    @staticmethod
    def none() -> "PackItems":
        """No items: of an idle replica, or of a pack of text alone."""
        empty = np.zeros(0, dtype=np.int32)
        return PackItems(
            modality=empty.astype(np.int8), start=empty, tokens=empty, notes=ItemNotes.unknown(0)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """One rank's part of one wave. `pack` is -1 when its replica is idle in the wave.

    `cu_seqlens` int32[S+1] are the padded sample offsets of the whole pack, `lengths`
    int32[S] the true lengths, `items` all its encoder items; `encodes[modality]` lists the items
    that this rank encodes, by pack, and `encode_notes[modality]` what is known of them.
    `loss_weights` float64[S] are of the samples, empty where all samples of the step weigh 1.
    """

    wave: int
    pack: int
    cp_group: tuple[int, ...]
    cp_rank: int
    seconds: float
    sample_ids: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    encodes: dict[Modality, tuple[ItemsOfPack, ...]]
    routes: dict[Modality, FeatureRoutes]
    encode_notes: dict[Modality, ItemNotes] = field(default_factory=dict)
    items: PackItems = field(default_factory=PackItems.none)
    loss_weights: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))


def microbatches_of(
    parts: StepParts, replica: int, wanted: WantedParts = EVERYTHING
) -> tuple[Microbatch, ...]:
    """One replica's microbatches as objects, wave by wave; idle waves included."""
    return microbatches(columns_of(parts, replica, wanted))


def microbatches(shard: ShardColumns) -> tuple[Microbatch, ...]:
    """The microbatches of a replica, idle waves included. Raises ValueError where the columns
    contradict each other."""
    given = {"waves": shard.waves, "phases": len(Modality) * shard.waves}
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
