"""Makes the Shard that the trainer sees from the rank shard and the parts that were received."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from dataservice_proto.v1 import coordinator_pb2
from numpy.typing import NDArray

from trainer_client.errors import MalformedShard
from trainer_client.fetch import Part, PartId
from trainer_client.parts import WantedParts
from trainer_client.positions import MropeRule, held_rows, in_sample, local_positions, sample_of
from trainer_client.shard import (
    FeatureExchange,
    Group,
    ItemNotes,
    Microbatch,
    ModalityBatch,
    PackItems,
    PlanSummary,
    Shard,
    StageReport,
    Wave,
)

Parts = Mapping[PartId, Part]
ItemOf = Callable[[int, int], torch.Tensor]

_EMPTY = torch.empty(0, dtype=torch.int64)
_ALL = WantedParts()


def assemble_shard(
    shard: coordinator_pb2.RankShard, parts: Parts, wanted: WantedParts = _ALL
) -> Shard:
    """Join the plan and the bytes. Raises MalformedShard where they contradict each other."""
    item_of = _item_index(parts) if wanted.media else None
    microbatches = tuple(
        _microbatch(shard, mb, parts, item_of, wanted) for mb in shard.microbatches
    )
    waves = [mb.wave for mb in microbatches]
    if waves != sorted(set(waves)):
        raise MalformedShard(f"step {shard.step}: waves come in the order {waves}")
    return Shard(
        job=shard.job,
        attempt=shard.attempt,
        step=shard.step,
        rank=shard.rank,
        replica=shard.replica,
        cursor_after=shard.cursor_after,
        plan=plan_summary(shard),
        microbatches=microbatches,
        size_bytes=sum(part.size_bytes for part in parts.values()),
    )


def plan_summary(shard: coordinator_pb2.RankShard) -> PlanSummary:
    """The plan of the whole step, from its columns."""
    summary = shard.summary
    packs = len(summary.pack_wave)
    lengths = {len(summary.pack_degree), len(summary.pack_tokens), len(summary.pack_seconds)}
    if lengths != {packs} or sum(summary.pack_degree) != len(summary.pack_replicas):
        raise MalformedShard(f"step {shard.step}: the plan's columns have different lengths")
    groups: list[list[Group]] = [[] for _ in range(summary.waves)]
    start = 0
    for pack, (wave, degree) in enumerate(zip(summary.pack_wave, summary.pack_degree, strict=True)):
        if not 0 <= wave < summary.waves:
            raise MalformedShard(f"step {shard.step}: pack {pack} is in wave {wave}, of none")
        group = Group(
            pack=pack,
            replicas=tuple(summary.pack_replicas[start : start + degree]),
            tokens=summary.pack_tokens[pack],
            predicted_s=summary.pack_seconds[pack],
        )
        groups[wave].append(group)
        start += degree
    return PlanSummary(
        digest=shard.plan_digest,
        replicas=summary.replicas,
        samples=summary.samples,
        loss_tokens=shard.loss_tokens,
        weighted_loss_tokens=(
            shard.weighted_loss_tokens if shard.HasField("weighted_loss_tokens") else None
        ),
        predicted_s=summary.predicted_s,
        waves=tuple(_wave(index, of, summary.replicas) for index, of in enumerate(groups)),
        stages=tuple(_stage(stage) for stage in summary.stages),
    )


def _wave(index: int, groups: Iterable[Group], replicas: int) -> Wave:
    groups = tuple(groups)
    busy = [replica for group in groups for replica in group.replicas]
    if len(busy) != len(set(busy)) or not set(busy) <= set(range(replicas)):
        raise MalformedShard(
            f"wave {index} names the replicas {sorted(busy)}; each of 0..{replicas - 1} can be "
            "in one group only"
        )
    return Wave(index=index, groups=groups, idle=tuple(sorted(set(range(replicas)) - set(busy))))


def _stage(stage: coordinator_pb2.StageReport) -> StageReport:
    return StageReport(
        stage=stage.stage,
        algorithm=stage.algorithm,
        unit=stage.unit,
        before=stage.before,
        after=stage.after,
        lower_bound=stage.lower_bound,
    )


def _microbatch(
    shard: coordinator_pb2.RankShard,
    mb: coordinator_pb2.Microbatch,
    parts: Parts,
    item_of: ItemOf | None,
    wanted: WantedParts,
) -> Microbatch:
    sequence = _sequence(shard.step, mb, parts, wanted)
    local_tokens = _local_tokens(mb)
    phases = {
        phase.modality: _modality(shard, mb.wave, phase, local_tokens, item_of)
        for phase in mb.phases
    }
    bounds = np.array(list(mb.cu_seqlens) or [0], dtype=np.int64)
    items = _items(shard.step, mb.items)
    return Microbatch(
        wave=mb.wave,
        pack=mb.pack,
        cp_group=tuple(mb.cp_group),
        cp_rank=mb.cp_rank,
        predicted_s=mb.seconds,
        input_ids=sequence.get("input_ids"),
        labels=sequence.get("labels"),
        position_ids=sequence["position_ids"] if wanted.tokens else _position_ids(mb, bounds),
        cu_seqlens=_tensor(mb.cu_seqlens, np.int32),
        lengths=_tensor(mb.lengths, np.int32),
        sample_ids=_tensor(mb.sample_ids, np.int64),
        vision=phases.get(coordinator_pb2.VISION),
        audio=phases.get(coordinator_pb2.AUDIO),
        items=items,
        mrope=_mrope(shard.positions, mb, bounds, items),
        weights=_weights(shard, mb, bounds),
    )


def _weights(
    shard: coordinator_pb2.RankShard, mb: coordinator_pb2.Microbatch, bounds: NDArray[np.int64]
) -> torch.Tensor | None:
    """The loss weights of this rank's tokens, float64[local tokens]; None in a step without."""
    weights = np.array(list(mb.loss_weights), dtype=np.float64)
    wanted = len(bounds) - 1 if shard.HasField("weighted_loss_tokens") else 0
    if len(weights) != wanted or not (np.isfinite(weights) & (weights >= 0)).all():
        raise MalformedShard(
            f"step {shard.step}: pack {mb.pack} came with {len(weights)} loss weights; the plan "
            f"says {wanted} numbers from 0 on"
        )
    if not shard.HasField("weighted_loss_tokens"):
        return None
    rows = held_rows(bounds, max(1, len(mb.cp_group)), mb.cp_rank)
    return torch.from_numpy(weights[sample_of(bounds, rows)])


