from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.errors import PlanningError
from dataservice.planning.loads.problem import dist_ratio, pad_ratio
from dataservice.planning.packs.bfd import bound_falling, pack_bfd
from dataservice.planning.packs.isf import pack_isf
from dataservice.planning.packs.limits import isf_limits
from dataservice.planning.packs.padded import pack_length_grouped, pack_random
from dataservice.planning.packs.wave_assignment import assign_packs_to_waves

TILE = 1024
PACKERS = {"isf": pack_isf, "bfd": pack_bfd}
SAMPLES = st.lists(st.tuples(st.integers(0, 600), st.integers(0, 9)), max_size=120)


def vlm_sft(samples, seed=0):
    """InternVL-like lengths: 1, 3 or 5 tiles and a lognormal answer."""
    generator = np.random.default_rng(seed)
    tiles = generator.choice([1, 3, 5], samples, p=[0.70, 0.14, 0.16])
    answer = generator.lognormal(np.log(267) - 0.18, 0.6, samples)
    return 256 * tiles + np.maximum(1, np.rint(answer)).astype(np.int64), TILE * tiles


@pytest.mark.parametrize("packer", PACKERS)
@settings(max_examples=80, deadline=None)
@given(samples=SAMPLES, max_text=st.integers(1, 700), max_tiles=st.integers(0, 12))
def test_every_sample_is_in_one_pack_and_only_oversize_packs_exceed_a_limit(
    packer, samples, max_text, max_tiles
):
    text = np.array([sample[0] for sample in samples], dtype=np.int64)
    vision = np.array([sample[1] for sample in samples], dtype=np.int64)
    packing = PACKERS[packer](text, vision, max_text=max_text, max_vision=max_tiles)
    assert packing.pack_of.shape == text.shape
    assert packing.pack_of.dtype == np.int32
    counts = np.bincount(packing.pack_of, minlength=packing.packs)
    assert (counts >= 1).all()
    for totals, lengths in ((packing.text_tokens, text), (packing.vision_tokens, vision)):
        np.testing.assert_array_equal(
            totals, np.bincount(packing.pack_of, weights=lengths, minlength=packing.packs)
        )
    over = (packing.text_tokens > max_text) | (packing.vision_tokens > max_tiles)
    np.testing.assert_array_equal(over, packing.oversize)
    assert (counts[packing.oversize] == 1).all()
    assert not (packing.satisfied & packing.oversize).any()
    assert packing.lower_bound <= packing.packs


@settings(max_examples=60, deadline=None)
@given(samples=SAMPLES, seed=st.integers(0, 5), iterations=st.integers(0, 4))
def test_isf_packs_marked_satisfied_reach_a_minimum(samples, seed, iterations):
    text = np.array([sample[0] for sample in samples], dtype=np.int64)
    vision = np.array([sample[1] for sample in samples], dtype=np.int64)
    packing = pack_isf(
        text, vision, max_text=700, max_vision=12, min_text=650, min_vision=11,
        iterations=iterations, seed=seed,
    )  # fmt: skip
    reached = (packing.text_tokens >= 650) | (packing.vision_tokens >= 11)
    np.testing.assert_array_equal(packing.satisfied, reached & ~packing.oversize)


def test_the_open_last_group_is_kept():
    # Both samples fit together and nothing ever closes the group; the paper would drop them.
    packing = pack_isf([60, 40], [0, 0], max_text=100, max_vision=0, min_text=100, iterations=1)
    assert packing.pack_of.tolist() == [0, 0]
    assert packing.satisfied.tolist() == [True]


def test_an_oversize_sample_is_handed_on_alone():
    packing = pack_isf([50, 500, 50], [1, 1, 1], max_text=100, max_vision=8)
    assert packing.pack_of[0] == packing.pack_of[2]
    assert packing.oversize.tolist() == [False, True]
    assert packing.text_tokens.tolist() == [100, 500]
    assert packing.lower_bound == 2


def test_leftovers_are_packed_tightly_and_marked():
    packing = pack_isf([30, 30, 30, 30], [0] * 4, max_text=60, max_vision=0, min_text=61)
    assert packing.packs == 2
    assert not packing.satisfied.any()


