"""What goes over the wire and back is equal to what was sent."""

import sys
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from dataservice_proto.columns import (
    SHARD,
    SHARD_FIELDS,
    SUMMARY,
    TICKET,
    TICKET_FIELDS,
    columns_of,
    read_all,
)
from dataservice_proto.v1 import coordinator_pb2, worker_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.errors import SpecError
from dataservice.core.job import JobRecord, MixtureChange
from dataservice.core.mixture_tree import MixtureSource, MixtureTree
from dataservice.core.order_columns import PackOrders
from dataservice.core.orders import (
    EVERYTHING,
    BadSample,
    PackKey,
    PackKeys,
    PackOrder,
    PackReceipt,
    PackSample,
    RankShard,
    ShardColumns,
    StepSummary,
    Ticket,
    WantedParts,
)
from dataservice.core.plan import StageReport
from dataservice.core.positions import PositionRule
from dataservice.core.receipts import PackAnswers, PackReceipts
from dataservice.core.sample import (
    ByteSpan,
    ItemLengths,
    Modality,
    SampleLengths,
    SampleLocation,
    SampleRef,
)
from dataservice.core.tickets import check_ticket, holder_key, prove, sign_ticket
from dataservice.engine.api import JobStatus, JobVersion
from dataservice.engine.ready_step import step_summary
from dataservice.engine.shards import columns_of as columns_of_replica
from dataservice.engine.shards import cut_step
from dataservice.serving import wire_health, wire_jobs, wire_packs, wire_shards
from tests.one_order import each_of

words = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
int32s = st.integers(-(2**31), 2**31 - 1)
int64s = st.integers(-(2**63), 2**63 - 1)
counts = st.integers(0, 2**31 - 1)
reals = st.floats(allow_nan=False, allow_infinity=False)
modalities = st.sampled_from(Modality)


def several(strategy):
    return st.lists(strategy, max_size=3).map(tuple)


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
    sample_digests=st.lists(st.binary(min_size=8, max_size=8), max_size=3).map(b"".join),
)
blobs = st.binary(max_size=16)


def columns_as(table):
    return st.fixed_dictionaries({column.name: blobs for column in table})


