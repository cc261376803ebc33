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

from dataservice.decode.processors.whisper import WhisperProcessor
from demo.model import DemoModel, ModelConfig, patch_places
from demo.train import save, train
from tests.demo.scripted_steps import (
    ONE_REPLICA,
    SMALL,
    clip,
    image,
    plain_loop,
    scripted_samples,
    shard_of,
    sound,
    step_plan,
    two_replica_shard,
)
from trainer_client import ModalityBatch, patchify
from trainer_client.runtime import GroupPool, run_step

ROOT = Path(__file__).resolve().parents[2]


def small_model():
    torch.manual_seed(3)
    return DemoModel(SMALL).double()


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
