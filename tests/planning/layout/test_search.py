"""The layout as a whole: small models on few GPUs, judged by the step planner itself."""

import re
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import numpy as np
import pytest

from benchmarks import workloads
from dataservice.core.errors import PlanningError
from dataservice.core.plan_options import PlanOptions
from dataservice.planning.compose import StepSamples, compose_step
from dataservice.planning.layout import search
from dataservice.planning.layout.bubble_replica import BubbleAsk, backbone_times, encoder_times
from dataservice.planning.layout.microbatches import mean_work
from dataservice.planning.layout.model import ModelDescription, Projector
from dataservice.planning.layout.replica import PLACES, Place, states_of
from dataservice.planning.layout.search import LayoutTask, search_layout
from dataservice.planning.layout.search_bound import least_step_s
from dataservice.planning.layout.step_planner import StepPlanner
from tests.planning.layout.bubble_cases import faults_of
from tests.planning.layout.small_models import DECODER, MODEL, VISION, nodes
from tests.planning.step_samples import text_samples


def task(
    memory_bytes: float,
    *,
    model: ModelDescription = MODEL,
    count: int = 1,
    places: tuple[Place, ...] = ("first", "spread"),
) -> LayoutTask:
    batches = tuple(workloads.step_samples(workloads.vlm_sft(96, seed)) for seed in range(2))
    return LayoutTask(model=model, group=nodes(memory_bytes, count), batches=batches, places=places)


def longest_batch(asked: LayoutTask) -> StepSamples:
    """The one that layouts are made for."""
    return max(asked.batches, key=lambda batch: batch.lengths.llm_tokens.max())


@pytest.fixture(scope="module")
def roomy():
    asked = task(80e9, places=PLACES)
    return asked, search_layout(asked)


def test_the_best_is_none_slower_than_any_other_and_not_below_the_bound(roomy):
    _, layout = roomy
    assert layout.others
    assert all(layout.best.step_s <= other.step_s for other in layout.others[:8])
    assert 0 < layout.lower_bound_s <= layout.best.step_s


def test_its_seconds_are_those_of_the_step_planners_own_plans(roomy):
    asked, layout = roomy
    replica = layout.best.replica
    topology, memory = replica.topology(asked.group), replica.memory(asked.group)
    options = PlanOptions(
        memory_tokens=min(layout.best.microbatch_tokens, memory.tokens(topology)),
        cost=replica.cost(asked.group),
    )
    seconds = [
        compose_step(batch, step=0, topology=topology, options=options).predicted_s
        for batch in asked.batches
    ]
    assert layout.best.step_s == pytest.approx(np.mean(seconds), rel=1e-12)


def test_every_gpu_is_used_and_every_layer_is_in_one_chunk(roomy):
    asked, layout = roomy
    for candidate in (layout.best, *layout.others):
        replica, parallel = candidate.replica, candidate.replica.parallel
        assert parallel.ranks_per_replica * parallel.replicas == asked.group.gpus
        assert replica.bounds[-1] == len(replica.profile.names)
        assert len(replica.bounds) == parallel.chunks + 1
        assert (np.diff(replica.bounds) > 0).all()
        assert sum(replica.chunk_shares) == pytest.approx(1.0)


def test_every_choice_is_named_beside_what_came_second(roomy):
    _, layout = roomy
    names = [choice.name for choice in layout.choices]
    assert {"tensor_parallel", "pipeline_parallel", "encoder_stage", "recompute_entries"} <= {
        *names
    }
    for choice in layout.choices[:5]:
        assert choice.chosen != choice.runner_up
        assert choice.gain >= 0
        assert choice.runner_up_s == pytest.approx(layout.best.step_s * (1 + choice.gain))


def test_no_stage_holds_more_than_its_memory_where_that_is_tight():
    asked = task(9e9)
    layout = search_layout(asked)
    for candidate in (layout.best, *layout.others):
        replica = candidate.replica
        assert (replica.recompute.peak_bytes <= 9e9).all()
        states = states_of(replica.profile, replica.bounds, replica.parallel)
        assert (states < 9e9).all()
    assert layout.refused


