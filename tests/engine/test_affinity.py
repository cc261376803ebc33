"""The coordinator remembers where samples were decoded, and where it does not, they have a home."""

import numpy as np
import pytest

from dataservice.core.cursor import Cursor
from dataservice.core.ports import WorkerInfo
from dataservice.core.whereabouts import Whereabouts
from dataservice.engine import affinity
from dataservice.engine.affinity import NO_WISHES, Affinity, PackWishes
from dataservice.engine.pack_orders import decode_work, pack_orders
from dataservice.engine.planner import plan_step
from tests.engine.support import make_setup

SETUP = make_setup(samples=400, batch=64)


def worker(name, *, cache="", node="", zone=""):
    where = Whereabouts(node=node, zone=zone, cache=cache)
    return WorkerInfo(worker=name, address="a:1", slots=1, where=where)


def steps(count):
    """The job's first steps: plan, and orders."""
    cursor = Cursor()
    for _ in range(count):
        planned = plan_step(SETUP, cursor, SETUP.topology(4))
        plan, cursor = planned.plan, planned.next_cursor
        yield plan, pack_orders(plan, SETUP.catalog, job="job", digest="d", pipeline="{}")


def placed(affinity, plan, orders, workers, *, replicas=(), keys=True):
    wishes = PackWishes(
        keys=SETUP.catalog.row_keys(plan.sample_ids) if keys else NO_WISHES.keys,
        replicas=replicas,
    )
    work = decode_work(plan)[orders.pack]
    return affinity.place(plan, orders, work, wishes, workers, [0.0] * len(workers))


CACHES = [worker(f"w{k}", cache=f"c{k}") for k in range(3)]


def test_a_step_that_is_placed_again_goes_where_it_was():
    known = Affinity()
    for plan, orders in steps(3):
        first = placed(known, plan, orders, CACHES)
        again = placed(known, plan, orders, CACHES)
        assert first.cached < first.work, "there was nothing to go by but homes"
        assert again.cached >= 0.95 * again.work
        renamed = [worker(f"other{k}", cache=f"c{k}") for k in (2, 0, 1)]
        assert placed(known, plan, orders, renamed).cached >= 0.9 * again.work


def test_a_coordinator_that_knows_nothing_yet_places_as_the_one_before_it():
    ((plan, orders),) = steps(1)
    first, other = (placed(Affinity(), plan, orders, CACHES) for _ in range(2))
    assert first.worker.tolist() == other.worker.tolist()
    assert first.cached > 1.15 * first.work / 3, "more than at random"


def test_a_cache_that_goes_and_comes_back_is_found_again():
    known = Affinity()
    ((plan, orders),) = steps(1)
    before = placed(known, plan, orders, CACHES)
    gone = before.worker == 1
    some = orders.only(np.flatnonzero(~gone))
    without = placed(known, plan, some, [CACHES[0], CACHES[2]])
    assert without.cached >= 0.9 * without.work
    assert placed(known, plan, orders, CACHES).cached >= 0.9 * before.work


def test_caches_that_never_come_back_are_forgotten_in_time(monkeypatch):
    monkeypatch.setattr(affinity, "NAMES_KEPT", 8)
    known = Affinity()
    ((plan, orders),) = steps(1)
    for life in range(9):
        here = [worker("w", cache="stays"), worker("v", cache=f"life-{life}")]
        placed(known, plan, orders, here)
    again = placed(known, plan, orders, here)
    assert again.cached >= 0.9 * again.work


@pytest.mark.parametrize(("node", "zone"), [(True, False), (False, True)])
def test_packs_go_near_the_replicas_that_get_them(node, zone):
    names = ["a", "b", "c"]
    near = [worker(f"w{n}", node=node * n, zone=zone * n) for n in names]
    replicas = [Whereabouts(node=node * n, zone=zone * n) for n in ("a", "b", "c", "c")]
    for plan, orders in steps(3):
        told = placed(Affinity(), plan, orders, near, replicas=replicas, keys=False)
        share = (told.same_node if node else told.same_zone) / told.work
        plain = placed(Affinity(), plan, orders, near[:1] * 3, replicas=replicas, keys=False)
        assert share > 0.5 > plain.same_node / plain.work
        assert told.cached == 0


def test_without_caches_and_places_nothing_is_told_and_nothing_is_kept():
    known, plain = Affinity(), [worker("w0"), worker("w1")]
    ((plan, orders),) = steps(1)
    told = placed(known, plan, orders, plain)
    assert told.cached == told.same_node == told.same_zone == 0
    assert set(told.worker.tolist()) == {0, 1}
