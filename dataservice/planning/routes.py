"""Where every row of encoded features has to go: Π_LLM ∘ Π_enc⁻¹ at the grain of tokens.

OrchMLLM (§6) composes "back to the sample's owner" and "on to the text's rank" into one
exchange. Under context parallelism an item's tokens may straddle chunks of its sequence, so
the unit here is a *run*: consecutive rows of one item that go to one replica.

    item of 5 rows, degree 2      sequence  | chunk 0 | chunk 1 | chunk 2 | chunk 3 |
    encoded by replica 7          the item        [ 0 1 | 2 3 4 ]
                                  goes to     member 0 |  member 1

The way starts where an item's text is: its pack, and the replica that holds its first token.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.layout import locate, sample_starts
from dataservice.core.plan import StepPlan
from dataservice.core.sample import Modality
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.integers import ring_member
from dataservice.planning.kernels.sort import group_stable

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemPlaces:
    """Each item's pack and its place in that pack's list of items: int32[m] both; `order` int64[m]
    lists the items by pack, then place.

    A pack lists the items of its samples in sequence order, then in the sample's own order.
    """

    pack: NDArray[np.int32]
    place: NDArray[np.int32]
    order: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Runs of feature rows, k of them; all arrays [k].

    `item` in the plan's numbering, `wave`, `modality`; `source` and `target` replicas;
    `source_row` is the first row in the features that the source encodes in that wave and
    modality, `target_row` the first local token position at the target, `rows` the length.
    """

    item: NDArray[np.int64]
    wave: NDArray[np.int32]
    modality: NDArray[np.int8]
    source: NDArray[np.int32]
    target: NDArray[np.int32]
    source_row: NDArray[np.int64]
    target_row: NDArray[np.int64]
    rows: NDArray[np.int64]

    def take(self, rows: NDArray[np.int64] | slice) -> "Runs":
        """The same columns for some of the runs, in that order."""
        return Runs(**{name: getattr(self, name)[rows] for name in Runs.__dataclass_fields__})


def item_places(plan: StepPlan) -> ItemPlaces:
    """Pack and place of every item. O(n + m)."""
    counts = np.bincount(plan.item_sample, minlength=len(plan.sample_ids))
    pack, place, order = _places(plan.pack_offsets, plan.pack_samples, sample_starts(counts))
    return ItemPlaces(pack=pack, place=place, order=order)


def phase_bucket(
    plan: StepPlan,
    wave: NDArray[np.int32],
    modality: NDArray[np.int8],
    replica: NDArray[np.int32],
) -> NDArray[np.int64]:
    """One number for (wave, modality, replica), in that order: int64[k] of arrays [k]."""
    return (wave.astype(np.int64) * len(Modality) + modality) * plan.replicas + replica


def buckets(plan: StepPlan) -> int:
    """How many numbers `phase_bucket` can give."""
    return plan.waves * len(Modality) * plan.replicas


def encode_order(plan: StepPlan, places: ItemPlaces) -> NDArray[np.int64]:
    """Items sorted by (wave, modality, encoding replica, pack, place): int64[m]. O(m + W·N).

    Within one replica this is the order in which it encodes and in which its rows lie.
    """
    wave = plan.pack_wave[places.pack]
    bucket = phase_bucket(plan, wave, plan.item_modality, plan.item_replica)
    order, _ = group_stable(bucket, places.order, buckets(plan))
    return order


def feature_runs(plan: StepPlan, places: ItemPlaces) -> Runs:
    """All runs of a step, sorted by (wave, modality, source, target, source row).

    Source and target sort their rows in the same way, so what one sends in order the other
    receives in order and no index has to travel with the rows. O(k + W·N).
    """
    order = encode_order(plan, places)
    wave = plan.pack_wave[places.pack]
    bucket = phase_bucket(plan, wave, plan.item_modality, plan.item_replica)
    source_row = _source_rows(bucket, order, plan.item_llm_tokens)
    padded, start = _sample_places(plan.padded_sample_tokens, plan.pack_offsets, plan.pack_samples)
    degree = plan.pack_degree
    item, run_first, rows = _cut_runs(
        order,
        plan.item_sample,
        plan.item_position,
        plan.item_llm_tokens,
        places.pack,
        degree,
        padded,
    )
    target, target_row = _targets(plan, places, item, run_first, padded, start)
    # Runs come by bucket and source row: sorting by the minor key first and then, stably, by the
    # major one puts the target between them.
    by_target, _ = group_stable(target.astype(np.int64), np.arange(len(item)), plan.replicas)
    sorted_runs, _ = group_stable(bucket[item], by_target, buckets(plan))
    return Runs(
        item=item,
        wave=wave[item],
        modality=plan.item_modality[item],
        source=plan.item_replica[item],
        target=target,
        source_row=source_row[item] + run_first - plan.item_position[item],
        target_row=target_row,
        rows=rows,
    ).take(sorted_runs)


