"""One evaluator for a whole step, its bound, and what the planner makes of both."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import workloads
from dataservice.core.cost import ContextCost, PhaseCost, StepCost
from dataservice.core.errors import WorldSizeError
from dataservice.core.layout import sample_starts
from dataservice.core.plan import StepPlan
from dataservice.core.plan_options import STRATEGIES, CostModel, PlanOptions
from dataservice.core.sample import LengthTable, Modality
from dataservice.core.topology import Topology
from dataservice.planning import compose as compose_module
from dataservice.planning.compose import BASELINES, StepSamples, compose_step
from dataservice.planning.pipeline_parallel.simulator import FORWARD, make_program, simulate_1f1b
from dataservice.planning.stages.dispatch import encoder_items
from dataservice.planning.stages.static_bounds import StaticBounds
from dataservice.planning.step_bound import StepBound
from dataservice.planning.step_time import (
    FORWARD_SHARE,
    rank_seconds,
    step_phases,
    step_seconds,
    time_phases,
)
from tests.planning.step_samples import MEMORY, step_samples

FREE = PhaseCost(linear_s_per_token=0.0)
RICH = CostModel(
    llm=ContextCost(
        attention_s_per_token2=2e-9,
        linear_s_per_token=5e-5,
        group_s=0.02,
        ring_intra_s_per_token=5e-6,
        ring_inter_s_per_token=1e-4,
    ),
    vision=PhaseCost(linear_s_per_token=4e-5, item_s=1e-3, batch_s=2e-3),
    audio=PhaseCost(linear_s_per_token=1e-5, quadratic_s_per_token2=1e-7),
    step=StepCost(
        feature_intra_s_per_token=1e-6,
        feature_inter_s_per_token=2e-5,
        exchange_s=1e-3,
        gradient_s=0.05,
    ),
)


def topologies() -> st.SearchStrategy[Topology]:
    """Trainers of up to 8 replicas, in every layout that the evaluator knows."""
    return st.builds(
        lambda replicas, stages, virtual, node, meet, encoders, train, ahead, parts: Topology(
            world_size=replicas * stages,
            ranks_per_replica=stages,
            pipeline_stages=stages,
            virtual_stages=virtual if stages > 1 else 1,
            replicas_per_node=node,
            replicas_meet=meet,
            encoder_stage=encoders,
            encoders_train=train,
            features_ahead=ahead and stages == 1,
            vision_shares=_cut(encoders, parts, stages * (virtual if stages > 1 else 1)),
            audio_shares=_cut(encoders, parts[1:], stages * (virtual if stages > 1 else 1)),
        ),
        replicas=st.integers(1, 8),
        stages=st.sampled_from([1, 1, 2, 4]),
        virtual=st.integers(1, 2),
        node=st.sampled_from([None, 2, 4]),
        meet=st.sampled_from(["wave", "step"]),
        encoders=st.sampled_from(["first", "spread", "own", "cut"]),
        train=st.booleans(),
        ahead=st.booleans(),
        parts=st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=9, max_size=9),
    )


def _cut(encoders: str, parts: list[float], chunks: int) -> tuple[float, ...]:
    """Parts of an encoder for so many chunks, where encoders are cut."""
    return (1.0, *parts[: chunks - 1]) if encoders == "cut" else ()


def composed(samples: StepSamples, topology: Topology, **options: object) -> StepPlan:
    return compose_step(
        samples,
        step=0,
        topology=topology,
        options=PlanOptions(**{"memory_tokens": MEMORY, "cost": RICH, **options}),
    )


@pytest.mark.parametrize("virtual_stages", [1, 2])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_a_pipeline_s_predicted_seconds_are_the_simulator_s_makespan(stages, virtual_stages):
    topology = Topology(
        world_size=4 * stages,
        ranks_per_replica=stages,
        pipeline_stages=stages,
        virtual_stages=virtual_stages,
    )
    cost = CostModel(vision=FREE, audio=FREE)
    made = composed(step_samples(90, 1, longest=2000), topology, cost=cost)
    seconds = np.array([max(g.seconds for g in made.groups(w)) for w in range(made.waves)])
    chunks = stages * virtual_stages
    forward = np.repeat(seconds[:, None], chunks, axis=1) / chunks * FORWARD_SHARE
    simulated = simulate_1f1b(
        forward, forward * (1 / FORWARD_SHARE - 1), virtual_stages=virtual_stages
    )
    assert made.waves > 1
    assert made.predicted_s == pytest.approx(simulated.makespan_s, rel=1e-12)


def test_memory_is_a_limit_of_a_pipeline_s_microbatches_and_not_their_size():
    samples = step_samples(200, 1, longest=900)
    topology = Topology(world_size=32, ranks_per_replica=8, pipeline_stages=8)
    cost = replace(RICH, llm=replace(RICH.llm, group_s=0.001))
    roomy, tight = (
        composed(samples, topology, memory_tokens=memory, cost=cost) for memory in (16_384, 4096)
    )
    assert roomy.predicted_s <= tight.predicted_s
    largest = composed(samples, topology, memory_tokens=16_384, cost=cost, pack="balanced")
    assert roomy.predicted_s < 0.9 * largest.predicted_s
    assert roomy.waves > largest.waves


def ends_by_hand(plan: StepPlan, topology: Topology, cost: CostModel) -> float:
    """Replicas that meet once a step, one event after the other, from the plan's own words."""
    items = encoder_items(plan, cost)
    phases = step_phases(plan, items, cost, topology)
    stages, trains = topology.pipeline_stages, topology.encoders_train
    program = make_program(plan.waves, stages, topology.virtual_stages)
    shares = topology.chunk_shares
    packs = {w: np.flatnonzero(plan.pack_wave == w).tolist() for w in range(plan.waves)}
    pack_of = plan.pack_of_sample[plan.item_sample]
    there = FORWARD_SHARE if trains else 1.0
    parts = stages if topology.encoder_stage == "spread" else 1

    def shown(wave: int, replica: int) -> float:
        """What part of a wave's exchange no backward pass of the wave before hides."""
        both = phases.exchange[wave].sum() / 2
        if not topology.features_ahead or wave == 0 or both == 0:
            return 1.0
        return max(0.0, both - phases.decode[wave - 1, replica] * (1 - FORWARD_SHARE)) / both

    def encoding(
        now: dict[int, float], wave: int, forward: bool, chunk: int | None = None
    ) -> dict[int, float]:
        for modality in list(Modality) if forward else list(Modality)[::-1]:
            share, last = 1.0, True
            if chunk is not None:  # the part of this chunk, and whether the encoder ends in it
                mine = topology.encoder_shares[modality]
                share, last = mine[chunk], not any(mine[chunk + 1 :]) and mine[chunk] > 0
            seconds = phases.encode[wave, modality] / parts * share
            own = {r: seconds[r] * (there if forward else 1 - there) for r in now}
            if forward:
                now = {r: t + own[r] for r, t in now.items()}
            before = dict(now)
            for item in np.flatnonzero(plan.item_modality == modality).tolist() if last else []:
                if plan.pack_wave[pack_of[item]] != wave:
                    continue
                encoder = int(plan.item_replica[item])
                for member in plan.replicas_of(int(pack_of[item])):
                    first, then = (encoder, member) if forward else (member, encoder)
                    now[then] = max(now[then], before[first])
            moving = phases.exchange[wave, modality] / 2 if last else 0.0
            now = {r: t + moving * (shown(wave, r) if forward else 1.0) for r, t in now.items()}
            if not forward:
                now = {r: t + own[r] for r, t in now.items()}
        return now

    replicas = range(plan.replicas)
    begun = dict.fromkeys(replicas, 0.0)
    if topology.encoder_stage == "spread":
        for wave in range(plan.waves):
            begun = encoding(begun, wave, True)
    free = {(stage, r): begun[r] for stage in range(stages) for r in replicas}
    ended = {(wave, r): 0.0 for wave in range(plan.waves) for r in replicas}
    for k in range(program.kind.size):
        wave, chunk = int(program.position[k]), int(program.chunk[k])
        stage, forward = chunk % stages, program.kind[k] == FORWARD
        now = {r: max(free[stage, r], ended[wave, r]) for r in replicas}
        encodes = topology.encoder_stage != "spread"
        if forward and encodes:
            now = encoding(now, wave, True, chunk)
        for pack in packs[wave]:
            members = plan.replicas_of(pack)
            part = FORWARD_SHARE if forward else 1 - FORWARD_SHARE
            end = max(now[r] for r in members) + plan.pack_seconds[pack] * shares[chunk] * part
            now.update(dict.fromkeys(members, end))
        if not forward and encodes and trains:
            now = encoding(now, wave, False, chunk)
        for r in replicas:
            free[stage, r] = ended[wave, r] = now[r]
    last = {r: max(free[stage, r] for stage in range(stages)) for r in replicas}
    if topology.encoder_stage == "spread" and trains:
        for wave in range(plan.waves):
            last = encoding(last, wave, False)
    return max(last.values()) + cost.step.gradient_s


