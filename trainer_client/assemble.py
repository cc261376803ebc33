"""Makes the Shard that the trainer sees from the rank shard and the parts that were received.

A rank's rows come as columns of numbers, wave after wave, and are cut here without looking at any
sample by itself.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from dataservice_proto.columns import SUMMARY, VERSION, columns_of, read_all, read_shard
from dataservice_proto.v1 import coordinator_pb2
from numpy.typing import NDArray

from trainer_client.errors import MalformedShard
from trainer_client.fetch import Part, PartId
from trainer_client.parts import WantedParts
from trainer_client.positions import MropeRule, held_rows, in_sample, local_positions, sample_of
from trainer_client.shard import (
    MODALITIES,
    FeatureExchange,
    Group,
    ItemNotes,
    LaterGroups,
    Microbatch,
    ModalityBatch,
    PackItems,
    PlanGroups,
    PlanSummary,
    Shard,
    StageReport,
    Wave,
)

Parts = Mapping[PartId, Part]
ItemOf = Callable[[int, int], torch.Tensor]
SummaryOf = Callable[[], coordinator_pb2.StepSummary]

_EMPTY = torch.empty(0, dtype=torch.int64)
_ALL = WantedParts()


def assemble_shard(
    shard: coordinator_pb2.RankShard,
    parts: Parts,
    wanted: WantedParts = _ALL,
    summary_of: SummaryOf | None = None,
) -> Shard:
    """Join the plan and the bytes. `summary_of` asks for the groups of the whole step, where they
    did not come along. Raises MalformedShard where plan and bytes contradict each other."""
    item_of = _item_index(parts) if wanted.media else None
    with _naming(shard.step):
        rows = _Rows(shard)
        microbatches = tuple(_microbatch(rows, wave, parts, item_of, wanted) for wave in rows.waves)
    return Shard(
        job=shard.job,
        attempt=shard.attempt,
        step=shard.step,
        rank=shard.rank,
        replica=shard.replica,
        cursor_after=shard.cursor_after,
        plan=plan_summary(shard, rows.rings, summary_of),
        microbatches=microbatches,
        size_bytes=sum(part.size_bytes for part in parts.values()),
    )


class _naming:
    """Raises what is wrong with a step's columns as MalformedShard, with the step's name."""

    def __init__(self, step: int) -> None:
        self._step = step

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ValueError) and not isinstance(error, MalformedShard):
            raise MalformedShard(f"step {self._step}: {error}") from error


# ---- the whole step --------------------------------------------------------------------------


def plan_summary(
    shard: coordinator_pb2.RankShard,
    rings: Mapping[int, int],
    summary_of: SummaryOf | None = None,
) -> PlanSummary:
    """The plan of the whole step; its groups are looked up when they are first read."""
    step, digest = shard.step, shard.plan_digest

    def ask() -> PlanGroups:
        if summary_of is None:
            raise MalformedShard(f"step {step}: its groups neither came nor can be asked for")
        summary = summary_of()
        with _naming(step):
            return _groups(summary, digest)

    waves: tuple[Wave, ...] | LaterGroups
    stages: tuple[StageReport, ...] | LaterGroups
    if shard.HasField("summary"):
        with _naming(step):
            came = _groups(shard.summary, digest)
        waves, stages = came.waves, came.stages
    else:
        waves = stages = LaterGroups(
            ask, wave_count=shard.columns.waves, ring_count=shard.columns.rings, rings=rings
        )
    return PlanSummary(
        digest=digest,
        replicas=shard.columns.replicas,
        samples=shard.samples,
        loss_tokens=shard.loss_tokens,
        weighted_loss_tokens=(
            shard.weighted_loss_tokens if shard.HasField("weighted_loss_tokens") else None
        ),
        predicted_s=shard.predicted_s,
        waves=waves,
        stages=stages,
    )


def _groups(summary: coordinator_pb2.StepSummary, digest: str) -> PlanGroups:
    if summary.version != VERSION or summary.plan_digest != digest:
        raise ValueError(
            f"the groups of plan {summary.plan_digest!r}, version {summary.version}, came for plan "
            f"{digest!r}, version {VERSION}"
        )
    of = read_all(SUMMARY, columns_of(summary, SUMMARY), {"packs": int(summary.packs)})
    ends = np.cumsum(of["pack_degree"])
    members = np.split(of["pack_replicas"], ends[:-1]) if len(ends) else []
    groups: list[list[Group]] = [[] for _ in range(summary.waves)]
    columns = (of[name].tolist() for name in ("pack_wave", "pack_tokens", "pack_seconds"))
    for pack, (replicas, wave, tokens, seconds) in enumerate(zip(members, *columns, strict=True)):
        if not 0 <= wave < summary.waves:
            raise ValueError(f"pack {pack} is in wave {wave}, of none")
        groups[wave].append(
            Group(pack=pack, replicas=tuple(replicas.tolist()), tokens=tokens, predicted_s=seconds)
        )
    return PlanGroups(
        waves=tuple(_wave(index, of, summary.replicas) for index, of in enumerate(groups)),
        stages=tuple(map(_stage, summary.stages)),
    )


def _wave(index: int, groups: Iterable[Group], replicas: int) -> Wave:
    groups = tuple(groups)
    busy = [replica for group in groups for replica in group.replicas]
    if len(busy) != len(set(busy)) or not set(busy) <= set(range(replicas)):
        raise ValueError(
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


# ---- this rank's rows ------------------------------------------------------------------------


class _Wave(NamedTuple):
    """A wave's own rows of the columns: `bounds` int64[S+1] are the padded sample offsets."""

    number: int
    pack: int
    cp_group: tuple[int, ...]
    cp_rank: int
    samples: slice
    items: slice
    bounds: NDArray[np.int64]

    @property
    def local_tokens(self) -> int:
        return 0 if self.pack < 0 else int(self.bounds[-1]) // len(self.cp_group)


