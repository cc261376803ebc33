"""A rank's part of a scripted step as plain lists, which a test may change before it is sent."""

from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from dataservice_proto import columns
from dataservice_proto.columns import packed
from dataservice_proto.v1 import coordinator_pb2, worker_pb2

VISION, AUDIO = 0, 1


@dataclass
class Phase:
    """What the rank does for one encoder in a wave; `encodes` are (pack, places)."""

    modality: int
    encodes: list[tuple[int, list[int]]]
    send_rows: list[int]
    send_splits: list[int]
    recv_splits: list[int]
    recv_positions: list[int]


@dataclass
class Microbatch:
    pack: int
    cp_group: list[int]
    cp_rank: int = 0
    seconds: float = 0.0
    sample_ids: list[int] = field(default_factory=list)
    cu_seqlens: list[int] = field(default_factory=lambda: [0])
    lengths: list[int] = field(default_factory=list)
    loss_weights: list[float] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)


@dataclass
class Part:
    """A part of a pack at a worker: a sequence of `member`, or items."""

    worker: str
    pack: int
    member: int = -1
    items: tuple[int, ...] = ()


@dataclass
class ScriptedShard:
    """A shard's scalars are those of `head`; `edit_columns` may spoil the columns when all else is
    done."""

    head: coordinator_pb2.RankShard
    microbatches: list[Microbatch]
    summary: dict[str, list[float]]
    waves: int = 2
    replicas: int = 2
    parts: list[Part] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    addresses: dict[str, str] = field(default_factory=dict)
    ticket_digest: str = ""
    spoil: dict[str, bytes] = field(default_factory=dict)
    with_summary: bool = True
    version: int = columns.VERSION

    def summary_message(self) -> coordinator_pb2.StepSummary:
        """The groups of the whole step."""
        return coordinator_pb2.StepSummary(
            version=columns.VERSION,
            plan_digest=self.head.plan_digest,
            replicas=self.replicas,
            waves=self.waves,
            packs=len(self.summary["pack_degree"]),
            predicted_s=0.75,
            samples=3,
            stages=[
                coordinator_pb2.StageReport(
                    stage="pack", algorithm="isf", unit="packs", before=3, after=2, lower_bound=2
                )
            ],
            **{name: packed(values) for name, values in self.summary.items()},
        )

    def message(self) -> coordinator_pb2.RankShard:
        """As the service sends it."""
        message = coordinator_pb2.RankShard()
        message.CopyFrom(self.head)
        message.columns.MergeFrom(
            coordinator_pb2.ShardColumns(
                version=self.version,
                waves=self.waves,
                replicas=self.replicas,
                rings=sum(degree > 1 for degree in self.summary["pack_degree"]),
                **{**self._columns(), **self.spoil},
            )
        )
        if self.with_summary:
            message.summary.CopyFrom(self.summary_message())
        if self.parts:
            self._add_ticket(message)
        return message

    def _columns(self) -> dict[str, bytes]:
        mbs, phases = self.microbatches, self._phases()
        known = [phase for phase in phases if phase is not None]
        parts = [part for phase in known for part in phase.encodes]
        sends = [self._sends(phase) for phase in phases]
        receives = [self._receives(phase) for phase in phases]
        weights = [weight for mb in mbs for weight in mb.loss_weights]
        shared = [pack for pack, k in enumerate(self.summary["pack_degree"]) if k > 1]
        made = {
            "wave_ring": [shared.index(mb.pack) if mb.pack in shared else -1 for mb in mbs],
            "wave_pack": [mb.pack for mb in mbs],
            "wave_seconds": [float(mb.seconds) for mb in mbs],
            "wave_member": [mb.cp_rank for mb in mbs],
            "wave_degree": [len(mb.cp_group) for mb in mbs],
            "wave_samples": [len(mb.sample_ids) for mb in mbs],
            "wave_items": [0 for _ in mbs],
            "group": [replica for mb in mbs for replica in mb.cp_group],
            "sample_id": [sample for mb in mbs for sample in mb.sample_ids],
            "sample_tokens": [tokens for mb in mbs for tokens in mb.lengths],
            "sample_padded": [int(k) for mb in mbs for k in np.diff(mb.cu_seqlens)],
            "part_pack": [pack for pack, _ in parts],
            "part_items": [len(places) for _, places in parts],
            "place": [place for _, places in parts for place in places],
            "send_row": [run[0] for of in sends for run in of],
            "send_rows": [run[1] for of in sends for run in of],
            "send_target": [run[2] for of in sends for run in of],
            "receive_row": [run[0] for of in receives for run in of],
            "receive_rows": [run[1] for of in receives for run in of],
            "receive_source": [run[2] for of in receives for run in of],
        }
        if known:
            made["phase_parts"] = [-1 if p is None else len(p.encodes) for p in phases]
            made["phase_sends"] = [len(of) for of in sends]
            made["phase_receives"] = [len(of) for of in receives]
        columns = {name: packed(values) for name, values in made.items() if values}
        return columns | ({"sample_weight": packed(weights)} if weights else {})

    def _phases(self) -> list[Phase | None]:
        """By wave, then modality."""
        return [
            next((phase for phase in mb.phases if phase.modality == modality), None)
            for mb in self.microbatches
            for modality in (VISION, AUDIO)
        ]

    @staticmethod
    def _sends(phase: Phase | None) -> list[tuple[int, int, int]]:
        return [] if phase is None else runs(phase.send_rows, phase.send_splits)

    @staticmethod
    def _receives(phase: Phase | None) -> list[tuple[int, int, int]]:
        return [] if phase is None else runs(phase.recv_positions, phase.recv_splits)

    def _add_ticket(self, message: coordinator_pb2.RankShard) -> None:
        workers = sorted({part.worker for part in self.parts})
        sequences = [part for part in self.parts if not part.items]
        items = [part for part in self.parts if part.items]
        ticket = {
            "sequence_worker": [workers.index(part.worker) for part in sequences],
            "sequence_pack": [part.pack for part in sequences],
            "sequence_member": [part.member for part in sequences],
            "part_worker": [workers.index(part.worker) for part in items],
            "part_pack": [part.pack for part in items],
            "part_items": [len(part.items) for part in items],
            "place": [place for part in items for place in part.items],
        }
        message.ticket.CopyFrom(
            worker_pb2.Ticket(
                version=columns.VERSION,
                job=message.job,
                step=message.step,
                plan_digest=self.ticket_digest or message.plan_digest,
                workers=workers,
                tensors=self.tensors,
                sequences=len(sequences),
                parts=len(items),
                **{name: packed(values) for name, values in ticket.items() if values},
            )
        )
        message.addresses.extend(self.addresses.get(worker, "") for worker in workers)


def runs(rows: list[int], splits: list[int]) -> list[tuple[int, int, int]]:
    """Rows in the order of the replicas that `splits` count them for, as (first, rows, replica)."""
    replicas = [replica for replica, count in enumerate(splits) for _ in range(count)]
    numbered = [
        (row, replica, row - k)
        for k, (row, replica) in enumerate(zip(rows, replicas, strict=False))
    ]
    return [
        (of[0][0], len(of), replica)
        for (replica, _), group in groupby(numbered, key=lambda row: row[1:])
        if (of := list(group))
    ]