def _items(step: int, message: coordinator_pb2.PackItems) -> PackItems:
    columns = [np.array(list(c), dtype=np.int64) for c in (message.modality, message.start)]
    tokens = np.array(list(message.tokens), dtype=np.int64)
    if {len(column) for column in columns} != {len(tokens)}:
        raise MalformedShard(f"step {step}: the columns of a pack's items have different lengths")
    notes = _notes(step, message.notes, len(tokens))
    return PackItems(
        modality=columns[0].astype(np.int8),
        start=columns[1],
        tokens=tokens,
        kind=notes.kind,
        grid=notes.grid,
        seconds_per_patch=notes.seconds_per_patch,
    )


def _notes(step: int, message: coordinator_pb2.ItemNotes, items: int) -> ItemNotes:
    """A column that is empty says nothing of any item; so does a service of an older release."""
    columns = (
        np.array(list(message.kind) or [-1] * items, dtype=np.int8),
        np.array(list(message.grid) or [0] * 4 * items, dtype=np.int64),
        np.array(list(message.seconds_per_patch) or [np.nan] * items, dtype=np.float64),
    )
    found = tuple(len(column) for column in columns)
    if found != (items, 4 * items, items):
        raise MalformedShard(f"step {step}: the notes on {items} items have {found} values")
    kind, grid, seconds = columns
    return ItemNotes(kind=kind, grid=grid.reshape(-1, 4), seconds_per_patch=seconds)


def _mrope(
    rule: coordinator_pb2.PositionRule,
    mb: coordinator_pb2.Microbatch,
    bounds: NDArray[np.int64],
    items: PackItems,
) -> torch.Tensor | None:
    if rule.scheme != "mrope":
        return None
    if mb.pack < 0:
        return _EMPTY.expand(3, 0)
    return local_positions(
        bounds,
        items,
        MropeRule(tokens_per_second=rule.tokens_per_second, past_time=rule.past_time),
        degree=len(mb.cp_group),
        cp_rank=mb.cp_rank,
    )