class _Rows:
    """The columns of a shard, read and cut by wave. Raises ValueError where they contradict each
    other."""

    def __init__(self, shard: coordinator_pb2.RankShard) -> None:
        self.shard = shard
        self.of = of = read_shard(shard.columns)
        self.replicas = int(shard.columns.replicas)
        self.phase_parts, self.part_rows = _cuts(of["phase_parts"]), _cuts(of["part_items"])
        self.sends, self.receives = _cuts(of["phase_sends"]), _cuts(of["phase_receives"])
        cuts = (_cuts(of[name]) for name in ("wave_degree", "wave_samples", "wave_items"))
        packs, members = of["wave_pack"].tolist(), of["wave_member"].tolist()
        self.waves = [
            _Wave(
                number=wave,
                pack=pack,
                cp_group=self._group(wave, of["group"][group].tolist(), member),
                cp_rank=member,
                samples=samples,
                items=items,
                bounds=np.concatenate([[0], np.cumsum(of["sample_padded"][samples])]),
            )
            for wave, (pack, member, group, samples, items) in enumerate(
                zip(packs, members, *cuts, strict=True)
            )
        ]
        self.rings = self._rings()

    def _rings(self) -> dict[int, int]:
        """By pack that others share, its number among all such packs of the step."""
        numbers = self.of["wave_ring"].tolist() or [-1] * len(self.waves)
        shared = [len(wave.cp_group) > 1 for wave in self.waves]
        found = {wave.pack: k for wave, k in zip(self.waves, numbers, strict=True) if k >= 0}
        most = int(self.shard.columns.rings)
        if [k >= 0 for k in numbers] != shared or any(k >= most for k in found.values()):
            raise ValueError(
                f"the packs that replica {self.shard.replica} shares have the numbers {numbers}, "
                f"of {most} in the step"
            )
        return found

    def _group(self, wave: int, replicas: Sequence[int], member: int) -> tuple[int, ...]:
        if not 0 <= member < len(replicas) or replicas[member] != self.shard.replica:
            raise ValueError(
                f"in wave {wave}, replica {self.shard.replica} is to be member {member} of the "
                f"group {list(replicas)}"
            )
        return tuple(replicas)

    def phases(self, wave: int) -> Iterator[tuple[str, int]]:
        """The modalities of a wave of which somebody has an item, each with its phase's number."""
        for place, modality in enumerate(MODALITIES):
            phase = wave * len(MODALITIES) + place
            if self.of["phase_parts"].size and self.of["phase_parts"][phase] >= 0:
                yield modality, phase


