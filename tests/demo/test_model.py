"""The demo's model and its training loop, on a scripted step that the real code cuts.

Run as a program, this file is one replica of the two-replica test.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

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
from dataservice.engine.shards import cut_step, microbatches_of
from dataservice.workers.pack import assemble
from demo.model import DemoModel, ModelConfig, patch_places
from demo.train import save, train
from tests.trainer_client.runtime.whole_attention import dense_attention
from trainer_client import Group, ModalityBatch, PlanSummary, Shard, Wave, patchify
from trainer_client.runtime import GroupPool, run_step
from trainer_client.runtime.step import Features

ROOT = Path(__file__).resolve().parents[2]
SMALL = ModelConfig(vocabulary=64, width=32, layers=2, heads=4, kv_heads=2, encoder_width=16)
VISION = Qwen2VLProcessor(min_pixels=28 * 28, video_min_pixels=28 * 28, max_pixels=16 * 28 * 28)
AUDIO = WhisperProcessor()


# A scripted step: samples with items of the real processors' shapes, and a plan for them.


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


def small_model():
    torch.manual_seed(3)
    return DemoModel(SMALL).double()


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


def gradients(model):
    return {name: weight.grad for name, weight in model.named_parameters()}


def assert_same_gradients(found, expected):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert grad.norm() > 0, name
        assert (found[name] - grad).norm() <= 1e-10 * grad.norm(), name


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: on a busy machine more threads wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Encoders.


@pytest.mark.parametrize("seed", range(4))
def test_images_and_clips_give_one_feature_row_for_each_llm_token(seed):
    rng, sizes = np.random.default_rng(seed), random.Random(seed)
    items = [image(rng, sizes.randint(10, 200), sizes.randint(10, 200)) for _ in range(4)]
    items += [clip(rng, sizes.randint(1, 20), sizes.randint(10, 90), 56) for _ in range(4)]
    model = small_model()
    batch = ModalityBatch(items=[torch.from_numpy(item[3]) for item in items], exchange=None)
    rows = model.encode("vision", batch)
    assert rows.shape == (sum(llm_tokens for _, _, llm_tokens, _ in items), SMALL.width)


@pytest.mark.parametrize("pool", [1, 2, 3, 5])
def test_recordings_give_one_feature_row_for_each_llm_token(pool):
    rng, lengths = np.random.default_rng(pool), random.Random(pool)
    processor = WhisperProcessor(pool=pool)
    seconds = [1, 159, 161, 480_000, *(lengths.randint(1, 40_000) for _ in range(8))]
    items = [sound(rng, samples, processor) for samples in seconds]
    torch.manual_seed(0)
    model = DemoModel(ModelConfig(vocabulary=64, width=32, encoder_width=16, audio_pool=pool))
    for _, _, llm_tokens, audio in items:
        batch = ModalityBatch(items=[torch.from_numpy(audio)], exchange=None)
        assert model.encode("audio", batch).shape == (llm_tokens, 32)


def test_the_features_of_an_item_do_not_depend_on_the_items_beside_it():
    rng = np.random.default_rng(0)
    model = small_model()
    for modality, items in {
        "vision": [image(rng, 90, 40), clip(rng, 6, 60, 60), image(rng, 28, 28)],
        "audio": [sound(rng, 3_000), sound(rng, 16_000), sound(rng, 480)],
    }.items():
        arrays = [torch.from_numpy(item[3]) for item in items]
        together = model.encode(modality, ModalityBatch(items=arrays, exchange=None))
        alone = [
            model.encode(modality, ModalityBatch(items=[array], exchange=None)) for array in arrays
        ]
        torch.testing.assert_close(together, torch.cat(alone), rtol=1e-9, atol=1e-12)


def test_patches_are_placed_where_patchify_takes_them_from():
    rows, columns = 4, 6
    pixels = torch.zeros(2, rows * 14, columns * 14, 3)
    pixels[..., 0] = torch.arange(rows).repeat_interleave(14)[:, None]
    pixels[..., 1] = torch.arange(columns).repeat_interleave(14)
    patches, (_, height, width) = patchify(pixels)
    colours = patches.unflatten(1, (3, -1)).mean(-1)[:, :2]
    torch.testing.assert_close(colours, patch_places(height, width).float())


def test_an_impossible_model_is_refused_with_its_numbers():
    with pytest.raises(ValueError, match=r"width=130.*130 must be a multiple of 4"):
        ModelConfig(width=130)


# Whole steps.


def test_one_replica_gets_the_gradients_of_a_plain_loop_in_every_weight():
    samples = scripted_samples()
    model = small_model()
    with GroupPool() as groups:
        shard = shard_of(step_plan(samples, ONE_REPLICA, [0] * 6), samples, 0)
        result = run_step(model, shard, groups)
    reference = small_model()
    assert result.loss == pytest.approx(plain_loop(reference, samples), rel=1e-12)
    assert_same_gradients(gradients(model), gradients(reference))


def test_two_replicas_that_share_a_pack_and_swap_items_get_the_same_gradients(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = [str(store.port), str(tmp_path)]
    replicas = [
        subprocess.Popen(
            [sys.executable, __file__, str(replica), *arguments],
            env=os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for replica in range(2)
    ]
    try:
        errors = [process.communicate(timeout=100)[1] for process in replicas]
    finally:
        for process in replicas:
            process.kill()
    assert [process.returncode for process in replicas] == [0, 0], "\n".join(errors)
    reference = small_model()
    loss = plain_loop(reference, scripted_samples())
    for replica in range(2):
        answer = torch.load(tmp_path / f"replica{replica}.pt")
        assert answer["loss"] == pytest.approx(loss, rel=1e-12)
        assert_same_gradients(answer["gradients"], gradients(reference))


def replica_main(replica, port, folder):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=replica, world_size=2)
    model = small_model()
    with GroupPool(timeout_s=60) as groups:
        result = run_step(model, two_replica_shard(replica), groups)
        torch.save(
            {"loss": result.loss, "gradients": gradients(model)}, folder / f"replica{replica}.pt"
        )
        dist.barrier()
    dist.destroy_process_group()


def test_the_script_gives_some_replica_nothing_but_the_items_of_others():
    last = two_replica_shard(1).microbatches[2]
    assert last.idle
    for batch in (last.vision, last.audio):
        assert len(batch.items) == 1
        assert sum(batch.exchange.recv_splits) == 0


# The training loop.


class ScriptedDataset:
    """`ShardDataset`'s contract over scripted steps: yields, commits, keeps a position."""

    def __init__(self, steps, attempt):
        self.steps, self.attempt, self.position = steps, attempt, 0

    def __iter__(self):
        for step in range(self.position, self.steps):
            samples = scripted_samples(seed=step % 2, vocabulary=2_000)
            plan = step_plan(samples, ONE_REPLICA, [0] * 6, step=step)
            yield shard_of(plan, samples, 0, attempt=self.attempt)

    def peek(self, *, wait):
        return None

    def commit(self, step, *, measured_s=None, phase_s=None):
        assert step == self.position
        assert measured_s is None or measured_s > 0
        self.position = step + 1

    def state_dict(self):
        return {"step": self.position}

    def load_state_dict(self, state):
        self.position = state["step"]


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with GroupPool() as groups:
        yield groups
    dist.destroy_process_group()


