"""Does a plan keep its promises? Every invariant of the design that a plan alone can show."""

import numpy as np

from dataservice.core.errors import PlanningError
from dataservice.core.plan import StepPlan
from dataservice.planning.routes import feature_runs, item_places


def validate_plan(plan: StepPlan, *, memory_tokens: int, sample_count: int) -> None:
    """Raises PlanningError naming the first broken invariant; returns when all hold.

    Checked: every sample in exactly one pack; no member of a group holds more than
    `memory_tokens`; degrees of a wave sum to at most N and no replica is in two groups of a
    wave; every item is encoded once and all of its rows arrive where its text is.
    O(n log n + m log m).
    """
    n = len(plan.sample_ids)
    _require(n == sample_count, f"the plan holds {n} samples, {sample_count} were drawn")
    counts = np.bincount(plan.pack_samples, minlength=n)
    _require(bool((counts == 1).all()), f"sample {int(np.argmax(counts != 1))} is not in one pack")
    _require(bool((np.diff(plan.pack_offsets) > 0).all()), "a pack has no samples")

    degree = plan.pack_degree
    held = plan.pack_tokens // degree
    if len(held):
        worst = int(held.argmax())
        _require(
            int(held[worst]) <= memory_tokens,
            f"pack {worst} puts {held[worst]} tokens on each of {degree[worst]} replicas, "
            f"the memory budget is {memory_tokens}",
        )
    _require(bool((np.diff(plan.pack_wave) >= 0).all()), "packs are not in wave order")
    wave_of_member = np.repeat(plan.pack_wave, degree)
    seats = wave_of_member.astype(np.int64) * plan.replicas + plan.pack_replicas
    _require(len(np.unique(seats)) == len(seats), "a replica is in two groups of one wave")
    inside = (plan.pack_replicas >= 0) & (plan.pack_replicas < plan.replicas)
    _require(bool(inside.all()), f"a group names a replica outside 0..{plan.replicas - 1}")
    _check_items(plan)


def _check_items(plan: StepPlan) -> None:
    encoders = (plan.item_replica >= 0) & (plan.item_replica < plan.replicas)
    _require(bool(encoders.all()), "an encoder item has no replica")
    runs = feature_runs(plan, item_places(plan))
    arrived = np.bincount(runs.item, weights=runs.rows, minlength=len(plan.item_sample))
    _require(
        bool((arrived == plan.item_llm_tokens).all()),
        "the exchange does not deliver every feature row of every item",
    )


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise PlanningError(
            f"invariant broken: {broken}. This is a defect of the planner; please report the "
            "job file and the step."
        )