@pytest.mark.parametrize("place", ["first", "cut", "own"])
def test_what_the_memory_of_a_layout_admits_fits_on_every_stage(place):
    asked = task(16e9, places=(place,))
    layout = search_layout(asked)
    for candidate in (layout.best, *layout.others):
        replica = candidate.replica
        memory, budget = replica.memory(asked.group), asked.group.device.memory_bytes
        most_tokens = (budget - memory.states_bytes) / memory.llm_token_bytes
        fullest = 0.0
        for part in (0.0, 0.3, 1.0):
            tokens = part * most_tokens
            left = budget - memory.states_bytes - tokens * memory.llm_token_bytes
            held = bytes_on_stages(replica, tokens, left / memory.vision_token_bytes)
            assert (held <= budget * (1 + 1e-9)).all()
            fullest = max(fullest, held.max())
        assert fullest == pytest.approx(budget)  # and none is wasted where nothing is encoded


def bytes_on_stages(replica, tokens, patches):
    """States, and what a microbatch of so many tokens and patches keeps: float64[stages]."""
    profile, parallel = replica.profile, replica.parallel
    kept = np.choose(replica.recompute.choice, [*profile.kept_token_bytes.values()])
    held = replica.states_bytes().copy()
    chunk = np.searchsorted(replica.bounds, np.arange(len(profile.names)), side="right") - 1
    for stage in range(parallel.pipeline_stages):
        share = parallel.kept_microbatches(stage) / parallel.kept_microbatches(0)
        mine = chunk % parallel.pipeline_stages == stage
        for module, count in (("decoder", tokens), ("vision", patches)):
            held[stage] += kept[mine & profile.entries_of(module)].sum() * count * share
    return held


def test_less_memory_never_makes_a_step_shorter():
    roomy_s, tight_s = (search_layout(task(bytes_)).best.step_s for bytes_ in (80e9, 12e9))
    assert tight_s >= roomy_s * (1 - 1e-9)


def test_a_model_that_cannot_fit_is_told_by_how_many_bytes_and_how_many_gpus_would_do():
    with pytest.raises(
        PlanningError, match=r"bytes a GPU, [\d,]+ too many. Give at least \d+ GPUs"
    ):
        search_layout(task(1e9))


def test_as_many_gpus_as_are_named_hold_what_one_gpu_alone_cannot():
    frozen = replace(task(1e9), places=("first",), batches=(text_samples([16] * 8),))
    with pytest.raises(PlanningError) as told:
        search_layout(frozen)
    named = int(re.search(r"at least (\d+) GPUs", str(told.value))[1])
    states = {ranks: frozen.profile(ranks) for ranks in frozen.tensor_ranks}
    fewest_bytes = min(
        float((each.state_bytes + each.optimizer_bytes).sum()) * ranks
        for ranks, each in states.items()
    )
    assert (named - 1) * 1e9 < fewest_bytes <= named * 1e9


@pytest.mark.parametrize("turned", [False, True])
def test_a_layout_has_room_for_the_longest_sample_of_any_batch(turned):
    short, long = text_samples([1000] * 16), text_samples([60_000] + [1000] * 4)
    asked = LayoutTask(
        model=ModelDescription(name="text", decoder=DECODER),
        group=replace(nodes(28e9), gpus_per_node=1),
        batches=(long, short) if turned else (short, long),
    )
    best = search_layout(asked).best
    assert best.replica.held_tokens(asked.group, best.microbatch_tokens) >= 60_000


