"""A scripted step of the demo's model: samples with items of the real processors' shapes, a plan
for them, and what one process that knows no plan makes of them."""

import types

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from benchmarks.cut_microbatches import microbatches_of
from benchmarks.planned_shards import microbatch
from dataservice.core.orders import PackSample
from dataservice.core.plan import StepPlan
from dataservice.core.sample import (
    DecodedSample,
    ItemLengths,
    Modality,
    SampleLengths,
    SampleLocation,
    SampleRef,
)
from dataservice.decode.processors.base import VideoHeader
from dataservice.decode.processors.qwen2_vl import Qwen2VLProcessor
from dataservice.decode.processors.whisper import WhisperProcessor
from dataservice.engine.shards import cut_step
from dataservice.workers.pack import assemble
from demo.model import ModelConfig
from tests.trainer_client.runtime.whole_attention import dense_attention
from trainer_client import Group, PlanSummary, Shard, Wave
from trainer_client.runtime.step import Features

SMALL = ModelConfig(vocabulary=64, width=32, layers=2, heads=4, kv_heads=2, encoder_width=16)
VISION = Qwen2VLProcessor(min_pixels=28 * 28, video_min_pixels=28 * 28, max_pixels=16 * 28 * 28)
AUDIO = WhisperProcessor()


def image(rng, width, height):
    return vision_item(rng, VISION.plan_image(width=width, height=height))


def clip(rng, frames, width, height):
    header = VideoHeader(width=width, height=height, frames=frames, frames_per_s=4.0)
    return vision_item(rng, VISION.plan_video(header))


def vision_item(rng, plan):
    pixels = rng.integers(0, 256, plan.shape, dtype=np.uint8)
    return Modality.VISION, plan.encoder_tokens, plan.llm_tokens, pixels


def sound(rng, samples, processor=AUDIO):
    (chunk,) = processor.plan(samples)
    audio = rng.standard_normal(chunk.samples).astype(np.float32)
    return Modality.AUDIO, chunk.encoder_tokens, chunk.llm_tokens, audio


