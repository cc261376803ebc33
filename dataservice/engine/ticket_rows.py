"""What the tickets of a step give, made for some replicas at once.

    packs of some replicas ── who holds each? ──► places in each ticket's workers, rows as bytes

All ranks ask for their tickets at once, and nearly all find every pack where it was ordered. So the
rows of `MADE_AT_ONCE` replicas are made when the first of them asks, in one pass of arrays; a rank
for which a pack has moved meanwhile has its own made anew.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from dataservice_proto.columns import TICKET, TICKET_FIELDS, narrowest
from numpy.typing import NDArray

from dataservice.core.layout import counts_between, sample_starts
from dataservice.core.orders import WantedParts
from dataservice.engine.cut_fields import CutWhenAsked, cut_fields
from dataservice.engine.placement import DispatchedStep
from dataservice.engine.shards import StepParts
from dataservice.planning.kernels.sort import group_stable

# As many as are made in three milliseconds, for which other calls wait; of four times as many each
# costs a twentieth less. Made in a thread they would hold the interpreter, and calls wait as long.
MADE_AT_ONCE = 64

_NAMES = tuple(column.name for column in TICKET)
_FIELDS = tuple(TICKET_FIELDS[name] for name in _NAMES)
_OF_SEQUENCES = frozenset(name for name in _NAMES if name.startswith("sequence_"))


class TicketRows(NamedTuple):
    """What one ticket gives: see core.orders.Ticket. `held` are the bytes of the int32 numbers of
    who holds each pack, as these rows say."""

    held: bytes
    workers: tuple[str, ...]
    addresses: tuple[str, ...]
    sequences: int
    parts: int
    columns: Mapping[str, bytes]
    written: bytes


class StepTickets:
    """The rows of a step's tickets, by replica."""

    def __init__(self, parts: StepParts, step: DispatchedStep) -> None:
        self._parts = parts
        self._step = step
        self._made: dict[tuple[WantedParts, int], list[TicketRows]] = {}

    def of(self, replica: int, wanted: WantedParts, held: NDArray[np.int32]) -> TicketRows:
        """The rows of a replica whose packs, those of `packs_of`, are held by these of the step's
        `workers`, int32[k]."""
        made = self.made(replica, wanted)
        if made.held == held.tobytes():
            return made
        return self._rows(range(replica, replica + 1), wanted, held)[0]

    def made(self, replica: int, wanted: WantedParts) -> TicketRows:
        """The rows of a replica whose packs are where they were when the first of
        `made_with(replica)` was asked for."""
        some = self.made_with(replica)
        made = self._made.get((wanted, some.start))
        if made is None:
            made = self._made[wanted, some.start] = self._rows(some, wanted)
        return made[replica - some.start]

    def made_with(self, replica: int) -> range:
        """The replicas whose rows are made together with this one's."""
        first = replica - replica % MADE_AT_ONCE
        return range(first, min(first + MADE_AT_ONCE, self._parts.plan.replicas))

    def _rows(
        self, replicas: range, wanted: WantedParts, held: NDArray[np.int32] | None = None
    ) -> list[TicketRows]:
        """The rows of these replicas, by default where their packs are now."""
        parts, step = self._parts, self._step
        begins = np.array(parts.fetched_begins[2 * replicas.start : 2 * replicas.stop + 1])
        counts = counts_between(begins).reshape(-1, 2)  # of each replica, its sequences and parts
        chosen = np.array([bool(wanted.sequence), wanted.media])
        if held is None:
            kept = np.repeat(np.tile(chosen, len(replicas)), counts.ravel())
            held = step.holder[parts.fetched[begins[0] : begins[-1]][kept]]
        counts *= chosen
        begins = sample_starts(counts.sum(axis=1))
        each = np.repeat(np.arange(len(replicas)), counts.sum(axis=1))
        heads, places = _numbered(each, begins, held, len(step.workers))
        of_sequence = np.repeat(np.tile([True, False], len(replicas)), counts.ravel())
        kind = narrowest(places)
        columns, rows = _wanted_columns(parts, replicas, wanted)
        for name, mine, count in (
            ("sequence_worker", of_sequence, counts[:, 0]),
            ("part_worker", ~of_sequence, counts[:, 1]),
        ):
            columns[name] = places[mine].astype(kind).tobytes()
            rows[name] = sample_starts(count) * int(kind[-1])
        written = cut_fields(
            _FIELDS, [columns[name] for name in _NAMES], [rows[name] for name in _NAMES]
        )
        found = _names(step, held[heads], np.bincount(each[heads], minlength=len(replicas)))
        owners = _cut(held.tobytes(), begins * held.itemsize)
        return [
            TicketRows(
                held=own,
                workers=workers,
                addresses=addresses,
                sequences=sequences,
                parts=parts_of_items,
                columns=CutWhenAsked(partial(_row, columns, rows, place)),
                written=row,
            )
            for place, (own, (workers, addresses), (sequences, parts_of_items), row) in enumerate(
                zip(owners, found, counts.tolist(), written, strict=True)
            )
        ]


def _numbered(
    each: NDArray[np.int64], begins: NDArray[np.int64], held: NDArray[np.int32], workers: int
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Of packs [k], by ticket, each held by one of these workers: whether the ticket names the
    worker there first, and its place among those that the ticket names, in this order. Those of
    ticket t begin at `begins[t]`."""
    order = np.arange(len(held))
    pair = each * (workers + 1) + held + 1  # -1 is of no worker
    alike, starts = group_stable(pair, order, len(begins) * (workers + 1))
    counts = counts_between(starts)
    first_of = np.empty_like(order)
    first_of[alike] = np.repeat(alike[starts[:-1][counts > 0]], counts[counts > 0])
    heads = first_of == order
    named = np.cumsum(heads)
    return heads, named[first_of] - named[begins[each]]


def _wanted_columns(
    parts: StepParts, replicas: range, wanted: WantedParts
) -> tuple[dict[str, bytes], dict[str, NDArray[np.int64]]]:
    """The columns but for who holds what, and where in each the rows of each replica begin."""
    columns, begins = dict(parts.ticket), {}
    for name in parts.ticket:
        begins[name] = parts.ticket_begins[name][replicas.start : replicas.stop + 1]
        if not (wanted.sequence if name in _OF_SEQUENCES else wanted.media):
            columns[name] = b""
            begins[name] = np.zeros(len(replicas) + 1, np.int64)
    return columns, begins


def _row(
    columns: Mapping[str, bytes], begins: Mapping[str, NDArray[np.int64]], place: int
) -> dict[str, bytes]:
    at = {name: begins[name][place : place + 2].tolist() for name in _NAMES}
    return {name: columns[name][start:stop] for name, (start, stop) in at.items()}


def _cut(column: bytes, begins: NDArray[Any]) -> list[bytes]:
    return [column[start:stop] for start, stop in pairwise(begins.tolist())]


def _names(
    step: DispatchedStep, found: NDArray[np.int32], counts: NDArray[np.int64]
) -> Iterable[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The names and addresses of the workers that each ticket names."""
    # A pack that nobody holds yet has number -1: the ticket that names it is never given.
    names = [*(worker.worker for worker in step.workers), ""]
    addresses = [*(worker.address for worker in step.workers), ""]
    numbers = found.tolist()
    named = tuple(map(names.__getitem__, numbers))
    reached = tuple(map(addresses.__getitem__, numbers))
    for start, stop in pairwise(sample_starts(counts).tolist()):
        yield named[start:stop], reached[start:stop]
