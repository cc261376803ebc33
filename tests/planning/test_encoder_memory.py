"""No replica keeps more bytes of a wave than its budget, whatever the step and the cluster."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import workloads
from benchmarks.planning.steps import random_case
from dataservice.core.errors import PlanningError
from dataservice.core.memory import MemoryModel
from dataservice.core.plan import StepPlan
from dataservice.core.plan_options import STRATEGIES, PlanOptions
from dataservice.core.sample import ItemLengths, LengthTable, Modality, SampleLengths
from dataservice.core.topology import Topology
from dataservice.planning import compose as compose_module
from dataservice.planning.compose import StepSamples, compose_step
from dataservice.planning.encoder_memory.fit import fit_items, have_room, keep_rooms
from dataservice.planning.encoder_memory.room import EncoderRoom
from dataservice.planning.encoder_memory.waves import sample_without_room
from dataservice.planning.pipeline_parallel.simulator import FORWARD, make_program
from dataservice.planning.stages.room import beside_encoders, static_degree, step_room
from dataservice.planning.stages.static_bounds import StaticBounds
from dataservice.planning.validate import check_items, validate_plan
from tests.planning.step_samples import MEMORY, step_samples

TOKEN = 100.0  # bytes
STATES = 5e8


def memory(vision: float, audio: float, stages: int = 1) -> MemoryModel:
    """As much as `MEMORY` tokens on each stage."""
    return MemoryModel(
        budget_bytes=STATES + MEMORY * TOKEN * stages,
        states_bytes=STATES,
        llm_token_bytes=TOKEN,
        vision_token_bytes=vision,
        audio_token_bytes=audio,
    )


def in_frames(samples: StepSamples, unit_frames: int) -> StepSamples:
    """The same samples, each item of one frame a token."""
    lengths = replace(samples.lengths, item_frames=samples.lengths.item_llm_tokens)
    return replace(samples, lengths=lengths, unit_frames=unit_frames)


def pipelined(replicas: int, stages: int, node: int | None, **more: object) -> Topology:
    return Topology(
        world_size=replicas * stages,
        ranks_per_replica=stages,
        pipeline_stages=stages,
        replicas_per_node=node,
        **more,
    )


def kept_bytes(plan: StepPlan, model: MemoryModel) -> np.ndarray:
    """What each replica keeps of each wave, float64[W, N], counted group by group."""
    kept = np.zeros((plan.waves, plan.replicas))
    wave_of = np.empty(len(plan.sample_ids), int)
    for pack, wave in enumerate(plan.pack_wave):
        samples = plan.pack_samples[plan.pack_offsets[pack] : plan.pack_offsets[pack + 1]]
        members = plan.pack_replicas[plan.replica_offsets[pack] : plan.replica_offsets[pack + 1]]
        unit = 2 * len(members) if len(members) > 1 else 1
        padded = sum(-(-int(plan.sample_tokens[s]) // unit) * unit for s in samples)
        kept[wave, members] += model.llm_token_bytes * padded / len(members)
        wave_of[samples] = wave
    sizes = np.array(model.encoder_token_bytes)[plan.item_modality] * plan.item_encoder_tokens
    np.add.at(kept, (wave_of[plan.item_sample], plan.item_replica), sizes)
    return kept


def most_at_once(plan: StepPlan, model: MemoryModel, stages: int) -> float:
    """The most that any first stage holds at any time of its 1F1B program, states included."""
    kept = kept_bytes(plan, model)
    program = make_program(plan.waves, stages)
    now, most = np.zeros(plan.replicas), 0.0
    for position, chunk, kind in zip(program.position, program.chunk, program.kind, strict=True):
        if chunk == 0:
            now += kept[position] * (1 if kind == FORWARD else -1)
            most = max(most, float(now.max()))
    return model.states_bytes + most


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 120),
    replicas=st.sampled_from([2, 3, 4, 8, 12]),
    stages=st.sampled_from([1, 1, 2, 4]),
    node=st.sampled_from([None, 1, 3, 4]),
    seed=st.integers(0, 100),
    vision=st.sampled_from([0.0, 3.0, 20.0, 90.0]),
    audio=st.sampled_from([1.0, 15.0, 60.0]),
    meet=st.sampled_from(["wave", "step"]),
    unit_frames=st.sampled_from([0, 0, 1]),
    options=st.sampled_from(
        [{"strategy": name} for name in STRATEGIES]
        + [
            {"pack": "balanced"},
            {"pack": "joint"},
            {"pack": "isf"},
            {"context": "power_of_two"},
            {"assign": "as_packed", "dispatch": "home"},
        ]
    ),
)
def test_no_plan_keeps_more_than_the_budget_at_any_time(
    n, replicas, stages, node, seed, vision, audio, meet, unit_frames, options
):
    samples = in_frames(step_samples(n, seed, longest=2000), unit_frames)
    model = memory(vision, audio, stages)
    topology = pipelined(replicas, stages, node, replicas_meet=meet)
    chosen = PlanOptions(memory=model, **options)
    room = EncoderRoom.of(model, topology)
    assert room is not None
    whole = chosen.over(topology)
    assert whole.memory_tokens == MEMORY
    units = samples.lengths.item_units(unit_frames)
    step = step_room(samples.lengths, units, topology, whole, room)
    try:
        made = compose_step(samples, step=0, topology=topology, options=chosen)
    except PlanningError:
        assert sample_without_room(step, MEMORY) is not None, "each sample alone has room"
        return
    validate_plan(made, memory_tokens=MEMORY, sample_count=n, room=room)
    assert most_at_once(made, model, stages) <= model.budget_bytes * (1 + 1e-12)
    again = compose_step(samples, step=0, topology=topology, options=chosen)
    assert again.digest == made.digest


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_bytes_that_count_no_encoder_plan_as_the_same_tokens_do(strategy):
    samples, topology = step_samples(90, 3, longest=2000), Topology(world_size=6)
    plain = PlanOptions(memory_tokens=MEMORY, strategy=strategy)
    in_bytes = PlanOptions(memory=memory(0.0, 0.0), strategy=strategy)
    assert (
        compose_step(samples, step=0, topology=topology, options=plain).digest
        == compose_step(samples, step=0, topology=topology, options=in_bytes).digest
    )


def test_encoders_that_weigh_little_leave_the_plan_as_it_is():
    samples, topology = step_samples(90, 3, longest=2000), Topology(world_size=6)
    plain = compose_step(
        samples, step=0, topology=topology, options=PlanOptions(memory_tokens=MEMORY)
    )
    roomy = replace(memory(1e-9, 1e-9), budget_bytes=STATES + (MEMORY + 0.5) * TOKEN)
    made = compose_step(samples, step=0, topology=topology, options=PlanOptions(memory=roomy))
    assert made.digest == plain.digest


def sample(text: int, *items: int) -> SampleLengths:
    """A sample with images of so many patches."""
    return SampleLengths(
        llm_tokens=text + len(items),
        loss_tokens=text,
        items=tuple(
            ItemLengths(
                modality=Modality.VISION,
                encoder_tokens=patches,
                llm_tokens=1,
                position=at,
                shape=(1, 1, 1, 3),
            )
            for at, patches in enumerate(items)
        ),
    )


def step_of(*each: SampleLengths) -> StepSamples:
    return StepSamples(
        sample_ids=np.arange(len(each), dtype=np.int64),
        epoch=np.zeros(len(each), np.int32),
        lengths=LengthTable.of(list(each)),
    )


def test_a_clip_that_fills_a_replica_is_encoded_where_no_text_is():
    """One replica's whole budget of patches; its text is short, and other samples fill the rest."""
    model = memory(10.0, 0.0)
    most = int(MEMORY * TOKEN / 10.0)
    samples = step_of(sample(50, most), *(sample(1500) for _ in range(8)))
    made = compose_step(
        samples, step=0, topology=Topology(world_size=4), options=PlanOptions(memory=model)
    )
    kept = kept_bytes(made, model)
    assert kept.max() <= MEMORY * TOKEN
    (pack,) = np.flatnonzero(made.pack_samples == 0)
    wave = made.pack_wave[np.searchsorted(made.pack_offsets, pack, side="right") - 1]
    encodes = (int(made.item_replica[0]),)
    idle = [group.replicas for group in made.groups(int(wave)) if group.pack < 0]
    assert encodes in idle