@settings(max_examples=40, deadline=None)
@given(topology=topologies(), n=st.integers(1, 40), seed=st.integers(0, 50))
def test_replicas_that_meet_once_a_step_end_when_their_events_say(topology, n, seed):
    topology = replace(topology, replicas_meet="step")
    made = composed(step_samples(n, seed, longest=1500), topology, strategy="packing")
    if topology.replicas == 1:
        assert made.predicted_s == pytest.approx(
            composed(
                step_samples(n, seed, longest=1500),
                replace(topology, replicas_meet="wave"),
                strategy="packing",
            ).predicted_s
        )
    else:
        assert made.predicted_s == pytest.approx(ends_by_hand(made, topology, RICH))


@settings(max_examples=60, deadline=None)
@given(topology=topologies(), n=st.integers(1, 60), seed=st.integers(0, 50))
def test_phases_add_up_and_meeting_less_often_never_takes_longer(topology, n, seed):
    made = composed(step_samples(n, seed, longest=1500), topology, strategy="packing")
    times = {
        meet: step_seconds(made, replace(topology, replicas_meet=meet), RICH)
        for meet in ("wave", "step")
    }
    assert made.predicted_s == times[topology.replicas_meet].total_s
    assert times["step"].total_s <= times["wave"].total_s * (1 + 1e-9)
    for time in times.values():
        phases = (time.vision_s, time.audio_s, time.exchange_s, time.llm_s, time.gradient_s)
        assert sum(phases) + time.waiting_s == pytest.approx(time.total_s)
        assert sum(time.phase_s.values()) == pytest.approx(time.total_s)
        ranks = rank_seconds(made, topology, RICH)
        means = [float(of_ranks.mean()) for of_ranks in ranks]
        assert means == pytest.approx(phases)
        assert all(
            of_ranks.shape == (topology.pipeline_stages, made.replicas) for of_ranks in ranks
        )
        assert sum(ranks).max() <= time.total_s * (1 + 1e-9)


