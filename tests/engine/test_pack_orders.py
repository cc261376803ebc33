"""What workers are told of a step: each pack's samples in their order, where they lie, and when
they were drawn."""

from dataclasses import replace

from dataservice.core.cursor import Cursor
from dataservice.core.order_columns import FEW_SAMPLES
from dataservice.core.topology import Topology
from dataservice.engine.pack_orders import pack_orders
from dataservice.engine.planner import plan_step
from dataservice.sources.mixture import Mixture
from tests.engine.support import make_setup


def test_every_sample_has_its_lengths_and_the_epoch_that_it_was_drawn_in():
    setup = make_setup(batch=150)
    setup = replace(setup, stream=Mixture(setup.catalog.sizes, [1.0, 1.0], seed=0, epochs=3))
    first = plan_step(setup, Cursor(), Topology(world_size=4))
    planned = plan_step(setup, first.next_cursor, Topology(world_size=4))
    plan = planned.plan
    assert set(plan.sample_epoch.tolist()) == {0, 1}, "the step holds the end of an epoch"
    epochs = list(zip(plan.sample_ids.tolist(), plan.sample_epoch.tolist(), strict=True))
    orders = pack_orders(plan, setup.catalog, job="job", digest="d", pipeline="{}")
    ordered = [sample for order in orders for sample in order.samples]
    assert sorted((s.ref.sample_id, s.epoch) for s in ordered) == sorted(epochs)
    assert all(type(sample.epoch) is int for sample in ordered), "JSON takes no numbers of numpy's"
    for order, start in zip(orders, plan.pack_offsets.tolist(), strict=False):
        rows = plan.pack_samples[start : start + len(order.samples)]
        assert [s.ref.sample_id for s in order.samples] == plan.sample_ids[rows].tolist()
        assert [s.epoch for s in order.samples] == plan.sample_epoch[rows].tolist()
        assert [order.samples[k] for k in range(len(order.samples))] == [*order.samples]
        assert order.samples[1:] == [*order.samples][1:]


class LateCatalog:
    """One whose rows are at hand while a step is planned, and perhaps not afterwards."""

    at_hand = False

    def __init__(self, catalog):
        self._catalog = catalog
        self.planning = True

    def columns(self, sample_ids):
        assert self.planning, "whoever sends orders would wait for storage"
        return self._catalog.columns(sample_ids)


def test_whoever_sends_orders_asks_nothing_of_an_index_that_is_still_being_read():
    setup = make_setup(samples=800, batch=2 * FEW_SAMPLES)
    plan = plan_step(setup, Cursor(), Topology(world_size=4)).plan
    late = LateCatalog(setup.catalog)
    orders, known = (
        pack_orders(plan, catalog, job="job", digest="d", pipeline="{}")
        for catalog in (late, setup.catalog)
    )
    late.planning = False
    shares = [[0, 2], [1]]
    for ours, theirs in zip(orders.shared_out(shares), known.shared_out(shares), strict=True):
        assert [*ours] == [*theirs]
