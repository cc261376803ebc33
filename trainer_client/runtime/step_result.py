"""What a step gave: its loss and where its seconds went, read when they are asked for."""

import time
from collections.abc import Mapping
from functools import cached_property

from trainer_client.runtime.clock import PhaseClock
from trainer_client.runtime.host_numbers import HostCopy
from trainer_client.runtime.peers import PeerGroup
from trainer_client.runtime.phases import StepTimes
from trainer_client.shard import PlanSummary


class StepResult:
    """The result of ``run_step`` and ``evaluate_step``.

    On a CPU all of it is known at once. On a GPU the host queued the step and ran ahead: reading
    ``loss``, ``seconds`` or ``phase_s`` waits until the device is through with the step, though not
    with what was queued after it. So read them after the optimizer's step, and ``phase_s`` on all
    replicas or on none: a replica that reads it alone waits until the others begin their next step.

    Attributes
    ----------
    loss: mean over the global batch's loss tokens, weighted where the job weighs them.
    loss_tokens: labels other than -100 over all replicas.
    seconds: this replica's own; on a GPU those of its stream.
    phase_s: seconds by phase, in the phases that the plan predicts: ``vision`` and ``audio``
        encoding, the ``exchange`` of features and ``llm`` (rings included), each in both
        directions; ``gradients``, what a step takes once: comparing plans, and the part of the sum
        of gradients that does not overlap with the last backward; and ``waiting`` for other
        replicas. They add up to ``seconds``.
    """

    def __init__(
        self,
        *,
        loss: HostCopy,
        loss_tokens: int,
        started_s: float,
        clock: PhaseClock,
        plan: PlanSummary,
        everyone: PeerGroup,
        chunks: int = 1,
    ) -> None:
        """``started_s``: when the step began, by ``time.perf_counter``. Stops the clock. Collective
        over ``everyone``, whose members all run ``chunks`` model chunks."""
        clock.stop()
        self.loss_tokens = loss_tokens
        self._loss = loss
        self._host_s = time.perf_counter() - started_s
        self._on_stream = clock.on_stream
        self._times = StepTimes(clock, plan, everyone, chunks=chunks)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(loss_tokens={self.loss_tokens})"  # reading the rest would wait
        )

    @cached_property
    def loss(self) -> float:
        return self._loss.read()[0]

    @property
    def seconds(self) -> float:
        return sum(self._times.spent.values()) if self._on_stream else self._host_s

    @property
    def phase_s(self) -> Mapping[str, float]:
        return self._times.phase_s