def sample(rng, number, tokens, *placed_items, vocabulary=SMALL.vocabulary):
    """`tokens` of text with items at given positions, as a pack order and its decoding hold it."""
    items = tuple(
        ItemLengths(
            modality=modality,
            encoder_tokens=encoder_tokens,
            llm_tokens=llm_tokens,
            position=position,
            shape=array.shape,
        )
        for position, (modality, encoder_tokens, llm_tokens, array) in placed_items
    )
    ids = rng.integers(0, vocabulary, tokens, dtype=np.int32)
    labels = np.append(ids[1:], -100).astype(np.int32)
    labels[: tokens // 3] = -100
    ref = SampleRef(
        sample_id=number, source="s", key=str(number), location=SampleLocation(file="f")
    )
    lengths = SampleLengths(llm_tokens=tokens, loss_tokens=int((labels != -100).sum()), items=items)
    decoded = DecodedSample(
        input_ids=ids, labels=labels, items=tuple(item[3] for _, item in placed_items)
    )
    return PackSample(ref=ref, lengths=lengths), decoded


def scripted_samples(seed=0, vocabulary=SMALL.vocabulary):
    rng = np.random.default_rng(seed)
    recipes = [
        (61, (3, image(rng, 150, 90)), (20, sound(rng, 16_000))),
        (9,),
        (47, (1, clip(rng, 9, 56, 84)), (30, image(rng, 60, 60))),
        (38, (2, sound(rng, 7_000)), (30, image(rng, 28, 60))),
    ]
    return [
        sample(rng, 100 + number, *recipe, vocabulary=vocabulary)
        for number, recipe in enumerate(recipes)
    ]


# (wave, replicas, samples): a shared pack; two alone; one alone beside an idle replica.
TWO_REPLICAS = [(0, (1, 0), [0]), (1, (0,), [1]), (1, (1,), [2]), (2, (0,), [3])]
ONE_REPLICA = [(0, (0,), [0, 1]), (1, (0,), [2]), (2, (0,), [3])]


def step_plan(samples, packs, item_replica, *, step=0):
    lengths = [order.lengths for order, _ in samples]
    items = [(number, item) for number, of in enumerate(lengths) for item in of.items]

    def column(values, dtype=np.int32):
        return np.array(list(values), dtype=dtype)

    def offsets(parts):
        return np.cumsum([0, *map(len, parts)])

    return StepPlan(
        step=step,
        replicas=1 + max(replica for _, members, _ in packs for replica in members),
        waves=1 + max(wave for wave, _, _ in packs),
        cost_version="",
        predicted_s=0.5,
        sample_ids=column((order.ref.sample_id for order, _ in samples), np.int64),
        sample_epoch=column([0] * len(samples)),
        sample_tokens=column(of.llm_tokens for of in lengths),
        sample_loss_tokens=column(of.loss_tokens for of in lengths),
        pack_offsets=offsets([held for _, _, held in packs]),
        pack_samples=column(number for _, _, held in packs for number in held),
        pack_wave=column(wave for wave, _, _ in packs),
        pack_seconds=column([0.25] * len(packs), np.float64),
        replica_offsets=offsets([members for _, members, _ in packs]),
        pack_replicas=column(replica for _, members, _ in packs for replica in members),
        item_sample=column(number for number, _ in items),
        item_modality=column((item.modality for _, item in items), np.int8),
        item_encoder_tokens=column(item.encoder_tokens for _, item in items),
        item_llm_tokens=column(item.llm_tokens for _, item in items),
        item_position=column(item.position for _, item in items),
        item_replica=column(item_replica),
    )


def shard_of(plan, samples, replica, *, attempt=1):
    """What a rank would get of the plan, without a service in between."""
    packs = [
        assemble(
            [samples[number][0] for number in plan.samples_of(pack)],
            [samples[number][1] for number in plan.samples_of(pack)],
            degree=len(plan.replicas_of(pack)),
            pad_token_id=0,
        )
        for pack in range(plan.packs)
    ]
    waves = []
    for wave in range(plan.waves):
        groups = [group for group in plan.groups(wave) if group.pack >= 0]
        waves.append(
            Wave(
                index=wave,
                groups=tuple(
                    Group(
                        pack=group.pack,
                        replicas=group.replicas,
                        tokens=group.tokens,
                        predicted_s=group.seconds,
                    )
                    for group in groups
                ),
                idle=(),
            )
        )
    return Shard(
        job="scripted",
        attempt=attempt,
        step=plan.step,
        rank=replica,
        replica=replica,
        cursor_after=str(plan.step + 1),
        plan=PlanSummary(
            digest=plan.digest,
            replicas=plan.replicas,
            samples=len(samples),
            loss_tokens=int(plan.sample_loss_tokens.sum()),
            predicted_s=plan.predicted_s,
            waves=tuple(waves),
            stages=(),
        ),
        microbatches=tuple(
            microbatch_of(cut, packs) for cut in microbatches_of(cut_step(plan), replica)
        ),
        size_bytes=0,
    )


def microbatch_of(cut, packs):
    empty = {name: np.zeros(0, np.int32) for name in ("input_ids", "labels", "position_ids")}
    sequence = packs[cut.pack].members[cut.cp_rank] if cut.pack >= 0 else empty
    return microbatch(
        cut,
        {name: torch.from_numpy(rows).long() for name, rows in sequence.items()},
        lambda of: [torch.from_numpy(packs[of.pack].items[item]) for item in of.items],
    )


def two_replica_shard(replica):
    """Every item is encoded where its text is not, or only a part of it."""
    samples = scripted_samples()
    return shard_of(step_plan(samples, TWO_REPLICAS, [1, 1, 0, 0, 1, 1]), samples, replica)


def plain_loop(model, samples):
    """Loss and gradients of one process that goes through the samples one by one."""
    total = sum(order.lengths.loss_tokens for order, _ in samples)
    loss_sum = torch.zeros((), dtype=torch.float64)
    for order, decoded in samples:
        features = {}
        for item, array in zip(order.lengths.items, decoded.items, strict=True):
            modality = item.modality.name.lower()
            batch = types.SimpleNamespace(items=[torch.from_numpy(array)])
            positions = torch.arange(item.position, item.position + item.llm_tokens)
            features[item.position] = Features(
                rows=model.encode(modality, batch), positions=positions
            )
        tokens = types.SimpleNamespace(
            input_ids=torch.from_numpy(decoded.input_ids).long(),
            position_ids=torch.arange(order.lengths.llm_tokens),
        )
        logits = model.decode(tokens, features, dense_attention)
        labels = torch.from_numpy(decoded.labels).long()
        loss_sum = loss_sum + cross_entropy(logits, labels, reduction="sum")
    (loss_sum / total).backward()
    return float(loss_sum.detach() / total)
