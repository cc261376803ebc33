"""One optimizer step: samples, a plan of your choosing, and each replica's shard of it.

    waves ─ packs ─ members, samples ─┬─ tokens, padded and cut in zigzag
                                      └─ items ─ routes ─ encoder inputs and exchange

The same arguments give the same shards on every replica, so ranks need not talk to build them.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer_client.errors import BadArgument
from trainer_client.parts import WantedParts
from trainer_client.positions import (
    MropeRule,
    held_rows,
    in_sample,
    local_positions,
    sample_of,
)
from trainer_client.shard import (
    IGNORED_LABEL,
    MODALITIES,
    Group,
    ItemNotes,
    Microbatch,
    ModalityBatch,
    PackItems,
    PlanSummary,
    Shard,
    Wave,
)
from trainer_client.synthetic.routes import Encoders, Pack, WaveRoutes, least_loaded, wave_routes
from trainer_client.synthetic.sample import SyntheticItem, SyntheticSample

WIRE_BYTES = 4  # of a token id, a label or a position
PlannedWaves = Sequence[Sequence[tuple[Sequence[int], Sequence[int]]]]
"""By wave, its groups: (replicas in ring order, places of the pack's samples)."""

_ALL = WantedParts()


class SyntheticStep:
    """The shards of `samples`, trained in `waves`.

    `encoders` says which replica encodes which item, by default whoever has least to encode.
    With `mrope`, shards have positions of time, height and width by the items' grids. The digest
    is of the plan and the lengths.

    Raises BadArgument where a replica is in two groups of a wave, or a sample in no pack or in two.
    """

    def __init__(
        self,
        samples: Sequence[SyntheticSample],
        waves: PlannedWaves,
        *,
        replicas: int,
        step: int = 0,
        job: str = "synthetic",
        encoders: Encoders = least_loaded,
        mrope: MropeRule | None = None,
    ) -> None:
        self.samples = tuple(samples)
        self.replicas, self.step, self.job, self.mrope = replicas, step, job, mrope
        self._waves = _packs_of(self.samples, waves, replicas)
        self._weighs = any(sample.weight != 1 for sample in self.samples)
        self._routes: tuple[dict[str, WaveRoutes | None], ...] = tuple(
            {
                modality: wave_routes(packs, modality, replicas=replicas, encoders=encoders)
                for modality in MODALITIES
            }
            for packs in self._waves
        )

    @cached_property
    def plan(self) -> PlanSummary:
        """The plan of the whole step, the same for all replicas."""
        weighted = sum(sample.weight * sample.loss_tokens for sample in self.samples)
        return PlanSummary(
            digest=self._digest(),
            replicas=self.replicas,
            samples=len(self.samples),
            loss_tokens=sum(sample.loss_tokens for sample in self.samples),
            predicted_s=0.0,
            waves=tuple(self._wave(index, packs) for index, packs in enumerate(self._waves)),
            stages=(),
            weighted_loss_tokens=weighted if self._weighs else None,
        )

    def shard(self, replica: int, *, rank: int | None = None, wanted: WantedParts = _ALL) -> Shard:
        """What the service would give to `rank`, one of this replica; by default its only one."""
        if not 0 <= replica < self.replicas:
            raise BadArgument(f"replica {replica} is outside 0..{self.replicas - 1}")
        microbatches = tuple(
            self._microbatch(wave, replica, wanted) for wave in range(len(self._waves))
        )
        return Shard(
            job=self.job,
            attempt=1,
            step=self.step,
            rank=replica if rank is None else rank,
            replica=replica,
            cursor_after=str(self.step + 1),
            plan=self.plan,
            microbatches=microbatches,
            size_bytes=self._wire_bytes(replica, microbatches, wanted),
        )

    def _wire_bytes(
        self, replica: int, microbatches: Sequence[Microbatch], wanted: WantedParts
    ) -> int:
        """Bytes that the service would have sent."""
        tokens = sum(microbatch.local_tokens for microbatch in microbatches)
        media = [
            item.values.nbytes
            for by_modality in self._routes
            for routes in filter(None, by_modality.values())
            for item in routes.items[replica]
        ]
        return WIRE_BYTES * len(wanted.sequence) * tokens + sum(media) * wanted.media

    def _wave(self, index: int, packs: Sequence[Pack]) -> Wave:
        groups = tuple(
            Group(
                pack=pack.number,
                replicas=pack.members,
                tokens=int(pack.bounds[-1]),
                predicted_s=0.0,
            )
            for pack in packs
        )
        busy = {replica for pack in packs for replica in pack.members}
        idle = tuple(replica for replica in range(self.replicas) if replica not in busy)
        return Wave(index=index, groups=groups, idle=idle)

    def _digest(self) -> str:
        digest = hashlib.sha256(f"{self.job} {self.step} {self.replicas}".encode())
        for packs in self._waves:
            for pack in packs:
                held = [(s.id, s.tokens, [i.tokens for i in s.items]) for s in pack.samples]
                digest.update(repr((pack.number, pack.members, held)).encode())
            digest.update(b"wave")
        for routes in self._routes:
            for found in filter(None, routes.values()):
                digest.update(found.source.tobytes())
        return digest.hexdigest()

    def _microbatch(self, wave: int, replica: int, wanted: WantedParts) -> Microbatch:
        idle = Pack(number=-1, members=(replica,), samples=())
        mine = next((pack for pack in self._waves[wave] if replica in pack.members), idle)
        cp_rank, bounds = mine.members.index(replica), mine.bounds
        degree = len(mine.members)
        rows = held_rows(bounds, degree, cp_rank)
        items = _pack_items(mine)
        mrope = None
        if self.mrope is not None:
            mrope = local_positions(bounds, items, self.mrope, degree=degree, cp_rank=cp_rank)
        weights = np.array([sample.weight for sample in mine.samples], dtype=np.float64)
        encodes = wanted.tokens or wanted.media
        batches = {
            modality: _batch(routes, replica, wanted) if routes and encodes else None
            for modality, routes in self._routes[wave].items()
        }
        return Microbatch(
            wave=wave,
            pack=mine.number,
            cp_group=mine.members,
            cp_rank=cp_rank,
            predicted_s=0.0,
            input_ids=_cut(mine, bounds, rows, "input_ids", 0) if wanted.tokens else None,
            labels=_cut(mine, bounds, rows, "labels", IGNORED_LABEL) if wanted.labels else None,
            position_ids=torch.from_numpy(in_sample(bounds, rows)),
            cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
            lengths=torch.tensor([sample.tokens for sample in mine.samples], dtype=torch.int32),
            sample_ids=torch.tensor([sample.id for sample in mine.samples], dtype=torch.int64),
            vision=batches["vision"],
            audio=batches["audio"],
            items=items,
            mrope=mrope,
            weights=torch.from_numpy(weights[sample_of(bounds, rows)]) if self._weighs else None,
        )


def _packs_of(
    samples: Sequence[SyntheticSample], waves: PlannedWaves, replicas: int
) -> tuple[tuple[Pack, ...], ...]:
    number, made = 0, []
    for index, wave in enumerate(waves):
        busy = [replica for members, _ in wave for replica in members]
        if len(set(busy)) != len(busy) or not set(busy) <= set(range(replicas)):
            raise BadArgument(
                f"wave {index} names the replicas {sorted(busy)}; each of 0..{replicas - 1} can "
                "be in one group only"
            )
        packs = []
        for members, held in wave:
            chosen = tuple(samples[int(place)] for place in held)
            packs.append(Pack(number=number, members=tuple(map(int, members)), samples=chosen))
            number += 1
        made.append(tuple(packs))
    held = sorted(int(place) for wave in waves for _, places in wave for place in places)
    if held != list(range(len(samples))):
        raise BadArgument(
            f"the packs hold the samples {held}; each of 0..{len(samples) - 1} must be in one pack"
        )
    return tuple(made)


def _cut(
    pack: Pack, bounds: NDArray[np.int64], rows: NDArray[np.int64], column: str, filler: int
) -> Tensor:
    """A column of the pack's samples, padded and cut for one member: int64[local tokens]."""
    whole = torch.full((int(bounds[-1]),), filler, dtype=torch.int64)
    for start, sample in zip(bounds[:-1].tolist(), pack.samples, strict=True):
        whole[start : start + sample.tokens] = getattr(sample, column)
    return whole[torch.from_numpy(rows)]


def _batch(routes: WaveRoutes, replica: int, wanted: WantedParts) -> ModalityBatch:
    items = routes.items[replica]
    return ModalityBatch(
        items=[item.values for item in items] if wanted.media else None,
        exchange=routes.exchange(replica),
        notes=_notes(items),
    )


def _notes(items: Sequence[SyntheticItem]) -> ItemNotes:
    return ItemNotes(
        kind=np.array([item.kind for item in items], dtype=np.int8),
        grid=np.array([item.grid for item in items], dtype=np.int64).reshape(-1, 4),
        seconds_per_patch=np.array([i.seconds_per_patch for i in items], dtype=np.float64),
    )


def _pack_items(pack: Pack) -> PackItems:
    items = [item for sample in pack.samples for item in sample.items]
    starts = [
        start + item.position
        for start, sample in zip(pack.bounds[:-1].tolist(), pack.samples, strict=True)
        for item in sample.items
    ]
    notes = _notes(items)
    return PackItems(
        modality=np.array([MODALITIES.index(item.modality) for item in items], dtype=np.int8),
        start=np.array(starts, dtype=np.int64),
        tokens=np.array([item.tokens for item in items], dtype=np.int64),
        kind=notes.kind,
        grid=notes.grid,
        seconds_per_patch=notes.seconds_per_patch,
    )
