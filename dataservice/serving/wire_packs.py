"""Orders, receipts and tickets of packs, to and from protobuf.

Every `x_to_proto` has its `x_from_proto`, and converting there and back gives an equal value.
Values that this project never sends raise SpecError. The same holds in wire_shards.py,
wire_jobs.py and wire_health.py; nowhere else are protobuf messages and core dataclasses converted
into each other.
"""

from collections.abc import Sequence

from dataservice_proto.columns import TICKET, VERSION, columns_of
from dataservice_proto.v1 import worker_pb2

from dataservice.core.errors import SpecError
from dataservice.core.orders import (
    BadSample,
    PackKey,
    PackOrder,
    PackReceipt,
    PackSample,
    SourceWork,
    Ticket,
)
from dataservice.core.sample import (
    ByteSpan,
    ItemLengths,
    Modality,
    SampleLengths,
    SampleLocation,
    SampleRef,
)
from dataservice.core.team import TeamShare


def pack_key_to_proto(key: PackKey) -> worker_pb2.PackKey:
    """A pack's name."""
    return worker_pb2.PackKey(
        job=key.job, step=key.step, plan_digest=key.plan_digest, pack=key.pack
    )


def pack_key_from_proto(message: worker_pb2.PackKey) -> PackKey:
    """A pack's name."""
    return PackKey(
        job=message.job, step=message.step, plan_digest=message.plan_digest, pack=message.pack
    )


def pack_order_to_proto(order: PackOrder) -> worker_pb2.PackOrder:
    """What a worker is to decode and assemble."""
    message = pack_order_head_to_proto(order)
    add_pack_samples(message, order.samples)
    return message


def pack_order_head_to_proto(order: PackOrder) -> worker_pb2.PackOrder:
    """An order without its samples."""
    return worker_pb2.PackOrder(
        key=pack_key_to_proto(order.key),
        degree=order.degree,
        pipeline=order.pipeline,
        team_weight=order.share.weight,
        team_limit=order.share.limit,
    )


def add_pack_samples(message: worker_pb2.PackOrder, samples: Sequence[PackSample]) -> None:
    """Append samples to an order."""
    message.samples.extend(map(_pack_sample_to_proto, samples))


def pack_order_from_proto(message: worker_pb2.PackOrder) -> PackOrder:
    """What a worker is to decode and assemble. Raises SpecError where its numbers are invalid."""
    if message.degree < 1:
        raise SpecError(f"a pack order has degree {message.degree}; it must be at least 1.")
    if not (message.team_weight > 0 and message.team_limit > 0):
        raise SpecError(
            f"a pack order has team weight {message.team_weight} and limit {message.team_limit}; "
            "both must be above 0. Run one release of coordinator and workers."
        )
    return PackOrder(
        key=pack_key_from_proto(message.key),
        degree=message.degree,
        pipeline=message.pipeline,
        samples=tuple(_pack_sample_from_proto(sample) for sample in message.samples),
        share=TeamShare(weight=message.team_weight, limit=message.team_limit),
    )


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


def _pack_sample_to_proto(sample: PackSample) -> worker_pb2.PackSample:
    return worker_pb2.PackSample(
        sample_id=sample.ref.sample_id,
        source=sample.ref.source,
        key=sample.ref.key,
        location=location_to_proto(sample.ref.location),
        llm_tokens=sample.lengths.llm_tokens,
        loss_tokens=sample.lengths.loss_tokens,
        items=[_item_to_proto(item) for item in sample.lengths.items],
        crc32=sample.ref.crc32,
        epoch=sample.epoch,
    )


def _pack_sample_from_proto(message: worker_pb2.PackSample) -> PackSample:
    return PackSample(
        ref=SampleRef(
            sample_id=message.sample_id,
            source=message.source,
            key=message.key,
            location=location_from_proto(message.location),
            crc32=message.crc32 if message.HasField("crc32") else None,
        ),
        lengths=SampleLengths(
            llm_tokens=message.llm_tokens,
            loss_tokens=message.loss_tokens,
            items=tuple(_item_from_proto(item) for item in message.items),
        ),
        epoch=message.epoch,
    )


def _item_to_proto(item: ItemLengths) -> worker_pb2.ItemLengths:
    return worker_pb2.ItemLengths(
        modality=int(item.modality),
        encoder_tokens=item.encoder_tokens,
        llm_tokens=item.llm_tokens,
        position=item.position,
        shape=item.shape,
    )


def _item_from_proto(message: worker_pb2.ItemLengths) -> ItemLengths:
    return ItemLengths(
        modality=modality_from_proto(message.modality),
        encoder_tokens=message.encoder_tokens,
        llm_tokens=message.llm_tokens,
        position=message.position,
        shape=tuple(message.shape),
    )


def pack_receipt_to_proto(receipt: PackReceipt) -> worker_pb2.PackReceipt:
    """What assembling a pack took."""
    return worker_pb2.PackReceipt(
        key=pack_key_to_proto(receipt.key),
        size_bytes=receipt.size_bytes,
        decode_s=receipt.decode_s,
        bad_samples=[
            worker_pb2.BadSample(
                sample_id=bad.sample_id, source=bad.source, key=bad.key, reason=bad.reason
            )
            for bad in receipt.bad_samples
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
            for work in receipt.sources
        ],
        sample_digests=receipt.sample_digests,
        room_s=receipt.room_s,
    )


def pack_receipt_from_proto(message: worker_pb2.PackReceipt) -> PackReceipt:
    """What assembling a pack took."""
    return PackReceipt(
        key=pack_key_from_proto(message.key),
        size_bytes=message.size_bytes,
        decode_s=message.decode_s,
        bad_samples=tuple(
            BadSample(sample_id=bad.sample_id, source=bad.source, key=bad.key, reason=bad.reason)
            for bad in message.bad_samples
        ),
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
        sample_digests=message.sample_digests,
        room_s=message.room_s,
    )


def ticket_to_proto(ticket: Ticket) -> worker_pb2.Ticket:
    """The right to stream some parts, without the workers' addresses."""
    return worker_pb2.Ticket(
        version=VERSION,
        job=ticket.job,
        step=ticket.step,
        plan_digest=ticket.plan_digest,
        rank=ticket.rank,
        holder=ticket.holder,
        expires_unix_s=ticket.expires_unix_s,
        workers=ticket.workers,
        tensors=ticket.tensors,
        sequences=ticket.sequences,
        parts=ticket.parts,
        signature=ticket.signature,
        **ticket.columns,
    )


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


def modality_from_proto(value: int) -> Modality:
    try:
        return Modality(value)
    except ValueError as error:
        known = ", ".join(f"{each.value} ({each.name.lower()})" for each in Modality)
        raise SpecError(
            f"modality {value} is not known; this release knows {known}. Run one release of "
            "coordinator and workers."
        ) from error
