"""What goes over the wire and back is equal to what was sent."""

from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
from dataservice_proto.v1 import coordinator_pb2, worker_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.errors import SpecError
from dataservice.core.job import JobRecord, MixtureChange
from dataservice.core.mixture_tree import MixtureSource, MixtureTree
from dataservice.core.orders import (
    BadSample,
    FeatureRoutes,
    ItemsOfPack,
    Microbatch,
    PackItems,
    PackKey,
    PackOrder,
    PackReceipt,
    PackSample,
    PartSpec,
    RankShard,
    Ticket,
    UnitRange,
    WantedParts,
)
from dataservice.core.sample import (
    ByteSpan,
    ItemLengths,
    ItemNotes,
    Modality,
    SampleLengths,
    SampleLocation,
    SampleRef,
)
from dataservice.core.tickets import check_ticket, holder_key, prove, sign_ticket
from dataservice.engine.api import JobStatus, JobVersion
from dataservice.serving import wire_health, wire_jobs, wire_packs, wire_shards

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
            piece=int32s,
        ),
    ),
    lengths=st.builds(
        SampleLengths, llm_tokens=counts, loss_tokens=counts, items=several(item_lengths)
    ),
    epoch=int32s,
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
    sample_digests=st.binary(max_size=32),
)
unit_ranges = st.builds(UnitRange, first=counts, stop=counts, of=counts)
tickets = st.builds(
    Ticket,
    worker=words,
    address=words,
    rank=int32s,
    holder=words,
    expires_unix_s=int64s,
    parts=several(
        st.builds(
            PartSpec,
            key=pack_keys,
            cp_rank=int32s,
            items=several(int32s),
            tensors=several(words),
            ranges=several(unit_ranges),
        )
    ),
    signature=st.binary(max_size=32),
)


def columns(dtype, values, rows):
    return st.lists(values, min_size=rows, max_size=rows).map(lambda of: np.array(of, dtype=dtype))


@st.composite
def item_notes(draw, items):
    """Each column as it is, or with nothing known of any item."""
    unknown = ItemNotes.unknown(items)
    grid = columns(np.int32, counts, 4 * items).map(lambda flat: flat.reshape(-1, 4))
    return ItemNotes(
        kind=draw(columns(np.int8, st.integers(-1, 2), items) | st.just(unknown.kind)),
        grid=draw(grid | st.just(unknown.grid)),
        seconds_per_patch=draw(
            columns(float, reals | st.just(np.nan), items) | st.just(unknown.seconds_per_patch)
        ),
    )


@st.composite
def pack_items(draw):
    items = draw(st.integers(0, 4))
    return PackItems(
        modality=draw(columns(np.int8, modalities, items)),
        start=draw(columns(np.int32, counts, items)),
        tokens=draw(columns(np.int32, counts, items)),
        notes=draw(item_notes(items)),
    )


@st.composite
def microbatches(draw):
    present = draw(st.sets(modalities))
    int32_arrays = arrays(np.int32, int32s)
    encodes = {
        kind: draw(
            several(
                st.builds(
                    ItemsOfPack, pack=counts, items=several(counts), ranges=several(unit_ranges)
                )
            )
        )
        for kind in present
    }
    return Microbatch(
        wave=draw(counts),
        pack=draw(st.integers(-1, 9)),
        cp_group=draw(several(counts)),
        cp_rank=draw(counts),
        seconds=draw(reals),
        sample_ids=draw(arrays(np.int64, int64s)),
        cu_seqlens=draw(int32_arrays),
        lengths=draw(int32_arrays),
        items=draw(pack_items()),
        loss_weights=draw(arrays(np.float64, reals)),
        encodes=encodes,
        encode_notes={
            kind: draw(item_notes(sum(len(of.items) for of in encodes[kind]))) for kind in present
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
    weighted_loss_tokens=st.none() | reals,
    microbatches=several(microbatches()),
    tickets=several(tickets),
)
weights = st.dictionaries(words, st.floats(0, 1000), min_size=1, max_size=3)
mixture_changes = st.builds(
    MixtureChange, weights=weights, from_epoch=st.integers(1, 2**31)
) | st.builds(MixtureChange, weights=weights, from_step=st.integers(0, 2**53))
statuses = st.builds(
    JobStatus,
    record=st.builds(
        JobRecord,
        name=words,
        spec_json=words,
        index_fingerprint=words,
        state=st.sampled_from(["active", "draining"]),
        created_unix_s=reals,
        spec_version=st.integers(1, 2**31 - 1),
    ),
    samples=int64s,
    attempt=int32s,
    world_size=int32s,
    planned_step=int64s,
    committed_step=int64s,
    quarantined=int64s,
    attempt_version=int32s,
    versions=several(
        st.builds(
            JobVersion,
            version=int32s,
            submitted_unix_s=reals,
            changes=words,
            first_attempt=int32s,
            last_attempt=int32s,
        )
    ),
    mixture=st.none()
    | st.builds(
        MixtureTree,
        epochs=int32s,
        sources=several(
            st.builds(
                MixtureSource,
                source=words,
                fingerprint=words,
                samples=int64s,
                tokens=int64s,
                weight=reals,
                passes=reals,
                max_passes=st.none() | reals,
            )
        ),
        changes=several(mixture_changes),
    ),
)


def plain(value):
    """A value whose arrays compare by type, shape and text, in which nan equals nan."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, repr(value.tolist())
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
    proof = prove(signed, holder_key(value.holder, b"secret"))
    now = {"worker": value.worker, "now_unix_s": value.expires_unix_s}
    check_ticket(received, proof, b"secret", **now)


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
@given(statuses, st.none() | statuses)
def test_job_statuses_survive(value, validation):
    value = replace(value, validation=validation)
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


def test_a_service_of_before_tells_no_mixture_and_no_progress():
    of_before = coordinator_pb2.JobInfo(name="j", state="active")
    assert wire_jobs.job_status_from_proto(of_before).mixture is None
    seen = coordinator_pb2.GetHealthResponse(jobs=[coordinator_pb2.JobHealth(job="j")])
    (job,) = wire_health.health_from_proto(seen).jobs
    assert job.health.progress is None


def test_a_job_state_of_another_release_is_refused():
    with pytest.raises(SpecError, match="state 'paused'"):
        wire_jobs.job_status_from_proto(coordinator_pb2.JobInfo(name="j", state="paused"))
