"""Where the feature rows of a wave go: the splits and indices that all replicas agree on.

    items of the wave, by pack and place ─ encoded by ─▶ source, its row there
                     └ their tokens ─ held by ─▶ target, its row there

A source sends its rows by target, then by its own row; a target gets them by source, in the same
order, as the service has it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.positions import held_rows
from trainer_client.shard import FeatureExchange
from trainer_client.synthetic.sample import SyntheticItem, SyntheticSample

Ints = NDArray[np.int64]
Encoders = Callable[[Sequence[int], int], Sequence[int]]
"""(tokens of each item of one modality in a wave, number of replicas) → who encodes each."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pack:
    """The samples that `members` share in a wave. `number` is the group's place in the plan."""

    number: int
    members: tuple[int, ...]
    samples: tuple[SyntheticSample, ...]

    @property
    def bounds(self) -> Ints:
        """Offsets of the padded samples, int64[S+1]; each is a multiple of 2d at degree d > 1."""
        unit = 2 * len(self.members) if len(self.members) > 1 else 1
        padded = [-(-sample.tokens // unit) * unit for sample in self.samples]
        return np.cumsum([0, *padded], dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WaveRoutes:
    """One modality of a wave: `items` by encoder, in the order in which it encodes them, and for
    each feature row its source, target and row at both, int64[rows] all."""

    replicas: int
    items: tuple[tuple[SyntheticItem, ...], ...]
    source: Ints
    target: Ints
    source_row: Ints
    target_row: Ints

    def exchange(self, replica: int) -> FeatureExchange:
        """A replica's part."""
        sent = np.flatnonzero(self.source == replica)
        sent = sent[np.lexsort((self.source_row[sent], self.target[sent]))]
        got = np.flatnonzero(self.target == replica)
        got = got[np.lexsort((self.source_row[got], self.source[got]))]
        return FeatureExchange(
            send_rows=torch.from_numpy(self.source_row[sent]),
            send_splits=np.bincount(self.target[sent], minlength=self.replicas).tolist(),
            recv_splits=np.bincount(self.source[got], minlength=self.replicas).tolist(),
            recv_positions=torch.from_numpy(self.target_row[got]),
        )


def least_loaded(tokens: Sequence[int], replicas: int) -> list[int]:
    """Largest items first, each to the replica that encodes the fewest tokens so far."""
    loads, chosen = np.zeros(replicas), [0] * len(tokens)
    for item in np.argsort([-count for count in tokens], kind="stable").tolist():
        chosen[item] = int(loads.argmin())
        loads[chosen[item]] += tokens[item]
    return chosen


def wave_routes(
    packs: Sequence[Pack], modality: str, *, replicas: int, encoders: Encoders
) -> WaveRoutes | None:
    """The routes of a modality, None where the wave has no such item. O(tokens)."""
    placed = list(_placed_items(packs, modality))
    if not placed:
        return None
    chosen = [int(r) for r in encoders([item.tokens for item, *_ in placed], replicas)]
    ends = np.zeros(replicas, dtype=np.int64)
    first_row = []
    for (item, *_), replica in zip(placed, chosen, strict=True):
        first_row.append(int(ends[replica]))
        ends[replica] += item.tokens
    counts = [item.tokens for item, *_ in placed]
    return WaveRoutes(
        replicas=replicas,
        items=tuple(
            tuple(item for (item, *_), r in zip(placed, chosen, strict=True) if r == replica)
            for replica in range(replicas)
        ),
        source=np.repeat(np.array(chosen, dtype=np.int64), counts),
        target=np.concatenate([target for _, target, _ in placed]),
        source_row=np.concatenate(
            [first + np.arange(count) for first, count in zip(first_row, counts, strict=True)]
        ),
        target_row=np.concatenate([row for *_, row in placed]),
    )


def _placed_items(packs: Sequence[Pack], modality: str) -> "list[tuple[SyntheticItem, Ints, Ints]]":
    """Each item with the replica and the local row of each of its tokens, by pack and place."""
    placed = []
    for pack in packs:
        replica_of, row_of = _held_by(pack)
        for start, sample in zip(pack.bounds[:-1], pack.samples, strict=True):
            for item in sample.items:
                if item.modality == modality:
                    first = int(start) + item.position
                    own = slice(first, first + item.tokens)
                    placed.append((item, replica_of[own], row_of[own]))
    return placed


def _held_by(pack: Pack) -> tuple[Ints, Ints]:
    """The replica that holds each row of a padded pack, and its local row there."""
    bounds, degree = pack.bounds, len(pack.members)
    replica_of = np.empty(int(bounds[-1]), dtype=np.int64)
    row_of = np.empty_like(replica_of)
    for cp_rank, replica in enumerate(pack.members):
        rows = held_rows(bounds, degree, cp_rank)
        replica_of[rows] = replica
        row_of[rows] = np.arange(len(rows))
    return replica_of, row_of
