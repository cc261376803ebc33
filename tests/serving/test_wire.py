"""What goes over the wire and back is equal to what was sent."""

from dataclasses import fields, is_dataclass

import numpy as np
import pytest
from dataservice_proto.v1 import coordinator_pb2, worker_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.errors import SpecError
from dataservice.core.job import JobRecord
from dataservice.core.orders import (
    BadSample,
    FeatureRoutes,
    ItemsOfPack,
    Microbatch,
    PackKey,
    PackOrder,
    PackReceipt,
    PackSample,
    PartSpec,
    RankShard,
    Ticket,
    WantedParts,
)
from dataservice.core.sample import (
    ByteSpan,
    ItemLengths,
    Modality,
    SampleLengths,
    SampleLocation,
    SampleRef,
)
from dataservice.core.tickets import check_ticket, sign_ticket
from dataservice.engine.api import JobStatus
from dataservice.serving import wire_jobs, wire_packs, wire_shards

words = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
int32s = st.integers(-(2**31), 2**31 - 1)
int64s = st.integers(-(2**63), 2**63 - 1)
counts = st.integers(0, 2**31 - 1)
reals = st.floats(allow_nan=False, allow_infinity=False)
modalities = st.sampled_from(Modality)


def several(strategy):
    return st.lists(strategy, max_size=3).map(tuple)


def arrays(dtype, values):
    return st.lists(values, max_size=4).map(lambda each: np.array(each, dtype=dtype))


pack_keys = st.builds(PackKey, job=words, step=int64s, plan_digest=words, pack=int32s)
item_lengths = st.builds(
    ItemLengths,
    modality=modalities,
    encoder_tokens=counts,
    llm_tokens=counts,
    position=counts,
    shape=several(counts),
)
samples = st.builds(
    PackSample,
    ref=st.builds(
        SampleRef,
        sample_id=int64s,
        source=words,
        key=words,
        location=st.builds(
            SampleLocation,
            file=words,
            spans=several(st.builds(ByteSpan, name=words, offset_bytes=int64s, size_bytes=int64s)),
            row_group=int32s,
            row=int32s,
        ),
    ),
    lengths=st.builds(
        SampleLengths, llm_tokens=counts, loss_tokens=counts, items=several(item_lengths)
    ),
)
orders = st.builds(
    PackOrder, key=pack_keys, degree=st.integers(1, 64), pipeline=words, samples=several(samples)
)
receipts = st.builds(
    PackReceipt,
    key=pack_keys,
    size_bytes=int64s,
    decode_s=reals,
    bad_samples=several(
        st.builds(BadSample, sample_id=int64s, source=words, key=words, reason=words)
    ),
)
tickets = st.builds(
    Ticket,
    worker=words,
    address=words,
    rank=int32s,
    expires_unix_s=int64s,
    parts=several(
        st.builds(
            PartSpec,
            key=pack_keys,
            cp_rank=int32s,
            items=several(int32s),
            tensors=several(words),
        )
    ),
    signature=st.binary(max_size=32),
)


@st.composite
def microbatches(draw):
    present = draw(st.sets(modalities))
    int32_arrays = arrays(np.int32, int32s)
    return Microbatch(
        wave=draw(counts),
        pack=draw(st.integers(-1, 9)),
        cp_group=draw(several(counts)),
        cp_rank=draw(counts),
        seconds=draw(reals),
        sample_ids=draw(arrays(np.int64, int64s)),
        cu_seqlens=draw(int32_arrays),
        lengths=draw(int32_arrays),
        encodes={
            kind: draw(several(st.builds(ItemsOfPack, pack=counts, items=several(counts))))
            for kind in present
        },
        routes={
            kind: FeatureRoutes(
                modality=kind,
                send_rows=draw(int32_arrays),
                send_splits=draw(int32_arrays),
                recv_splits=draw(int32_arrays),
                recv_positions=draw(int32_arrays),
            )
            for kind in present
        },
    )