def test_a_clip_beyond_one_replica_is_encoded_in_pieces_where_it_may_be_cut():
    model = memory(10.0, 0.0)
    most = int(MEMORY * TOKEN / 10.0)
    clip = sample(50, 3 * most)
    clip = replace(clip, items=(replace(clip.items[0], llm_tokens=most, shape=(most, 1, 1, 3)),))
    clip = replace(clip, llm_tokens=50 + most, loss_tokens=50)
    topology = Topology(world_size=24)
    samples = replace(step_of(clip, *(sample(1500) for _ in range(8))), unit_frames=1)
    options = PlanOptions(memory=model)
    made = compose_step(samples, step=0, topology=topology, options=options)
    room = EncoderRoom.of(model, topology)
    validate_plan(made, memory_tokens=MEMORY, sample_count=9, room=room)
    assert len(np.unique(made.item_replica)) > 3
    whole = replace(samples, unit_frames=0)
    with pytest.raises(PlanningError, match="no replicas have room"):
        compose_step(whole, step=0, topology=topology, options=options)


@pytest.mark.parametrize("dispatch", ["balanced", "home"])
def test_a_clip_has_room_in_single_units_where_even_pieces_have_none(dispatch):
    """Two replicas with 35 of 80 units each beside their text: a clip of 66 would be in 7 pieces,
    of which 6 fit."""
    unit_bytes, units = 1000, 66
    model = replace(memory(1.0, 0.0), budget_bytes=STATES + 80 * unit_bytes, llm_token_bytes=10.0)
    text = (80 - 35) * unit_bytes // 10
    clip = ItemLengths(
        modality=Modality.VISION,
        encoder_tokens=units * unit_bytes,
        llm_tokens=units,
        position=0,
        shape=(units, 1, 1, 3),
    )
    lengths = SampleLengths(llm_tokens=text, loss_tokens=text - units, items=(clip,))
    samples = replace(step_of(lengths, sample(text)), unit_frames=1)
    topology = Topology(world_size=2)
    options = PlanOptions(memory=model, strategy="packing", dispatch=dispatch)
    made = compose_step(samples, step=0, topology=topology, options=options)
    room = EncoderRoom.of(model, topology)
    whole = options.over(topology).memory_tokens
    validate_plan(made, memory_tokens=whole, sample_count=2, room=room)
    assert made.waves == 1
    assert made.item_units.sum() == units


