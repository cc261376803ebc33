"""Orders, receipts and tickets of packs, to and from protobuf.

Every `x_to_proto` has its `x_from_proto`, and converting there and back gives an equal value.
Values that this project never sends raise SpecError. The same holds in wire_shards.py,
wire_jobs.py and wire_health.py; nowhere else are protobuf messages and core dataclasses converted
into each other.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
from dataservice_proto.columns import (
    ORDERS,
    ORDERS_VERSION,
    RECEIPTS,
    RECEIPTS_VERSION,
    TICKET,
    VERSION,
    columns_of,
    packed,
    read_all,
)
from dataservice_proto.v1 import worker_pb2

from dataservice.core.content import SAMPLE_DIGEST
from dataservice.core.errors import SpecError
from dataservice.core.field_bytes import BYTES, NUMBER, fields, heads_of, numbers, texts
from dataservice.core.order_columns import PackOrders
from dataservice.core.orders import (
    BadSample,
    PackKey,
    PackKeys,
    PackOrder,
    SourceWork,
    StorageOutage,
    Ticket,
)
from dataservice.core.receipts import PackAnswers, PackReceipts
from dataservice.core.sample import ByteSpan, SampleLocation
from dataservice.core.sample_columns import (
    NUMBERS,
    SampleColumns,
    numbers_of,
)
from dataservice.core.sample_files import SampleFiles
from dataservice.core.team import TeamShare
from dataservice.core.tickets import written_of
from dataservice.serving.status_codes import error_named


def pack_keys_to_proto(keys: Iterable[PackKey]) -> list[worker_pb2.PackKeys]:
    """Packs' names, those of one plan together."""
    if isinstance(keys, PackKeys):
        of_plan = worker_pb2.PackKeys(
            job=keys.job, step=keys.step, plan_digest=keys.plan_digest, packs=keys.packs
        )
        return [of_plan] if keys else []
    by_plan: dict[tuple[str, int, str], list[int]] = {}
    for key in keys:
        by_plan.setdefault((key.job, key.step, key.plan_digest), []).append(key.pack)
    return [
        worker_pb2.PackKeys(job=job, step=step, plan_digest=plan_digest, packs=packs)
        for (job, step, plan_digest), packs in by_plan.items()
    ]


def pack_keys_from_proto(messages: Iterable[worker_pb2.PackKeys]) -> list[PackKey]:
    """Packs' names."""
    return [key for keys in keys_of_plans_from_proto(messages) for key in keys]


def keys_of_plans_from_proto(messages: Iterable[worker_pb2.PackKeys]) -> list[PackKeys]:
    """Packs' names, those of each message together."""
    return [
        PackKeys(job=of.job, step=of.step, plan_digest=of.plan_digest, packs=tuple(of.packs))
        for of in messages
    ]


def storage_outage_to_proto(outage: StorageOutage) -> worker_pb2.StorageOutage:
    """StorageOutage as a message."""
    return worker_pb2.StorageOutage(
        job=outage.job, source=outage.source, away_s=outage.away_s, reason=outage.reason
    )


def storage_outage_from_proto(message: worker_pb2.StorageOutage) -> StorageOutage:
    """StorageOutage from its message."""
    return StorageOutage(
        job=message.job, source=message.source, away_s=message.away_s, reason=message.reason
    )


def pack_orders_to_proto(orders: PackOrders) -> worker_pb2.PackOrders:
    """What a worker is to decode and assemble: packs of one step, of one job."""
    samples = orders.columns()
    files, file = samples.own_files()
    numbers = {**numbers_of(samples), "file": file}
    columns: dict[str, Any] = {name: packed(of) for name, of in numbers.items()}
    return worker_pb2.PackOrders(
        version=ORDERS_VERSION,
        job=orders.job,
        step=orders.step,
        plan_digest=orders.plan_digest,
        pipeline=orders.pipeline,
        team_weight=orders.share.weight,
        team_limit=orders.share.limit,
        packs=len(orders),
        sources=files.sources,
        files=len(files),
        file_source=packed(files.source),
        path_bytes=packed(files.path_bytes),
        paths=files.paths.tobytes(),
        keys=samples.keys,
        names=samples.names,
        pack=packed(orders.pack),
        degree=packed(orders.degree),
        samples=packed(orders.counts),
        **columns,
    )


