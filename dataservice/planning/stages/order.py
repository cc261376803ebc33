"""The order in which waves run, for pipeline parallelism.

A wave is one microbatch of every replica, and CP groups tie replicas together, so whole waves
are put in order: each counts with its slowest group, and its slowest encoders on the first stage.
Without pipeline stages every order takes the same time, and waves stay as formed.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dataservice.core.plan import StageReport
from dataservice.core.plan_options import Order, algorithm_named
from dataservice.planning.pipeline_parallel.microbatch_order import order_microbatches
from dataservice.planning.pipeline_parallel.simulator import simulate_1f1b
from dataservice.planning.step_time import ChunkTimes


def order_waves(
    times: ChunkTimes, *, algorithm: Order, stages: int, virtual_stages: int = 1
) -> tuple[NDArray[np.int32], StageReport]:
    """The waves in execution order, int32[W], and the simulated makespan of 1F1B before and after;
    of interleaved 1F1B where each stage has several `virtual_stages`. Raises PlanningError on an
    unknown algorithm."""
    put_in_order = algorithm_named(ORDERS, algorithm, "plan.order")
    forward, backward = times.forward, times.backward
    waves = len(forward)
    if stages == 1 or waves < 2:
        total = float(forward.sum() + backward.sum())
        return np.arange(waves, dtype=np.int32), _report("as_formed", total, total, total)
    before = simulate_1f1b(forward, backward, virtual_stages=virtual_stages).makespan_s
    order = put_in_order(forward, backward, virtual_stages=virtual_stages)
    after = simulate_1f1b(forward[order], backward[order], virtual_stages=virtual_stages).makespan_s
    return order, _report(algorithm, before, after, times.busiest_s(stages) - times.outside_s)


def _as_formed(
    forward: NDArray[np.float64], backward: NDArray[np.float64], *, virtual_stages: int
) -> NDArray[np.int32]:
    return np.arange(len(forward), dtype=np.int32)


# From seconds [waves, chunks] of the forward and backward passes to an order int32[waves].
ORDERS: dict[Order, Callable[..., NDArray[np.int32]]] = {
    "search": partial(order_microbatches, algorithm="search"),
    "mmscale": partial(order_microbatches, algorithm="mmscale"),
    "as_formed": _as_formed,
}


def _report(algorithm: str, before: float, after: float, bound: float) -> StageReport:
    return StageReport(
        stage="order",
        algorithm=algorithm,
        unit="s",
        before=before,
        after=after,
        lower_bound=bound,
    )