@pytest.mark.parametrize("seed", range(48))
def test_full_is_never_worse_than_a_baseline_where_memory_counts_bytes(seed):
    samples, topology, options = random_case(seed)
    generator = np.random.default_rng(seed)
    model = MemoryModel(
        budget_bytes=4 * options.memory_tokens,
        llm_token_bytes=4,
        vision_token_bytes=float(generator.choice([0.3, 1.0, 3.0, 10.0])),
        audio_token_bytes=float(generator.choice([0.5, 2.0, 8.0])),
    )
    seconds = {}
    for name in STRATEGIES:
        try:
            made = compose_step(
                samples,
                step=0,
                topology=topology,
                options=replace(options, memory=model, strategy=name),
            )
        except PlanningError:  # a sample has no room, or none at the one degree of a baseline
            continue
        seconds[name] = made.predicted_s
        assert made.predicted_s >= made.stages[-1].lower_bound * (1 - 1e-9)
    assert not seconds or seconds["full"] <= min(seconds.values()) * 1.001


@pytest.mark.parametrize("strategy", ["packing", "length_grouped", "random"])
@pytest.mark.parametrize("vision", [2.0, 20.0])
@pytest.mark.parametrize("seed", range(4))
def test_what_leaves_its_wave_for_want_of_room_makes_static_waves_no_shorter(
    strategy, vision, seed
):
    samples, topology = step_samples(90, seed, longest=2000), Topology(world_size=8)
    chosen = PlanOptions(memory=memory(vision, 1.0), strategy=strategy)
    room = EncoderRoom.of(chosen.memory, topology)
    held = room.of_all(samples.lengths)
    options = beside_encoders(samples.lengths, held, topology, chosen.over(topology))
    made = compose_step(samples, step=0, topology=topology, options=chosen)
    (waves_s,) = (stage.after for stage in made.stages if stage.stage == "group")
    degree = static_degree(samples.lengths, 8, options)
    static = StaticBounds(samples.lengths, None, topology, room=room)
    assert static.packs_stay(degree, options)
    spread_s = static.of_any(degree, options).spread_s
    for packed_s in static.of_packs(degree, options, spread_s):
        assert packed_s <= waves_s * (1 + 1e-9)