def _local_tokens(mb: coordinator_pb2.Microbatch) -> int:
    if mb.pack < 0 or not mb.cu_seqlens:
        return 0
    return mb.cu_seqlens[-1] // max(1, len(mb.cp_group))


def _sequence(
    step: int, mb: coordinator_pb2.Microbatch, parts: Parts, wanted: WantedParts
) -> dict[str, torch.Tensor]:
    """This rank's tokens of a pack, widened from the wire's int32 to torch's index type."""
    names = tuple(sorted(wanted.sequence))
    if mb.pack < 0:
        return dict.fromkeys(names, _EMPTY)
    part = parts.get(PartId(mb.pack, mb.cp_rank, ()))
    tensors = dict(part.tensors) if part else {}
    local_tokens = _local_tokens(mb)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != dict.fromkeys(names, (local_tokens,)):
        raise MalformedShard(
            f"step {step}: the sequence of pack {mb.pack}, member {mb.cp_rank}, came as {found}; "
            f"the plan says {', '.join(names)} of {local_tokens} tokens"
        )
    return {name: tensors[name].to(torch.int64) for name in names}


def _position_ids(mb: coordinator_pb2.Microbatch, bounds: NDArray[np.int64]) -> torch.Tensor:
    """The position_ids of this rank's tokens, int64[local tokens], from the plan."""
    rows = held_rows(bounds, max(1, len(mb.cp_group)), mb.cp_rank)
    return torch.from_numpy(in_sample(bounds, rows))


def _modality(
    shard: coordinator_pb2.RankShard,
    wave: int,
    phase: coordinator_pb2.EncoderPhase,
    local_tokens: int,
    item_of: ItemOf | None,
) -> ModalityBatch:
    replicas = shard.summary.replicas
    positions = _tensor(phase.recv_positions, np.int64)
    rows = _tensor(phase.send_rows, np.int64)
    lengths = (len(phase.send_splits), len(phase.recv_splits))
    sums = (sum(phase.send_splits), sum(phase.recv_splits))
    inside = not len(positions) or 0 <= int(positions.min()) <= int(positions.max()) < local_tokens
    if lengths != (replicas, replicas) or sums != (len(rows), len(positions)) or not inside:
        raise MalformedShard(
            f"step {shard.step}, wave {wave}: the exchange has splits of {lengths} replicas that "
            f"sum to {sums}, {len(rows)} rows and {len(positions)} positions"
            f"{'' if inside else ' outside the local tokens'}; there are {replicas} replicas and "
            f"{local_tokens} local tokens"
        )
    return ModalityBatch(
        items=item_of and [item_of(of.pack, item) for of in phase.encodes for item in of.items],
        exchange=FeatureExchange(
            send_rows=rows,
            send_splits=list(phase.send_splits),
            recv_splits=list(phase.recv_splits),
            recv_positions=positions,
        ),
        notes=_notes(shard.step, phase.notes, sum(len(of.items) for of in phase.encodes)),
    )


def _tensor(values: Iterable[int], dtype: type[np.int32] | type[np.int64]) -> torch.Tensor:
    # Through a list: numpy would read protobuf's own sequences item by item.
    return torch.from_numpy(np.array(list(values), dtype=dtype))


def _item_index(parts: Parts) -> ItemOf:
    """A function that finds an encoder item by pack and place, whichever ticket brought it."""
    items: dict[tuple[int, int], torch.Tensor] = {}
    for part_id, part in parts.items():
        if part_id.items and len(part_id.items) != len(part.tensors):
            raise MalformedShard(
                f"{part_id}: {len(part.tensors)} tensors came for {len(part_id.items)} items"
            )
        for item, (_, tensor) in zip(part_id.items, part.tensors, strict=False):
            items[part_id.pack, item] = tensor

    def item_of(pack: int, item: int) -> torch.Tensor:
        try:
            return items[pack, item]
        except KeyError:
            raise MalformedShard(f"no ticket brought item {item} of pack {pack}") from None

    return item_of
