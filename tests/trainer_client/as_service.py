"""A synthetic step as the service would send it: planned, cut, serialised, and assembled by the
client from the bytes that workers would have sent."""

from collections import Counter

import numpy as np
import torch
from dataservice_proto.v1 import coordinator_pb2

from benchmarks.cut_microbatches import microbatches_of
from dataservice.core.orders import PackSample, RankShard
from dataservice.core.plan import StepPlan
from dataservice.core.positions import PositionRule
from dataservice.core.sample import (
    DecodedSample,
    ItemLengths,
    ItemNotes,
    Modality,
    SampleLengths,
    SampleLocation,
    SampleRef,
)
from dataservice.engine.ready_step import step_summary
from dataservice.engine.shards import columns_of, cut_step
from dataservice.serving.wire_shards import rank_shard_to_proto
from dataservice.workers.pack import assemble
from trainer_client.assemble import assemble_shard
from trainer_client.fetch import Part, PartId


def in_turn(tokens, replicas):
    """Encodes the k-th item of a wave on replica k mod N."""
    return [item % replicas for item in range(len(tokens))]


def plan_of(step, waves):
    """The service's plan of a synthetic step whose items are encoded `in_turn`."""
    samples = step.samples
    packs = [(k, members, held) for k, wave in enumerate(waves) for members, held in wave]
    items = [(number, item) for number, sample in enumerate(samples) for item in sample.items]
    turn, replica_of = Counter(), {}
    for wave, _, held in packs:
        for item in (item for number in held for item in samples[number].items):
            replica_of[id(item)] = turn[wave, item.modality] % step.replicas
            turn[wave, item.modality] += 1

    def column(values, dtype=np.int32):
        return np.array(list(values), dtype=dtype)

    def offsets(parts):
        return np.cumsum([0, *map(len, parts)])

    return StepPlan(
        step=step.step,
        replicas=step.replicas,
        waves=len(waves),
        cost_version="",
        predicted_s=0.0,
        sample_ids=column((sample.id for sample in samples), np.int64),
        sample_epoch=column([0] * len(samples)),
        sample_tokens=column(sample.tokens for sample in samples),
        sample_loss_tokens=column(sample.loss_tokens for sample in samples),
        sample_loss_weights=column((sample.weight for sample in samples), np.float64),
        pack_offsets=offsets([held for *_, held in packs]),
        pack_samples=column(number for *_, held in packs for number in held),
        pack_wave=column(wave for wave, *_ in packs),
        pack_seconds=column([0.0] * len(packs), np.float64),
        replica_offsets=offsets([members for _, members, _ in packs]),
        pack_replicas=column(replica for _, members, _ in packs for replica in members),
        item_sample=column(number for number, _ in items),
        item_modality=column((modality_of(item) for _, item in items), np.int8),
        item_encoder_tokens=column(item.tokens for _, item in items),
        item_llm_tokens=column(item.tokens for _, item in items),
        item_position=column(item.position for _, item in items),
        item_replica=column(replica_of[id(item)] for _, item in items),
    )


def modality_of(item):
    return Modality[item.modality.upper()]


def sent_by_service(step, waves):
    """What each replica's client makes of the same step, planned and cut by the service."""
    plan = plan_of(step, waves)
    items = [item for sample in step.samples for item in sample.items]
    notes = ItemNotes(
        kind=np.array([item.kind for item in items], dtype=np.int8),
        grid=np.array([item.grid for item in items], dtype=np.int32).reshape(-1, 4),
        seconds_per_patch=np.array([item.seconds_per_patch for item in items]),
    )
    cut, parts = cut_step(plan, notes), parts_of(step, plan)
    rule = PositionRule(scheme="mrope", tokens_per_second=step.mrope.tokens_per_second)
    shards = []
    for replica in range(step.replicas):
        microbatches = microbatches_of(cut, replica)
        of_rank = RankShard(
            job=step.job, attempt=1, step=step.step, rank=replica, replica=replica,
            plan_digest=step.plan.digest, cursor_after=str(step.step + 1),
            loss_tokens=int(plan.sample_loss_tokens.sum()), samples=len(plan.sample_ids),
            predicted_s=plan.predicted_s, columns=columns_of(cut, replica), ticket=None,
            summary=step_summary(plan, step.plan.digest), positions=rule,
            weighted_loss_tokens=step.plan.weighted_loss_tokens,
        )  # fmt: skip
        message = rank_shard_to_proto(of_rank).SerializeToString()
        mine = {part_id: part for part_id, part in parts.items() if wants(microbatches, part_id)}
        shards.append(assemble_shard(coordinator_pb2.RankShard.FromString(message), mine))
    return shards


def wants(microbatches, part_id):
    if part_id.items:
        return any(
            part_id.pack == of.pack and set(part_id.items) <= set(of.items)
            for microbatch in microbatches
            for encodes in microbatch.encodes.values()
            for of in encodes
        )
    return any((mb.pack, mb.cp_rank) == (part_id.pack, part_id.cp_rank) for mb in microbatches)


def parts_of(step, plan):
    """All parts of all packs, each item by itself."""
    parts = {}

    def add(part_id, arrays):
        tensors = tuple((name, torch.from_numpy(array)) for name, array in arrays)
        size_bytes = sum(array.nbytes for _, array in arrays)
        parts[part_id] = Part(part_id, tensors, size_bytes)

    for pack in range(plan.packs):
        held = [step.samples[number] for number in plan.samples_of(pack)]
        degree = len(plan.replicas_of(pack))
        made = assemble(
            [order_of(sample) for sample in held],
            [decoded(sample) for sample in held],
            degree=degree,
            pad_token_id=0,
        )
        for cp_rank, member in enumerate(made.members):
            add(PartId(pack, cp_rank, ()), list(member.items()))
        for place, item in enumerate(made.items):
            add(PartId(pack, -1, (place,)), [("item", item)])
    return parts


def order_of(sample):
    items = tuple(
        ItemLengths(
            modality=modality_of(item),
            encoder_tokens=item.tokens,
            llm_tokens=item.tokens,
            position=item.position,
            shape=tuple(item.values.shape),
        )
        for item in sample.items
    )
    ref = SampleRef(
        sample_id=sample.id, source="s", key=str(sample.id), location=SampleLocation(file="f")
    )
    lengths = SampleLengths(llm_tokens=sample.tokens, loss_tokens=sample.loss_tokens, items=items)
    return PackSample(ref=ref, lengths=lengths)


def decoded(sample):
    return DecodedSample(
        input_ids=sample.input_ids.numpy().astype(np.int32),
        labels=sample.labels.numpy().astype(np.int32),
        items=tuple(item.values.numpy() for item in sample.items),
    )
