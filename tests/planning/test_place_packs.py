"""Packs go where their samples are kept and near their ranks, and no step is decoded much later."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.plan import StepPlan
from dataservice.planning.place_packs import (
    ENCODER_TOKEN_WORK,
    SAME_NODE,
    SAME_ZONE,
    SLACK,
    Pull,
    WorkerSites,
    place_packs,
)


def plan_of(rng, packs, replicas, items=2):
    """Packs of one to four samples in random order, of one or two replicas each."""
    counts = rng.integers(1, 5, packs)
    samples = int(counts.sum())
    degree = rng.integers(1, min(2, replicas) + 1, packs)
    of_sample = np.repeat(np.arange(samples), rng.integers(0, items + 1, samples))
    members = [rng.choice(replicas, size, replace=False) for size in degree]
    tokens = rng.integers(1, 400, samples).astype(np.int32)
    return StepPlan(
        step=0,
        replicas=replicas,
        waves=1,
        cost_version="",
        predicted_s=0.0,
        sample_ids=np.arange(samples),
        sample_epoch=np.zeros(samples, np.int32),
        sample_tokens=tokens,
        sample_loss_tokens=tokens,
        pack_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        pack_samples=rng.permutation(samples).astype(np.int32),
        pack_wave=np.zeros(packs, np.int32),
        pack_seconds=np.ones(packs),
        replica_offsets=np.concatenate([[0], np.cumsum(degree)]).astype(np.int64),
        pack_replicas=np.concatenate(members).astype(np.int32),
        item_sample=of_sample.astype(np.int32),
        item_modality=np.zeros(len(of_sample), np.int8),
        item_encoder_tokens=rng.integers(1, 300, len(of_sample)).astype(np.int32),
        item_llm_tokens=np.ones(len(of_sample), np.int32),
        item_position=np.zeros(len(of_sample), np.int32),
        item_replica=rng.integers(0, replicas, len(of_sample)).astype(np.int32),
    )


def work_of(plan, pack):
    items = np.isin(plan.item_sample, plan.samples_of(pack))
    encoded = int(plan.item_encoder_tokens[items].sum())
    return int(plan.sample_tokens[plan.samples_of(pack)].sum()) + ENCODER_TOKEN_WORK * encoded


def all_work(plan):
    return np.array([work_of(plan, pack) for pack in range(plan.packs)])


def sites_of(rng, workers, sites, *, queued=0.0):
    """Every worker at some site; some caches, nodes and zones are not known."""
    site = np.concatenate([np.arange(sites), rng.integers(0, sites, workers - sites)])
    return WorkerSites(
        queued=rng.uniform(0, queued, workers) if queued else np.zeros(workers),
        slots=rng.integers(1, 4, workers),
        site=site,
        cache=rng.permutation(np.arange(-1, sites - 1)),
        node=rng.integers(-1, sites, sites),
        zone=rng.integers(-1, 2, sites),
    )


def pull_of(rng, plan, sites):
    return Pull(
        cache=rng.integers(-1, max(1, sites), len(plan.sample_ids)),
        node=rng.integers(-1, max(1, sites), plan.replicas),
        zone=rng.integers(-1, 2, plan.replicas),
    )


def kept(plan, pack, at, pull):
    """(cached, same node, same zone) of one pack at (cache, node, zone), counted one by one."""
    cached = near = zoned = 0.0
    replicas = plan.replicas_of(pack)
    for sample in plan.samples_of(pack).tolist():
        text = int(plan.sample_tokens[sample])
        whole = text
        for item in np.flatnonzero(plan.item_sample == sample).tolist():
            own = ENCODER_TOKEN_WORK * int(plan.item_encoder_tokens[item])
            replica = plan.item_replica[item]
            whole += own
            near += own * (at[1] >= 0 and pull.node[replica] == at[1])
            zoned += own * (at[2] >= 0 and pull.zone[replica] == at[2])
        cached += whole * (at[0] >= 0 and pull.cache[sample] == at[0])
        for replica in replicas:
            near += text / len(replicas) * (at[1] >= 0 and pull.node[replica] == at[1])
            zoned += text / len(replicas) * (at[2] >= 0 and pull.zone[replica] == at[2])
    return np.array([cached, near, zoned])


def last_done(work, queued, slots, worker_of):
    """When the last of the workers that got a pack is done with all it has."""
    ends = queued + np.bincount(worker_of, weights=work, minlength=len(slots)) / slots
    return ends[np.unique(worker_of)].max()


def by_load(work, queued, slots):
    """Each pack in turn to whoever is done first."""
    done, worker_of = queued.copy(), []
    for each in work:
        worker = int(np.argmin(done))
        done[worker] += each / slots[worker]
        worker_of.append(worker)
    return np.array(worker_of)


settings.register_profile("placement", max_examples=60, deadline=None)
seeds = st.integers(0, 2**32 - 1)


@settings(settings.get_profile("placement"))
@given(
    seed=seeds,
    packs=st.integers(1, 40),
    workers=st.integers(1, 8),
    queued=st.sampled_from([0, 5000]),
)
def test_no_step_is_decoded_later_than_by_load_alone_by_more_than_the_slack(
    seed, packs, workers, queued
):
    rng = np.random.default_rng(seed)
    plan = plan_of(rng, packs, replicas=3)
    sites = sites_of(rng, workers, int(rng.integers(1, workers + 1)), queued=queued)
    work, pull = all_work(plan), pull_of(rng, plan, workers)
    before = plan.digest, sites.queued.copy()
    placed = place_packs(plan, np.arange(packs), work, sites, pull)
    assert placed.worker.shape == (packs,), "each pack once"
    assert set(placed.worker.tolist()) <= set(range(workers))
    alone = last_done(work, sites.queued, sites.slots, by_load(work, sites.queued, sites.slots))
    limit = alone + SLACK * work.sum() / sites.slots.sum()
    assert last_done(work, sites.queued, sites.slots, placed.worker) <= limit * (1 + 1e-9)
    assert limit <= (1 + SLACK) * alone * (1 + 1e-9), "nothing is done sooner than the mean"
    again = place_packs(plan, np.arange(packs), work, sites, pull)
    assert again.worker.tolist() == placed.worker.tolist()
    assert (plan.digest, sites.queued.tolist()) == (before[0], before[1].tolist())


@settings(settings.get_profile("placement"))
@given(seed=seeds, packs=st.integers(1, 30), workers=st.integers(1, 6))
def test_what_is_told_of_a_placement_is_true_of_it(seed, packs, workers):
    rng = np.random.default_rng(seed)
    plan = plan_of(rng, packs, replicas=4)
    sites = sites_of(rng, workers, int(rng.integers(1, workers + 1)))
    chosen = rng.permutation(packs)[: int(rng.integers(1, packs + 1))]
    work, pull = all_work(plan)[chosen], pull_of(rng, plan, workers)
    placed = place_packs(plan, chosen, work, sites, pull)
    at = np.stack([sites.cache, sites.node, sites.zone], axis=1)[sites.site[placed.worker]]
    told = sum(kept(plan, pack, at[k], pull) for k, pack in enumerate(chosen.tolist()))
    assert placed.work == work.sum()
    np.testing.assert_allclose([placed.cached, placed.same_node, placed.same_zone], told)


@pytest.mark.parametrize("seed", range(30))
def test_a_pack_goes_to_the_best_site_of_all_where_there_is_room(seed):
    rng = np.random.default_rng(seed)
    plan = plan_of(rng, 1, replicas=4)
    sites = sites_of(rng, 5, 5)
    sites = replace(sites, slots=np.full(5, 2))
    pull = pull_of(rng, plan, 5)
    placed = place_packs(plan, np.array([0]), all_work(plan), sites, pull)
    at = zip(sites.cache.tolist(), sites.node.tolist(), sites.zone.tolist(), strict=True)
    weights = np.array([1.0, SAME_NODE, SAME_ZONE])
    votes = [float(kept(plan, 0, each, pull) @ weights) for each in at]
    assert votes[sites.site[placed.worker[0]]] == pytest.approx(max(votes))


def test_on_average_it_gets_most_of_what_the_best_placement_within_the_bound_does():
    """Of seven packs at two caches, all placements are tried."""
    found = without = possible = 0.0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        plan, at_cache = plan_of(rng, 7, replicas=2), np.arange(2)
        sites = WorkerSites(
            queued=np.zeros(2), slots=np.ones(2, np.int64), site=at_cache, cache=at_cache,
            node=np.full(2, -1), zone=np.full(2, -1),
        )  # fmt: skip
        unknown = np.full(2, -1)
        pull = Pull(cache=rng.integers(0, 2, len(plan.sample_ids)), node=unknown, zone=unknown)
        work = all_work(plan)
        alone = by_load(work, sites.queued, sites.slots)
        bound = last_done(work, sites.queued, sites.slots, alone) + SLACK * work.sum() / 2
        own = np.array([[kept(plan, p, (c, -1, -1), pull)[0] for c in at_cache] for p in range(7)])
        within = (
            own[np.arange(7), each].sum()
            for each in map(np.array, product(at_cache, repeat=7))
            if last_done(work, sites.queued, sites.slots, each) <= bound
        )
        best = max(within)
        placed = place_packs(plan, np.arange(7), work, sites, pull)
        assert placed.cached <= best * (1 + 1e-9)
        found, possible = found + placed.cached, possible + best
        without += own[np.arange(7), alone].sum()
    assert found >= without + 0.7 * (possible - without)


def test_samples_at_their_homes_find_as_much_as_there_is_where_work_is_even():
    """Packs whose samples are all in one cache, as those of a replayed step."""
    rng = np.random.default_rng(0)
    plan = plan_of(rng, 400, replicas=8)
    place = np.arange(4)
    cache_of_pack = rng.integers(0, 4, 400)
    cache = np.empty(len(plan.sample_ids), np.int64)
    cache[plan.pack_samples] = np.repeat(cache_of_pack, np.diff(plan.pack_offsets))
    sites = WorkerSites(
        queued=np.zeros(4), slots=np.ones(4, np.int64), site=place, cache=place, node=place,
        zone=np.full(4, -1),
    )  # fmt: skip
    nowhere = np.full(8, -1)
    work = all_work(plan)
    pull = Pull(cache=cache, node=nowhere, zone=nowhere)
    placed = place_packs(plan, np.arange(400), work, sites, pull)
    assert placed.cached >= 0.95 * placed.work
    none = Pull(cache=np.full(len(cache), -1), node=np.arange(8) // 2, zone=nowhere)
    near = place_packs(plan, np.arange(400), work, sites, none)
    scattered = place_packs(plan, np.arange(400), work, sites, replace(none, node=nowhere))
    assert near.same_node > 1.5 * 0.25 * near.work
    assert scattered.same_node == scattered.cached == 0


def test_without_anything_known_packs_go_by_load_alone():
    rng = np.random.default_rng(1)
    plan = plan_of(rng, 30, replicas=2)
    one = WorkerSites(
        queued=np.array([0.0, 700.0, 0.0]), slots=np.array([1, 1, 2]), site=np.zeros(3, np.int64),
        cache=np.array([-1]), node=np.array([-1]), zone=np.array([-1]),
    )  # fmt: skip
    nowhere = np.full(2, -1)
    pull = Pull(cache=np.full(len(plan.sample_ids), -1), node=nowhere, zone=nowhere)
    work = all_work(plan)
    placed = place_packs(plan, np.arange(30), work, one, pull)
    assert placed.worker.tolist() == by_load(work, one.queued, one.slots).tolist()
