"""How good microbatch orders are: beside every order of 8, and beside MMScale's."""

import numpy as np
from numpy.typing import NDArray

from benchmarks import exact
from benchmarks.harness import Peer, Row, Scale
from dataservice.planning import order_microbatches, simulate_1f1b
from dataservice.planning.pipeline_parallel.microbatch_order import OrderAlgorithm

ALGORITHMS: tuple[OrderAlgorithm, ...] = ("search", "mmscale")


def _makespan(forward: NDArray[np.float64], order: NDArray[np.int32] | None) -> float:
    return simulate_1f1b(forward, 2 * forward, order=order).makespan_s


def microbatch_orders(scale: Scale) -> list[Row]:
    """The search against all orders of 8 microbatches, and against MMScale's order at 32 × 10."""
    rows = []
    for stages in (3, 4):
        over: dict[str, list[float]] = {"search": [], "mmscale": [], "as drawn": []}
        for seed in range(scale.seeds):
            forward = np.random.default_rng(seed).lognormal(0, 0.8, (8, stages))
            best = exact.best_order_makespan(forward, 2 * forward)
            for name in ALGORITHMS:
                order = order_microbatches(forward, 2 * forward, algorithm=name)
                over[name].append(100 * (_makespan(forward, order) / best - 1))
            over["as drawn"].append(100 * (_makespan(forward, None) / best - 1))
        rows.append(
            Row(
                group="order",
                what=f"order over the best of all 40,320, worst of {scale.seeds} draws, "
                f"8 microbatches × {stages} stages",
                figure=max(0.0, max(over["search"])),
                unit="%",
                limit=0.1,
                peers=(
                    Peer(name="MMScale Alg. 3, corrected", figure=max(over["mmscale"])),
                    Peer(name="as drawn", figure=max(over["as drawn"])),
                ),
                explanation="Each microbatch and stage has a lognormal time, σ .8, backward twice "
                "forward. As printed, Alg. 3 places l+p−2 of l microbatches and cannot be run.",
            )
        )
    gains, drawn, bound = [], [], []
    for seed in range(scale.seeds):
        forward = np.random.default_rng(seed).lognormal(0, 0.8, (32, 10))
        search, paper = (
            _makespan(forward, order_microbatches(forward, 2 * forward, algorithm=name))
            for name in ALGORITHMS
        )
        gains.append(100 * (paper / search - 1))
        drawn.append(100 * (_makespan(forward, None) / search - 1))
        bound.append(search / float(3 * forward.sum(axis=0).max()))
    rows.append(
        Row(
            group="order",
            what=f"MMScale's order over ours, mean of {scale.seeds} draws, 32 × 10 lognormal",
            figure=float(np.mean(gains)),
            unit="%",
            limit=5.0,
            at_least=True,
            peers=(Peer(name="order as drawn over ours", figure=float(np.mean(drawn))),),
            explanation=f"Ours is {np.mean(bound):.2f} × the busiest stage's own work.",
        )
    )
    return rows
