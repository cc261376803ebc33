"""The loads that measure.py runs: groups of replicas, with packs and items of many lengths."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from trainer_client.errors import BadArgument
from trainer_client.runtime.group_pool import GroupPool
from trainer_client.runtime.linear_loss import settled
from trainer_client.runtime.loss import LossTokens, microbatch_loss
from trainer_client.runtime.ring_attention import PackedAttention
from trainer_client.runtime.step import MultimodalModel
from trainer_client.runtime.wave_features import Features
from trainer_client.shard import MODALITIES, FeatureExchange, Microbatch, ModalityBatch

PACKED = 4  # sequences in a pack or items in a batch; separates linear from quadratic cost
CLIP_FRAMES = 8
TOKEN_IDS = 251  # number of different ids; with a single one the embedding's gradient is slow


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """A partition of the replicas into groups of `degree`; those left over compute alone."""

    degree: int
    crosses_node: bool
    members: tuple[tuple[int, ...], ...]

    def of(self, replica: int) -> tuple[int, ...]:
        """The group of a replica; the replica alone if it is in none."""
        return next((group for group in self.members if replica in group), (replica,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What one measurement runs: sequences, items or feature rows of these numbers of tokens, and
    `run`, which gives its seconds where it measures them itself."""

    phase: str
    tokens: tuple[int, ...]
    groups: Groups
    run: Callable[[], float | None]
    clip: bool = False

    @property
    def in_words(self) -> str:
        """A description for the progress output."""
        if self.phase == "exchange":
            return f"{self.phase}: {self.tokens[0]} feature rows to another replica and back"
        if self.phase == "gradients":
            return "gradients: what a step takes once"
        what = "a clip of" if self.clip else f"{len(self.tokens)} ×"
        return f"{self.phase}: {what} {self.tokens[0]} tokens at degree {self.groups.degree}"

    def row(self, seconds: float, peak_bytes: float = math.nan) -> dict[str, Any]:
        """The measurement as a row of the file of measurements; without a peak that is nan."""
        found: dict[str, Any] = {"tokens": list(self.tokens), "seconds": seconds}
        if self.phase == "exchange":
            found |= {"crosses_node": self.groups.crosses_node}
        if self.phase == "llm":
            found |= {"degree": self.groups.degree, "crosses_node": self.groups.crosses_node}
        if peak_bytes > 0:
            found |= {"peak_bytes": peak_bytes}
        return found | ({"clip": True} if self.clip else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedAs:
    """How a modality's items count: `tokens_per_row` encoder tokens make one feature row; an
    item grows by `area`, or by `frames` where the encoder takes one picture size alone."""

    name: str
    tokens_per_row: float
    grows: str

    @classmethod
    def parse(cls, text: str) -> "EncodedAs":
        """Parse NAME:TOKENS_PER_ROW:GROWS. Raises BadArgument."""
        name, _, rest = text.partition(":")
        tokens, _, grows = rest.partition(":")
        try:
            made = cls(name=name, tokens_per_row=float(tokens or 1), grows=grows or "area")
        except ValueError:
            made = cls(name="", tokens_per_row=1, grows="")
        if made.name not in MODALITIES or made.grows not in ("area", "frames"):
            raise BadArgument(
                f"modality {text!r} is not NAME:TOKENS_PER_ROW:GROWS; NAME is vision or audio and "
                "GROWS is area or frames, as in vision:4:area."
            )
        return made


def partitions(degrees: Sequence[int], replicas: int, per_node: int) -> Iterator[Groups]:
    """One partition for each degree that fits into a node, and with several nodes one for each
    degree across them."""
    order = list(range(replicas))
    nodes = replicas // per_node
    spread = sorted(order, key=lambda r: (r % per_node, r // per_node))
    for degree in sorted({d for d in degrees if d <= replicas}):
        if degree <= per_node:
            inside = [
                tuple(order[node * per_node + first : node * per_node + first + degree])
                for node in range(nodes)
                for first in range(0, per_node - degree + 1, degree)
            ]
            yield Groups(degree=degree, crosses_node=False, members=tuple(inside))
        if nodes > 1 and degree > 1:
            across = [
                tuple(spread[first : first + degree])
                for first in range(0, replicas - degree + 1, degree)
            ]
            yield Groups(degree=degree, crosses_node=True, members=tuple(across))


def decoder_loads(
    model: MultimodalModel,
    pool: GroupPool,
    groups: Groups,
    lengths: Sequence[int],
    *,
    modalities: Sequence[str],
) -> Iterator[Load]:
    """Each length as one sequence and as a pack of `PACKED` sequences; for groups also each length
    times the degree, where that is longer than all given lengths.

    Text alone, whose gradients go back as far as in training: also through a decoder that is
    frozen, to encoders that train."""
    features = {name: _no_rows(model, name) for name in modalities if model.encoder_trains(name)}
    longer = [n * groups.degree for n in lengths if n * groups.degree > max(lengths)]
    packs: list[tuple[int, ...]] = [(n,) for n in [*lengths, *longer]]
    packs += [(n // PACKED,) * PACKED for n in lengths if n >= 16 * PACKED * groups.degree]
    members = groups.of(pool.replica)
    for tokens in packs:
        # A rank outside the groups gets the token count of one member.
        own = tokens if len(members) == groups.degree else _shared(tokens, groups.degree)
        microbatch = make_microbatch(own, members, members.index(pool.replica), device_of(model))

        def run(microbatch: Microbatch = microbatch) -> None:
            attention = PackedAttention(
                microbatch.cu_seqlens,
                group=pool.get(microbatch.cp_group),
                lengths=microbatch.lengths,
            )
            given = settled(model.decode(microbatch, features, attention), microbatch)
            rows = max(1, microbatch.local_tokens)
            loss = microbatch_loss(given, microbatch, LossTokens(count=rows, weight=rows))
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]

        yield Load(phase="llm", tokens=tokens, groups=groups, run=run)


def encoder_loads(
    model: MultimodalModel, encoded: EncodedAs, item_tokens: Sequence[int], groups: Groups
) -> Iterator[Load]:
    """Each length as one item and as a batch of `PACKED` items; for vision encoders that take
    images of any size also as a clip, whose frames they may treat separately."""
    dummy = model.dummy_item(encoded.name)
    dummy_tokens = len(_encode(model, encoded.name, [dummy])) * encoded.tokens_per_row
    seen = set()
    for tokens in item_tokens:
        one = grown(dummy, round(tokens / dummy_tokens), encoded)
        quarter = grown(dummy, round(tokens / PACKED / dummy_tokens), encoded)
        batches = [[one], [quarter] * PACKED]
        if encoded.name == "vision" and encoded.grows == "area":
            batches.append([quarter.repeat(CLIP_FRAMES, 1, 1, 1)])
        for batch in batches:
            clip = encoded.grows == "area" and batch[0].ndim == 4 and len(batch[0]) > len(dummy)
            # Ask the encoder itself for its rows: it may join frames or drop some.
            with torch.no_grad():
                rows = len(_encode(model, encoded.name, batch[:1]))
            load = (max(1, round(rows * encoded.tokens_per_row)),) * len(batch)
            if (load, batch[0].shape) in seen:
                continue
            seen.add((load, batch[0].shape))

            def run(batch: list[Tensor] = batch) -> None:
                features = _encode(model, encoded.name, batch)
                if features.requires_grad:
                    features.float().square().sum().backward()  # type: ignore[no-untyped-call]

            yield Load(phase=encoded.name, tokens=load, groups=groups, run=run, clip=clip)


def feature_row(model: MultimodalModel) -> Tensor:
    """A row as the encoders give it, [1, width], by its shape and type."""
    with torch.no_grad():
        return _encode(model, "vision", [model.dummy_item("vision")])[:1].clone()


def _no_rows(model: MultimodalModel, modality: str) -> Features:
    """What arrives of a modality where nothing does; it links the decoder to the encoder."""
    with torch.no_grad():
        rows = _encode(model, modality, [model.dummy_item(modality)])[:0]
    positions = torch.zeros(0, dtype=torch.int64, device=rows.device)
    return Features(rows=rows.detach().requires_grad_(), positions=positions)


def _encode(model: MultimodalModel, modality: str, items: list[Tensor]) -> Tensor:
    nothing = torch.zeros(0, dtype=torch.int64)
    exchange = FeatureExchange(
        send_rows=nothing, send_splits=[], recv_splits=[], recv_positions=nothing
    )
    with torch.set_grad_enabled(model.encoder_trains(modality) and torch.is_grad_enabled()):
        return model.encode(modality, ModalityBatch(items=items, exchange=exchange))


def grown(dummy: Tensor, times: int, encoded: EncodedAs) -> Tensor:
    """The dummy item repeated about `times` times, at least once."""
    times = max(1, times)
    if encoded.name == "audio":
        return dummy.repeat(times)
    if encoded.grows == "frames":
        return dummy.repeat(times, 1, 1, 1)
    high = max(1, int(times**0.5))
    return dummy.repeat(1, high, max(1, round(times / high)), 1)


def make_microbatch(
    tokens: Sequence[int], members: tuple[int, ...], cp_rank: int, device: torch.device
) -> Microbatch:
    """This rank's part of a pack of sequences of `tokens`, cut as the service cuts it."""
    degree = len(members)
    unit = 2 * degree if degree > 1 else 1
    padded = [-(-n // unit) * unit for n in tokens]
    held = [cp_rank, 2 * degree - 1 - cp_rank] if degree > 1 else [0]
    chunks = [
        np.arange(index * (n // unit), (index + 1) * (n // unit)) for n in padded for index in held
    ]
    positions = torch.from_numpy(np.concatenate(chunks)).to(device)
    ids = positions % TOKEN_IDS
    return Microbatch(
        wave=0,
        pack=0,
        cp_group=members,
        cp_rank=cp_rank,
        predicted_s=0.0,
        input_ids=ids,
        labels=ids,
        position_ids=positions,
        cu_seqlens=torch.from_numpy(np.cumsum([0, *padded], dtype=np.int32)),
        lengths=torch.tensor(list(tokens), dtype=torch.int32),
        sample_ids=torch.arange(len(tokens)),
    )


def _shared(tokens: Sequence[int], degree: int) -> tuple[int, ...]:
    return tuple(max(1, n // degree) for n in tokens)


def device_of(model: MultimodalModel) -> torch.device:
    """The device of the model's weights."""
    return next(cast(Module, model).parameters()).device
