"""A step plan cut into the parts of its ranks: columns of all replicas, of which each gets a slice.

    plan ── sorted by replica, once ──► columns of the step ──► rows of one replica, as bytes

No object is made for a sample or an item: whatever a rank is told of its part of the step are the
bytes between two offsets of each column, see `dataservice_proto.columns`. Ranks of one replica get
the same microbatches; what differs is which of their bytes each may fetch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from dataservice_proto.columns import SHARD, SHARD_FIELDS, TICKET, packed
from numpy.typing import NDArray

from dataservice.core.layout import counts_between, expanded, sample_starts
from dataservice.core.orders import EVERYTHING, ShardColumns, WantedParts
from dataservice.core.plan import StepPlan
from dataservice.core.sample import ItemNotes, Modality
from dataservice.engine.cut_fields import CutWhenAsked, cut_fields
from dataservice.planning.pieces import item_numbers, unit_counts
from dataservice.planning.routes import (
    ByPhase,
    ListedItems,
    Runs,
    encode_order,
    encoded_parts,
    feature_runs,
    listed_items,
)

Array = NDArray[Any]
_PHASES = len(Modality)
# The columns of a shard that differ by replica.
_SHARD_COLUMNS = tuple(column.name for column in SHARD)
# The columns of what is encoded and exchanged: ranks without tokens and media have no part in it.
_OF_PHASES = tuple(
    column.name
    for column in SHARD
    if column.name.startswith(("phase_", "part_", "place", "send_", "receive_"))
)
# The columns of a ticket but for who holds what.
_TICKET_COLUMNS = tuple(column.name for column in TICKET if not column.name.endswith("_worker"))
_OF_WAVES = tuple(name for name in _SHARD_COLUMNS if name not in _OF_PHASES)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """A plan, ready to be cut: the columns of all replicas end to end. `written` are the columns as
    fields of a message: of each replica those of what it has of each wave, and those of what is
    encoded and exchanged. `rings` is how many packs are shared by several. `ticket` are the columns
    of tickets but for who holds what, and `ticket_begins` int64[N+1] where in each the rows of each
    replica begin, in bytes.

    `fetched` int32 are the packs that each replica fetches: of replica r, those of its sequences
    from `fetched_begins[2 * r]` on, and those that it encodes parts of from
    `fetched_begins[2 * r + 1]` on.
    """

    plan: StepPlan
    rings: int
    shard: "_Cuts"
    written: "_Written"
    ticket: Mapping[str, bytes]
    ticket_begins: Mapping[str, NDArray[np.int64]]
    fetched: NDArray[np.int32]
    fetched_begins: list[int]


class _Cuts(NamedTuple):
    """Columns of all replicas by name, and where in each the rows of each replica begin, in bytes,
    int64[N+1]."""

    columns: Mapping[str, bytes]
    begins: Mapping[str, NDArray[np.int64]]

    def of(self, replica: int) -> dict[str, bytes]:
        """The rows of one replica."""
        begins = self.begins.items()
        return {name: self.columns[name][at[replica] : at[replica + 1]] for name, at in begins}


class _Written(NamedTuple):
    """Columns as fields: of each replica those of its waves and of its phases."""

    waves: list[bytes]
    phases: list[bytes]


def cut_step(plan: StepPlan, notes: ItemNotes | None = None) -> StepParts:
    """The columns of a step. O(n + m + k + W·N) for n samples, m items and k runs of feature rows.
    `notes` are of the plan's items as they were drawn, in its order."""
    listed = listed_items(plan)
    drawn, order = _drawn_items(plan, listed), encode_order(plan, listed)
    known = ItemNotes.unknown(len(drawn.number)) if notes is None else notes.take(drawn.number)
    packs = _packs_by_replica(plan)
    encoded, sequences = _encoded(plan, listed, order, drawn, known), _sequences(plan, *packs)
    columns: dict[str, bytes] = {}
    begins: dict[str, NDArray[np.int64]] = {}
    groups = [
        *_waves(plan, *packs, listed, drawn, known),
        *encoded,
        *_exchanged(plan, feature_runs(plan, listed, order)),
        sequences,
    ]
    for group in groups:
        for name, values in group.columns.items():
            column = columns[name] = b"" if values is None else packed(values)
            rows = group.begins[-1]
            begins[name] = group.begins * (len(column) // rows if rows else 0)
    fetched, fetched_begins = _in_turn(sequences, encoded[1])
    return StepParts(
        plan=plan,
        rings=int((plan.pack_degree > 1).sum()),
        shard=_Cuts(columns, {name: begins[name] for name in _SHARD_COLUMNS}),
        written=_Written(
            waves=_fields(_OF_WAVES, columns, begins),
            phases=_fields(_OF_PHASES, columns, begins),
        ),
        ticket={name: columns[name] for name in _TICKET_COLUMNS},
        ticket_begins={name: begins[name] for name in _TICKET_COLUMNS},
        fetched=fetched,
        fetched_begins=fetched_begins,
    )


def _fields(
    names: tuple[str, ...], columns: Mapping[str, bytes], begins: Mapping[str, NDArray[np.int64]]
) -> list[bytes]:
    return cut_fields(
        [SHARD_FIELDS[name] for name in names],
        [columns[name] for name in names],
        [begins[name] for name in names],
    )


def _in_turn(sequences: "_Columns", parts: "_Columns") -> tuple[NDArray[np.int32], list[int]]:
    """The packs of each replica's sequences, behind them those of its parts, int32, and where each
    replica's begin of either: [2N+1]."""
    packs = _known(sequences, "sequence_pack"), _known(parts, "part_pack")
    counts = np.stack(
        [counts_between(sequences.begins), counts_between(parts.begins)], axis=1
    ).ravel()
    firsts = np.stack([sequences.begins, len(packs[0]) + parts.begins], axis=1)[:-1].ravel()
    values = np.concatenate(packs)[expanded(firsts, counts)]
    return values, sample_starts(counts).tolist()


def columns_of(parts: StepParts, replica: int, wanted: WantedParts = EVERYTHING) -> ShardColumns:
    """One replica's rows. A rank that wants neither tokens nor media has no part in the encoders
    and their exchange: its columns leave them out."""
    plan, written = parts.plan, parts.written
    encodes = wanted.tokens or wanted.media
    return ShardColumns(
        waves=plan.waves,
        replicas=plan.replicas,
        rings=parts.rings,
        columns=CutWhenAsked(partial(_rows_of, parts, replica, () if encodes else _OF_PHASES)),
        written=(written.waves[replica], written.phases[replica] if encodes else b""),
    )


def _rows_of(parts: StepParts, replica: int, left_out: Sequence[str]) -> dict[str, bytes]:
    return parts.shard.of(replica) | dict.fromkeys(left_out, b"")


def packs_of(parts: StepParts, replica: int, wanted: WantedParts = EVERYTHING) -> NDArray[np.int32]:
    """The packs of which a rank of this replica wants something, one for each piece: int32[k],
    first those of its sequences, then of each part of items."""
    first, second, end = parts.fetched_begins[2 * replica : 2 * replica + 3]
    begin, stop = first if wanted.sequence else second, end if wanted.media else second
    return parts.fetched[begin:stop]


class _Columns(NamedTuple):
    """Columns of the same rows, sorted by replica: those of replica r are
    `begins[r]:begins[r + 1]` of `begins` int64[N+1]. Nothing is known where one is None."""

    begins: NDArray[np.int64]
    columns: dict[str, Array | None]


def _known(of: _Columns, name: str) -> NDArray[np.int32]:
    values = of.columns[name]
    assert values is not None, "what is fetched is known"
    return values.astype(np.int32)


def _by_replica(plan: StepPlan, counts: Array) -> NDArray[np.int64]:
    """Where each replica's rows begin, by the counts of its waves or phases [N·W] or [N·W·2]."""
    return sample_starts(counts.reshape(plan.replicas, -1).sum(axis=1))


def _of_replicas(plan: StepPlan, begins: Array) -> NDArray[np.int64]:
    """Where each replica's rows begin, by where those of its phases do: int64[N+1]. A step may have
    no wave."""
    return begins[np.arange(plan.replicas + 1) * plan.waves * _PHASES]


# ---- what a replica has of each wave: its pack, with samples and items -----------------------


def _waves(
    plan: StepPlan,
    pack: Array,
    member: Array,
    listed: ListedItems,
    drawn: "_DrawnItems",
    notes: ItemNotes,
) -> list[_Columns]:
    idle = pack < 0
    replica = np.repeat(np.arange(plan.replicas), plan.waves)
    pack_items = counts_between(drawn.begins)
    degree = np.where(idle, 1, plan.pack_degree[pack])
    samples = np.where(idle, 0, counts_between(plan.pack_offsets)[pack])
    items = np.where(idle, 0, pack_items[pack])
    # An idle replica is alone in its group: its own number stands behind the groups of the plan.
    pool = np.concatenate([plan.pack_replicas, np.arange(plan.replicas)])
    alone = len(plan.pack_replicas) + replica
    shared, ring = plan.pack_degree > 1, None
    if shared.any():
        ring = np.where(degree > 1, np.cumsum(shared)[pack] - 1, -1)
    return [
        _Columns(
            np.arange(plan.replicas + 1) * plan.waves,
            {
                "wave_pack": pack,
                "wave_seconds": np.where(idle, 0.0, plan.pack_seconds[pack]),
                "wave_member": member,
                "wave_degree": degree,
                "wave_samples": samples,
                "wave_items": items,
                "wave_ring": ring,
            },
        ),
        _Columns(
            _by_replica(plan, degree),
            {"group": pool[expanded(np.where(idle, alone, plan.replica_offsets[pack]), degree)]},
        ),
        _samples(plan, expanded(plan.pack_offsets[pack], samples), _by_replica(plan, samples)),
        _items(
            listed,
            drawn,
            notes,
            expanded(drawn.begins[pack], items),
            _by_replica(plan, items),
        ),
    ]


def _packs_by_replica(plan: StepPlan) -> tuple[Array, Array]:
    """The pack of each replica in each wave, -1 where it is idle, and its place in the pack's
    group: int32[N·W] both, by replica."""
    at = np.full((plan.replicas, plan.waves), -1, dtype=np.int32)
    member = np.zeros((plan.replicas, plan.waves), dtype=np.int32)
    pack = np.repeat(np.arange(plan.packs, dtype=np.int32), plan.pack_degree)
    at[plan.pack_replicas, plan.pack_wave[pack]] = pack
    within = np.arange(len(pack)) - plan.replica_offsets[pack]
    member[plan.pack_replicas, plan.pack_wave[pack]] = within
    return at.ravel(), member.ravel()


def _sequences(plan: StepPlan, pack: Array, member: Array) -> _Columns:
    """Of the packs of each replica, without the waves in which it is idle."""
    busy = pack >= 0
    return _Columns(
        _by_replica(plan, busy), {"sequence_pack": pack[busy], "sequence_member": member[busy]}
    )


def _samples(plan: StepPlan, rows: Array, begins: Array) -> _Columns:
    """Of the samples at `rows` of the packs end to end."""
    sample = plan.pack_samples.take(rows).astype(np.int64)  # else each column would make them so
    weights = plan.sample_loss_weights
    return _Columns(
        begins,
        {
            "sample_id": plan.sample_ids.take(sample),
            "sample_tokens": plan.sample_tokens.take(sample),
            "sample_padded": plan.padded_sample_tokens.take(rows),
            "sample_weight": None if weights is None else weights[sample],
        },
    )


def _items(
    listed: ListedItems, drawn: "_DrawnItems", notes: ItemNotes, items: Array, begins: Array
) -> _Columns:
    """Of these of the drawn items."""
    rows = items if drawn.rows is None else drawn.rows.take(items)
    return _Columns(
        begins,
        {
            "item_modality": listed.modality.take(rows),
            "item_start": listed.start.take(rows),
            "item_tokens": drawn.llm_tokens.take(items),
            **_noted("item", notes.take(items)),
        },
    )


def _noted(kind: str, notes: ItemNotes) -> dict[str, Array | None]:
    """The notes as columns; those in which nothing is known are left out."""
    unknown = np.isnan(notes.seconds_per_patch).all()
    return {
        f"{kind}_kind": notes.kind if (notes.kind >= 0).any() else None,
        f"{kind}_grid": notes.grid if notes.grid.any() else None,
        f"{kind}_seconds": None if unknown else notes.seconds_per_patch,
    }


class _DrawnItems(NamedTuple):
    """The items of a plan as they were drawn, by pack, which may have cut some of them: `number`
    int64[items] in the plan's order, `begins` int64[P+1] of those of each pack, and `llm_tokens`
    int32[items].

    Of the listed rows: `of` int64[m] the item above that each is of, `place` int32[m] that item's
    place in its pack, and `ranges` int32[m, 3] the units of it that the row has; `rows`
    int64[items] are those of the items' first pieces. Where none is cut, each item is a row, and
    `rows`, `of` and `ranges` are None.
    """

    number: NDArray[np.int64]
    begins: NDArray[np.int64]
    llm_tokens: NDArray[np.int32]
    place: NDArray[np.int32]
    rows: NDArray[np.int64] | None = None
    of: NDArray[np.int64] | None = None
    ranges: NDArray[np.int32] | None = None


def _drawn_items(plan: StepPlan, listed: ListedItems) -> _DrawnItems:
    first = plan.item_first_unit
    if first is None:
        return _DrawnItems(listed.item, listed.begins, listed.llm_tokens, listed.place)
    numbers, held = item_numbers(plan), unit_counts(plan)
    units = np.bincount(numbers, weights=held).astype(np.int32)
    tokens = np.bincount(numbers, weights=plan.item_llm_tokens).astype(np.int32)
    rows = np.flatnonzero(first[listed.item] == 0)
    number, pack = numbers[listed.item[rows]], listed.pack[rows]
    begins = sample_starts(np.bincount(pack, minlength=plan.packs))
    by_number = np.empty_like(rows)
    by_number[number] = np.arange(len(rows))
    of = by_number[numbers[listed.item]]
    place = (np.arange(len(rows)) - begins[pack]).astype(np.int32)
    ranges = np.stack([first, first + held, units[numbers]], axis=1)
    return _DrawnItems(number, begins, tokens[number], place[of], rows, of, ranges[listed.item])


# ---- what a replica encodes, sends and receives ----------------------------------------------


def _encoded(
    plan: StepPlan, listed: ListedItems, encoded: ByPhase, drawn: _DrawnItems, notes: ItemNotes
) -> list[_Columns]:
    order, begins = encoded
    parts = encoded_parts(listed, encoded)
    of_replicas = counts_between(begins).reshape(plan.replicas, -1)
    absent = np.tile(~of_replicas.any(axis=0), plan.replicas)
    return [
        _Columns(
            np.arange(plan.replicas + 1) * plan.waves * _PHASES,
            {"phase_parts": np.where(absent, -1, parts.counts)},
        ),
        _Columns(
            _by_replica(plan, parts.counts),
            {"part_pack": parts.pack, "part_items": parts.items},
        ),
        _Columns(
            _of_replicas(plan, begins),
            {
                "place": drawn.place.take(order),
                **_ranges(drawn, order),
                **_noted("place", _encode_notes(notes, drawn, order)),
            },
        ),
    ]


def _ranges(drawn: _DrawnItems, order: Array) -> dict[str, Array | None]:
    names = ("place_first", "place_stop", "place_of")
    if drawn.ranges is None:
        return dict.fromkeys(names)
    return dict(zip(names, drawn.ranges[order].T, strict=True))


def _encode_notes(notes: ItemNotes, drawn: _DrawnItems, order: Array) -> ItemNotes:
    """What is known of each row: of a piece as of its item, in a grid as long as the piece."""
    if drawn.ranges is None or drawn.of is None:
        return notes.take(order)
    of_rows = notes.take(drawn.of[order])
    first, stop, of = drawn.ranges[order].T
    grid = of_rows.grid.copy()
    grid[:, 0] = grid[:, 0] // of * (stop - first)
    return replace(of_rows, grid=grid)


def _exchanged(plan: StepPlan, runs: Runs) -> list[_Columns]:
    sent, received = runs.sent.order, runs.received.order
    return [
        *_runs(
            plan,
            runs.sent.begins,
            "phase_sends",
            send_row=runs.source_row.take(sent),
            send_rows=runs.rows.take(sent),
            send_target=runs.target.take(sent),
        ),
        *_runs(
            plan,
            runs.received.begins,
            "phase_receives",
            receive_row=runs.target_row.take(received),
            receive_rows=runs.rows.take(received),
            receive_source=runs.source.take(received),
        ),
    ]


def _runs(
    plan: StepPlan, begins: NDArray[np.int64], counted: str, **columns: Array
) -> list[_Columns]:
    """The runs at one end of the exchange, by phase."""
    phases = np.arange(plan.replicas + 1) * plan.waves * _PHASES
    return [
        _Columns(phases, {counted: counts_between(begins)}),
        _Columns(_of_replicas(plan, begins), dict(columns)),
    ]
