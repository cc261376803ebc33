"""Where every row of encoded features has to go: Π_LLM ∘ Π_enc⁻¹ at the grain of tokens.

OrchMLLM (§6) composes "back to the sample's owner" and "on to the text's rank" into one
exchange. Under context parallelism an item's tokens may straddle chunks of its sequence, so
the unit here is a *run*: consecutive rows of one item that go to one replica.

    item of 5 rows, degree 2      sequence  | chunk 0 | chunk 1 | chunk 2 | chunk 3 |
    encoded by replica 7          the item        [ 0 1 | 2 3 4 ]
                                  goes to     member 0 |  member 1

The way starts where an item's text is: its pack, and the replica that holds its first token.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.core.plan import StepPlan
from dataservice.core.sample import Modality
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.integers import padded_length, ring_member
from dataservice.planning.kernels.sort import group_stable

_MODALITIES = len(Modality)
_ALL_ITEMS = slice(None)


def item_packs(plan: StepPlan) -> NDArray[np.int32]:
    """The pack of each item: int32[m]. O(n + m)."""
    return _item_packs(plan.pack_offsets, plan.pack_samples, plan.item_sample)


def item_homes(
    plan: StepPlan, pack: NDArray[np.int32], some: NDArray[np.int64] | slice = _ALL_ITEMS
) -> NDArray[np.int32]:
    """The replica that holds the first token of each item, or of `some` of them: int32[k]; `pack`
    int32[m] as above."""
    return _item_homes(
        plan.replica_offsets,
        plan.pack_replicas,
        pack[some],
        plan.item_sample[some],
        plan.item_position[some],
        plan.sample_tokens,
    )


@kernel
def _item_packs(
    offsets: NDArray[np.int64], samples: NDArray[np.int32], item_sample: NDArray[np.int32]
) -> NDArray[np.int32]:
    pack_of = np.empty(samples.size, np.int32)
    for pack in range(offsets.size - 1):
        for place in range(offsets[pack], offsets[pack + 1]):
            pack_of[samples[place]] = pack
    packs = np.empty(item_sample.size, np.int32)
    for item in range(item_sample.size):
        packs[item] = pack_of[item_sample[item]]
    return packs


@kernel
def _item_homes(
    replica_offsets: NDArray[np.int64],
    pack_replicas: NDArray[np.int32],
    pack: NDArray[np.int32],
    item_sample: NDArray[np.int32],
    item_position: NDArray[np.int32],
    sample_tokens: NDArray[np.int32],
) -> NDArray[np.int32]:
    home = np.empty(pack.size, np.int32)
    for item in range(pack.size):
        first = replica_offsets[pack[item]]
        degree = replica_offsets[pack[item] + 1] - first
        if degree > 1:
            tokens = int(sample_tokens[item_sample[item]])
            first += ring_member(int(item_position[item]), tokens, int(degree))
        home[item] = pack_replicas[first]
    return home


class ListedItems(NamedTuple):
    """The items of a plan by pack: those of a pack's samples in sequence order, then in the
    sample's own order. Columns [m] in that order, in which items that replicas of one node exchange
    lie near each other, as they do not in the plan.

    `item` int64, the row of the plan; `pack` and `place`, among those of its pack, int32; `start`
    int64, its first token in the padded pack; `llm_tokens` int32, `modality` int8 and `replica`
    int32 as in the plan. Those of pack p begin at `begins[p]`, int64[P+1].
    """

    item: NDArray[np.int64]
    pack: NDArray[np.int32]
    place: NDArray[np.int32]
    start: NDArray[np.int64]
    llm_tokens: NDArray[np.int32]
    modality: NDArray[np.int8]
    replica: NDArray[np.int32]
    begins: NDArray[np.int64]


class ByPhase(NamedTuple):
    """Rows of a list by what a replica encodes, sends or receives of one modality in one wave:
    `order` int64[k], of which phase (replica · waves + wave) · modalities + modality has those from
    `begins[phase]` on, int64[phases + 1]."""

    order: NDArray[np.int64]
    begins: NDArray[np.int64]


class EncodedParts(NamedTuple):
    """What replicas encode of packs, by phase, then pack: how many packs each phase has parts of,
    int64[phases]; and of each part the pack, int32, and how many items it has, int64."""

    counts: NDArray[np.int64]
    pack: NDArray[np.int32]
    items: NDArray[np.int64]


class Runs(NamedTuple):
    """Runs of feature rows, k of them, in the order in which their sources encode; all arrays [k].

    `item` in the plan's numbering; `source` and `target` replicas; `source_row` is the first row in
    the features that the source encodes in that wave and modality, `target_row` the first local
    token position at the target, `rows` the length.

    `sent` and `received` list the runs by the phase of the source, or of the target. Those of one
    phase are sorted by the replica at the other end, then by source row: what one sends in order
    the other receives in order, and no index has to travel with the rows.
    """

    item: NDArray[np.int64]
    source: NDArray[np.int32]
    target: NDArray[np.int32]
    source_row: NDArray[np.int64]
    target_row: NDArray[np.int64]
    rows: NDArray[np.int32]
    sent: ByPhase
    received: ByPhase


def listed_items(plan: StepPlan) -> ListedItems:
    """The items of all packs. O(n + m)."""
    item, pack, place, start, begins = _listed_items(
        plan.pack_offsets,
        plan.pack_samples,
        plan.replica_offsets,
        plan.sample_tokens,
        plan.item_sample,
    )
    start += plan.item_position.take(item)  # numpy's own loops wait for less of what is far apart
    return ListedItems(
        item=item,
        pack=pack,
        place=place,
        start=start,
        llm_tokens=plan.item_llm_tokens.take(item),
        modality=plan.item_modality.take(item),
        replica=plan.item_replica.take(item),
        begins=begins,
    )


def encode_order(plan: StepPlan, listed: ListedItems) -> ByPhase:
    """Listed items by (encoding replica, wave, modality, pack, place): the order in which each
    replica encodes, and in which its rows lie. O(m + W·N)."""
    return ByPhase(
        *_encode_order(
            listed.pack,
            listed.modality,
            listed.replica,
            plan.pack_wave,
            plan.waves,
            plan.replicas,
        )
    )


def encoded_parts(listed: ListedItems, encoded: ByPhase) -> EncodedParts:
    """The packs that each phase has items of, in their `encode_order`. O(m + W·N)."""
    return EncodedParts(*_encoded_parts(*encoded, listed.pack))


def feature_runs(plan: StepPlan, listed: ListedItems, encoded: ByPhase) -> Runs:
    """All runs of a step, of items in their `encode_order`. O(k + W·N)."""
    item, source, target, source_row, target_row, rows, phase, target_phase = _cut_runs(
        *encoded,
        listed.item,
        listed.pack,
        listed.start,
        listed.llm_tokens,
        plan.item_sample,
        plan.item_position,
        plan.sample_tokens,
        plan.replica_offsets,
        plan.pack_replicas,
        plan.waves,
    )
    # Runs come by source and source row. Sorted by the phase of the target they are as they are
    # received; sorting those by the phase of the source puts the target before the row.
    phases = len(encoded.begins) - 1
    received = ByPhase(*group_stable(target_phase, np.arange(len(phase)), phases))
    sent = ByPhase(*group_stable(phase, received.order, phases))
    return Runs(item, source, target, source_row, target_row, rows, sent, received)


@kernel
def _listed_items(
    pack_offsets: NDArray[np.int64],
    samples: NDArray[np.int32],
    replica_offsets: NDArray[np.int64],
    sample_tokens: NDArray[np.int32],
    item_sample: NDArray[np.int32],
) -> tuple[
    NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]
]:
    """Item, pack, place, first token of its sample in the padded pack, int[m]; and `begins`."""
    items = item_sample.size
    offsets = np.zeros(samples.size + 1, np.int64)  # int64[n + 1]: items of each sample
    for item in range(items):
        offsets[item_sample[item] + 1] += 1
    for sample in range(samples.size):
        offsets[sample + 1] += offsets[sample]
    item_of, start = np.empty(items, np.int64), np.empty(items, np.int64)
    pack_of, place = np.empty(items, np.int32), np.empty(items, np.int32)
    begins = np.zeros(pack_offsets.size, np.int64)
    row = 0
    for pack in range(pack_offsets.size - 1):
        degree = int(replica_offsets[pack + 1] - replica_offsets[pack])
        first, of_sample = row, 0
        for at in range(pack_offsets[pack], pack_offsets[pack + 1]):
            sample = samples[at]
            for item in range(offsets[sample], offsets[sample + 1]):
                item_of[row], start[row] = item, of_sample
                pack_of[row], place[row] = pack, row - first
                row += 1
            of_sample += padded_length(int(sample_tokens[sample]), degree)
        begins[pack + 1] = row
    return item_of, pack_of, place, start, begins


@kernel
def _encode_order(
    pack: NDArray[np.int32],
    modality: NDArray[np.int8],
    replica: NDArray[np.int32],
    pack_wave: NDArray[np.int32],
    waves: int,
    replicas: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    phase = np.empty(pack.size, np.int64)  # int64[m]
    for row in range(pack.size):
        of_replica = np.int64(replica[row]) * waves + pack_wave[pack[row]]
        phase[row] = of_replica * _MODALITIES + modality[row]
    return group_stable(phase, np.arange(pack.size), replicas * waves * _MODALITIES)


@kernel
def _encoded_parts(
    order: NDArray[np.int64], begins: NDArray[np.int64], pack: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    counts = np.zeros(begins.size - 1, np.int64)  # int64[phases]
    of_pack = np.empty(order.size, np.int32)  # int32[parts], and room for more
    items = np.empty(order.size, np.int64)  # int64[parts]
    parts = 0
    for phase in range(counts.size):
        before, last, count = parts, -1, 0
        for at in range(begins[phase], begins[phase + 1]):
            # No branch: whether a part begins or goes on is anyone's guess.
            goes_on = pack[order[at]] == last
            last = pack[order[at]]
            parts += not goes_on
            count = 1 + (count if goes_on else 0)
            of_pack[parts - 1], items[parts - 1] = last, count
        counts[phase] = parts - before
    return counts, of_pack[:parts].copy(), items[:parts].copy()


@kernel
def _cut_runs(
    order: NDArray[np.int64],
    begins: NDArray[np.int64],
    item_of: NDArray[np.int64],
    pack: NDArray[np.int32],
    start: NDArray[np.int64],
    tokens: NDArray[np.int32],
    item_sample: NDArray[np.int32],
    position: NDArray[np.int32],
    sample_tokens: NDArray[np.int32],
    replica_offsets: NDArray[np.int64],
    pack_replicas: NDArray[np.int32],
    waves: int,
) -> tuple[
    NDArray[np.int64],
    NDArray[np.int32],
    NDArray[np.int32],
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.int32],
    NDArray[np.int64],
    NDArray[np.int64],
]:
    """Items cut where their sequence is: the columns of `Runs`, and the phases of source and
    target, int64[k]. Which member holds a token, and at which row, is as in `core.layout.locate`.
    """
    of_replica = waves * _MODALITIES  # phases
    most = 0  # runs, wherever in a chunk an item begins
    for row in range(order.size):
        degree = int(replica_offsets[pack[row] + 1] - replica_offsets[pack[row]])
        if tokens[row] > 0:
            most += 1
        if tokens[row] > 0 and degree > 1:
            sample = item_sample[item_of[row]]
            length = padded_length(int(sample_tokens[sample]), degree)
            most += tokens[row] // (length // (2 * degree)) + 1
    items = np.empty(most, np.int64)
    source, target = np.empty(most, np.int32), np.empty(most, np.int32)
    source_row, target_row = np.empty(most, np.int64), np.empty(most, np.int64)
    rows = np.empty(most, np.int32)
    source_phase, target_phase = np.empty(most, np.int64), np.empty(most, np.int64)
    run = 0
    for phase in range(begins.size - 1):
        replica, encoded = phase // of_replica, 0
        for at in range(begins[phase], begins[phase + 1]):
            row = order[at]
            item, ring = item_of[row], replica_offsets[pack[row]]
            degree = int(replica_offsets[pack[row] + 1] - ring)
            begin, left = start[row], int(tokens[row])  # of the whole pack, then of the sample
            of_sample = chunk = 0
            if degree > 1:
                begin = np.int64(position[item])
                of_sample = int(start[row] - begin)
                length = padded_length(int(sample_tokens[item_sample[item]]), degree)
                chunk = length // (2 * degree)
            while left > 0:
                member, count, to_row = 0, left, begin
                if degree > 1:
                    index = int(begin // chunk)
                    inside = begin - index * chunk
                    count = min(left, int(chunk - inside))
                    member, to_row = index, of_sample // degree + inside
                    if index >= degree:
                        member, to_row = 2 * degree - 1 - index, to_row + chunk
                items[run] = item
                source[run], target[run] = replica, pack_replicas[ring + member]
                source_row[run], target_row[run] = encoded, to_row
                rows[run] = count
                source_phase[run] = phase
                target_phase[run] = phase + (target[run] - replica) * of_replica
                encoded += count
                begin += count
                left -= count
                run += 1
    return (
        items[:run],
        source[:run],
        target[:run],
        source_row[:run],
        target_row[:run],
        rows[:run],
        source_phase[:run],
        target_phase[:run],
    )