def test_an_exchange_takes_nothing_where_every_replica_keeps_its_rows():
    samples, topology = step_samples(40, 1, longest=600), Topology(world_size=4)
    made = composed(samples, topology, strategy="packing", dispatch="home")
    items = encoder_items(made, RICH)
    alone = made.pack_degree.max() == 1
    assert alone
    assert step_phases(made, items, RICH, topology).exchange.sum() == 0
    moved = replace(made, item_replica=(made.item_replica + 1) % 4)
    exchange = step_phases(moved, items, RICH, topology).exchange
    used = np.unique(items.phase)
    assert exchange.ravel()[used].min() > RICH.step.exchange_s
    assert np.delete(exchange.ravel(), used).sum() == 0


@settings(max_examples=60, deadline=None)
@given(
    topology=topologies(),
    n=st.integers(1, 80),
    seed=st.integers(0, 100),
    longest=st.sampled_from([300, 2000, 6000]),
)
def test_full_is_never_worse_than_a_baseline_and_no_plan_is_below_the_bound(
    topology, n, seed, longest
):
    longest = min(longest, topology.replicas * MEMORY - 500)
    samples = step_samples(n, seed, longest=longest)
    made = {name: composed(samples, topology, strategy=name) for name in STRATEGIES}
    (report,) = [stage for stage in made["full"].stages if stage.stage == "step"]
    assert report.after == made["full"].predicted_s
    for plan in made.values():
        assert made["full"].predicted_s <= plan.predicted_s * 1.001
        assert report.lower_bound <= plan.predicted_s * (1 + 1e-9)
        assert step_seconds(plan, topology, RICH).total_s == pytest.approx(plan.predicted_s)


