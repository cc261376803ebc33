"""Items that several replicas encode: cut before they are spread, joined where parts met again.

A clip of minutes takes one replica longer than all else in its wave. Where its encoder attends
within frames (or pairs of them, or tiles) alone, it may be cut between them without changing a
number: each *unit* is encoded as if it were alone. So in a phase with an item that is a large part
of a replica's share, items are cut wherever a replica is full (`nodes/slices.py`); pieces of one
item on one replica become one again.

    item of 6 units, shares of 2     before  | 0 1 | 2 3 | 4 5 |    on replicas 3, 1, 3
                                     after   | 0 1 2 3 | 4 5 |      3, 1

Shapes: m items, k pieces; a phase is one modality in one wave.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.core.plan import StepPlan
from dataservice.planning.kernels.compile import kernel, leaf

# Of a replica's share of a phase: above what an item is too long to be spread whole.
LONG_SHARE = 0.3


class Cut(NamedTuple):
    """Rows in pieces: piece j is `held` int32[k] units of `row` int64[k], from the `first` int32[k]
    of that row on."""

    row: NDArray[np.int64]
    first: NDArray[np.int32]
    held: NDArray[np.int32]

    def again(self, finer: "Cut") -> "Cut":
        """These pieces cut into `finer` ones, as a cut of the rows themselves."""
        row, first = _again(self.row, self.first, finer.row, finer.first)
        return Cut(row, first, finer.held)

    def take(self, chosen: NDArray[np.bool_]) -> "Cut":
        """Some of these pieces."""
        if chosen.all():
            return self
        return Cut(self.row[chosen], self.first[chosen], self.held[chosen])

    def beside(self, other: "Cut") -> "Cut":
        """These pieces, and behind them others."""
        return Cut(
            np.append(self.row, other.row),
            np.append(self.first, other.first),
            np.append(self.held, other.held),
        )


def by_row(cut: Cut, replica: NDArray[np.int32], rows: int) -> tuple[Cut, NDArray[np.int32]]:
    """Pieces and their replicas [k] by row, and then by first unit. O(k + m) where those of a row
    come nearly in order."""
    row, first, held, sorted_replica = _by_row(*cut, replica, rows)
    return Cut(row, first, held), sorted_replica


class Long(NamedTuple):
    """Phases that have a long item which may be cut, bool[phases]; and into how many pieces of at
    most a replica's share to cut each row of those, int64[m]."""

    phases: NDArray[np.bool_]
    pieces: NDArray[np.int64]


def long_items(
    phase: NDArray[np.int64],
    seconds: NDArray[np.float64],
    units: NDArray[np.int32],
    large: NDArray[np.bool_],
    replicas: int,
) -> Long:
    """What takes a replica long of rows [m] of a plan; all of it in `large` bool[phases], where
    some would keep too much as well."""
    return Long(*_long_items(phase, seconds, units, large, replicas, LONG_SHARE))


def cut_evenly(units: NDArray[np.int32], pieces: NDArray[np.int64]) -> Cut:
    """Rows of `units` [m] in so many `pieces` [m] each, as even as units allow. O(k)."""
    return Cut(*_cut_evenly(units, pieces))


def cut_items(plan: StepPlan, cut: Cut) -> StepPlan:
    """The plan with its rows in such pieces. O(k)."""
    row, first, held = cut
    begins = plan.item_first_unit
    encoder_tokens, llm_tokens, position = _cut_columns(
        *cut,
        unit_counts(plan),
        plan.item_encoder_tokens,
        plan.item_llm_tokens,
        plan.item_position,
    )
    return replace(
        plan,
        item_sample=plan.item_sample[row],
        item_modality=plan.item_modality[row],
        item_encoder_tokens=encoder_tokens,
        item_llm_tokens=llm_tokens,
        item_position=position,
        item_units=held,
        item_replica=plan.item_replica[row],
        item_first_unit=(first if first.any() else None) if begins is None else begins[row] + first,
    )


def join_items(plan: StepPlan) -> StepPlan:
    """The plan with one piece for each item and replica: units are alike, so a replica that has
    several of an item's gets as many neighbours. O(k)."""
    if plan.item_first_unit is None:
        return plan
    pieces = Cut(np.arange(len(plan.item_sample)), plan.item_first_unit, unit_counts(plan))
    cut, replica = join_pieces(pieces, plan.item_replica)
    if cut.row.size == plan.item_replica.size:
        return plan
    joined = replace(cut_items(plan, cut), item_replica=replica)
    return joined if cut.first.any() else replace(joined, item_first_unit=None)


def join_pieces(cut: Cut, replica: NDArray[np.int32]) -> tuple[Cut, NDArray[np.int32]]:
    """The same of pieces by row and their replicas [k]: an item begins where `first` is 0, and its
    pieces are all of the row where it begins."""
    row, first, held, joined_replica = _joined(*cut, replica)
    return Cut(row, first, held), joined_replica


def unit_counts(plan: StepPlan) -> NDArray[np.int32]:
    """Units of each row: int32[m]; 1 where items cannot be cut."""
    return np.ones(len(plan.item_sample), np.int32) if plan.item_units is None else plan.item_units


def item_numbers(plan: StepPlan) -> NDArray[np.int64]:
    """The item that each row is of, by its place among all items: int64[m]."""
    if plan.item_first_unit is None:
        return np.arange(len(plan.item_sample))
    return np.cumsum(plan.item_first_unit == 0) - 1


