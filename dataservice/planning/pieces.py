"""Items that several replicas encode: cut before they are spread, joined where parts met again.

A clip of minutes takes one replica longer than all else in its wave. Where its encoder attends
within frames (or pairs of them, or tiles) alone, it may be cut between them without changing a
number: each *unit* is encoded as if it were alone. So an item that holds more than a small part of
a replica's share of its phase is cut into pieces of about that size; the spread treats pieces as
items, and pieces of one item on one replica become one again.

    item of 6 units, shares of 2     before  | 0 1 | 2 3 | 4 5 |    on replicas 3, 1, 3
                                     after   | 0 1 2 3 | 4 5 |      3, 1

Shapes: m items, k pieces; a phase is one modality in one wave.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.core.plan import StepPlan
from dataservice.planning.kernels.compile import kernel

# Of a replica's share of a phase: above what an item is too long to be spread whole, and what a
# piece then has at most, small enough to fill every gap, and large enough for its own fixed cost.
LONG_SHARE = 1.0 / 2.0
PIECE_SHARE = 1.0 / 8.0


class Cut(NamedTuple):
    """Rows in pieces: piece j is `held` int32[k] units of `row` int64[k], from the `first` int32[k]
    of that row on."""

    row: NDArray[np.int64]
    first: NDArray[np.int32]
    held: NDArray[np.int32]


def long_pieces(
    plan: StepPlan, phase: NDArray[np.int64], seconds: NDArray[np.float64], phases: int
) -> NDArray[np.int64]:
    """Into how many pieces to cut each row of a plan, as it takes a replica long: int64[m]; `phase`
    and `seconds` [m] are of the rows."""
    units = unit_counts(plan)
    return _piece_counts(phase, seconds, units, phases, plan.replicas, LONG_SHARE, PIECE_SHARE)


def cut_evenly(units: NDArray[np.int32], pieces: NDArray[np.int64]) -> Cut:
    """Rows of `units` [m] in so many `pieces` [m] each, as even as units allow. O(k)."""
    row = np.repeat(np.arange(units.size), pieces)
    place = np.arange(row.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = (units[row] * place // pieces[row]).astype(np.int32)
    behind = (units[row] * (place + 1) // pieces[row]).astype(np.int32)
    return Cut(row, first, behind - first)


def cut_items(plan: StepPlan, cut: Cut) -> StepPlan:
    """The plan with its rows in such pieces. O(k)."""
    row, first, held = cut
    units = unit_counts(plan)[row]
    encoder_tokens = plan.item_encoder_tokens[row] // units
    llm_tokens = plan.item_llm_tokens[row] // units
    begins = 0 if plan.item_first_unit is None else plan.item_first_unit[row]
    return replace(
        plan,
        item_sample=plan.item_sample[row],
        item_modality=plan.item_modality[row],
        item_encoder_tokens=encoder_tokens * held,
        item_llm_tokens=llm_tokens * held,
        item_position=plan.item_position[row] + llm_tokens * first,
        item_units=held,
        item_replica=plan.item_replica[row],
        item_first_unit=begins + first,
    )


def join_items(plan: StepPlan) -> StepPlan:
    """The plan with one piece for each item and replica: units are alike, so a replica that has
    several of an item's gets as many neighbours. O(k)."""
    if plan.item_first_unit is None:
        return plan
    item, first, held, replica = _joined(
        item_numbers(plan), unit_counts(plan), plan.item_first_unit, plan.item_replica
    )
    if item.size == plan.item_replica.size:
        return plan
    whole = _whole_items(plan, np.flatnonzero(plan.item_first_unit == 0))
    if item.size == whole.item_replica.size:
        return replace(whole, item_replica=replica)
    return replace(cut_items(whole, Cut(item, first, held)), item_replica=replica)


def unit_counts(plan: StepPlan) -> NDArray[np.int32]:
    """Units of each row: int32[m]; 1 where items cannot be cut."""
    return np.ones(len(plan.item_sample), np.int32) if plan.item_units is None else plan.item_units


def item_numbers(plan: StepPlan) -> NDArray[np.int64]:
    """The item that each row is of, by its place among all items: int64[m]."""
    if plan.item_first_unit is None:
        return np.arange(len(plan.item_sample))
    return np.cumsum(plan.item_first_unit == 0) - 1


def _whole_items(plan: StepPlan, begins: NDArray[np.int64]) -> StepPlan:
    """The plan with every item in one row; `begins` are the rows of their first pieces."""

    def summed(column: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.add.reduceat(column, begins).astype(np.int32)

    return replace(
        plan,
        item_sample=plan.item_sample[begins],
        item_modality=plan.item_modality[begins],
        item_position=plan.item_position[begins],
        item_encoder_tokens=summed(plan.item_encoder_tokens),
        item_llm_tokens=summed(plan.item_llm_tokens),
        item_units=summed(unit_counts(plan)),
        item_replica=plan.item_replica[begins],
        item_first_unit=None,
    )


@kernel
def _piece_counts(
    phase: NDArray[np.int64],
    seconds: NDArray[np.float64],
    units: NDArray[np.int32],
    phases: int,
    replicas: int,
    long_share: float,
    piece_share: float,
) -> NDArray[np.int64]:
    mean = np.zeros(phases)  # seconds of a replica, float64[phases]
    longest = np.zeros(phases)
    for item in range(phase.size):
        mean[phase[item]] += seconds[item] / replicas
        longest[phase[item]] = max(longest[phase[item]], seconds[item])
    pieces = np.ones(phase.size, np.int64)
    for item in range(phase.size):
        of_phase = phase[item]
        if units[item] > 1 and longest[of_phase] > mean[of_phase] * long_share:
            wanted = np.ceil(seconds[item] / (mean[of_phase] * piece_share))
            pieces[item] = np.int64(max(1.0, min(float(units[item]), wanted)))
    return pieces


@kernel
def _joined(
    item: NDArray[np.int64],
    units: NDArray[np.int32],
    first: NDArray[np.int32],
    replica: NDArray[np.int32],
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Item, first unit, units and replica of each piece that is left, an item's replicas in the
    order in which they come first."""
    rows = item.size
    joined = 0
    to_item = np.empty(rows, np.int64)
    to_first = np.empty(rows, np.int32)
    to_units = np.empty(rows, np.int32)
    to_replica = np.empty(rows, np.int32)
    begin = 0  # of the item's pieces among those that are left
    for row in range(rows):
        if first[row] == 0:
            begin = joined
        place = begin
        while place < joined and to_replica[place] != replica[row]:
            place += 1
        if place == joined:
            to_item[joined] = item[row]
            to_units[joined] = 0
            to_replica[joined] = replica[row]
            joined += 1
        to_units[place] += units[row]
    for place in range(joined):
        new = place == 0 or to_item[place - 1] != to_item[place]
        to_first[place] = 0 if new else to_first[place - 1] + to_units[place - 1]
    return to_item[:joined], to_first[:joined], to_units[:joined], to_replica[:joined]