def pack_orders_from_proto(message: worker_pb2.PackOrders) -> list[PackOrder]:
    """What a worker is to decode and assemble. Raises SpecError where its numbers are invalid."""
    if message.version != ORDERS_VERSION:
        raise SpecError(
            f"orders came as columns of version {message.version}; this worker reads version "
            f"{ORDERS_VERSION}. Run one release of coordinator and workers."
        )
    if not (message.team_weight > 0 and message.team_limit > 0):
        raise SpecError(
            f"a pack order has team weight {message.team_weight} and limit {message.team_limit}; "
            "both must be above 0. Run one release of coordinator and workers."
        )
    try:
        given = {"packs": message.packs, "files": message.files}
        of = read_all(ORDERS, columns_of(message, ORDERS), given)
        samples = SampleColumns(
            files=SampleFiles.read(
                message.sources, of["file_source"], of["path_bytes"], message.paths
            ),
            keys=message.keys,
            names=message.names,
            **{name: of[name] for name in NUMBERS},
        ).samples()
    except (ValueError, IndexError) as error:
        raise SpecError(f"orders whose columns cannot be read: {error}.") from error
    if of["degree"].size and of["degree"].min() < 1:
        raise SpecError(f"a pack order has degree {of['degree'].min()}; it must be at least 1.")
    ends = np.cumsum(of["samples"]).tolist()
    share = TeamShare(weight=message.team_weight, limit=message.team_limit)
    return [
        PackOrder(
            key=PackKey(
                job=message.job, step=message.step, plan_digest=message.plan_digest, pack=pack
            ),
            degree=degree,
            pipeline=message.pipeline,
            samples=tuple(samples[end - count : end]),
            share=share,
        )
        for pack, degree, count, end in zip(
            of["pack"].tolist(), of["degree"].tolist(), of["samples"].tolist(), ends, strict=True
        )
    ]


def location_to_proto(location: SampleLocation) -> worker_pb2.SampleLocation:
    """Where a sample's bytes lie."""
    return worker_pb2.SampleLocation(
        file=location.file,
        spans=[
            worker_pb2.ByteSpan(
                name=span.name, offset_bytes=span.offset_bytes, size_bytes=span.size_bytes
            )
            for span in location.spans
        ],
        row_group=location.row_group,
        row=location.row,
        piece=location.piece,
    )


def location_from_proto(message: worker_pb2.SampleLocation) -> SampleLocation:
    """Where a sample's bytes lie."""
    return SampleLocation(
        file=message.file,
        spans=tuple(
            ByteSpan(name=span.name, offset_bytes=span.offset_bytes, size_bytes=span.size_bytes)
            for span in message.spans
        ),
        row_group=message.row_group,
        row=message.row,
        piece=message.piece,
    )


def pack_answers_to_proto(answers: PackAnswers) -> worker_pb2.PackAnswers:
    """What became of some packs of one call."""
    return worker_pb2.PackAnswers(
        receipts=_receipts_to_proto(answers.receipts) if len(answers.receipts) else None,
        failures=[
            worker_pb2.PackFailure(pack=pack, error=type(error).__name__, message=str(error))
            for pack, error in answers.failures.items()
        ],
    )


def pack_answers_from_proto(message: worker_pb2.PackAnswers, step: PackKey) -> PackAnswers:
    """What became of some packs of the step that `step` names one of. Raises SpecError where its
    columns cannot be read."""
    told = message.HasField("receipts")
    return PackAnswers(
        receipts=_receipts_from_proto(message.receipts, step) if told else PackReceipts(),
        failures={
            failure.pack: error_named(failure.error, failure.message)
            for failure in message.failures
        },
    )


def _receipts_to_proto(receipts: PackReceipts) -> worker_pb2.PackReceipts:
    return worker_pb2.PackReceipts(
        version=RECEIPTS_VERSION,
        packs=len(receipts),
        sample_digests=receipts.sample_digests.tobytes(),
        bad=[
            worker_pb2.BadSample(
                sample_id=bad.sample_id, source=bad.source, key=bad.key, reason=bad.reason
            )
            for bad in receipts.bad
        ],
        sources=[
            worker_pb2.SourceWork(
                source=work.source,
                samples=work.samples,
                read_s=work.read_s,
                decode_s=work.decode_s,
                read_bytes=work.read_bytes,
                read_cpu_s=work.read_cpu_s,
                decode_cpu_s=work.decode_cpu_s,
            )
            for work in receipts.sources
        ],
        **{column.name: packed(getattr(receipts, column.name)) for column in RECEIPTS},
    )


