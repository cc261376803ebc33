"""Asks the step planner, with a replica's own seconds and bytes, for the steps of the index."""

from dataclasses import dataclass, replace

import numpy as np

from dataservice.core.plan import StepPlan
from dataservice.core.plan_options import PlanOptions
from dataservice.planning.compose import StepSamples, compose_step
from dataservice.planning.layout.bubble_replica import BubbleAsk, in_bubbles
from dataservice.planning.layout.microbatches import mean_work
from dataservice.planning.layout.replica import Replica
from dataservice.planning.layout.task import LayoutTask


@dataclass(frozen=True, slots=True)
class StepPlanner:
    """What a replica's steps take. `ask`: for the schedules of bubbles."""

    task: LayoutTask
    ask: BubbleAsk

    def rough_s(self, replica: Replica, tokens: int) -> float:
        """Seconds of the first batch's step, planned in one pass. Raises PlanningError."""
        return self._one_pass(replica, tokens).predicted_s

    def full_s(self, replica: Replica, tokens: int) -> float:
        """Mean seconds of all batches' steps, planned as in training. Raises PlanningError where
        one of them has a sample that does not fit."""
        options = PlanOptions(
            memory_tokens=replica.held_tokens(self.task.group, tokens),
            cost=replica.cost(self.task.group),
        )
        plans = [self._plan(batch, replica, options) for batch in self.task.batches]
        return float(np.mean([plan.predicted_s for plan in plans]))

    def placed(self, replica: Replica, tokens: int) -> Replica:
        """The replica with a schedule of its bubbles, where encoders run in them: for as many
        microbatches as the first batch's step has. Raises PlanningError."""
        if replica.parallel.encoder_stage != "bubbles":
            return replica
        hidden = replace(replica, encoding_shown=0.0, in_bubbles=None)
        waves = self._one_pass(hidden, tokens).waves
        count = waves * replica.parallel.replicas
        mean = mean_work(self.task.batches[0], count, self.task.model.module_names)
        return in_bubbles(hidden, self.ask, mean, waves)

    def _one_pass(self, replica: Replica, tokens: int) -> StepPlan:
        options = PlanOptions(
            memory_tokens=replica.held_tokens(self.task.group, tokens),
            cost=replica.cost(self.task.group),
            pack="balanced",
            order="mmscale",
        )
        return self._plan(self.task.batches[0], replica, options)

    def _plan(self, batch: StepSamples, replica: Replica, options: PlanOptions) -> StepPlan:
        topology = replica.topology(self.task.group)
        return compose_step(batch, step=0, topology=topology, options=options)
