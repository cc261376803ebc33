"""Where every row of encoded features has to go: Π_LLM ∘ Π_enc⁻¹ at the grain of tokens.

OrchMLLM (§6) composes "back to the sample's owner" and "on to the text's rank" into one
exchange. Under context parallelism an item's tokens may straddle chunks of its sequence, so
the unit here is a *run*: consecutive rows of one item that go to one replica.

    item of 5 rows, degree 2      sequence  | chunk 0 | chunk 1 | chunk 2 | chunk 3 |
    encoded by replica 7          the item        [ 0 1 | 2 3 4 ]
                                  goes to     member 0 |  member 1
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.layout import locate, sample_starts
from dataservice.core.plan import StepPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemPlaces:
    """Each item's pack and its place in that pack's list of items: int32[m] both.

    A pack lists the items of its samples in sequence order, then in the sample's own order.
    """

    pack: NDArray[np.int32]
    place: NDArray[np.int32]


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


def item_places(plan: StepPlan) -> ItemPlaces:
    """Pack and place of every item. O(m log m)."""
    pack = plan.pack_of_sample[plan.item_sample]
    sequence_place = np.empty(len(plan.sample_ids), dtype=np.int64)
    sequence_place[plan.pack_samples] = np.arange(len(plan.pack_samples))
    order = np.argsort(sequence_place[plan.item_sample], kind="stable")
    first = np.searchsorted(pack[order], np.arange(plan.packs))
    place = np.empty(len(pack), dtype=np.int32)
    place[order] = np.arange(len(pack)) - first[pack[order]]
    return ItemPlaces(pack=pack, place=place)


def encode_order(plan: StepPlan, places: ItemPlaces) -> NDArray[np.int64]:
    """Items sorted by (wave, modality, encoding replica, pack, place): int64[m].

    Within one replica this is the order in which it encodes and in which its rows lie.
    """
    wave = plan.pack_wave[places.pack]
    keys = (places.place, places.pack, plan.item_replica, plan.item_modality, wave)
    return np.lexsort(keys)


def _source_rows(plan: StepPlan, places: ItemPlaces) -> NDArray[np.int64]:
    """First feature row of each item at the replica that encodes it: int64[m]."""
    order = encode_order(plan, places)
    wave = plan.pack_wave[places.pack][order].astype(np.int64)
    bucket = (wave * 2 + plan.item_modality[order]) * plan.replicas + plan.item_replica[order]
    ends = sample_starts(plan.item_llm_tokens[order])
    first_of_bucket = np.searchsorted(bucket, bucket)
    rows = np.empty(len(order), dtype=np.int64)
    rows[order] = ends[:-1] - ends[first_of_bucket]
    return rows


def feature_runs(plan: StepPlan, places: ItemPlaces) -> Runs:
    """All runs of a step, sorted by (wave, modality, source, target, source row).

    Source and target sort their rows alike, so what one sends in order the other receives in
    order and no index has to travel with the rows. O(k log k).
    """
    degree = plan.pack_degree[places.pack]
    sequence_place = np.empty(len(plan.sample_ids), dtype=np.int64)
    sequence_place[plan.pack_samples] = np.arange(len(plan.pack_samples))
    padded_in_order = plan.padded_sample_tokens
    at = sequence_place[plan.item_sample]
    padded = padded_in_order[at]
    starts = sample_starts(padded_in_order)
    start = starts[at] - starts[plan.pack_offsets[places.pack]]

    first = plan.item_position.astype(np.int64)
    last = first + plan.item_llm_tokens - 1
    chunk = np.where(degree > 1, padded // (2 * degree), padded)
    pieces = last // chunk - first // chunk + 1
    item = np.repeat(np.arange(len(first)), pieces)
    nth = np.arange(len(item)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    chunk_index = (first // chunk)[item] + nth
    run_first = np.maximum(first[item], chunk_index * chunk[item])
    run_stop = np.minimum(last[item] + 1, (chunk_index + 1) * chunk[item])

    cp_rank, target_row = locate(run_first, padded[item], degree[item], start[item])
    runs = {
        "item": item,
        "wave": plan.pack_wave[places.pack][item],
        "modality": plan.item_modality[item],
        "source": plan.item_replica[item],
        "target": plan.pack_replicas[plan.replica_offsets[places.pack[item]] + cp_rank],
        "source_row": _source_rows(plan, places)[item] + run_first - first[item],
        "target_row": target_row,
        "rows": run_stop - run_first,
    }
    order = np.lexsort(
        [runs[key] for key in ("source_row", "target", "source", "modality", "wave")]
    )
    return Runs(**{name: values[order] for name, values in runs.items()})