def test_a_pack_that_may_have_no_room_beside_it_is_not_said_to_stay():
    samples, topology = step_samples(90, 0, longest=2000), Topology(world_size=2)
    options = PlanOptions(memory=memory(200.0, 1.0)).over(topology)
    room = EncoderRoom.of(options.memory, topology)
    static = StaticBounds(samples.lengths, None, topology, room=room)
    assert not static.packs_stay(1, options)
    assert not static.packs_stay(2, options)


def test_baselines_of_many_samples_are_refused_by_what_their_packs_take(monkeypatch):
    """Where planning each would take longer than the step allows, and seeing its packs does not."""
    planned, seen = [], []

    def place_items(*given, near=None, place=compose_module.place_items):
        planned.append(given[-1].strategy)
        return place(*given, near=near)

    def of_any(self, degree, options, found=StaticBounds.of_any):
        seen.append(options.strategy)
        return found(self, degree, options)

    monkeypatch.setattr(compose_module, "place_items", place_items)
    monkeypatch.setattr(StaticBounds, "of_any", of_any)
    samples = workloads.step_samples(workloads.vlm_sft(40_000, 0))
    model = MemoryModel(budget_bytes=4 * 8192, llm_token_bytes=4, vision_token_bytes=1)
    made = compose_step(
        samples,
        step=0,
        topology=Topology(world_size=640, replicas_per_node=8),
        options=PlanOptions(memory=model),
    )
    assert compose_module.NEAR < made.stages[-1].after / made.stages[-1].lower_bound < 1.03
    assert planned == ["full"]
    assert set(seen) == {"packing", "length_grouped", "random"}


@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(1, 120),
    replicas=st.sampled_from([1, 2, 3, 8]),
    stages=st.sampled_from([1, 1, 2]),
    seed=st.integers(0, 10**6),
    vision=st.sampled_from([0.0, 3.0, 20.0, 90.0, 400.0]),
    audio=st.sampled_from([1.0, 15.0, 60.0, 300.0]),
    unit_frames=st.sampled_from([0, 1]),
    longest=st.sampled_from([300, 2000, 9000]),
    context=st.sampled_from(["dynamic", "power_of_two"]),
)
def test_what_surely_has_room_is_not_looked_at_and_nothing_without_room_is_missed(
    n, replicas, stages, seed, vision, audio, unit_frames, longest, context
):
    lengths = in_frames(step_samples(n, seed, longest=longest), unit_frames).lengths
    model, topology = memory(vision, audio, stages), pipelined(replicas, stages, None)
    options = PlanOptions(memory=model, context=context).over(topology)
    room = EncoderRoom.of(model, topology)
    assert room is not None

    def without_room(some):
        units = some.item_units(unit_frames)
        return sample_without_room(step_room(some, units, topology, options, room), MEMORY)

    rows = room.may_be_lacked_by(lengths, MEMORY)
    missed = [k for k in range(n) if k not in rows and without_room(lengths.take([k])) is not None]
    assert not missed
    found = without_room(lengths.take(rows)) if rows.size else None
    assert without_room(lengths) == (None if found is None else rows[found])
    tokens = lengths.llm_tokens
    of_items = np.add.reduceat(
        np.append(lengths.item_encoder_tokens * max(vision, audio, 1.0) * 2, 0.0),
        np.minimum(lengths.item_offsets[:-1], len(lengths.item_encoder_tokens)),
    )
    small = (tokens <= MEMORY) & (tokens * TOKEN + of_items + 1 <= room.microbatch_bytes)
    assert not np.isin(np.flatnonzero(small), rows).any()