def test_the_same_seed_gives_the_same_packs_and_inputs_stay_unchanged():
    text, vision = vlm_sft(500)
    text.setflags(write=False)
    vision.setflags(write=False)
    plans = [pack_isf(text, vision, max_text=4500, max_vision=9 * TILE, seed=4) for _ in range(2)]
    np.testing.assert_array_equal(plans[0].pack_of, plans[1].pack_of)
    other = pack_isf(text, vision, max_text=4500, max_vision=9 * TILE, seed=5)
    assert (other.pack_of != plans[0].pack_of).any()


def test_levelling_evens_out_text_and_leaves_vision_alone():
    text, vision = vlm_sft(20_000)
    limits = {"max_text": 4600, "max_vision": 9 * TILE}
    plain = pack_isf(text, vision, **limits, level=False)
    level = pack_isf(text, vision, **limits)
    np.testing.assert_array_equal(level.vision_tokens, plain.vision_tokens)
    np.testing.assert_array_equal(level.satisfied, plain.satisfied)
    assert level.text_tokens.max() <= 4600
    assert level.text_tokens.sum() == plain.text_tokens.sum()
    full = plain.vision_tokens == 9 * TILE
    assert level.text_tokens[full].std() < 0.6 * plain.text_tokens[full].std()


def test_best_fit_fills_text_packs_as_well_as_today_s_trainers_do():
    text = np.minimum(np.random.default_rng(0).lognormal(6, 1, 20_000).astype(int) + 1, 8192)
    packing = pack_bfd(text, np.zeros_like(text), max_text=8192, max_vision=0)
    assert text.sum() / (8192 * packing.packs) > 0.997


@given(
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=90),
    room=st.sampled_from([20_000, 20_001, 33_000, 700_000]),  # in columns of 1 to 2**12 tokens
    few=st.booleans(),
)
def test_best_fit_opens_no_more_packs_and_leaves_no_more_room_than_was_said(lengths, room, few):
    falling = np.sort(np.array(lengths))[::-1].copy()
    packing = pack_bfd(falling, np.zeros_like(falling), max_text=room, max_vision=0)
    least = packing.lower_bound if few else packing.packs
    most, held = bound_falling(falling, room, least)
    assert packing.packs <= most
    assert packing.text_tokens[:-1].min(initial=room) >= held > 0


def test_what_is_said_of_best_fit_before_it_packs_is_close_where_many_are_short():
    rng = np.random.default_rng(3)
    falling = np.sort(rng.lognormal(6, 1, 20_000).astype(np.int64).clip(1, 8192))[::-1].copy()
    packing = pack_bfd(falling, np.zeros_like(falling), max_text=8192, max_vision=0)
    most, held = bound_falling(falling, 8192, packing.lower_bound)
    assert most <= 1.02 * packing.packs
    assert held >= 0.8 * 8192


def test_best_fit_prefers_the_tighter_pack():
    # 70 and 60 open packs; 30 fits exactly beside 70, 40 beside 60.
    packing = pack_bfd([70, 60, 40, 30], [0, 0, 0, 0], max_text=100, max_vision=0)
    assert packing.pack_of[0] == packing.pack_of[3]
    assert packing.pack_of[1] == packing.pack_of[2]


def test_searched_limits_beat_the_paper_s_on_a_vision_mix():
    text, vision = vlm_sft(60_000)
    excess, ratios = {}, {}
    for method in ("paper", "search"):
        limits = isf_limits(text, vision, method=method)
        packing = pack_isf(text, vision, **asdict(limits))
        assert not packing.oversize.any()
        excess[method] = packing.packs / packing.lower_bound - 1
        ratios[method] = wave_ratios(packing, replicas=16, waves=8, steps=12)
    assert excess["search"] <= 0.01 < excess["paper"]
    assert ratios["search"][0] <= 0.02
    assert ratios["search"][1] <= 0.03


def packed_within_limits(text, vision, **chosen):
    return pack_isf(text, vision, **asdict(isf_limits(text, vision, **chosen)))


def tiled(seed, samples=9000):
    """Lengths of dynamic tiling: up to 13 tiles an image, a share of text alone, long answers."""
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.ones(14) * rng.uniform(0.2, 2.0))
    tiles = rng.choice(np.arange(14), samples, p=share)
    words = rng.lognormal(rng.uniform(3.5, 6.0), rng.uniform(0.4, 1.2), samples).astype(int)
    return np.minimum(words + 20, 4000) + 256 * tiles, TILE * tiles


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("cap", [4096, 8192, 16_384])
def test_within_a_cap_searched_limits_never_make_more_packs_than_the_paper_s(seed, cap):
    text, vision = tiled(seed)
    fits = text <= cap
    text, vision = text[fits], vision[fits]
    packs = {
        method: packed_within_limits(text, vision, method=method, cap_text=cap).packs
        for method in ("paper", "search")
    }
    assert packs["search"] <= packs["paper"]