@kernel
def _long_items(
    phase: NDArray[np.int64],
    seconds: NDArray[np.float64],
    units: NDArray[np.int32],
    large: NDArray[np.bool_],
    replicas: int,
    long_share: float,
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    mean = np.zeros(large.size)  # seconds of a replica, float64[phases]
    longest = np.zeros(large.size)  # of what may be cut
    for item in range(phase.size):
        mean[phase[item]] += seconds[item] / replicas
        if units[item] > 1:
            longest[phase[item]] = max(longest[phase[item]], seconds[item])
    long = large | (longest > mean * long_share)
    pieces = np.ones(phase.size, np.int64)
    for item in range(phase.size):
        if long[phase[item]] and units[item] > 1:
            wanted = np.ceil(seconds[item] / mean[phase[item]])
            pieces[item] = np.int64(max(1.0, min(float(units[item]), wanted)))
    return long, pieces


@kernel
def _again(
    row: NDArray[np.int64],
    first: NDArray[np.int32],
    of_piece: NDArray[np.int64],
    inside: NDArray[np.int32],
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Row and first unit of pieces [k] of pieces, each from unit `inside` on `of_piece`."""
    to_row = np.empty(of_piece.size, np.int64)
    to_first = np.empty(of_piece.size, np.int32)
    for piece in range(of_piece.size):
        to_row[piece] = row[of_piece[piece]]
        to_first[piece] = first[of_piece[piece]] + inside[piece]
    return to_row, to_first


@kernel
def _cut_evenly(
    units: NDArray[np.int32], pieces: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    count = pieces.sum()
    to_row = np.empty(count, np.int64)
    to_first = np.empty(count, np.int32)
    to_held = np.empty(count, np.int32)
    at = 0
    for row in range(units.size):
        first = 0
        for place in range(1, pieces[row] + 1):
            behind = int(units[row])
            if place < pieces[row]:
                behind = first_of_piece(behind, int(pieces[row]), place)
            to_row[at], to_first[at], to_held[at] = row, first, behind - first
            first = behind
            at += 1
    return to_row, to_first, to_held


@leaf
def first_of_piece(units: int, pieces: int, place: int) -> int:
    """The first unit of an even piece; of the one behind the last, all of them."""
    return units * place // pieces


@kernel
def _cut_columns(
    row: NDArray[np.int64],
    first: NDArray[np.int32],
    held: NDArray[np.int32],
    units: NDArray[np.int32],
    encoder_tokens: NDArray[np.int32],
    llm_tokens: NDArray[np.int32],
    position: NDArray[np.int32],
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Encoder tokens, LLM tokens and position of each piece: int32[k]."""
    to_encoder = np.empty(row.size, np.int32)
    to_llm = np.empty(row.size, np.int32)
    to_position = np.empty(row.size, np.int32)
    for piece in range(row.size):
        item = row[piece]
        to_encoder[piece], to_llm[piece] = encoder_tokens[item], llm_tokens[item]
        to_position[piece] = position[item]
        if first[piece] > 0 or held[piece] != units[item]:
            of_unit = llm_tokens[item] // units[item]
            to_encoder[piece] = encoder_tokens[item] // units[item] * held[piece]
            to_llm[piece] = of_unit * held[piece]
            to_position[piece] += of_unit * first[piece]
    return to_encoder, to_llm, to_position


@kernel
def _joined(
    row: NDArray[np.int64],
    first: NDArray[np.int32],
    units: NDArray[np.int32],
    replica: NDArray[np.int32],
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """The row of the item's first piece, first unit, units and replica of each piece that is left,
    an item's replicas in the order in which they come first."""
    rows = row.size
    joined = 0
    to_row = np.empty(rows, np.int64)
    to_first = np.empty(rows, np.int32)
    to_units = np.empty(rows, np.int32)
    to_replica = np.empty(rows, np.int32)
    head, begin = np.int64(0), 0  # the item's row, and its first piece of those that are left
    for piece in range(rows):
        if first[piece] == 0:
            head, begin = row[piece], joined
        place = begin
        while place < joined and to_replica[place] != replica[piece]:
            place += 1
        if place == joined:
            to_row[joined] = head
            to_units[joined] = 0
            to_replica[joined] = replica[piece]
            joined += 1
        to_units[place] += units[piece]
    for place in range(joined):
        new = place == 0 or to_row[place - 1] != to_row[place]
        to_first[place] = 0 if new else to_first[place - 1] + to_units[place - 1]
    return to_row[:joined], to_first[:joined], to_units[:joined], to_replica[:joined]


@kernel
def _by_row(
    row: NDArray[np.int64],
    first: NDArray[np.int32],
    held: NDArray[np.int32],
    replica: NDArray[np.int32],
    rows: int,
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    to_row, to_first = np.full_like(row, -1), np.empty_like(first)
    to_held, to_replica = np.empty_like(held), np.empty_like(replica)
    places = np.zeros(rows + 1, np.int64)  # where the next piece of each row is written
    for piece in range(row.size):
        places[row[piece] + 1] += 1
    for k in range(rows):
        places[k + 1] += places[k]
    for piece in range(row.size):
        at = places[row[piece]]
        places[row[piece]] += 1
        while at > 0 and to_row[at - 1] == row[piece] and to_first[at - 1] > first[piece]:
            to_row[at], to_first[at] = to_row[at - 1], to_first[at - 1]
            to_held[at], to_replica[at] = to_held[at - 1], to_replica[at - 1]
            at -= 1
        to_row[at], to_first[at] = row[piece], first[piece]
        to_held[at], to_replica[at] = held[piece], replica[piece]
    return to_row, to_first, to_held, to_replica