def test_a_clip_beyond_one_replica_has_no_room_and_is_found():
    model = memory(10.0, 0.0)
    topology = Topology(world_size=4)
    samples = step_of(sample(60), sample(50, int(MEMORY * TOKEN / 10.0) + 1))
    options = PlanOptions(memory=model).over(topology)
    room = EncoderRoom.of(model, topology)
    assert room is not None
    step = step_room(samples.lengths, None, topology, options, room)
    assert sample_without_room(step, options.memory_tokens) == 1
    with pytest.raises(PlanningError, match="sample 1 of the step"):
        compose_step(samples, step=0, topology=topology, options=options)


def test_a_baseline_without_room_is_no_rival_and_no_error():
    """The clip needs a replica without text, and static context gives all of them to the text."""
    model = memory(10.0, 0.0)
    most = int(MEMORY * TOKEN / 10.0)
    samples = step_of(sample(3 * MEMORY - 100), sample(MEMORY + 10, most), sample(40, most))
    topology, options = Topology(world_size=3), PlanOptions(memory=model)
    with pytest.raises(PlanningError, match="has items that no replicas have room for"):
        compose_step(
            samples, step=0, topology=topology, options=replace(options, strategy="packing")
        )
    made = compose_step(samples, step=0, topology=topology, options=options)
    assert kept_bytes(made, model).max() <= MEMORY * TOKEN


def test_encoders_on_a_stage_of_their_own_do_not_share_its_memory_with_text():
    model = memory(10.0, 0.0, stages=2)
    most = int(MEMORY * TOKEN / 10.0)
    samples = step_of(*(sample(MEMORY - 1, most) for _ in range(4)))
    beside = pipelined(4, 2, None)
    with pytest.raises(PlanningError):
        compose_step(samples, step=0, topology=pipelined(1, 2, None), options=PlanOptions(
            memory=model))  # fmt: skip
    apart = pipelined(1, 2, None, encoder_stage="own")
    made = compose_step(samples, step=0, topology=apart, options=PlanOptions(memory=model))
    assert made.waves == 4
    made = compose_step(samples, step=0, topology=beside, options=PlanOptions(memory=model))
    assert made.waves > 1, "the images wait for replicas without text"


def test_a_dispatch_that_keeps_too_much_is_a_defect():
    samples, topology = step_samples(40, 1, longest=500), Topology(world_size=4)
    model = memory(20.0, 20.0)
    made = compose_step(samples, step=0, topology=topology, options=PlanOptions(memory=model))
    room = EncoderRoom.of(model, topology)
    check_items(made, made.item_replica, room)
    with pytest.raises(PlanningError, match=r"invariant broken: in wave \d+ replica 2 keeps"):
        check_items(made, np.full_like(made.item_replica, 2), room)


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=0, max_size=8),
    room=st.lists(st.integers(0, 100), min_size=1, max_size=4),
)
def test_items_that_are_placed_fit_and_small_ones_always_are(sizes, room):
    falling = np.array(sorted(sizes, reverse=True), dtype=np.int64)
    rooms, place_of = np.array(room, dtype=np.int64), np.full(len(sizes), -1)
    found = fit_items(falling, rooms, place_of)
    if found:
        held = np.bincount(place_of, weights=falling, minlength=len(room))
        assert (held <= rooms).all()
    else:
        largest = int(falling.max())
        assert falling.sum() + len(room) * largest > rooms.sum(), "there was room for any of them"
    assert have_room(falling, rooms) == found