def test_one_without_room_for_a_later_batch_is_refused_and_others_are_planned(monkeypatch):
    planned = StepPlanner.full_s

    def no_room(self, replica, tokens):
        if replica.parallel.tensor_ranks == 1:
            raise PlanningError("a sample has no room")
        return planned(self, replica, tokens)

    asked = task(80e9, places=("first",))
    usual = search_layout(asked)
    monkeypatch.setattr(StepPlanner, "full_s", no_room)
    others = search_layout(asked)
    assert usual.best.choices["tensor_parallel"] == 1
    assert others.best.choices["tensor_parallel"] > 1
    assert np.isfinite(others.best.step_s)
    assert any("TP 1" in refused and "no room" in refused for refused in others.refused)


def test_schedules_that_cannot_be_made_are_not_counted_as_made(monkeypatch):
    placed, refused = StepPlanner.placed, []

    def often_refused(self, replica, tokens):
        if len(refused) < 3:
            refused.append(replica)
            raise PlanningError("too many microbatches for a schedule")
        return placed(self, replica, tokens)

    monkeypatch.setattr(search, "SCHEDULES", 2)
    monkeypatch.setattr(StepPlanner, "placed", often_refused)
    layout = search_layout(task(80e9, places=("bubbles",)))
    found = [each for each in (layout.best, *layout.others) if each.replica.in_bubbles]
    assert 1 <= len(found) <= 2


def test_a_sample_for_which_no_shape_is_long_enough_is_told_with_its_length():
    asked = replace(task(80e9), batches=(text_samples([300_000]),))
    with pytest.raises(PlanningError, match=r"300,000 tokens, and 4 replicas take 262,144 at most"):
        search_layout(asked)


def test_a_frozen_encoder_asks_for_fewer_seconds():
    frozen = ModelDescription(
        name="frozen",
        decoder=DECODER,
        encoders=(replace(VISION, frozen=True),),
    )
    made = search_layout(task(80e9, model=frozen))
    assert made.best.step_s < search_layout(task(80e9)).best.step_s
    assert made.best.replica.cost(nodes(80e9)).vision.linear_s_per_token > 0


def test_a_text_model_has_no_place_for_encoders_to_choose():
    text = ModelDescription(name="text", decoder=DECODER)
    layout = search_layout(task(80e9, model=text))
    assert "encoder_stage" not in {choice.name for choice in layout.choices}


def test_an_encoder_that_the_index_has_no_lengths_for_is_refused():
    odd = ModelDescription(name="odd", decoder=DECODER, encoders=(replace(VISION, name="lidar"),))
    with pytest.raises(PlanningError, match=r"'lidar'.* vision and audio"):
        task(80e9, model=odd)


def test_the_search_tells_how_far_it_is():
    told = []
    asked = replace(task(80e9), places=("first",))
    layout = search_layout(asked, progress=lambda *now: told.append(now))
    assert [done for done, _, _ in told] == list(range(1, told[-1][1] + 1))
    planned_in_full = told[-1][1] - (1 + len(layout.others) + len(layout.refused))
    assert 0 < planned_in_full <= 1 + len(layout.others)


def test_encoders_are_tried_in_every_place(roomy):
    _, layout = roomy
    places = {each.choices["encoder_stage"] for each in (layout.best, *layout.others)}
    assert places == set(PLACES)


def test_only_the_places_that_are_asked_for_are_tried_and_one_stage_needs_none():
    layout = search_layout(replace(task(80e9), places=("own",)))
    for each in (layout.best, *layout.others):
        parallel = each.replica.parallel
        assert parallel.encoder_stage == ("own" if parallel.pipeline_stages > 1 else "first")


@pytest.mark.parametrize("places", [(), ("nowhere",)])
def test_places_that_are_none_are_refused_by_name(places):
    with pytest.raises(PlanningError, match=r"first, own, cut, spread, bubbles"):
        replace(task(80e9), places=places)


def large_encoder():
    """Two thirds of the work in an encoder, which one of four stages cannot have."""
    encoder = replace(VISION, layers=24, tokens_per_row=1.0)
    return ModelDescription(
        name="large-encoder", decoder=replace(DECODER, layers=8), encoders=(encoder,)
    )