shards = st.builds(
    RankShard,
    job=words,
    attempt=int32s,
    step=int64s,
    rank=int32s,
    replica=int32s,
    plan_digest=words,
    cursor_after=words,
    loss_tokens=int64s,
    microbatches=several(microbatches()),
    tickets=several(tickets),
)
statuses = st.builds(
    JobStatus,
    record=st.builds(
        JobRecord,
        name=words,
        spec_json=words,
        index_fingerprint=words,
        state=st.sampled_from(["active", "draining"]),
        created_unix_s=reals,
    ),
    samples=int64s,
    attempt=int32s,
    world_size=int32s,
    planned_step=int64s,
    committed_step=int64s,
    quarantined=int64s,
)


def plain(value):
    """A value whose arrays compare as lists, their types kept."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(each) for each in value)
    return value


def sent(message):
    """The message as the other side parses it."""
    return type(message).FromString(message.SerializeToString())


@settings(deadline=None)
@given(pack_keys)
def test_pack_keys_survive(value):
    assert wire_packs.pack_key_from_proto(sent(wire_packs.pack_key_to_proto(value))) == value


@settings(deadline=None)
@given(orders)
def test_pack_orders_survive(value):
    assert wire_packs.pack_order_from_proto(sent(wire_packs.pack_order_to_proto(value))) == value


@settings(deadline=None)
@given(receipts)
def test_pack_receipts_survive(value):
    assert (
        wire_packs.pack_receipt_from_proto(sent(wire_packs.pack_receipt_to_proto(value))) == value
    )


@settings(deadline=None)
@given(tickets)
def test_tickets_survive_with_their_signature(value):
    signed = sign_ticket(value, b"secret")
    received = wire_packs.ticket_from_proto(sent(wire_packs.ticket_to_proto(signed)))
    assert received == signed
    check_ticket(received, b"secret", worker=value.worker, now_unix_s=value.expires_unix_s)


@given(st.builds(WantedParts, tokens=st.booleans(), media=st.booleans(), labels=st.booleans()))
def test_wanted_parts_survive(value):
    assert (
        wire_shards.wanted_parts_from_proto(sent(wire_shards.wanted_parts_to_proto(value))) == value
    )


@settings(deadline=None)
@given(shards)
def test_rank_shards_survive(value):
    received = wire_shards.rank_shard_from_proto(sent(wire_shards.rank_shard_to_proto(value)))
    assert plain(received) == plain(value)


@settings(deadline=None)
@given(statuses)
def test_job_statuses_survive(value):
    assert wire_jobs.job_status_from_proto(sent(wire_jobs.job_status_to_proto(value))) == value


def test_a_summary_shows_every_group_of_the_step(make):
    plan = make.plan()
    summary = wire_shards.step_summary_to_proto(plan)
    assert (summary.replicas, summary.waves, summary.samples) == (2, 1, 3)
    assert summary.predicted_s == 0.5
    assert list(summary.pack_wave) == [0, 0]
    assert list(summary.pack_degree) == [1, 1]
    assert list(summary.pack_replicas) == [1, 0]
    assert list(summary.pack_tokens) == [12, 6]
    assert list(summary.pack_seconds) == [0.5, 0.25]
    (stage,) = summary.stages
    assert (stage.stage, stage.algorithm, stage.unit) == ("pack", "isf", "packs")
    assert (stage.before, stage.after, stage.lower_bound) == (3, 2, 1.5)


def test_a_modality_of_another_release_is_refused():
    item = worker_pb2.ItemLengths(modality=9)
    sample = worker_pb2.PackSample(items=[item])
    order = worker_pb2.PackOrder(degree=1, samples=[sample], team_weight=1, team_limit=1)
    with pytest.raises(SpecError, match=r"modality 9 is not known.*0 \(vision\)"):
        wire_packs.pack_order_from_proto(order)


def test_an_order_without_its_teams_share_is_refused():
    order = worker_pb2.PackOrder(degree=1)
    with pytest.raises(SpecError, match=r"weight 0.0 and limit 0.0; both must be above 0"):
        wire_packs.pack_order_from_proto(order)


def test_a_job_state_of_another_release_is_refused():
    with pytest.raises(SpecError, match="state 'paused'"):
        wire_jobs.job_status_from_proto(coordinator_pb2.JobInfo(name="j", state="paused"))
