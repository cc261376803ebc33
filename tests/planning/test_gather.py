"""Waves whose heavy items sit together: the same packs and seats, in other waves."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import dataservice.planning.compose as compose_module
from benchmarks import workloads
from dataservice.core.cost import ContextCost
from dataservice.core.memory import MemoryModel
from dataservice.core.plan_options import PlanOptions
from dataservice.core.topology import Topology
from dataservice.planning.compose import compose_step
from dataservice.planning.context.check import check_waves
from dataservice.planning.context.groups import ContextPlan, plan_context_waves
from dataservice.planning.context.units import make_setting
from dataservice.planning.stages.dispatch import EncoderItems
from dataservice.planning.stages.gather import gathered_waves
from dataservice.planning.step_bound import StageParts
from dataservice.planning.validate import validate_plan

ALL = StageParts(1.0, np.ones(2))
RINGS = ContextCost(
    attention_s_per_token2=1e-9, linear_s_per_token=1e-4, ring_inter_s_per_token=1e-4
)


def items_in(pack: np.ndarray, wave: np.ndarray, seconds: np.ndarray) -> EncoderItems:
    """An image in each `pack`, of so many seconds, in waves as they are."""
    ones = np.ones(pack.size, np.int32)
    return EncoderItems(
        phases=2 * (int(wave[-1]) + 1),
        phase=2 * wave[pack].astype(np.int64),
        seconds=seconds,
        batch_s=np.zeros(2),
        pack=pack.astype(np.int32),
        home=0 * ones,
        encoder_tokens=np.maximum(seconds * 1e4, 1).astype(np.int32),
        llm_tokens=ones,
        units=ones,
        unit_seconds=seconds,
    )


def waves_of_packs(waves: tuple[ContextPlan, ...]) -> np.ndarray:
    """The wave of every pack."""
    return np.repeat(np.arange(len(waves)), [len(wave.time_s) for wave in waves])


def packs_of(waves: tuple[ContextPlan, ...]) -> list[tuple[tuple[int, ...], float, int]]:
    """Every pack: its samples, seconds and padded tokens."""
    return sorted(
        (tuple(group.samples.tolist()), group.time_s, group.padded_tokens)
        for wave in waves
        for group in wave.groups
    )


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(20, 150),
    replicas=st.sampled_from([4, 8, 12]),
    node=st.sampled_from([3, 4, 8]),
    seed=st.integers(0, 1000),
)
def test_packs_and_seats_stay_as_they_are_and_only_waves_change(n, replicas, node, seed):
    generator = np.random.default_rng(seed)
    tokens = generator.integers(100, 1500, n)
    found = plan_context_waves(
        tokens, ranks=replicas, memory_tokens=1000, cost=RINGS, ranks_per_node=node
    )
    wave = waves_of_packs(found.waves)
    pack = np.sort(generator.permutation(wave.size)[: max(1, wave.size // 5)])
    items = items_in(pack, wave, generator.uniform(0.5, 2.0, pack.size))
    made = gathered_waves(found.waves, items, replicas=replicas, ranks_per_node=node, parts=ALL)
    if made is None:
        return
    setting = make_setting(
        ranks=replicas, memory_tokens=1000, cost=RINGS, ranks_per_node=node, degrees="any"
    )
    check_waves(made, tokens, None, setting)  # seconds are those of the ranks
    assert packs_of(made) == packs_of(found.waves)
    for before, after in zip(found.waves, made, strict=True):
        assert sorted(after.ranks.tolist()) == sorted(before.ranks.tolist())
        assert sorted(after.degrees.tolist()) == sorted(before.degrees.tolist())


def test_waves_stay_where_no_item_is_heavy():
    found = plan_context_waves(np.full(32, 900), ranks=8, memory_tokens=1000, cost=RINGS)
    wave = waves_of_packs(found.waves)
    items = items_in(np.repeat(np.arange(wave.size), 8), wave, np.full(8 * wave.size, 0.1))
    assert gathered_waves(found.waves, items, replicas=8, ranks_per_node=8, parts=ALL) is None


def test_a_wave_of_unlike_packs_is_not_worth_few_encoders():
    """Long packs beside short ones would take longer than what their small items save."""
    tokens = np.repeat([1000, 500, 250, 125], 8)
    found = plan_context_waves(tokens, ranks=8, memory_tokens=1000, cost=RINGS)
    wave = waves_of_packs(found.waves)
    pack = np.array([int(np.flatnonzero(wave == w)[0]) for w in np.unique(wave)])
    items = items_in(pack, wave, np.full(pack.size, 1e-4))
    assert gathered_waves(found.waves, items, replicas=8, ranks_per_node=8, parts=ALL) is None


def test_where_memory_counts_encoders_gathered_items_have_room_and_end_sooner(monkeypatch):
    samples = workloads.step_samples(workloads.rare_clips(256))
    topology = Topology(world_size=16, replicas_per_node=8)
    memory = MemoryModel(
        budget_bytes=4 * 8192 + 70_000,
        llm_token_bytes=16,
        vision_token_bytes=1,
        audio_token_bytes=1,
    )
    options = PlanOptions(memory=memory)
    made = compose_step(samples, step=0, topology=topology, options=options)
    validate_plan(made, memory_tokens=options.over(topology).memory_tokens, sample_count=256)
    monkeypatch.setattr(compose_module, "gathered_waves", lambda *given, **named: None)
    before = compose_step(samples, step=0, topology=topology, options=options)
    assert made.predicted_s < before.predicted_s