def of_shape(layout, stages, place):
    """The best of so many stages, each of one chunk, with encoders there."""
    return min(
        (
            each
            for each in (layout.best, *layout.others)
            if each.replica.parallel.pipeline_stages == stages
            and each.replica.parallel.virtual_stages == 1
            and each.choices["encoder_stage"] == place
        ),
        key=lambda each: each.step_s,
    )


@pytest.fixture(scope="module")
def cut():
    asked = replace(task(80e9, model=large_encoder()), places=("first", "own", "cut"))
    return asked, search_layout(asked)


def test_a_stage_that_ends_inside_a_large_encoder_is_faster_than_an_encoder_kept_whole(cut):
    _, layout = cut
    whole = min(of_shape(layout, 4, place).step_s for place in ("first", "own"))
    assert of_shape(layout, 4, "cut").step_s < 0.8 * whole


def test_a_projector_stays_with_the_last_layer_of_its_encoder_however_heavy_it_is():
    heavy = replace(VISION, projector=Projector(widths=(49_152, 2048)))
    model = ModelDescription(name="heavy", decoder=DECODER, encoders=(heavy,))
    layout = search_layout(task(80e9, model=model, places=("cut",)))
    found = [each.replica for each in (layout.best, *layout.others)]
    cut = [replica for replica in found if replica.parallel.encoder_stage == "cut"]
    assert cut
    for replica in cut:
        begun = [replica.profile.names[at] for at in replica.bounds[:-1].tolist()]
        assert not [name for name in begun if name.endswith(".projector")]


def test_a_cut_encoder_takes_the_seconds_of_the_layers_that_each_chunk_holds(cut):
    asked, layout = cut
    replica = of_shape(layout, 4, "cut").replica
    profile, bounds = replica.profile, replica.bounds
    topology, cost = replica.topology(asked.group), replica.cost(asked.group)
    vision, decoder = (
        np.array([module == name for module in profile.modules]) for name in ("vision", "decoder")
    )
    each = replica.seconds_a_token
    for chunk, (low, high) in enumerate(pairwise(bounds.tolist())):
        inside = np.arange(len(profile.names))
        inside = (inside >= low) & (inside < high)
        ours = topology.encoder_shares[0][chunk] * cost.vision.linear_s_per_token
        assert ours == pytest.approx(each[inside & vision].sum())
        ours = topology.chunk_shares[chunk] * cost.llm.linear_s_per_token
        assert ours == pytest.approx(each[inside & decoder].sum())
    assert replica.is_cut
    assert sum(topology.encoder_shares[0]) == pytest.approx(1.0)


@pytest.fixture(scope="module")
def bubbles(roomy):
    asked, layout = roomy
    found = [each for each in (layout.best, *layout.others) if each.replica.in_bubbles]
    return asked, found


def test_a_schedule_of_bubbles_has_the_chunks_of_its_layout_and_replays_without_a_fault(bubbles):
    asked, found = bubbles
    profile = cache(asked.profile)
    ask = BubbleAsk(
        group=asked.group, profile=profile, linkless=cache(partial(asked.profile, linkless=True))
    )
    for each in found:
        replica, made = each.replica, each.replica.in_bubbles
        count = made.microbatches * replica.parallel.replicas
        mean = mean_work(longest_batch(asked), count, asked.model.module_names)
        backbone = backbone_times(replica, ask, mean, made.microbatches)
        encoders = encoder_times(replica, ask, mean, made.recompute)
        assert faults_of(made.schedule, backbone, encoders) == []
        layers = made.layers
        assert layers["vision"] == tuple(f"vision.{n}" for n in range(VISION.layers))
        assert layers["decoder"] == replica.profile.names[replica.bounds[0] :]