def _cuts(counts: NDArray[Any]) -> list[slice]:
    ends = np.cumsum(np.maximum(counts, 0)).tolist()
    return [slice(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]


def _microbatch(
    rows: _Rows, wave: _Wave, parts: Parts, item_of: ItemOf | None, wanted: WantedParts
) -> Microbatch:
    sequence = _sequence(wave, parts, wanted)
    phases = {
        name: _modality(rows, wave, phase, item_of) for name, phase in rows.phases(wave.number)
    }
    items = _items(rows, wave)
    return Microbatch(
        wave=wave.number,
        pack=wave.pack,
        cp_group=wave.cp_group,
        cp_rank=wave.cp_rank,
        predicted_s=float(rows.of["wave_seconds"][wave.number]),
        input_ids=sequence.get("input_ids"),
        labels=sequence.get("labels"),
        position_ids=sequence["position_ids"] if wanted.tokens else _position_ids(wave),
        cu_seqlens=torch.from_numpy(wave.bounds.astype(np.int32)),
        lengths=torch.from_numpy(rows.of["sample_tokens"][wave.samples].astype(np.int32)),
        sample_ids=torch.from_numpy(rows.of["sample_id"][wave.samples]),
        vision=phases.get("vision"),
        audio=phases.get("audio"),
        items=items,
        mrope=_mrope(rows.shard.positions, wave, items),
        weights=_weights(rows, wave),
    )


def _weights(rows: _Rows, wave: _Wave) -> torch.Tensor | None:
    """The loss weights of this rank's tokens, float64[local tokens]; None in a step without."""
    weights = rows.of["sample_weight"]
    weighed = rows.shard.HasField("weighted_loss_tokens")
    wanted = len(rows.of["sample_id"]) if weighed else 0
    if len(weights) != wanted or not (np.isfinite(weights) & (weights >= 0)).all():
        raise ValueError(
            f"{len(weights)} loss weights came; the plan says {wanted} numbers from 0 on"
        )
    if not weighed:
        return None
    held = held_rows(wave.bounds, len(wave.cp_group), wave.cp_rank)
    return torch.from_numpy(weights[wave.samples][sample_of(wave.bounds, held)])


def _items(rows: _Rows, wave: _Wave) -> PackItems:
    notes = _notes(rows, "item", wave.items)
    return PackItems(
        modality=rows.of["item_modality"][wave.items].astype(np.int8),
        start=rows.of["item_start"][wave.items],
        tokens=rows.of["item_tokens"][wave.items],
        kind=notes.kind,
        grid=notes.grid,
        seconds_per_patch=notes.seconds_per_patch,
    )


def _notes(rows: _Rows, of: str, own: slice) -> ItemNotes:
    """What is known of some items. A column that is empty says nothing of any."""
    count = own.stop - own.start
    kind, grid, seconds = (rows.of[f"{of}_{name}"] for name in ("kind", "grid", "seconds"))
    return ItemNotes(
        kind=kind[own].astype(np.int8) if kind.size else np.full(count, -1, dtype=np.int8),
        grid=grid[own] if grid.size else np.zeros((count, 4), dtype=np.int64),
        seconds_per_patch=seconds[own] if seconds.size else np.full(count, np.nan),
    )


def _mrope(
    rule: coordinator_pb2.PositionRule, wave: _Wave, items: PackItems
) -> torch.Tensor | None:
    if rule.scheme != "mrope":
        return None
    if wave.pack < 0:
        return _EMPTY.expand(3, 0)
    return local_positions(
        wave.bounds,
        items,
        MropeRule(tokens_per_second=rule.tokens_per_second, past_time=rule.past_time),
        degree=len(wave.cp_group),
        cp_rank=wave.cp_rank,
    )


def _sequence(wave: _Wave, parts: Parts, wanted: WantedParts) -> dict[str, torch.Tensor]:
    """This rank's tokens of a pack, widened from the wire's int32 to torch's index type."""
    names = tuple(sorted(wanted.sequence))
    if wave.pack < 0:
        return dict.fromkeys(names, _EMPTY)
    part = parts.get(PartId(wave.pack, wave.cp_rank, ()))
    tensors = dict(part.tensors) if part else {}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != dict.fromkeys(names, (wave.local_tokens,)):
        raise ValueError(
            f"the sequence of pack {wave.pack}, member {wave.cp_rank}, came as {found}; the plan "
            f"says {', '.join(names)} of {wave.local_tokens} tokens"
        )
    return {name: tensors[name].to(torch.int64) for name in names}


def _position_ids(wave: _Wave) -> torch.Tensor:
    """The position_ids of this rank's tokens, int64[local tokens], from the plan."""
    rows = held_rows(wave.bounds, len(wave.cp_group), wave.cp_rank)
    return torch.from_numpy(in_sample(wave.bounds, rows))


def _modality(rows: _Rows, wave: _Wave, phase: int, item_of: ItemOf | None) -> ModalityBatch:
    parts = range(*rows.phase_parts[phase].indices(len(rows.part_rows)))
    encoded = slice(0, 0)
    if parts:
        encoded = slice(rows.part_rows[parts[0]].start, rows.part_rows[parts[-1]].stop)
    return ModalityBatch(
        items=item_of
        and [
            item_of(int(rows.of["part_pack"][part]), place)
            for part in parts
            for place in rows.of["place"][rows.part_rows[part]].tolist()
        ],
        exchange=_exchange(rows, wave, phase),
        notes=_notes(rows, "place", encoded),
    )


def _exchange(rows: _Rows, wave: _Wave, phase: int) -> FeatureExchange:
    of, sends, receives = rows.of, rows.sends[phase], rows.receives[phase]
    sent, got = of["send_rows"][sends], of["receive_rows"][receives]
    targets, sources = of["send_target"][sends], of["receive_source"][receives]
    send_rows = _expanded(of["send_row"][sends], sent)
    positions = _expanded(of["receive_row"][receives], got)
    for what, values, most in (
        ("rows that are sent", send_rows, None),
        ("local tokens that features are for", positions, wave.local_tokens),
        ("targets", targets, rows.replicas),
        ("sources", sources, rows.replicas),
    ):
        if values.size and (values.min() < 0 or (most is not None and values.max() >= most)):
            raise ValueError(
                f"the exchange of wave {wave.number} names {what} from {values.min()} to "
                f"{values.max()}; there are {rows.replicas} replicas and {wave.local_tokens} "
                "local tokens"
            )
    return FeatureExchange(
        send_rows=torch.from_numpy(send_rows),
        send_splits=_splits(targets, sent, rows.replicas),
        recv_splits=_splits(sources, got, rows.replicas),
        recv_positions=torch.from_numpy(positions),
    )


def _expanded(first: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Runs (first, rows) as single row numbers: int64[sum(rows)]."""
    if rows.size and rows.min() < 0:
        raise ValueError(f"a run of {rows.min()} rows")
    before = np.cumsum(rows) - rows
    expanded: NDArray[np.int64] = np.repeat(first - before, rows) + np.arange(int(rows.sum()))
    return expanded


def _splits(replicas: NDArray[np.int64], rows: NDArray[np.int64], count: int) -> list[int]:
    """The rows of each replica; sources and targets come in the replicas' order."""
    if (np.diff(replicas) < 0).any():
        raise ValueError(f"an exchange names the replicas {replicas.tolist()} out of order")
    splits: list[int] = np.bincount(replicas, rows, count).astype(np.int64).tolist()
    return splits


def _item_index(parts: Parts) -> ItemOf:
    """A function that finds an encoder item by pack and place, whichever worker brought it."""
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