def test_waves_are_few_where_each_waits_for_its_encoders():
    samples = workloads.step_samples(workloads.video(200, 2))
    llm = ContextCost(attention_s_per_token2=0.0, linear_s_per_token=1e-4)
    alone = CostModel(llm=llm, vision=FREE)
    beside = replace(alone, vision=PhaseCost(linear_s_per_token=1e-5))
    many, few = (
        composed(samples, Topology(world_size=39), cost=cost, memory_tokens=8192)
        for cost in (alone, beside)
    )
    least = -(-int(samples.lengths.llm_tokens.sum()) // (39 * 8192))
    assert few.waves <= least + 1 < many.waves


def test_naming_what_full_would_do_anyway_changes_nothing():
    samples = step_samples(60, 3, longest=800)
    named = {"pack": "auto", "context": "dynamic", "assign": "balanced", "order": "search"}
    plain = composed(samples, Topology(world_size=8))
    assert composed(samples, Topology(world_size=8), **named).digest == plain.digest


def a_few_samples(seed: int) -> StepSamples:
    """Three samples, one or two of which have an image."""
    rng = np.random.default_rng(seed)
    images = rng.permutation([0, 1, int(rng.integers(0, 2))])
    m = int(images.sum())
    return StepSamples(
        sample_ids=np.arange(3, dtype=np.int64),
        epoch=np.zeros(3, np.int32),
        lengths=LengthTable(
            llm_tokens=rng.integers(60, 400, 3).astype(np.int32),
            loss_tokens=np.full(3, 10, np.int32),
            item_offsets=sample_starts(images.astype(np.int64)),
            item_modality=np.zeros(m, np.int8),
            item_encoder_tokens=rng.integers(100, 2000, m).astype(np.int32),
            item_llm_tokens=np.full(m, 20, np.int32),
            item_position=np.full(m, 4, np.int32),
        ),
    )


def partitions(of: int) -> Iterator[tuple[int, ...]]:
    """The pack of each sample, packs numbered by their first sample."""
    for packs in product(range(of), repeat=of):
        if all(p <= max(packs[:i], default=-1) + 1 for i, p in enumerate(packs)):
            yield packs


def every_plan(samples: StepSamples, cost: CostModel, memory: int) -> Iterator[StepPlan]:
    """All plans of three samples on two replicas of one node."""
    lengths = samples.lengths
    like = compose_step(
        samples,
        step=0,
        topology=Topology(world_size=2),
        options=PlanOptions(memory_tokens=memory, cost=cost),
    )
    for pack_of in partitions(3):
        count = max(pack_of) + 1
        for members in product([(0,), (1,), (0, 1)], repeat=count):
            for waves in product(range(count), repeat=count):
                order = sorted(range(count), key=lambda p: waves[p])
                seats = [(waves[p], r) for p in order for r in members[p]]
                if set(waves) != set(range(max(waves) + 1)) or len(set(seats)) < len(seats):
                    continue
                held = [[s for s in range(3) if pack_of[s] == p] for p in order]
                degree = np.array([len(members[p]) for p in order])
                plan = replace(
                    like,
                    waves=max(waves) + 1,
                    pack_offsets=sample_starts(np.array([len(each) for each in held])),
                    pack_samples=np.concatenate(held).astype(np.int32),
                    pack_wave=np.array([waves[p] for p in order], np.int32),
                    replica_offsets=sample_starts(degree),
                    pack_replicas=np.concatenate([members[p] for p in order]).astype(np.int32),
                    pack_seconds=np.array(
                        [
                            cost.llm.time_s(lengths.llm_tokens[each], int(d))
                            for each, d in zip(held, degree, strict=True)
                        ]
                    ),
                )
                if (plan.pack_tokens > memory * degree).any():
                    continue
                for replica in product(range(2), repeat=len(lengths.item_modality)):
                    yield replace(plan, item_replica=np.array(replica, np.int32))


def test_what_stages_take_is_found_once_a_topology(monkeypatch):
    topology = Topology(world_size=4, ranks_per_replica=2, pipeline_stages=2, stage_shares=(3, 5))
    found, shares = [], Topology.chunk_shares
    monkeypatch.setattr(
        Topology, "chunk_shares", property(lambda of: found.append(of) or shares.fget(of))
    )
    options = PlanOptions(memory_tokens=420, cost=RICH)
    for seed in range(2):
        bound = StepBound(a_few_samples(seed).lengths, topology, options)
        assert bound.given(0.0) <= bound.given(9.0)
    assert found == [topology]


@pytest.mark.parametrize("meet", ["wave", "step"])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_the_bound_of_a_step_is_below_the_best_of_all_its_plans(meet, stages, seed):
    samples = a_few_samples(seed)
    topology = Topology(
        world_size=2 * stages,
        ranks_per_replica=stages,
        pipeline_stages=stages,
        replicas_meet=meet,
    )
    options = PlanOptions(memory_tokens=420, cost=RICH)
    made = compose_step(samples, step=0, topology=topology, options=options)
    (report,) = [stage for stage in made.stages if stage.stage == "step"]
    best_s = min(
        step_seconds(plan, topology, RICH).total_s for plan in every_plan(samples, RICH, 420)
    )
    assert StepBound(samples.lengths, topology, options).given(0.0) <= report.lower_bound
    assert report.lower_bound <= best_s * (1 + 1e-9)
    assert best_s <= made.predicted_s * (1 + 1e-9)
    assert made.predicted_s <= 1.15 * best_s


@pytest.mark.parametrize("meet", ["wave", "step"])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_no_plan_that_is_compared_ends_before_the_bound_of_its_waves(
    monkeypatch, meet, stages, seed
):
    samples = step_samples(60, seed, longest=800)
    topology = Topology(
        world_size=6 * stages,
        ranks_per_replica=stages,
        pipeline_stages=stages,
        replicas_meet=meet,
    )
    options = PlanOptions(memory_tokens=420, cost=RICH)
    bound = StepBound(samples.lengths, topology, options)
    compared, waves, group = [], [], compose_module.group_packs

    def timed(phases, plan, *values):
        time = time_phases(phases, plan, *values)
        compared.append((plan, time.total_s))
        return time

    def grouped(packed):
        waves.append(group(packed))
        return waves[-1]

    monkeypatch.setattr(compose_module, "time_phases", timed)
    monkeypatch.setattr(compose_module, "group_packs", grouped)
    compose_step(samples, step=0, topology=topology, options=options)
    assert len(compared) > 5
    for plan, total_s in compared:
        seconds = sorted(plan.pack_seconds)
        (made,) = {
            bound.of(each)
            for each in waves
            if sorted(np.concatenate([w.time_s for w in each.waves])) == seconds
        }
        assert bound.given() <= made <= total_s * (1 + 1e-9)
        if stages == 1 and meet == "step":
            assert made >= (plan.pack_seconds * plan.pack_degree).sum() / 6


@pytest.mark.parametrize("meet", ["wave", "step"])
@pytest.mark.parametrize("virtual_stages", [1, 2])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("strategy", BASELINES)
def test_a_baseline_does_not_end_before_its_groups_have_encoded_their_own_items(
    monkeypatch, strategy, stages, virtual_stages, meet
):
    topology = Topology(
        world_size=6 * stages,
        ranks_per_replica=stages,
        pipeline_stages=stages,
        virtual_stages=virtual_stages if stages > 1 else 1,
        replicas_meet=meet,
    )
    options = PlanOptions(memory_tokens=420, cost=RICH, strategy=strategy)
    formed, group = [], compose_module.group_packs
    monkeypatch.setattr(
        compose_module, "group_packs", lambda packed: formed.append(group(packed)) or formed[-1]
    )
    nearer = 0
    for seed in range(6):
        samples = step_samples(60, seed, longest=800)
        units = samples.lengths.item_units(samples.unit_frames)
        made = compose_step(samples, step=0, topology=topology, options=options)
        bound = StepBound(samples.lengths, topology, options, units)
        of_waves, as_formed = bound.of(formed[-1]), bound.as_formed(formed[-1])
        assert of_waves <= as_formed <= made.predicted_s * (1 + 1e-9)
        nearer += as_formed > of_waves
    assert nearer > 3


def test_a_stage_of_its_own_for_encoders_has_no_part_of_the_decoder():
    topology = Topology(world_size=4, ranks_per_replica=4, pipeline_stages=4, encoder_stage="own")
    assert topology.chunk_shares == pytest.approx((0, 1 / 3, 1 / 3, 1 / 3))
    samples = step_samples(60, 0, longest=800)
    shared, own = (
        composed(samples, replace(topology, encoder_stage=stage), strategy="packing").predicted_s
        for stage in ("first", "own")
    )
    assert shared != own


@pytest.mark.parametrize("shares", [(1.0,), (1.0, -1.0), (0.0, 0.0), (1.0, float("nan"))])
def test_shares_that_are_none_are_refused(shares):
    with pytest.raises(WorldSizeError, match="each of the 2 model chunks"):
        Topology(world_size=2, ranks_per_replica=2, pipeline_stages=2, stage_shares=shares)


def test_an_exchange_costs_what_travels_between_nodes():
    samples = step_samples(60, 3, longest=800)
    topology = Topology(world_size=8, replicas_per_node=4)
    made = composed(samples, topology, strategy="packing")
    at_home = step_seconds(made, topology, RICH)
    away = replace(made, item_replica=(made.item_replica + 4) % 8)
    times = step_seconds(away, topology, RICH)
    near = step_seconds(away, replace(topology, replicas_per_node=None), RICH)
    assert at_home.exchange_s < near.exchange_s < times.exchange_s
    frozen = step_seconds(away, replace(topology, encoders_train=False), RICH)
    assert frozen.exchange_s == pytest.approx(times.exchange_s / 2)


@pytest.mark.parametrize("between_s", [1e-7, 2e-5, 1e-2])
def test_an_exchange_that_goes_ahead_takes_what_the_backward_pass_before_does_not_hide(between_s):
    cost = replace(RICH, step=StepCost(feature_inter_s_per_token=between_s))
    samples, topology = step_samples(120, 3, longest=800), Topology(world_size=8)
    topology = replace(topology, replicas_per_node=4)
    made = composed(samples, topology, strategy="packing", cost=cost)
    made = replace(made, item_replica=(made.item_replica + 4) % 8)
    phases = step_phases(made, encoder_items(made, cost), cost, topology)
    sent_s = phases.exchange.sum(axis=1) / 2
    hides_s = phases.decode.max(axis=1)[:-1] * (1 - FORWARD_SHARE)
    hidden_s = np.minimum(sent_s[1:], hides_s).sum()
    waits = step_seconds(made, topology, cost)
    ahead = step_seconds(made, replace(topology, features_ahead=True), cost)
    assert made.waves > 1
    assert hidden_s > 0
    assert waits.total_s - ahead.total_s == pytest.approx(hidden_s)
    assert waits.exchange_s - ahead.exchange_s == pytest.approx(hidden_s)


def test_features_do_not_go_ahead_in_a_pipeline():
    with pytest.raises(WorldSizeError, match="features_ahead with 2 pipeline stages"):
        Topology(world_size=2, ranks_per_replica=2, pipeline_stages=2, features_ahead=True)


@pytest.mark.parametrize("strategy", ["packing", "length_grouped", "random"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("longest", [120, 1000, 4000])
def test_no_static_waves_go_below_what_refuses_them_before_they_are_made(strategy, seed, longest):
    samples = step_samples(60, seed, longest=longest)
    topology = Topology(world_size=8, replicas_per_node=4)
    options = PlanOptions(memory_tokens=MEMORY, strategy=strategy)
    made = compose_step(samples, step=0, topology=topology, options=options)
    degree = int(made.pack_degree[0])
    (waves_s,) = (stage.after for stage in made.stages if stage.stage == "group")
    static = StaticBounds(samples.lengths, None, topology)
    least = static.of_any(degree, options)
    assert 0 < max(least) <= waves_s * (1 + 1e-9)
    packed_s = [least.spread_s, *static.of_packs(degree, options, least.spread_s)]
    assert packed_s == sorted(packed_s)
    # A baseline that pads pays for padding; the bound is of its packs where a trainer packs them.
    assert packed_s[-1] <= waves_s * (1 + 2e-9)


def test_baselines_are_looked_at_until_a_plan_is_near_the_bound_however_many_samples(monkeypatch):
    looked_at = []

    def of_any(self, degree, options, found=StaticBounds.of_any):
        looked_at.append(options.strategy)
        return found(self, degree, options)

    monkeypatch.setattr(StaticBounds, "of_any", of_any)
    samples = workloads.step_samples(workloads.vlm_long(40_000, 0))
    topology = Topology(world_size=640, replicas_per_node=8)
    options = PlanOptions(memory_tokens=32_768)
    made = compose_step(samples, step=0, topology=topology, options=options)
    (step,) = (stage for stage in made.stages if stage.stage == "step")
    assert compose_module.NEAR < step.after / step.lower_bound < 1.03
    assert looked_at == ["packing", "length_grouped", "random"]