def _targets(
    plan: StepPlan,
    places: ItemPlaces,
    item: NDArray[np.int64],
    run_first: NDArray[np.int64],
    padded: NDArray[np.int64],
    start: NDArray[np.int64],
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Replica that needs each run and its first row there: int32[k], int64[k]."""
    sample, pack = plan.item_sample[item], places.pack[item]
    target = plan.pack_replicas[plan.replica_offsets[pack]]
    target_row = start[sample] + run_first
    ring = np.flatnonzero(plan.pack_degree[pack] > 1)
    sample, pack = sample[ring], pack[ring]
    cp_rank, target_row[ring] = locate(
        run_first[ring], padded[sample], plan.pack_degree[pack], start[sample]
    )
    target[ring] = plan.pack_replicas[plan.replica_offsets[pack] + cp_rank]
    return target, target_row


@kernel
def _places(
    pack_offsets: NDArray[np.int64], samples: NDArray[np.int32], item_offsets: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    items = item_offsets[-1]
    pack_of = np.empty(items, np.int32)  # int32[m]
    place_of = np.empty(items, np.int32)  # int32[m]
    order = np.empty(items, np.int64)  # int64[m]
    end = 0
    for pack in range(pack_offsets.size - 1):
        first = end
        for at in range(pack_offsets[pack], pack_offsets[pack + 1]):
            for item in range(item_offsets[samples[at]], item_offsets[samples[at] + 1]):
                pack_of[item] = pack
                place_of[item] = end - first
                order[end] = item
                end += 1
    return pack_of, place_of, order


@kernel
def _source_rows(
    bucket: NDArray[np.int64], order: NDArray[np.int64], tokens: NDArray[np.int32]
) -> NDArray[np.int64]:
    """First feature row of each item at the replica that encodes it: int64[m]."""
    rows = np.empty(order.size, np.int64)
    end = 0
    last = -1
    for item in order:
        if bucket[item] != last:
            end = 0
            last = bucket[item]
        rows[item] = end
        end += tokens[item]
    return rows


@kernel
def _sample_places(
    padded_in_order: NDArray[np.int64],
    pack_offsets: NDArray[np.int64],
    samples: NDArray[np.int32],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Padded length of each sample and its start in its pack: int64[n] both."""
    padded = np.empty(samples.size, np.int64)
    start = np.empty(samples.size, np.int64)
    for pack in range(pack_offsets.size - 1):
        end = 0
        for at in range(pack_offsets[pack], pack_offsets[pack + 1]):
            padded[samples[at]] = padded_in_order[at]
            start[samples[at]] = end
            end += padded_in_order[at]
    return padded, start


@kernel
def _cut_runs(
    order: NDArray[np.int64],
    item_sample: NDArray[np.int32],
    position: NDArray[np.int32],
    tokens: NDArray[np.int32],
    pack: NDArray[np.int32],
    degree: NDArray[np.int64],
    padded: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Items cut where their sequence is: item, first token in the sample, and length of each run,
    in the order of the items; int64[k] all."""
    chunk = np.empty(order.size, np.int64)  # int64[m]: rows of a chunk of its sample
    runs = 0
    for at in range(order.size):
        item = order[at]
        ring = degree[pack[item]]
        chunk[at] = padded[item_sample[item]] // (2 * ring if ring > 1 else 1)
        if tokens[item] > 0:
            last = position[item] + tokens[item] - 1
            runs += last // chunk[at] - position[item] // chunk[at] + 1
    items = np.empty(runs, np.int64)  # int64[k]
    first = np.empty(runs, np.int64)  # int64[k]
    rows = np.empty(runs, np.int64)  # int64[k]
    run = 0
    for at in range(order.size):
        item = order[at]
        begin = np.int64(position[item])
        stop = begin + tokens[item]
        while begin < stop:
            cut = min(stop, (begin // chunk[at] + 1) * chunk[at])
            items[run] = item
            first[run] = begin
            rows[run] = cut - begin
            begin = cut
            run += 1
    return items, first, rows