def _receipts_from_proto(message: worker_pb2.PackReceipts, step: PackKey) -> PackReceipts:
    if message.version != RECEIPTS_VERSION:
        raise SpecError(
            f"receipts came as columns of version {message.version}; this coordinator reads "
            f"version {RECEIPTS_VERSION}. Run one release of coordinator and workers."
        )
    try:
        of = read_all(RECEIPTS, columns_of(message, RECEIPTS), {"packs": message.packs})
        digests = np.frombuffer(message.sample_digests, SAMPLE_DIGEST)
        for name, rows in (("bad_samples", message.bad), ("digests", digests)):
            if (of[name].size and of[name].min() < 0) or of[name].sum() != len(rows):
                raise ValueError(f"{name} count {of[name].sum()} rows of {len(rows)}")
    except ValueError as error:
        raise SpecError(f"receipts whose columns cannot be read: {error}.") from error
    return PackReceipts(
        job=step.job,
        step=step.step,
        plan_digest=step.plan_digest,
        bad=tuple(
            BadSample(sample_id=bad.sample_id, source=bad.source, key=bad.key, reason=bad.reason)
            for bad in message.bad
        ),
        sample_digests=digests,
        sources=tuple(
            SourceWork(
                source=work.source,
                samples=work.samples,
                read_s=work.read_s,
                decode_s=work.decode_s,
                read_bytes=work.read_bytes,
                read_cpu_s=work.read_cpu_s,
                decode_cpu_s=work.decode_cpu_s,
            )
            for work in message.sources
        ),
        **of,
    )


def ticket_to_proto(ticket: Ticket) -> worker_pb2.Ticket:
    """The right to stream some parts, without the workers' addresses."""
    return worker_pb2.Ticket.FromString(b"".join(ticket_parts(ticket)))


def ticket_parts(ticket: Ticket) -> list[bytes]:
    """The bytes of `ticket_to_proto`'s message, to be joined."""
    return [
        _of_step(ticket.job, ticket.step, ticket.plan_digest, ticket.tensors),
        *numbers(
            _TICKET_NUMBERS,
            rank=ticket.rank,
            expires_unix_s=ticket.expires_unix_s,
            sequences=ticket.sequences,
            parts=ticket.parts,
        ),
        *texts(_TICKET["workers"], ticket.workers),
        *fields(_TICKET, {"holder": ticket.holder.encode(), "signature": ticket.signature}),
        written_of(ticket),
    ]


_TICKET = heads_of(worker_pb2.Ticket, BYTES)
_TICKET_NUMBERS = heads_of(worker_pb2.Ticket, NUMBER)


@lru_cache(maxsize=64)
def _of_step(job: str, step: int, plan_digest: str, tensors: tuple[str, ...]) -> bytes:
    """The fields that the tickets of a step have in common."""
    return worker_pb2.Ticket(
        version=VERSION, job=job, step=step, plan_digest=plan_digest, tensors=tensors
    ).SerializeToString()


def ticket_from_proto(message: worker_pb2.Ticket, addresses: tuple[str, ...] = ()) -> Ticket:
    """The right to stream some parts; not yet checked. Raises SpecError where it is of another
    release."""
    if message.version != VERSION:
        raise SpecError(
            f"the ticket's columns are of version {message.version}, and version {VERSION} is read "
            "here. Run one release of coordinator, workers and trainer_client."
        )
    return Ticket(
        job=message.job,
        step=message.step,
        plan_digest=message.plan_digest,
        rank=message.rank,
        holder=message.holder,
        expires_unix_s=message.expires_unix_s,
        workers=tuple(message.workers),
        addresses=addresses,
        tensors=tuple(message.tensors),
        sequences=message.sequences,
        parts=message.parts,
        columns=columns_of(message, TICKET),
        signature=message.signature,
    )
