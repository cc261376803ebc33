"""What the coordinator computes for a step, stage by stage, without a socket: one process, one
thread at a time."""

from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.harness import Row, timed_row
from benchmarks.scale.made_job import JOB, made_setup
from benchmarks.scale.play import WORKERS
from benchmarks.scale.service import Size
from dataservice.core.cursor import Cursor
from dataservice.core.order_columns import PackOrders
from dataservice.core.topology import Topology
from dataservice.engine.pack_orders import pack_orders
from dataservice.engine.planner import plan_step
from dataservice.engine.ready_bytes import planned_bytes
from dataservice.engine.shards import StepParts, columns_of, cut_step
from dataservice.serving import wire_packs

REPEATS = 5
# Of an index of a million samples: a step then has about as many of each file as of a large corpus.
FEW_ROWS_A_FILE = 10


def stages(size: Size) -> list[Row]:
    """Each stage of one step, from the cursor to what is sent."""
    batch = size.ranks * size.samples_a_rank
    setup = made_setup(max(size.indexed, batch), batch)
    topology = Topology(world_size=size.ranks, replicas_per_node=8)
    planned = plan_step(setup, Cursor(), topology)
    assert planned is not None, "the job is endless"
    plan, digest = planned.plan, planned.plan.digest
    items = setup.catalog.item_details(plan.sample_ids)
    orders = pack_orders(plan, setup.catalog, job=JOB, digest=digest, pipeline="{}")
    parts = cut_step(plan, items.notes)
    works: dict[str, Callable[[], object]] = {
        "draw to plan": partial(plan_step, setup, Cursor(), topology),
        "columns of all ranks": partial(cut_step, plan, items.notes),
        "what is known of items": partial(setup.catalog.item_details, plan.sample_ids),
        "decoded bytes": partial(planned_bytes, plan, items),
        f"orders as they are sent to {WORKERS} workers": partial(_written, orders),
        "rows of all ranks": partial(_rows, parts, size.ranks),
    }
    about = f"{batch:,} samples, {size.ranks:,} ranks, {plan.packs:,} packs"
    return [
        timed_row(
            {name: work},
            group="stages",
            what=f"{name}: {about}",
            limit=None,
            repeats=REPEATS,
        )
        for name, work in works.items()
    ]


def scattered_orders(size: Size) -> Row:
    """The orders of a step whose samples lie in nearly as many files, as those of a large corpus
    do."""
    batch = size.ranks * size.samples_a_rank
    samples = max(size.indexed, batch)
    setup = made_setup(samples, batch, rows_a_file=FEW_ROWS_A_FILE)
    planned = plan_step(setup, Cursor(), Topology(world_size=size.ranks, replicas_per_node=8))
    assert planned is not None, "the job is endless"
    plan, digest = planned.plan, planned.plan.digest
    orders = pack_orders(plan, setup.catalog, job=JOB, digest=digest, pipeline="{}")
    name = f"orders as they are sent to {WORKERS} workers"
    about = f"{batch:,} samples in {samples // FEW_ROWS_A_FILE:,} files"
    works: dict[str, Callable[[], object]] = {name: partial(_written, orders)}
    return timed_row(works, group="stages", what=f"{name}: {about}", limit=None, repeats=REPEATS)


def _written(orders: PackOrders) -> int:
    shares = orders.shared_out(range(k, len(orders), WORKERS) for k in range(WORKERS))
    sizes = [len(wire_packs.pack_orders_to_proto(of).SerializeToString()) for of in shares if of]
    return int(np.sum(sizes))


def _rows(parts: StepParts, ranks: int) -> int:
    return sum(len(b"".join(columns_of(parts, rank).written)) for rank in range(ranks))
