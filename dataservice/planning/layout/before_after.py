"""One step of the index as a plain layout runs it, and as the chosen one does.

*Before* is the plainest layout that fits: the chosen TP and PP where they fit, no virtual stages,
encoders on the first stage, equally many decoder layers a stage, and packs trained as they were
filled (strategy `packing`: nothing is balanced). Each stage recomputes as little as fits.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dataservice.core.errors import PlanningError
from dataservice.core.plan_options import PlanOptions, Strategy
from dataservice.planning.compose import StepSamples, compose_step
from dataservice.planning.layout.replica import Replica
from dataservice.planning.layout.search import Candidate, Layout, LayoutTask
from dataservice.planning.step_timeline import StepTimeline, step_timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedLayout:
    """A layout, how its step was planned, and that step."""

    replica: Replica
    microbatch_tokens: int
    strategy: Strategy
    timeline: StepTimeline


@dataclass(frozen=True, kw_only=True, slots=True)
class BeforeAfter:
    """The plainest layout that fits, None where none does; and the chosen one."""

    before: TimedLayout | None
    after: TimedLayout


def time_before_after(task: LayoutTask, layout: Layout, *, step: int = 0) -> BeforeAfter:
    """Both timelines of the task's batch `step`. Raises PlanningError where there is no such."""
    if not 0 <= step < len(task.batches):
        raise PlanningError(
            f"step is {step}; the layout was made for {len(task.batches)} steps: give one of them, "
            "from 0"
        )
    batch, best = task.batches[step], layout.best
    after = _timed(task, best.replica, best.microbatch_tokens, batch, "full")
    return BeforeAfter(before=_plainest(task, layout, batch), after=after)


def _plainest(task: LayoutTask, layout: Layout, batch: StepSamples) -> TimedLayout | None:
    for candidate in _plain(layout):
        try:
            replica = candidate.cutting.cut(even=True)
            return _timed(task, replica, candidate.microbatch_tokens, batch, "packing")
        except PlanningError:
            continue  # no room for equal layers, or for unbalanced packs
    return None


def _plain(layout: Layout) -> Iterator[Candidate]:
    """What has one chunk a stage, with encoders on the first: of the chosen TP and PP before
    others, and of the chosen tokens before others."""
    chosen = layout.best

    def unlike(candidate: Candidate) -> tuple[bool, bool]:
        ours, theirs = chosen.replica.parallel, candidate.replica.parallel
        shape = (ours.tensor_ranks, ours.pipeline_stages)
        return (
            (theirs.tensor_ranks, theirs.pipeline_stages) != shape,
            candidate.microbatch_tokens != chosen.microbatch_tokens,
        )

    for candidate in sorted((chosen, *layout.others), key=unlike):
        parallel = candidate.replica.parallel
        if parallel.virtual_stages == 1 and parallel.encoder_stage == "first":
            yield candidate


def _timed(
    task: LayoutTask, replica: Replica, tokens: int, batch: StepSamples, strategy: Strategy
) -> TimedLayout:
    topology, cost = replica.topology(task.group), replica.cost(task.group)
    held = replica.held_tokens(task.group, tokens)
    options = PlanOptions(memory_tokens=held, cost=cost, strategy=strategy)
    plan = compose_step(batch, step=0, topology=topology, options=options)
    return TimedLayout(
        replica=replica,
        microbatch_tokens=held,
        strategy=strategy,
        timeline=step_timeline(plan, topology, cost),
    )


def chunk_layers(replica: Replica) -> list[int]:
    """How many of the decoder's layers each chunk holds, in model order."""
    names = replica.profile.names
    layers = [name.startswith("decoder.") and name.rsplit(".", 1)[-1].isdigit() for name in names]
    counts = np.add.reduceat(np.array(layers, np.int64), replica.bounds[:-1])
    return [int(count) for count in counts]