def test_what_a_full_replica_hands_on_goes_to_whoever_keeps_least():
    """In nodes of 2, replica 0 keeps 30 of 20: replica 1 of its node has no room, 2 has most."""
    rooms = np.array([[20, 10, 100, 40]])
    sizes = np.array([20, 10, 10, 40, 5])
    kept, full = keep_rooms(
        np.zeros(5, np.int64), sizes, np.array([0, 0, 1, 2, 3], np.int32), rooms, 2
    )
    assert kept.tolist() == [0, 3, 1, 2, 3]
    assert not full.any()


@settings(max_examples=200, deadline=None)
@given(data=st.data(), waves=st.integers(1, 3), node=st.integers(1, 4))
def test_what_is_handed_on_fits_and_nothing_else_moves(data, waves, node):
    rooms = np.array(
        [data.draw(st.lists(st.integers(0, 60), min_size=4, max_size=4)) for _ in range(waves)]
    )
    item = st.tuples(st.integers(0, waves - 1), st.integers(0, 30), st.integers(0, 3))
    items = data.draw(st.lists(item, min_size=1, max_size=12))
    wave_of, sizes, replica = (np.array(column) for column in zip(*items, strict=True))
    kept, full = keep_rooms(wave_of, sizes, replica.astype(np.int32), rooms, node)
    before, after = np.zeros((waves, 4), int), np.zeros((waves, 4), int)
    np.add.at(before, (wave_of, replica), sizes)
    np.add.at(after, (wave_of, kept), sizes)
    for wave in range(waves):
        mine = wave_of == wave
        if full[wave]:
            falling = np.sort(sizes[mine])[::-1].copy()
            assert not fit_items(falling, rooms[wave], np.empty(falling.size, np.int64))
        else:
            assert (after[wave] <= rooms[wave]).all()
            if (before[wave] <= rooms[wave]).all():
                assert (kept[mine] == replica[mine]).all()


@pytest.mark.parametrize("part", [0.5, 0.9, 0.97, 1.0])
def test_many_items_are_known_to_fit_as_they_are_placed(part):
    for seed in range(40):
        rng = np.random.default_rng(seed)
        rooms = rng.integers(100, 1000, int(rng.integers(1, 60)))
        sizes = rng.integers(1, 120, 4000)
        falling = np.sort(sizes[sizes.cumsum() <= part * rooms.sum()])[::-1].copy()
        assert have_room(falling, rooms) == fit_items(falling, rooms, np.empty(falling.size, int))


def test_images_that_see_themselves_both_ways_cost_their_attention_again():
    """η of DHP eq. 8: a sample of s tokens with one image of v has s² + v² of attention."""
    samples = step_samples(40, 2, longest=800)
    topology = Topology(world_size=1)
    options = PlanOptions(memory_tokens=1 << 20, strategy="packing")
    causal, both = (
        compose_step(
            samples, step=0, topology=topology, options=replace(options, full_attention=which)
        )
        for which in ("none", "items")
    )
    squares = (samples.lengths.item_llm_tokens.astype(float) ** 2).sum()
    more_s = options.cost.llm.attention_s_per_token2 * squares
    assert both.pack_seconds.sum() - causal.pack_seconds.sum() == pytest.approx(more_s)
    for strategy in STRATEGIES:
        chosen = PlanOptions(memory_tokens=MEMORY, strategy=strategy, full_attention="items")
        made = compose_step(samples, step=0, topology=Topology(world_size=4), options=chosen)
        validate_plan(made, memory_tokens=MEMORY, sample_count=40)
        step = made.stages[-1]
        assert step.after >= step.lower_bound * (1 - 1e-9)
