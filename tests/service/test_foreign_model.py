"""A model of transformers on a real service: a step's loss and gradients are those of the library's
own forward on each sample that came, images and clips included."""

import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen2VLImageProcessorPil

from dataservice.decode.tokenizer import load_tokenizer
from tests.service.support import dataservice, job_file, serving
from tests.trainer_client.runtime.random_steps import worst_difference
from trainer_client import ShardDataset
from trainer_client.adapters.transformers import trainable
from trainer_client.encoder_inputs import patch_rows
from trainer_client.runtime import GroupPool, LayoutError, run_step

pytestmark = pytest.mark.long

STEPS = 3
KINDS = {0: ("pixel_values", "image_grid_thw"), 1: ("pixel_values_videos", "video_grid_thw")}
PROCESSOR = Qwen2VLImageProcessorPil()


@pytest.fixture(scope="module")
def served(corpus, tmp_path_factory):
    """A service with a job of each clock, and the ids of the tokens for images and clips."""
    home = tmp_path_factory.mktemp("foreign")
    plain = yaml.safe_load((corpus / "job.yaml").read_text())
    names = ("images", "clips", "text")
    tokenizer = load_tokenizer(str(corpus / "tokenizer"))
    pads = [tokenizer.id_of("<|image_pad|>"), tokenizer.id_of("<|video_pad|>")]
    with serving(home) as service:
        for kind in ("qwen2_vl", "qwen2_5_vl"):
            vision = {**plain["pipeline"]["vision"], "kind": kind}
            file = job_file(
                corpus,
                home,
                job=kind,
                sources=[source for source in plain["sources"] if source["name"] in names],
                pipeline={
                    **plain["pipeline"], "audio": None, "vision": vision, "positions": "auto"
                },
                plan={"memory_tokens": 16384},
                index=str(home / f"index-{kind}"),
            )  # fmt: skip
            dataservice("index", str(file))
            service.cli("job", "submit", str(file))
        yield service.address, pads


def qwen2_5_vl(pads):
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 48}
    config = Qwen2_5_VLConfig(
        text_config={
            **size, "vocab_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]
            },
        },
        vision_config={
            **size, "depth": 2, "num_heads": 2, "out_hidden_size": 32,
            "fullatt_block_indexes": [1], "tokens_per_second": 2,  # the published number
        },
        image_token_id=pads[0],
        video_token_id=pads[1],
    )  # fmt: skip
    return AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").double()


def steps_of(address, job):
    with ShardDataset(address, job=job, rank=0, world_size=1, timeout_s=60) as dataset:
        for shard in dataset:
            yield shard
            dataset.commit(shard.step)
            if shard.step + 1 == STEPS:
                break


def samples_of(shard, pads):
    """Each sample's tokens, labels and media, as the library's forward takes them, and its kinds
    of media."""
    for mb in shard.microbatches:
        waiting = list(mb.vision.items) if mb.vision is not None else []
        bounds = mb.cu_seqlens.tolist()
        for start, length in zip(bounds, mb.lengths.tolist(), strict=False):
            ids = mb.input_ids[start : start + length]
            shifted = mb.labels[start : start + length]
            assert shifted[-1] == -100
            labels = torch.cat([shifted[-1:], shifted[:-1]])
            kinds = (ids == pads[0]) + 2 * (ids == pads[1])
            inputs = {"input_ids": ids[None], "mm_token_type_ids": kinds.int()[None]}
            held = [k for k, at in enumerate(mb.items.start) if start <= at < start + length]
            frames = [waiting.pop(0) for _ in held]
            for kind, (pixels, grids) in KINDS.items():
                mine = [f for k, f in zip(held, frames, strict=True) if mb.items.kind[k] == kind]
                if mine:
                    colours = PROCESSOR.image_mean, PROCESSOR.image_std
                    made = patch_rows(mine, *colours, dtype=torch.float64)
                    inputs |= {pixels: made.pixel_values, grids: made.grid_thw}
            clips = [k for k in held if mb.items.kind[k] == 1]
            if clips:
                inputs["second_per_grid_ts"] = torch.tensor(mb.items.seconds_per_patch[clips])
            yield inputs, labels, {int(mb.items.kind[k]) for k in held}


def test_a_step_of_the_service_is_what_transformers_trains_from_the_same_samples(served):
    address, pads = served
    seen = set()
    for shard in steps_of(address, "qwen2_5_vl"):
        library = qwen2_5_vl(pads)
        model = trainable(qwen2_5_vl(pads), processor=PROCESSOR)
        with GroupPool() as groups:
            result = run_step(model, shard, groups)
        loss = torch.zeros((), dtype=torch.float64)
        for inputs, labels, kinds in samples_of(shard, pads):
            logits = library(**inputs).logits[0]
            loss = loss + cross_entropy(logits[:-1], labels[1:], reduction="sum")
            seen |= kinds
        (loss / result.loss_tokens).backward()
        mean = float(loss.detach()) / result.loss_tokens
        grads = {name: p.grad for name, p in library.named_parameters()}
        parameter, difference = worst_difference(result, model.model, mean, grads)
        assert difference < 1e-9, (shard.step, parameter)
    assert seen == {0, 1}


def train(address, job, model):
    with GroupPool() as groups:
        for shard in steps_of(address, job):
            run_step(model, shard, groups)


def test_a_job_with_another_clock_for_clips_is_refused(served):
    address, pads = served
    model = trainable(qwen2_5_vl(pads), processor=PROCESSOR)
    with pytest.raises(LayoutError, match=r"another clock.* needs `vision: {kind: qwen2_5_vl}`"):
        train(address, "qwen2_vl", model)
