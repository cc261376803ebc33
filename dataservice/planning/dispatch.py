"""Encoder items over replicas: each wave's items of one modality are balanced on their own.

Where an item's text goes does not bind it (OrchMLLM §6): the features travel in one exchange.
With nodes known, items stay in their node as far as balance allows.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.plan import StageReport
from dataservice.core.sample import Modality
from dataservice.planning.loads.partition import partition
from dataservice.planning.nodes.balance import balance_nodewise
from dataservice.planning.options import CostModel

# A balance this close to its bound is worth more than the milliseconds that a closer one takes.
TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderItems:
    """Items of a step, arrays [m]: their wave, modality, sizes, and `home`, where their first
    token is needed."""

    wave: NDArray[np.int32]
    modality: NDArray[np.int8]
    encoder_tokens: NDArray[np.int32]
    llm_tokens: NDArray[np.int32]
    home: NDArray[np.int32]


def dispatch_items(
    items: EncoderItems,
    *,
    replicas: int,
    replicas_per_node: int | None,
    algorithm: str,
    cost: CostModel,
) -> NDArray[np.int32]:
    """The replica that encodes each item: int32[m]."""
    if algorithm == "home" or len(items.home) == 0:
        return items.home.astype(np.int32)
    seconds = item_seconds(items, cost)
    replica_of = np.empty(len(seconds), dtype=np.int32)
    for chosen in _phases(items):
        if replicas_per_node is None or replicas_per_node >= replicas:
            replica_of[chosen] = _near_home(
                partition(seconds[chosen], replicas, tolerance=TOLERANCE).rank_of,
                items.home[chosen],
                replicas,
            )
        else:
            replica_of[chosen] = balance_nodewise(
                seconds[chosen],
                items.home[chosen],
                items.llm_tokens[chosen],
                replicas,
                replicas_per_node,
            ).rank_of
    return replica_of


def item_seconds(items: EncoderItems, cost: CostModel) -> NDArray[np.float64]:
    """Seconds to encode each item: float64[m]."""
    vision = cost.vision.item_seconds(items.encoder_tokens)
    audio = cost.audio.item_seconds(items.encoder_tokens)
    return np.where(items.modality == Modality.VISION, vision, audio)


def dispatch_reports(
    items: EncoderItems,
    replica_of: NDArray[np.int32],
    replicas: int,
    algorithm: str,
    cost: CostModel,
) -> tuple[StageReport, ...]:
    """For each modality: Σ over waves of the slowest replica's encoding, before (at home) and
    after; the bound is the larger of the mean and the longest item."""
    seconds = item_seconds(items, cost)
    reports = []
    for modality in Modality:
        before = after = bound = 0.0
        for chosen in _phases(items, modality):
            spent = seconds[chosen]
            before += _slowest(items.home[chosen], spent, replicas)
            after += _slowest(replica_of[chosen], spent, replicas)
            bound += max(float(spent.sum()) / replicas, float(spent.max()))
        reports.append(
            StageReport(
                stage=f"dispatch {modality.name.lower()}",
                algorithm=algorithm,
                unit="s",
                before=before,
                after=after,
                lower_bound=bound,
            )
        )
    return tuple(reports)


def _phases(items: EncoderItems, modality: Modality | None = None) -> list[NDArray[np.int64]]:
    """Rows of each (wave, modality) that occurs."""
    keys = items.wave.astype(np.int64) * 2 + items.modality
    order = np.argsort(keys, kind="stable")
    _, first = np.unique(keys[order], return_index=True)
    phases = np.split(order, first[1:]) if len(order) else []
    return [rows for rows in phases if modality is None or items.modality[rows[0]] == modality]


def _near_home(
    part_of: NDArray[np.int32], home: NDArray[np.int32], replicas: int
) -> NDArray[np.int32]:
    """Name the parts of a partition after the replicas that already hold most of their text.

    Loads stay as they are; fewer features travel. Greedy over (items in common), O(m log m).
    """
    pairs, count = np.unique(part_of.astype(np.int64) * replicas + home, return_counts=True)
    name = np.full(replicas, -1, dtype=np.int32)
    taken = np.zeros(replicas, dtype=bool)
    for pair in pairs[np.argsort(-count, kind="stable")].tolist():
        part, replica = divmod(pair, replicas)
        if name[part] < 0 and not taken[replica]:
            name[part] = replica
            taken[replica] = True
    name[name < 0] = np.flatnonzero(~taken)
    return name[part_of]


def _slowest(replica_of: NDArray[np.int32], seconds: NDArray[np.float64], replicas: int) -> float:
    return float(np.bincount(replica_of, weights=seconds, minlength=replicas).max())