tickets = st.builds(
    Ticket,
    job=words,
    step=int64s,
    plan_digest=words,
    rank=int32s,
    holder=words,
    expires_unix_s=int64s,
    workers=st.lists(words, min_size=1, max_size=3).map(tuple),
    addresses=several(words),
    tensors=several(words),
    sequences=counts,
    parts=counts,
    columns=columns_as(TICKET),
    signature=blobs,
)
stages = st.builds(
    StageReport,
    stage=words,
    algorithm=words,
    unit=words,
    before=reals,
    after=reals,
    lower_bound=reals,
)
summaries = st.builds(
    StepSummary,
    plan_digest=words,
    replicas=counts,
    waves=counts,
    packs=counts,
    samples=counts,
    predicted_s=reals,
    stages=several(stages),
    columns=columns_as(SUMMARY),
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
    samples=counts,
    predicted_s=reals,
    columns=st.builds(
        ShardColumns, waves=counts, replicas=counts, rings=counts, columns=columns_as(SHARD)
    ),
    ticket=st.none() | tickets,
    summary=st.none() | summaries,
    positions=st.builds(
        PositionRule,
        scheme=st.sampled_from(["sequence", "mrope"]),
        tokens_per_second=reals,
        past_time=st.booleans(),
    ),
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
    notes=several(words),
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


def sent(message):
    """The message as the other side parses it."""
    return type(message).FromString(message.SerializeToString())


@settings(deadline=None)
@given(pack_keys)
def test_pack_keys_survive(value):
    keys = [value, replace(value, pack=7), replace(value, step=value.step ^ 1), value]
    messages = wire_packs.pack_keys_to_proto(keys)
    assert len(messages) == 2, "those of one plan are together"
    received = wire_packs.pack_keys_from_proto(map(sent, messages))
    assert sorted(received, key=repr) == sorted(keys, key=repr)


def test_packs_of_one_plan_are_named_by_their_numbers():
    keys = PackKeys(job="a", step=3, plan_digest="d", packs=[5, 0, 7])
    (message,) = wire_packs.pack_keys_to_proto(keys)
    assert wire_packs.pack_keys_from_proto([sent(message)]) == [*keys]
    assert [message] == wire_packs.pack_keys_to_proto([*keys])
    assert wire_packs.pack_keys_to_proto(keys[:0]) == []


@settings(deadline=None)
@given(orders)
def test_pack_orders_survive(value):
    orders = [value, replace(value, key=replace(value.key, pack=7), degree=2)]
    assert (
        wire_packs.pack_orders_from_proto(
            sent(wire_packs.pack_orders_to_proto(PackOrders.of(orders)))
        )
        == orders
    )


@settings(deadline=None)
@given(receipts)
def test_what_became_of_packs_survives(value):
    told = [value, replace(value, key=replace(value.key, pack=7), size_bytes=5), value]
    receipts = PackReceipts.of(told)
    answers = PackAnswers(receipts=receipts, failures={3: SpecError("no such processor")})
    message = sent(wire_packs.pack_answers_to_proto(answers))
    received = wire_packs.pack_answers_from_proto(message, replace(value.key, pack=9))
    sums = receipts.sources
    assert each_of(received.receipts) == [replace(each, sources=sums) for each in told]
    (failure,) = received.failures.items()
    assert (failure[0], type(failure[1]), str(failure[1])) == (3, SpecError, "no such processor")


def test_receipts_of_another_release_or_that_contradict_themselves_are_refused():
    key = PackKey(job="job", step=3, plan_digest="d", pack=0)
    told = PackReceipt(key=key, size_bytes=1, decode_s=0.1, sample_digests=bytes(16))
    answers = PackAnswers(receipts=PackReceipts.of([told]))
    for change, said in (
        ({"version": 0}, "Run one release of coordinator and workers"),
        ({"sample_digests": bytes(8)}, "digests count 2 rows of 1"),
        ({"sample_digests": bytes(15)}, "cannot be read"),
        ({"bad_samples": b"\xff"}, "bad_samples count -1 rows of 0"),
        ({"decode_s": b"\x00"}, "column decode_s has 1 bytes for 1 rows"),
    ):
        message = wire_packs.pack_answers_to_proto(answers)
        for name, value in change.items():
            setattr(message.receipts, name, value)
        with pytest.raises(SpecError, match=said):
            wire_packs.pack_answers_from_proto(sent(message), key)


@settings(deadline=None)
@given(tickets)
def test_tickets_survive_with_their_signature(value):
    signed = sign_ticket(value, b"secret")
    message = sent(wire_packs.ticket_to_proto(signed))
    received = wire_packs.ticket_from_proto(message, value.addresses)
    assert received == signed
    worker = value.workers[-1]
    proof = prove(signed, worker, holder_key(value.holder, b"secret"))
    now = {"worker": worker, "now_unix_s": value.expires_unix_s}
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
    assert received == value


def test_columns_know_the_fields_that_they_are_sent_in():
    of = coordinator_pb2.ShardColumns.DESCRIPTOR.fields_by_name
    assert {name: of[name].number for name in SHARD_FIELDS} == SHARD_FIELDS
    assert [column.name for column in SHARD] == [*SHARD_FIELDS]
    of = worker_pb2.Ticket.DESCRIPTOR.fields_by_name
    assert {name: of[name].number for name in TICKET_FIELDS} == TICKET_FIELDS


@pytest.mark.parametrize(
    "wanted", [EVERYTHING, WantedParts(tokens=False, media=False, labels=True)]
)
def test_what_was_written_for_all_ranks_is_what_each_one_has(make, wanted):
    parts = cut_step(make.plan())
    for replica in range(2):
        columns = columns_of_replica(parts, replica, wanted)
        shard = replace(make.shard(rank=replica, step=5), columns=columns)
        plain = replace(shard, columns=replace(columns, written=()))
        assert wire_shards.rank_shard_to_proto(shard) == wire_shards.rank_shard_to_proto(plain)


def test_a_ticket_of_another_release_is_refused():
    with pytest.raises(SpecError, match=r"version 0, and version 2 is read here\. Run one release"):
        wire_packs.ticket_from_proto(worker_pb2.Ticket())


@settings(deadline=None)
@given(statuses, st.none() | statuses)
def test_job_statuses_survive(value, validation):
    value = replace(value, validation=validation)
    assert wire_jobs.job_status_from_proto(sent(wire_jobs.job_status_to_proto(value))) == value


def test_a_summary_shows_every_group_of_the_step(make):
    plan = make.plan()
    summary = step_summary(plan, plan.digest)
    written = wire_shards.step_summary_message(summary)
    assert wire_shards.step_summary_message(summary) is written, "once for all who ask"
    message = coordinator_pb2.StepSummary.FromString(written)
    assert (message.replicas, message.waves, message.samples, message.packs) == (2, 1, 3, 2)
    assert (message.predicted_s, message.plan_digest) == (0.5, plan.digest)
    read = read_all(SUMMARY, columns_of(message, SUMMARY), {"packs": 2})
    assert {name: of.tolist() for name, of in read.items()} == {
        "pack_wave": [0, 0],
        "pack_degree": [1, 1],
        "pack_replicas": [1, 0],
        "pack_tokens": [12, 6],
        "pack_seconds": [0.5, 0.25],
    }
    (stage,) = message.stages
    assert (stage.stage, stage.algorithm, stage.unit) == ("pack", "isf", "packs")
    assert (stage.before, stage.after, stage.lower_bound) == (3, 2, 1.5)


@pytest.mark.parametrize(
    ("spoiled", "complaint"),
    [
        ({"item_modality": b"\x09\x00\x00\x00"}, "9 is not a valid Modality"),
        ({"degree": b"\x00"}, "degree 0; it must be at least 1"),
        ({"sample_id": b"\x00"}, "column sample_id has 1 bytes for 2 rows"),
        ({"file": b"\x05\x05"}, "files 5 to 5 of 1"),
        ({"file": b"\xff\xff"}, "files -1 to -1 of 1"),
        ({"files": 2}, "column file_source has 1 bytes for 2 rows"),
        ({"files": -1}, "column file_source has 1 bytes for -1 rows"),
        ({"files": 0, "file_source": b"", "path_bytes": b"", "paths": b""}, "files 0 to 0 of 0"),
        ({"sources": []}, "files of source 0 to 0 of 0"),
        ({"file_source": b"\x01"}, "files of source 1 to 1 of 1"),
        ({"file_source": b"\xff"}, "files of source -1 to -1 of 1"),
        ({"path_bytes": b"\x7f"}, "the paths of 1 files came as"),
        ({"path_bytes": b"\xff"}, "the paths of 1 files came as"),
        ({"path_bytes": b"\xff" * 7 + b"\x7f"}, "the paths of 1 files came as"),
        ({"paths": b"a.tar"}, "the paths of 1 files came as 5 bytes"),
        ({"path_bytes": b"\x03", "paths": b"\xff" * 8}, "codec can't decode"),
        ({"samples": b"\xff"}, "column samples counts from -1 to -1 rows"),
        ({"key_bytes": b"\xff\x01"}, "texts of 0 bytes came as"),
        ({"keys": b"k"}, "bytes came as 1 bytes"),
        ({"team_weight": 0.0}, r"weight 0.0 and limit 1.0; both must be above 0"),
        ({"version": 2}, "columns of version 2; this worker reads version 3. Run one release"),
    ],
)
def test_orders_of_another_release_or_that_contradict_themselves_are_refused(
    make, spoiled, complaint
):
    message = wire_packs.pack_orders_to_proto(PackOrders.of([make.order()]))
    for name, value in spoiled.items():
        if name == "sources":
            message.sources[:] = value
        else:
            setattr(message, name, value)
    with pytest.raises(SpecError, match=complaint):
        wire_packs.pack_orders_from_proto(message)


@settings(deadline=None)
@given(
    samples=st.lists(samples, min_size=1, max_size=3),
    spoiled=st.fixed_dictionaries(
        {},
        optional={
            "files": int32s | st.integers(0, 4),
            "file": blobs,
            "file_source": blobs,
            "path_bytes": blobs,
            "paths": blobs,
        },
    ),
)
def test_whatever_is_told_of_files_is_read_or_refused(samples, spoiled):
    key = PackKey(job="job", step=3, plan_digest="d", pack=0)
    order = PackOrder(key=key, degree=1, pipeline="", samples=tuple(samples))
    message = wire_packs.pack_orders_to_proto(PackOrders.of([order]))
    for name, value in spoiled.items():
        setattr(message, name, value)
    with suppress(SpecError):
        (read,) = wire_packs.pack_orders_from_proto(sent(message))
        assert [each.ref.key for each in read.samples] == [each.ref.key for each in samples]


def test_a_path_is_sent_once_for_all_samples_of_its_file(make):
    orders = [make.order(pack=pack, samples=5) for pack in range(3)]
    message = wire_packs.pack_orders_to_proto(PackOrders.of(orders))
    files = {each.ref.location.file for order in orders for each in order.samples}
    assert (message.files, message.sources) == (1, [orders[0].samples[0].ref.source])
    assert [message.paths.rstrip(b"\0").decode()] == [*files]


def test_orders_of_many_files_take_no_more_calls_than_those_of_few(make):
    (sample, *_) = make.order().samples
    calls = []
    for files in (400, 4000):
        samples = [
            replace(sample, ref=replace(sample.ref, location=SampleLocation(file=f"{k:05d}.tar")))
            for k in range(files)
        ]
        orders, made = PackOrders.of([replace(make.order(), samples=samples)]), Counter[str]()
        half = replace(orders, starts=np.array([files // 4]), counts=np.array([files // 2]))
        wire_packs.pack_orders_to_proto(half)  # what is made once is made

        def count(_frame, event, _argument, made=made):
            made[event] += 1

        sys.setprofile(count)
        try:
            message = wire_packs.pack_orders_to_proto(half)
        finally:
            sys.setprofile(None)
        assert message.files == files // 2
        calls.append(made)
    assert calls[0] == calls[1]


def test_a_service_of_before_tells_no_mixture_and_no_progress():
    of_before = coordinator_pb2.JobInfo(name="j", state="active")
    assert wire_jobs.job_status_from_proto(of_before).mixture is None
    seen = coordinator_pb2.GetHealthResponse(jobs=[coordinator_pb2.JobHealth(job="j")])
    (job,) = wire_health.health_from_proto(seen).jobs
    assert job.health.progress is None


def test_a_job_state_of_another_release_is_refused():
    with pytest.raises(SpecError, match="state 'paused'"):
        wire_jobs.job_status_from_proto(coordinator_pb2.JobInfo(name="j", state="paused"))
