"""A step plan cut into the parts of its ranks: columns of all replicas, of which each gets a slice.

    plan ── sorted by replica, once ──► columns of the step ──► rows of one replica, as bytes

No object is made for a sample or an item: whatever a rank is told of its part of the step are the
bytes between two offsets of each column, see `dataservice_proto.columns`. Ranks of one replica get
the same microbatches; what differs is which of their bytes each may fetch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from dataservice_proto.columns import SHARD, SHARD_FIELDS, TICKET, packed
from numpy.typing import NDArray

from dataservice.core.field_bytes import BYTES, cut_fields, fields, head_of
from dataservice.core.layout import counts_between, expanded, sample_starts
from dataservice.core.orders import EVERYTHING, ShardColumns, WantedParts
from dataservice.core.plan import StepPlan
from dataservice.core.sample import ItemNotes, Modality
from dataservice.planning.kernels.sort import group_stable
from dataservice.planning.pieces import item_numbers, unit_counts
from dataservice.planning.routes import ItemPlaces, Runs, feature_runs, item_places

Array = NDArray[Any]
_PHASES = len(Modality)
# The columns of a shard that differ by replica.
_SHARD_COLUMNS = tuple(column.name for column in SHARD if column.name != "ring_pack")
# The columns of what is encoded and exchanged: ranks without tokens and media have no part in it.
_OF_PHASES = tuple(
    column.name
    for column in SHARD
    if column.name.startswith(("phase_", "part_", "place", "send_", "receive_"))
)
# The columns of a ticket but for who holds what.
_TICKET_COLUMNS = tuple(column.name for column in TICKET if not column.name.endswith("_worker"))
_RINGS_HEAD = {"ring_pack": head_of(SHARD_FIELDS["ring_pack"], BYTES)}
_OF_WAVES = tuple(name for name in _SHARD_COLUMNS if name not in _OF_PHASES)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """A plan, ready to be cut: the columns of all replicas end to end, and where in each the rows
    of each replica begin, in bytes: `begins[r][k]` in the k-th column. Lists, since thousands of
    ranks each read a few numbers. `written` are the columns as fields of a message: of each replica
    those of what it has of each wave, and those of what is encoded and exchanged, and once the
    packs with rings. `ticket` are the columns of tickets but for who holds what, and
    `ticket_begins` int64[N+1] where in each the rows of each replica begin, in bytes.

    `fetched` int32 are the packs that each replica fetches: of replica r, those of its sequences
    from `fetched_begins[2 * r]` on, and those that it encodes parts of from
    `fetched_begins[2 * r + 1]` on.
    """

    plan: StepPlan
    rings: int
    ring_pack: bytes
    shard: "_Cuts"
    written: "_Written"
    ticket: Mapping[str, bytes]
    ticket_begins: Mapping[str, NDArray[np.int64]]
    fetched: NDArray[np.int32]
    fetched_begins: list[int]


class _Cuts(NamedTuple):
    """Columns of all replicas by name, to be cut together."""

    names: tuple[str, ...]
    columns: tuple[bytes, ...]
    begins: list[list[int]]

    def of(self, replica: int) -> dict[str, bytes]:
        """The rows of one replica."""
        ends = zip(self.columns, self.begins[replica], self.begins[replica + 1], strict=True)
        return dict(zip(self.names, [rows[start:stop] for rows, start, stop in ends], strict=True))


class _Written(NamedTuple):
    """Columns as fields: of each replica those of its waves and of its phases, and once the packs
    with rings."""

    waves: list[bytes]
    phases: list[bytes]
    rings: bytes


class _Rows(Mapping[str, bytes]):
    """The columns of one replica by name, cut when one is asked for: most ranks are sent them as
    they were written for all at once."""

    __slots__ = ("_cut", "_left_out", "_parts", "_replica")

    def __init__(self, parts: StepParts, replica: int, left_out: Sequence[str]) -> None:
        self._parts, self._replica, self._left_out = parts, replica, left_out
        self._cut: dict[str, bytes] | None = None

    def _all(self) -> dict[str, bytes]:
        if self._cut is None:
            cut = self._parts.shard.of(self._replica) | dict.fromkeys(self._left_out, b"")
            self._cut = cut | {"ring_pack": self._parts.ring_pack}
        return self._cut

    def __getitem__(self, name: str) -> bytes:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


def cut_step(plan: StepPlan, notes: ItemNotes | None = None) -> StepParts:
    """The columns of a step. O(n + m + k + W·N) for n samples, m items and k runs of feature rows.
    `notes` are of the plan's items as they were drawn, in its order."""
    places = item_places(plan)
    drawn = _drawn_items(plan, places)
    notes = notes if notes is not None else ItemNotes.unknown(len(drawn.rows))
    encoded, sequences = _encoded(plan, places, drawn, notes), _sequences(plan)
    columns: dict[str, bytes] = {}
    begins: dict[str, NDArray[np.int64]] = {}
    groups = [*_waves(plan, drawn, notes, places), *encoded, *_exchanged(plan, places), sequences]
    for group in groups:
        for name, values in group.columns.items():
            column = columns[name] = b"" if values is None else packed(values)
            rows = group.begins[-1]
            begins[name] = group.begins * (len(column) // rows if rows else 0)
    rings = np.flatnonzero(plan.pack_degree > 1)
    ring_pack = packed(rings)
    fetched, fetched_begins = _in_turn(sequences, encoded[1])
    return StepParts(
        plan=plan,
        rings=len(rings),
        ring_pack=ring_pack,
        shard=_cuts(_SHARD_COLUMNS, columns, begins),
        written=_Written(
            waves=_fields(_OF_WAVES, columns, begins),
            phases=_fields(_OF_PHASES, columns, begins),
            rings=b"".join(fields(_RINGS_HEAD, {"ring_pack": ring_pack})),
        ),
        ticket={name: columns[name] for name in _TICKET_COLUMNS},
        ticket_begins={name: begins[name] for name in _TICKET_COLUMNS},
        fetched=fetched,
        fetched_begins=fetched_begins,
    )


def _cuts(
    names: tuple[str, ...],
    columns: Mapping[str, bytes],
    begins: Mapping[str, NDArray[np.int64]],
) -> _Cuts:
    at = np.array([begins[name] for name in names]).T.tolist()
    return _Cuts(names, tuple(columns[name] for name in names), at)


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
        columns=_Rows(parts, replica, () if encodes else _OF_PHASES),
        written=(
            written.waves[replica],
            written.phases[replica] if encodes else b"",
            written.rings,
        ),
    )


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
    plan: StepPlan, drawn: "_DrawnItems", notes: ItemNotes, places: ItemPlaces
) -> list[_Columns]:
    pack, member = _packs_by_replica(plan)
    idle = pack < 0
    replica = np.repeat(np.arange(plan.replicas), plan.waves)
    pack_items = np.bincount(places.pack[drawn.rows], minlength=plan.packs)
    degree = np.where(idle, 1, plan.pack_degree[pack])
    samples = np.where(idle, 0, counts_between(plan.pack_offsets)[pack])
    items = np.where(idle, 0, pack_items[pack])
    # An idle replica is alone in its group: its own number stands behind the groups of the plan.
    pool = np.concatenate([plan.pack_replicas, np.arange(plan.replicas)])
    alone = len(plan.pack_replicas) + replica
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
            },
        ),
        _Columns(
            _by_replica(plan, degree),
            {"group": pool[expanded(np.where(idle, alone, plan.replica_offsets[pack]), degree)]},
        ),
        _samples(plan, expanded(plan.pack_offsets[pack], samples), _by_replica(plan, samples)),
        _items(
            plan,
            drawn,
            notes,
            places,
            expanded(sample_starts(pack_items)[pack], items),
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


def _sequences(plan: StepPlan) -> _Columns:
    """Of the packs of each replica, without the waves in which it is idle."""
    pack, member = _packs_by_replica(plan)
    busy = pack >= 0
    return _Columns(
        _by_replica(plan, busy), {"sequence_pack": pack[busy], "sequence_member": member[busy]}
    )


def _samples(plan: StepPlan, rows: Array, begins: Array) -> _Columns:
    """Of the samples at `rows` of the packs end to end."""
    sample = plan.pack_samples[rows]
    weights = plan.sample_loss_weights
    return _Columns(
        begins,
        {
            "sample_id": plan.sample_ids[sample],
            "sample_tokens": plan.sample_tokens[sample],
            "sample_padded": plan.padded_sample_tokens[rows],
            "sample_weight": None if weights is None else weights[sample],
        },
    )


def _items(
    plan: StepPlan,
    drawn: "_DrawnItems",
    notes: ItemNotes,
    places: ItemPlaces,
    rows: Array,
    begins: Array,
) -> _Columns:
    """Of the items at `rows` of the packs' lists end to end, as they were drawn."""
    padded_starts = sample_starts(plan.padded_sample_tokens)
    sample_start = np.empty(len(plan.sample_ids), dtype=np.int64)
    sample_start[plan.pack_samples] = padded_starts[:-1]
    first = drawn.rows
    pack_start = padded_starts[plan.pack_offsets[places.pack[first]]]
    start = sample_start[plan.item_sample[first]] + plan.item_position[first] - pack_start
    return _Columns(
        begins,
        {
            "item_modality": plan.item_modality[first][rows],
            "item_start": start[rows],
            "item_tokens": drawn.llm_tokens[rows],
            **_noted("item", notes.take(drawn.item[first][rows])),
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


# ---- what a replica encodes, sends and receives ----------------------------------------------


def _phase_of(plan: StepPlan, replica: Array, wave: Array, modality: Array) -> NDArray[np.int64]:
    """One number for (replica, wave, modality), in that order: int64[k] of arrays [k]."""
    return (replica.astype(np.int64) * plan.waves + wave) * _PHASES + modality


def _encoded(
    plan: StepPlan, places: ItemPlaces, drawn: _DrawnItems, notes: ItemNotes
) -> list[_Columns]:
    wave = plan.pack_wave[places.pack]
    phase = _phase_of(plan, plan.item_replica, wave, plan.item_modality)
    phases = plan.replicas * plan.waves * _PHASES
    order, begins = group_stable(phase, places.order, phases)
    pack = places.pack[order]
    new = np.ones(len(order), dtype=bool)
    ordered = phase[order]
    new[1:] = (pack[1:] != pack[:-1]) | (ordered[1:] != ordered[:-1])
    heads = np.flatnonzero(new)
    parts = np.bincount(phase[order[heads]], minlength=phases)
    seen = np.zeros((plan.waves, _PHASES), dtype=bool)
    seen[wave, plan.item_modality] = True
    absent = ~np.tile(seen.ravel(), plan.replicas)
    of_phase = _of_replicas(plan, begins)
    return [
        _Columns(
            np.arange(plan.replicas + 1) * plan.waves * _PHASES,
            {"phase_parts": np.where(absent, -1, parts)},
        ),
        _Columns(
            _by_replica(plan, parts),
            {
                "part_pack": pack[heads],
                "part_items": np.diff(np.append(heads, len(order))),
            },
        ),
        _Columns(
            of_phase,
            {
                "place": drawn.place[order],
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
    of_rows = notes.take(drawn.item[order])
    if drawn.ranges is None:
        return of_rows
    first, stop, of = drawn.ranges[order].T
    grid = of_rows.grid.copy()
    grid[:, 0] = grid[:, 0] // of * (stop - first)
    return replace(of_rows, grid=grid)


def _exchanged(plan: StepPlan, places: ItemPlaces) -> list[_Columns]:
    runs = feature_runs(plan, places)  # sorted by wave, modality, source, target, source row
    return [
        *_runs(plan, runs, runs.source, "phase_sends", ("send_row", "send_rows", "send_target")),
        *_runs(
            plan,
            runs,
            runs.target,
            "phase_receives",
            ("receive_row", "receive_rows", "receive_source"),
        ),
    ]


def _runs(
    plan: StepPlan, runs: Runs, replica: Array, counted: str, names: tuple[str, str, str]
) -> list[_Columns]:
    """The runs of each replica at one end of the exchange, the others' order kept."""
    phase = _phase_of(plan, replica, runs.wave, runs.modality)
    phases = plan.replicas * plan.waves * _PHASES
    order, begins = group_stable(phase, np.arange(len(phase)), phases)
    sends = replica is runs.source
    row, other = (runs.source_row, runs.target) if sends else (runs.target_row, runs.source)
    values = (row[order], runs.rows[order], other[order])
    return [
        _Columns(
            np.arange(plan.replicas + 1) * plan.waves * _PHASES, {counted: counts_between(begins)}
        ),
        _Columns(_of_replicas(plan, begins), dict(zip(names, values, strict=True))),
    ]
