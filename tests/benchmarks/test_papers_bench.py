import numpy as np
import pytest

from benchmarks import omnibal, workloads
from benchmarks.harness import TINY
from benchmarks.planning.__main__ import PAPERS
from benchmarks.planning.papers.dhp_tables import dhp
from benchmarks.planning.papers.mmscale_figures import (
    MODELS,
    Trainer,
    compared,
    drawn,
    megatron_shapes,
)
from benchmarks.planning.papers.omnibal_batches import isf_batches, padded_batches
from benchmarks.planning.papers.omnibal_settings import setting
from benchmarks.planning.papers.orchmllm_figures import MODELS as SHARDED
from benchmarks.planning.papers.orchmllm_figures import drawn as drawn_modalities
from benchmarks.planning.papers.orchmllm_figures import loads, megatron_split
from benchmarks.planning.papers.speed_ups import (
    SpeedUp,
    entry_bounds,
    pipeline_step_s,
    sharded_step_s,
    split_by,
)
from dataservice.jobs.layout_files import read_model
from dataservice.planning import dist_ratio, simulate_1f1b
from dataservice.planning.layout.profile import LayerWork


@pytest.fixture(scope="module")
def main_model():
    """InternVL-6B + InternLM2-20B of OmniBal's Table 9."""
    return setting(1)


@pytest.mark.full
@pytest.mark.parametrize("name", PAPERS)
def test_every_row_of_the_papers_is_met_or_says_why_it_is_off(name):
    rows = PAPERS[name](TINY)
    assert len(rows) > 30
    for row in rows:
        assert row.group == name
        assert row.met is not None
        assert row.met != ("Off because" in row.explanation), row.what


def test_a_ratio_that_is_off_says_why_and_one_that_is_met_does_not():
    given = {"source": "A", "what": "b", "printed": 2.0, "explanation": "So.", "off_because": "c."}
    near = SpeedUp(found=2.2, ours=2.5, **given).row()
    assert near.figure == pytest.approx(10.0)
    assert (near.met, near.explanation) == (True, "So.")
    assert near.paper == "paper 2.00×, recomputed 2.20×, ours 2.50×"
    far = SpeedUp(found=1.0, **given).row()
    assert (far.met, far.explanation) == (False, "So. Off because c.")
    assert "ours" not in far.paper


def test_a_published_split_takes_every_entry_of_the_profile(main_model):
    profile = main_model.profile
    bounds = entry_bounds(profile, main_model.row.bounds)
    assert bounds[0] == 0
    assert bounds[-1] == len(profile.names)
    first_of_stage = [profile.names[place] for place in bounds[1:-1]]
    assert first_of_stage == ["vision.22", "vision.projector", "decoder.24"]


def test_a_pipeline_step_is_the_simulators_for_the_slowest_replica(main_model):
    profile, bounds = main_model.profile, entry_bounds(main_model.profile, main_model.row.bounds)
    heavy, light = isf_batches(0, 4).dealt(4)[:2]
    everything = np.ones(len(profile.names), np.bool_)
    found = pipeline_step_s(
        profile, [heavy, light], bounds, recomputed=everything, bytes_per_s=np.inf
    )
    steps = []
    for work in (heavy, light):
        forward, backward = profile.seconds(work)
        tables = (forward, backward + profile.added_s(work, "full"))
        by_stage = (np.add.reduceat(table, bounds[:-1], axis=1) for table in tables)
        steps.append(simulate_1f1b(*by_stage).makespan_s)
    assert found == pytest.approx(max(steps))


def test_ranks_of_a_sharded_step_wait_for_the_one_with_most_to_do(main_model):
    profile = main_model.profile
    even = LayerWork.of(vision=([4e3, 4e3], [4e6, 4e6]), decoder=([2e3, 2e3], [1e6, 1e6]))
    uneven = LayerWork.of(vision=([7e3, 1e3], [7e6, 1e6]), decoder=([1e3, 3e3], [5e5, 15e5]))
    seconds = [
        sharded_step_s(profile, work, shards=2, bytes_per_s=np.inf) for work in (even, uneven)
    ]
    assert seconds[1] / seconds[0] > 1.4
    bound = sharded_step_s(profile, even, shards=2, bytes_per_s=1e9)
    weights = (profile.state_bytes - profile.gradient_bytes).sum()
    assert bound == pytest.approx(3 * weights / 2 / 1e9)


