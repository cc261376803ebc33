"""When each stage runs what in one planned step: the bars that a picture of the step is made of.

    plan ──► step_phases ──► chunk_times ──► simulate_1f1b ──► bars: lane, work, microbatch, time

    stage 0  ▒f0 ▒f1     b0▒ f2 b1▒ …      ▒ encoders    f forward    b backward
    stage 1      f0  b0  f1  b1    …       lanes: the stages of the replica that ends last,
                                           or, where there is one stage, the replicas

A replica is drawn at its own pace, as the exact simulator runs its microbatches. What it waits for
other replicas, in CP groups and for features, comes between its last bar and the sum of gradients.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from dataservice.core.plan import StepPlan
from dataservice.core.plan_options import CostModel
from dataservice.core.topology import Topology
from dataservice.planning.pipeline_parallel.simulator import simulate_1f1b
from dataservice.planning.stages.dispatch import encoder_loads
from dataservice.planning.step_time import Phases, chunk_times, step_phases, time_phases

Work = Literal["encoder_forward", "forward", "backward", "encoder_backward", "gradients"]
WORK: tuple[Work, ...] = get_args(Work)
EVERY_MICROBATCH = -1
# More replicas than lanes that an eye follows: these many are shown, from the first to end to the
# last.
MOST_REPLICAS = 16


class Bars(NamedTuple):
    """Bars [bars]: `lane` int64, `work` int64 into WORK, `microbatch` int64 in the order in which
    they enter (−1: all of them together), and float64 `start_s`, `end_s` from the step's begin."""

    lane: NDArray[np.int64]
    work: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]

    @property
    def seconds(self) -> NDArray[np.float64]:
        """How long each bar is: float64[bars]."""
        return self.end_s - self.start_s

    def where(self, chosen: NDArray[np.bool_]) -> "Bars":
        """Those of `chosen` bool[bars]."""
        return Bars(
            lane=self.lane[chosen],
            work=self.work[chosen],
            microbatch=self.microbatch[chosen],
            start_s=self.start_s[chosen],
            end_s=self.end_s[chosen],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimeline:
    """One planned step. `lanes` are their names; `step_s` the evaluator's seconds, of all replicas;
    `idle` the part of the lanes' seconds in which nothing is computed, exchanged or summed."""

    lanes: tuple[str, ...]
    bars: Bars
    step_s: float

    @property
    def idle(self) -> float:
        """Bubbles and waiting, as a part of the step."""
        whole = len(self.lanes) * self.step_s
        busy = float(self.bars.seconds.sum())
        return max(0.0, 1.0 - busy / whole) if whole > 0 else 0.0


def step_timeline(plan: StepPlan, topology: Topology, cost: CostModel) -> StepTimeline:
    """The bars of `plan` on `topology`, without those that take no time. O(waves · chunks · N).

    With several stages, the lanes are those of the replica that ends last by itself; where replicas
    meet in every wave, each wave is the slowest one's. With one stage, lanes are replicas, at most
    16 of them from the first to end to the last.
    """
    items = encoder_loads(plan, cost)
    phases = step_phases(plan, items, cost, topology)
    step_s = time_phases(phases, plan, items, topology, cost).total_s
    if topology.replicas_meet == "wave" and topology.pipeline_stages > 1:
        runs = [(0, _run(phases, topology))]
    else:
        each = [(r, _run(_of_replica(phases, r), topology)) for r in range(plan.replicas)]
        runs = sorted(each, key=lambda run: run[1].end_s.max(initial=0.0))
    if topology.pipeline_stages > 1:
        lanes = tuple(f"stage {stage}" for stage in range(topology.pipeline_stages))
        shown = [runs[-1][1]]
    else:
        places = np.linspace(0, len(runs) - 1, min(len(runs), MOST_REPLICAS)).round().astype(int)
        chosen = sorted((runs[place] for place in places), key=lambda run: run[0])
        lanes = tuple(f"replica {replica}" for replica, _ in chosen)
        shown = [run._replace(lane=run.lane + lane) for lane, (_, run) in enumerate(chosen)]
    bars = _joined([*shown, _gradients(len(lanes), step_s, cost.step.gradient_s)])
    return StepTimeline(lanes=lanes, bars=bars, step_s=step_s)


def _of_replica(phases: Phases, replica: int) -> Phases:
    mine = slice(replica, replica + 1)
    return phases._replace(decode=phases.decode[:, mine], encode=phases.encode[:, :, mine])


def _run(phases: Phases, topology: Topology) -> Bars:
    """The bars of one pipeline, whose lanes are its stages."""
    silent = np.zeros_like
    times = chunk_times(phases, topology)
    bare = chunk_times(
        phases._replace(encode=silent(phases.encode), exchange=silent(phases.exchange)), topology
    )
    if not times.forward.size:
        return _joined([])
    run = simulate_1f1b(times.forward, times.backward, virtual_stages=topology.virtual_stages)
    before_s = _outside_before_s(phases, topology) if times.outside_s else 0.0
    start, end = run.start_s + before_s, run.end_s + before_s
    # What a chunk takes more than its decoder, it encodes: first of all forward, last backward.
    encoded = start[:, :, 0] + (times.forward - bare.forward)
    encodes = end[:, :, 1] - (times.backward - bare.backward)
    stages = topology.pipeline_stages
    parts: list[Bars] = [
        _table("encoder_forward", start[:, :, 0], encoded, stages),
        _table("forward", encoded, end[:, :, 0], stages),
        _table("backward", start[:, :, 1], encodes, stages),
        _table("encoder_backward", encodes, end[:, :, 1], stages),
    ]
    ended_s = before_s + run.makespan_s
    after_s = times.outside_s - before_s
    parts.append(_everywhere("encoder_forward", stages, 0.0, before_s))
    parts.append(_everywhere("encoder_backward", stages, ended_s, ended_s + after_s))
    return _joined(parts)


def _outside_before_s(phases: Phases, topology: Topology) -> float:
    """Seconds of encoding and exchange before the pipeline fills, encoders spread over all stages:
    what the first stage would take of them forward, had it a stage's part."""
    part = phases._replace(
        decode=np.zeros_like(phases.decode), encode=phases.encode / topology.pipeline_stages
    )
    first = chunk_times(part, replace(topology, encoder_stage="first"))
    return float(first.forward.sum())


def _table(work: Work, start: NDArray[np.float64], end: NDArray[np.float64], stages: int) -> Bars:
    """Bars from start and end, float64[microbatch, chunk] each."""
    microbatch, chunk = np.indices(start.shape)
    return Bars(
        lane=(chunk % stages).ravel().astype(np.int64),
        work=np.full(start.size, WORK.index(work)),
        microbatch=microbatch.ravel().astype(np.int64),
        start_s=start.ravel(),
        end_s=end.ravel(),
    )


def _everywhere(work: Work, lanes: int, start_s: float, end_s: float) -> Bars:
    """One bar in every lane."""
    return Bars(
        lane=np.arange(lanes),
        work=np.full(lanes, WORK.index(work)),
        microbatch=np.full(lanes, EVERY_MICROBATCH),
        start_s=np.full(lanes, start_s),
        end_s=np.full(lanes, end_s),
    )


def _gradients(lanes: int, step_s: float, gradient_s: float) -> Bars:
    return _everywhere("gradients", lanes, step_s - gradient_s, step_s)


def _joined(parts: list[Bars]) -> Bars:
    """All bars that take time; rounding leaves others a 10^-12 of the step."""
    if not parts:
        none = np.zeros(0, np.int64)
        return Bars(none, none, none, np.zeros(0), np.zeros(0))
    bars = Bars(
        lane=np.concatenate([part.lane for part in parts]),
        work=np.concatenate([part.work for part in parts]),
        microbatch=np.concatenate([part.microbatch for part in parts]),
        start_s=np.concatenate([part.start_s for part in parts]),
        end_s=np.concatenate([part.end_s for part in parts]),
    )
    return bars.where(bars.seconds > 1e-9 * float(bars.end_s.max(initial=0.0)))
