"""From files to positions: what a decoded sample of Qwen-VL gives is what `get_rope_index` of
transformers gives for its token ids and its own grids."""

import random

import numpy as np
import pytest
import torch

from dataservice.core.sample import ItemKind, MediaBlob, RawSample
from dataservice.decode.sample_pipeline import PipelineSpec, build_pipeline
from tests.decode.families import family
from tests.decode.files import Files, train
from tests.trainer_client.rope_index import rope_index_of
from trainer_client.positions import MropeRule, mrope_positions
from trainer_client.shard import PackItems


def pack_items(lengths) -> PackItems:
    """A sample's items as a shard has them, alone in its pack."""
    items = lengths.items
    spans = [np.nan if item.seconds_per_patch is None else item.seconds_per_patch for item in items]
    return PackItems(
        modality=np.array([item.modality for item in items], dtype=np.int8),
        kind=np.array([item.kind for item in items], dtype=np.int8),
        start=np.array([item.position for item in items], dtype=np.int64),
        tokens=np.array([item.llm_tokens for item in items], dtype=np.int64),
        grid=np.array([item.grid for item in items], dtype=np.int64).reshape(-1, 4),
        seconds_per_patch=np.array(spans, dtype=np.float64),
    )


def merged(grids: list[tuple[int, ...]]) -> list[list[int]]:
    """Grids of whole clips from those of their items: equal neighbours of one patch in time."""
    return [[len(grids), *grids[0][1:3]]] if grids and grids[0][0] == 1 else [list(grids[0][:3])]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_decoded_sample_is_placed_as_transformers_places_it(name, tmp_path):
    judge, rng = family(name), random.Random(name)
    tokenizer = train(list(judge.specials))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    spec = PipelineSpec(tokenizer=str(tmp_path), vision=judge.ours)
    pipeline, rule = build_pipeline(spec), spec.position_rule
    get_rope_index = rope_index_of(name)
    pad_of = {1: tokenizer.token_to_id("<|image_pad|>"), 2: tokenizer.token_to_id("<|video_pad|>")}
    for _ in range(12):
        image = Files.image(rng.randint(30, 400), rng.randint(30, 400), "PNG")
        clip = Files.video(rng.randint(4, 20), rng.choice([1, 2, 5]))
        media = [("image", image), ("video", clip)]
        rng.shuffle(media)
        text = "the cat " + " sat on ".join(f"<{kind}>" for kind, _ in media) + " a mat"
        blobs = tuple(MediaBlob(kind=kind, name="file", data=data) for kind, data in media)
        raw = RawSample(key="0", record={"text": text}, media=blobs)
        lengths = pipeline.measure(raw)
        ids = pipeline.decode(raw, lengths).input_ids
        grids = {
            kind: merged([item.grid for item in lengths.items if item.kind is kind])
            for kind in (ItemKind.IMAGE, ItemKind.CLIP)
        }
        spans = [i.seconds_per_patch for i in lengths.items if i.kind is ItemKind.CLIP][:1]
        more = {"second_per_grid_ts": torch.tensor(spans)} if name == "qwen2_5_vl" else {}
        wanted, _ = get_rope_index(
            input_ids=torch.from_numpy(ids.astype(np.int64))[None],
            mm_token_type_ids=torch.from_numpy(
                np.select([ids == pad for pad in pad_of.values()], list(pad_of), 0)
            )[None],
            image_grid_thw=torch.tensor(grids[ItemKind.IMAGE]),
            video_grid_thw=torch.tensor(grids[ItemKind.CLIP]),
            **more,
        )
        bounds = np.array([0, len(ids)])
        made = mrope_positions(
            bounds,
            pack_items(lengths),
            MropeRule(tokens_per_second=rule.tokens_per_second, past_time=rule.past_time),
        )
        assert rule.scheme == "mrope"
        assert (made == wanted[:, 0].numpy()).all()