def test_within_a_cap_slack_in_vision_saves_packs():
    text, vision = vlm_sft(12_000)
    paper, searched = (
        packed_within_limits(text, vision, method=method, cap_text=8192)
        for method in ("paper", "search")
    )
    assert searched.packs <= 0.98 * paper.packs
    ratios = wave_ratios(searched, replicas=16, waves=8, steps=searched.packs // 128)
    assert (ratios <= np.array([0.03, 0.03])).all()


def wave_ratios(packing, replicas, waves, steps):
    """Mean Dist ratio (vision, text) over the waves of some steps."""
    chosen = np.random.default_rng(1).permutation(packing.packs)[: replicas * waves * steps]
    ratios = []
    for step in chosen.reshape(steps, -1):
        tokens = np.stack((packing.vision_tokens[step], packing.text_tokens[step]), axis=1)
        wave_of = assign_packs_to_waves(tokens / tokens.mean(axis=0), replicas=replicas)
        in_waves = tokens[np.argsort(wave_of, kind="stable")].reshape(waves, replicas, 2)
        ratios.append([dist_ratio(in_waves[:, :, phase]) for phase in range(2)])
    return np.mean(ratios, axis=0)


def test_limits_keep_to_their_caps():
    text, vision = vlm_sft(3000)
    limits = isf_limits(text, vision, cap_text=3000, cap_vision=7 * TILE)
    assert limits.max_text <= 3000
    assert limits.max_vision <= 7 * TILE
    paper = isf_limits(text, vision, method="paper", cap_text=4096)
    assert (paper.max_text, paper.min_text) == (4096, 3968)
    assert paper.max_vision % TILE == 0


def test_limits_of_text_alone_need_no_vision():
    limits = isf_limits([10, 200, 300], [0, 0, 0])
    assert limits.max_text == 300
    assert limits.max_vision == 0


def test_baselines_batch_fixed_counts_and_pad():
    text, vision = vlm_sft(4000)
    at_random = pack_random(text, vision, samples_per_pack=4)
    grouped = pack_length_grouped(text, vision, samples_per_pack=4)
    for packing in (at_random, grouped):
        assert np.bincount(packing.pack_of).tolist() == [4] * 1000
    waste = [pad_ratio(text, packing.pack_of) for packing in (at_random, grouped)]
    assert waste[0] > 0.25
    assert waste[1] < 0.05


def test_pad_and_dist_ratios_follow_the_paper():
    assert pad_ratio([4, 2, 3, 3], [0, 0, 1, 1]) == pytest.approx(2 / 14)
    assert dist_ratio([4, 2, 2]) == pytest.approx(4 / 12)
    assert dist_ratio([[4, 2, 2], [5, 5, 5]]) == pytest.approx(2 / 12)
    assert dist_ratio([0, 0]) == 0
    assert pad_ratio([], []) == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pack_isf([1], [1, 2], max_text=4, max_vision=4), "1 samples and vision_tokens 2"),
        (lambda: pack_isf([-1], [1], max_text=4, max_vision=4), r"text_tokens\[0\] is -1"),
        (lambda: pack_isf([1.5], [1], max_text=4, max_vision=4), "whole token counts"),
        (lambda: pack_isf([np.nan], [1], max_text=4, max_vision=4), "whole token counts"),
        (lambda: pack_isf([1], [1], max_text=0, max_vision=4), "max_text is 0"),
        (lambda: pack_isf([1], [1], max_text=4, max_vision=4, iterations=-1), "iterations is -1"),
        (lambda: pack_bfd([1], [1], max_text=4, max_vision=-1), "max_vision is -1"),
        (lambda: isf_limits([1], [1], method="guess"), "guess"),
        (lambda: isf_limits([], []), "0 samples"),
        (lambda: pack_random([1], [1], samples_per_pack=0), "samples_per_pack is 0"),
        (lambda: pad_ratio([1], [0, 1]), "one batch an item"),
        (lambda: dist_ratio([]), "not empty"),
    ],
)
def test_bad_input_says_what_is_wrong(call, words):
    with pytest.raises(PlanningError, match=words):
        call()
