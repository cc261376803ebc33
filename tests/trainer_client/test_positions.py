"""Positions of a pack, against transformers' own `get_rope_index` of each sample alone."""

import numpy as np
import pytest
import torch

from dataservice.core.layout import member_rows, padded_tokens, sample_starts
from tests.trainer_client.rope_index import FAMILIES, rope_index_of
from trainer_client import MalformedShard
from trainer_client.positions import (
    MropeRule,
    held_rows,
    in_sample,
    local_positions,
    mrope_positions,
)
from trainer_client.shard import PackItems

TEXT, IMAGE, CLIP = range(3)
MERGE = 2


def random_sample(rng, family):
    """Lengths of text and grids of items, in turns: [(kind, tokens, grid, seconds per patch)]."""
    parts = []
    for _ in range(rng.integers(0, 5)):
        parts.append((TEXT, int(rng.integers(1, 20)), None, np.nan))
        h, w = (2 * rng.integers(1, 8, 2)).tolist()
        clip = rng.random() < 0.4
        # Qwen3-VL writes each patch of time as an item of its own.
        t = int(rng.integers(1, 12)) if clip and family != "qwen3_vl" else 1
        seconds = float(rng.uniform(0.1, 6.0)) if clip else np.nan
        parts.append((CLIP if clip else IMAGE, t * h * w // 4, (t, h, w, MERGE), seconds))
    parts.append((TEXT, int(rng.integers(1, 20)), None, np.nan))
    return parts


def items_of(samples, starts):
    """The items of packed samples, as a shard has them."""
    kind, start, tokens, grid, seconds = [], [], [], [], []
    for parts, place in zip(samples, starts, strict=False):
        for of, length, shape, span in parts:
            if of != TEXT:
                kind.append(of - IMAGE)
                start.append(place)
                tokens.append(length)
                grid.append(shape)
                seconds.append(span)
            place += length
    return PackItems(
        modality=np.zeros(len(kind), dtype=np.int8),
        kind=np.array(kind, dtype=np.int8),
        start=np.array(start, dtype=np.int64),
        tokens=np.array(tokens, dtype=np.int64),
        grid=np.array(grid, dtype=np.int64).reshape(-1, 4),
        seconds_per_patch=np.array(seconds, dtype=np.float64),
    )


def of_transformers(family, get_rope_index, parts):
    """What the family's own code gives for one sample alone: [3, tokens]."""
    types = np.repeat([of for of, *_ in parts], [tokens for _, tokens, *_ in parts])
    grids = {
        of: torch.tensor([g[:3] for kind, _, g, _ in parts if kind == of]) for of in (IMAGE, CLIP)
    }
    spans = torch.tensor([s for kind, *_, s in parts if kind == CLIP], dtype=torch.float32)
    more = {"second_per_grid_ts": spans} if family == "qwen2_5_vl" else {}
    positions, _ = get_rope_index(
        input_ids=torch.zeros(1, len(types), dtype=torch.int64),
        mm_token_type_ids=torch.from_numpy(types)[None],
        image_grid_thw=grids[IMAGE] if len(grids[IMAGE]) else None,
        video_grid_thw=grids[CLIP] if len(grids[CLIP]) else None,
        **more,
    )
    return positions[:, 0].numpy()


def check_packs(family, packs, samples_a_pack, seed):
    rng, get_rope_index = np.random.default_rng(seed), rope_index_of(family)
    for number in range(packs):
        degree = 1 + number % 8
        samples = [random_sample(rng, family) for _ in range(samples_a_pack)]
        lengths = np.array([sum(tokens for _, tokens, *_ in parts) for parts in samples])
        padded = padded_tokens(lengths, degree)
        starts = sample_starts(padded)
        expected = np.full((3, starts[-1]), -1)
        for parts, start, length in zip(samples, starts, lengths, strict=False):
            expected[:, start : start + length] = of_transformers(family, get_rope_index, parts)
        items = items_of(samples, starts.tolist())
        for member in range(degree):
            found = local_positions(
                starts, items, FAMILIES[family][2], degree=degree, cp_rank=member
            ).numpy()
            wanted = expected[:, member_rows(padded, degree, member)]
            real = wanted[0] >= 0  # padding is behind every true token
            np.testing.assert_array_equal(found[:, real], wanted[:, real])


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_those_of_transformers_at_every_degree(family):
    check_packs(family, packs=24, samples_a_pack=4, seed=5)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_positions_of_thousands_of_samples_are_those_of_transformers(family):
    check_packs(family, packs=840, samples_a_pack=4, seed=6)


def test_text_behind_a_long_clip_may_begin_past_its_last_time():
    items = items_of([[(TEXT, 2, None, np.nan), (CLIP, 5, (5, 2, 2, 2), 1.0)]], [0])
    bounds = np.array([0, 9])
    five = mrope_positions(bounds, items, MropeRule())
    four = mrope_positions(bounds, items, MropeRule(past_time=True))
    np.testing.assert_array_equal(five[0], [0, 1, 2, 3, 4, 5, 6, 3, 4])
    np.testing.assert_array_equal(four[0], [0, 1, 2, 3, 4, 5, 6, 7, 8])
    seconds = mrope_positions(bounds, items, MropeRule(tokens_per_second=2.0, past_time=True))
    np.testing.assert_array_equal(seconds[0], [0, 1, 2, 4, 6, 8, 10, 11, 12])


def test_text_alone_has_one_number_in_all_three_rows():
    items = items_of([], [])
    positions = mrope_positions(np.array([0, 3, 5]), items, MropeRule())
    np.testing.assert_array_equal(positions, [[0, 1, 2, 0, 1]] * 3)


def test_a_grid_that_contradicts_the_tokens_is_refused():
    items = items_of([[(IMAGE, 5, (1, 4, 4, 2), np.nan)]], [0])
    with pytest.raises(MalformedShard, match=r"\[1, 4, 4, 2\].*4 tokens, and 5 tokens in the plan"):
        mrope_positions(np.array([0, 8]), items, MropeRule())


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_members_hold_the_rows_that_the_plan_gives_them(degree):
    padded = padded_tokens(np.array([7, 1, 40, 12]), degree)
    starts = sample_starts(padded)
    whole = np.arange(starts[-1]) - np.repeat(starts[:-1], padded)
    for cp_rank in range(degree):
        rows = held_rows(starts, degree, cp_rank)
        np.testing.assert_array_equal(rows, member_rows(padded, degree, cp_rank))
        np.testing.assert_array_equal(in_sample(starts, rows), whole[rows])