def test_layers_are_cut_at_equal_shares():
    np.testing.assert_array_equal(split_by(np.ones(8), 4), [0, 2, 4, 6, 8])
    np.testing.assert_array_equal(split_by(np.array([3.0, 1, 1, 1]), 2), [0, 1, 4])


def test_batches_of_four_are_as_uneven_as_omnibal_says():
    batches = padded_batches("random", 0)
    tiles, tokens = (column.reshape(-1, 8) for column in (batches.tiles, batches.tokens))
    assert dist_ratio(tiles) == pytest.approx(0.34, abs=0.04)
    assert dist_ratio(tokens) == pytest.approx(0.30, abs=0.04)


def test_packs_hold_what_omnibals_limits_allow():
    packs = isf_batches(0, 4)
    assert packs.tiles.max() <= omnibal.TILES
    assert packs.tokens.max() <= omnibal.TEXT_TOKENS
    assert packs.samples / packs.tiles.size == pytest.approx(4.6, abs=0.1)


def test_published_splits_say_that_narrow_vision_layers_are_slow(main_model):
    assert main_model.vision_pace == pytest.approx(1.24, abs=0.05)
    assert setting(5).vision_pace > main_model.vision_pace > setting(7).vision_pace


def test_sequences_of_mmscale_are_full_of_pictures():
    work = drawn(16, 512, 0)
    assert (work.tokens["decoder"] == 8192).all()
    assert (work.tokens["vision"] > 4096).all()
    assert (work.tokens["vision"] < 8192).all()
    assert (work.tokens["generator"] % 4096 == 0).all()


def test_megatron_gives_encoder_and_generator_as_many_gpus_as_a_stage():
    shapes = megatron_shapes(MODELS[0], 98, 128)
    assert sum(shape.gpus for shape in shapes.values()) == 96
    assert len({shape.gpus for shape in shapes.values()}) == 1
    found = compared(MODELS[0], 98, 128)
    assert found.megatron_s > found.reordered_s >= found.ours_s


def test_stages_of_a_module_hold_whole_layers():
    trainer = Trainer(model=read_model("mmscale-mllm-15b"), work=drawn(2, 512, 0))
    shares = trainer.stage_shares("decoder", 6)
    np.testing.assert_allclose(40 * shares, [7, 7, 7, 7, 6, 6])


def test_balanced_phases_have_the_work_of_unbalanced_ones_on_fuller_ranks():
    samples = drawn_modalities(SHARDED[0], 320, 0)
    drawn_loads, balanced = (loads(samples, 8, kind) for kind in ("none", "all"))
    for name in ("vision", "decoder"):
        assert balanced[name][0].sum() == drawn_loads[name][0].sum()
        assert balanced[name][0].max() < drawn_loads[name][0].max()
    assert loads(samples, 8, "decoder")["vision"][0].max() == drawn_loads["vision"][0].max()


@pytest.mark.parametrize("of", SHARDED, ids=lambda of: of.model.name)
def test_megatrons_stages_hold_all_layers(of):
    split = megatron_split(of)
    assert split.size == of.stages + 1
    assert (np.diff(split) > 0).all()
    layers = of.model.decoder.layers + sum(each.layers for each in of.model.encoders)
    assert (split[0], split[-1]) == (0, layers)


def test_rows_of_dhp_are_built_from_the_step_planners_seconds():
    rows = dhp(TINY)
    assert len(rows) == 5
    assert all("recomputed" in row.paper and "ours" in row.paper for row in rows)


def test_other_shares_of_tiles_draw_other_samples():
    one = workloads.vlm_sft(200, 0, tile_shares=(1.0, 0.0, 0.0))
    assert (one.media_llm_tokens == workloads.TILE_LLM_TOKENS).all()
    assert workloads.vlm_sft(200, 0).media_llm_tokens.max() == 5 * workloads.TILE_LLM_TOKENS