def run_attempt(groups, folder, *, attempt=1, steps=8, max_steps=100, resume=False):
    folder.mkdir(exist_ok=True)
    options = argparse.Namespace(
        out=folder, resume=resume, max_steps=max_steps, steps_per_checkpoint=3
    )
    train(ScriptedDataset(steps, attempt), groups, options)
    lines = (folder / "rank0.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def last_weights(folder):
    newest = sorted(folder.glob("checkpoint-*.pt"))[-1]
    return torch.load(newest, weights_only=True)["model"]


def test_training_that_was_interrupted_ends_with_the_same_weights(one_rank, tmp_path):
    whole = run_attempt(one_rank, tmp_path / "whole")
    run_attempt(one_rank, tmp_path / "parts", max_steps=5)
    # A kill between checkpoints: step 4 is in the log, and trained again by the next attempt.
    (tmp_path / "parts" / "checkpoint-00000005.pt").unlink()
    parts = run_attempt(one_rank, tmp_path / "parts", attempt=2, resume=True)
    assert [(line["attempt"], line["step"]) for line in parts] == [
        *((1, step) for step in range(5)),
        *((2, step) for step in range(3, 8)),
    ]
    assert [line["loss"] for line in parts[5:]] == [line["loss"] for line in whole[3:]]
    expected = last_weights(tmp_path / "whole")
    for name, weight in last_weights(tmp_path / "parts").items():
        assert torch.equal(weight, expected[name]), name


def test_a_run_logs_its_steps_and_keeps_the_last_two_checkpoints(one_rank, tmp_path, capsys):
    lines = run_attempt(one_rank, tmp_path)
    assert [line["sample_ids"] for line in lines] == [[100, 101, 102, 103]] * 8
    assert {line["tokens"] for line in lines} == {61 + 9 + 47 + 38}
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert lines[0]["degrees"] == [1, 1, 1]
    kept = sorted(path.name for path in tmp_path.glob("checkpoint*"))
    assert kept == ["checkpoint-00000006.pt", "checkpoint-00000008.pt"]
    assert len(capsys.readouterr().out.splitlines()) == 8
    assert run_attempt(one_rank, tmp_path, attempt=2, resume=True) == lines, "nothing was left"


def test_a_checkpoint_that_fails_leaves_the_older_one_to_resume_from(one_rank, tmp_path):
    run_attempt(one_rank, tmp_path, max_steps=3)
    before = last_weights(tmp_path)
    unsaveable = types.SimpleNamespace(state_dict=lambda: {"lambda": lambda: 0})
    with pytest.raises(Exception, match=r"pickle|local"):
        save(tmp_path, 4, {"model": unsaveable})
    assert torch.equal(last_weights(tmp_path)["norm.weight"], before["norm.weight"])


def test_the_demo_model_is_small():
    assert 5e5 < sum(weight.numel() for weight in DemoModel().parameters()) < 3e6


def test_the_trainer_exits_with_the_clients_message(tmp_path):
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "demo.train",
            "--service",
            "nowhere",
            "--job",
            "j",
            "--out",
            str(tmp_path),
        ],
        env=os.environ | torchrun | {"GLOO_SOCKET_IFNAME": "lo"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert "rank 0: BadArgument: address 'nowhere' is not host:port, such as" in done.stderr


if __name__ == "__main__":
    replica_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