def test_encoders_in_bubbles_cost_what_their_step_takes_longer_than_the_backbone_alone(bubbles):
    asked, found = bubbles
    for each in found:
        replica, schedule = each.replica, each.replica.in_bubbles.schedule
        mean = mean_work(longest_batch(asked), replica.parallel.replicas, asked.model.module_names)
        phase = replica.cost(asked.group).vision
        shown = phase.linear_s_per_token * mean.tokens["vision"][0]
        shown += phase.quadratic_s_per_token2 * mean.squares["vision"][0]
        shown /= replica.parallel.pipeline_stages
        assert shown == pytest.approx(schedule.step_s - schedule.backbone_s, rel=1e-9)


def test_overlapped_gradients_never_make_a_step_longer():
    asked = task(80e9)
    overlapped = search_layout(replace(asked, overlap_gradients=True))
    assert overlapped.best.step_s <= search_layout(asked).best.step_s * (1 + 1e-9)
    assert overlapped.lower_bound_s <= overlapped.best.step_s


@pytest.mark.parametrize("seed", range(2))
def test_no_layout_is_below_the_bound(seed):
    rng = np.random.default_rng(seed)
    model = ModelDescription(
        name="any",
        decoder=replace(DECODER, layers=int(rng.integers(4, 10))),
        encoders=(replace(VISION, layers=int(rng.integers(2, 12)), frozen=bool(seed % 2)),),
    )
    samples = workloads.step_samples(workloads.vlm_sft(int(rng.integers(4, 24)), seed))
    asked = LayoutTask(model=model, group=nodes(80e9), batches=(samples,))
    profiles = {ranks: asked.profile(ranks) for ranks in asked.tensor_ranks}
    layout = search_layout(asked)
    bound_s = least_step_s(asked, profiles)
    for each in (layout.best, *layout.others):
        assert each.step_s >= bound_s * (1 - 1e-9)


@pytest.mark.parametrize("bytes_per_s", [5e10, 1e9])
def test_encoders_that_run_while_the_decoder_exchanges_are_not_below_the_bound(bytes_per_s):
    """Two large layers on four GPUs: no layout has room for one without tensor parallelism."""
    decoder = replace(
        DECODER, layers=2, hidden_size=8192, heads=64, kv_heads=8, ffn_size=24_576, vocabulary=1000
    )
    vision = replace(VISION, layers=24, frozen=True, projector=Projector(widths=(4096, 8192)))
    samples = workloads.step_samples(workloads.vlm_sft(24))
    asked = LayoutTask(
        model=ModelDescription(name="wide", decoder=decoder, encoders=(vision,)),
        group=replace(nodes(20e9), inside_bytes_per_s=bytes_per_s),
        batches=(samples,),
        places=("bubbles",),
    )
    layout = search_layout(asked)
    assert layout.best.replica.parallel.tensor_ranks > 1
    assert 0.8 * layout.best.step_s < layout.lower_bound_s <= layout.best.step_s


def test_spread_encoders_have_room_for_the_batch_that_has_most_to_encode():
    pictures = workloads.step_samples(workloads.vlm_sft(96))
    text = text_samples([int(pictures.lengths.llm_tokens.max()) + 1])  # the longest, laid out first
    asked = task(80e9, places=("spread",))
    alone, both = (
        {
            each.replica.parallel: each.replica.encoder_fixed_bytes
            for each in (found.best, *found.others)
        }
        for found in (
            search_layout(replace(asked, batches=batches))
            for batches in ((pictures,), (text, pictures))
        )
    )
    assert both.keys() & alone.keys()
    assert all(both[parallel] >= alone[parallel] for parallel in both.keys() & alone.keys())


def test_the_bound_counts_gradients_and_leaves_out_what_has_no_room():
    asked = task(80e9, count=16)  # more GPUs than one replica can have
    profiles = {ranks: asked.profile(ranks) for ranks in asked.tensor_ranks}
    bound_s = least_step_s(asked, profiles)
    assert bound_s > least_step_s(replace(asked, overlap_gradients=True), profiles)
    assert least_step_s(task(1e8), profiles) == np.inf
