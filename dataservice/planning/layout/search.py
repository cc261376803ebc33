"""`dataservice layout`: TP, PP, virtual stages, encoders' place, stages and recomputation together.

    every parallelism ─► stages ─► recomputation ─► topology, cost, memory ─► steps of the index
                         partition_  choose_          Replica                  compose_step, its
                         stages      recompute                                 evaluator
                                                 └─► bubbles of the most promising: schedule_bubbles

A candidate costs what the step planner, with the candidate's own seconds and bytes, makes of steps
drawn from the index: so it is judged by balanced steps, and by the one evaluator. All are planned
in one pass (`pack: balanced`), those near the best by strategy `full`, as training will be.

Encoders in bubbles take a schedule of each candidate. Those are made in the order of what the
candidate could reach if encoding cost nothing, until no other could still be better.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from dataservice.core.errors import PlanningError
from dataservice.planning.layout.bubble_replica import BubbleAsk
from dataservice.planning.layout.cut_replica import CutTask
from dataservice.planning.layout.microbatches import batch_work, microbatch_work
from dataservice.planning.layout.profile import RECOMPUTE, LayerProfile
from dataservice.planning.layout.recompute import FULL
from dataservice.planning.layout.replica import Parallel, Replica
from dataservice.planning.layout.search_bound import least_step_s
from dataservice.planning.layout.search_shapes import MICROBATCH_TOKENS, shape_words, shapes
from dataservice.planning.layout.step_planner import StepPlanner
from dataservice.planning.layout.task import LayoutTask

__all__ = [
    "Candidate",
    "Choice",
    "Layout",
    "LayoutTask",
    "Progress",
    "search_layout",
]

FINALISTS = 8
# Bubble schedules that are made at most: each takes up to a second or two.
SCHEDULES = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One layout, and the mean seconds of the steps that the step planner makes by it."""

    replica: Replica
    microbatch_tokens: int
    step_s: float
    cutting: CutTask

    @property
    def choices(self) -> dict[str, object]:
        """What was chosen, by name."""
        parallel = self.replica.parallel
        return {
            "tensor_parallel": parallel.tensor_ranks,
            "pipeline_parallel": parallel.pipeline_stages,
            "virtual_stages": parallel.virtual_stages,
            "encoder_stage": parallel.encoder_stage,
            "microbatch_tokens": self.microbatch_tokens,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One decision: the best that any other value of it reaches, and how much slower that is."""

    name: str
    chosen: object
    runner_up: object
    runner_up_s: float
    gain: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The best of the candidates, the others behind it, and what no layout goes below,
    `lower_bound_s`; and why others cannot be. Of those with encoders in bubbles, only those are
    here that were scheduled."""

    best: Candidate
    others: tuple[Candidate, ...]
    choices: tuple[Choice, ...]
    lower_bound_s: float
    refused: tuple[str, ...]

    @property
    def gap(self) -> float:
        """How far the step is above the lower bound, relatively."""
        return self.best.step_s / self.lower_bound_s - 1.0 if self.lower_bound_s > 0 else 0.0


Progress = Callable[[int, int, float], None]
"""Called with (candidates done, candidates in all, best seconds so far)."""


def search_layout(task: LayoutTask, *, progress: Progress | None = None) -> Layout:
    """The layout whose steps take least, of all `shapes`. Raises PlanningError where none fits,
    with what the nearest one lacks."""
    # What has room for the longest sample has it for all, so the first batch is the one with it.
    longest_first = sorted(task.batches, key=lambda batch: -batch.lengths.llm_tokens.max())
    return _Search(replace(task, batches=tuple(longest_first)), progress).layout()


class _Search:
    """One search: what was found so far, and why the rest cannot be."""

    def __init__(self, task: LayoutTask, progress: Progress | None) -> None:
        self._task, self._progress = task, progress
        profile = cache(task.profile)
        self._profiles = {ranks: profile(ranks) for ranks in task.tensor_ranks}
        ask = BubbleAsk(
            group=task.group,
            profile=profile,
            linkless=cache(partial(task.profile, linkless=True)),
        )
        self._batches = batch_work(task.batches, task.model.module_names)
        self._planner = StepPlanner(task, ask)
        self._found: list[Candidate] = []
        self._refused: list[str] = []
        self._done = self._total = 0  # candidates, for the progress

    def layout(self) -> Layout:
        """See `search_layout`."""
        tried = list(shapes(self._task))
        self._total = len(tried) + FINALISTS
        waiting: list[Candidate] = []
        for parallel, tokens in tried:
            made = self._candidate(parallel, tokens)
            if made is not None and parallel.encoder_stage == "bubbles":
                waiting.append(made)
            elif made is not None:
                self._found.append(made)
                self._tell()
        self._schedule(sorted(waiting, key=lambda each: each.step_s))
        ranked = self._ranked()
        if not ranked:
            raise _nothing_fits(self._task, self._profiles, self._refused)
        best = ranked[0]
        return Layout(
            best=best,
            others=tuple(ranked[1:]),
            choices=tuple(_choices(self._planner, best, ranked)),
            lower_bound_s=least_step_s(self._task, self._profiles),
            refused=tuple(self._refused),
        )

    def _tell(self) -> None:
        self._done += 1
        if self._progress is not None:
            best_s = min((each.step_s for each in self._found), default=np.inf)
            self._progress(self._done, self._total, best_s)

    def _candidate(self, parallel: Parallel, tokens: int) -> Candidate | None:
        """One shape, cut and priced; None where it cannot be, or is another one."""
        try:
            cutting = self._cutting(parallel, tokens)
            replica = cutting.cut()
            if parallel.encoder_stage == "cut" and not replica.is_cut:
                raise PlanningError("no stage ends inside an encoder: it is another place")
            if parallel.encoder_stage == "bubbles":  # what it could reach: bubbles hide everything
                replica = replace(replica, encoding_shown=0.0)
            step_s = self._planner.rough_s(replica, tokens)
        except PlanningError as error:
            self._refuse(parallel, tokens, error)
            return None
        return Candidate(cutting=cutting, replica=replica, microbatch_tokens=tokens, step_s=step_s)

    def _refuse(self, parallel: Parallel, tokens: int, error: PlanningError) -> None:
        self._refused.append(f"{shape_words(parallel, tokens)}: {error}")
        self._tell()

    def _cutting(self, parallel: Parallel, tokens: int) -> CutTask:
        task, modules = self._task, self._task.model.module_names
        return CutTask(
            profile=self._profiles[parallel.tensor_ranks],
            parallel=parallel,
            group=task.group,
            work=microbatch_work(task.batches[0], tokens, parallel.replicas, modules),
            batches=self._batches,
            ring_token_bytes=task.ring_token_bytes,
            row_bytes=task.row_bytes,
            overlap_gradients=task.overlap_gradients,
        )

    def _schedule(self, waiting: Sequence[Candidate]) -> None:
        """Schedules of bubbles, most promising first, until none can be better any more."""
        best_s, made = np.inf, 0
        for each in waiting:
            if made >= SCHEDULES or each.step_s >= best_s:
                self._tell()
                continue
            parallel, tokens = each.replica.parallel, each.microbatch_tokens
            try:
                replica = self._planner.placed(each.replica, tokens)
                step_s = self._planner.rough_s(replica, tokens)
            except PlanningError as error:
                self._refuse(parallel, tokens, error)
                continue
            self._found.append(replace(each, replica=replica, step_s=step_s))
            best_s, made = min(best_s, step_s), made + 1
            self._tell()

    def _ranked(self) -> list[Candidate]:
        """Fastest first: the finalists planned in full, which are the first, and of every value of
        a choice the first, to be named beside it; behind them the others as they were. One without
        room for a later batch is refused, and the next is a finalist in its place."""
        self._total = self._done + len(self._found)
        final: list[Candidate] = []
        others: list[Candidate] = []
        planned: set[tuple[str, object]] = set()
        for each in sorted(self._found, key=lambda each: each.step_s):
            if len(final) >= FINALISTS and planned.issuperset(each.choices.items()):
                others.append(each)
                self._tell()
                continue
            tokens = each.microbatch_tokens
            try:
                step_s = self._planner.full_s(each.replica, tokens)
            except PlanningError as error:
                self._refuse(each.replica.parallel, tokens, error)
                continue
            final.append(replace(each, step_s=step_s))
            planned.update(each.choices.items())
            self._tell()
        return sorted(final, key=lambda each: each.step_s) + others


def _nothing_fits(
    task: LayoutTask, profiles: Mapping[int, LayerProfile], refused: Sequence[str]
) -> PlanningError:
    """By how many bytes, were the states of all layers spread evenly over all GPUs; or the last
    refusal, where those would fit, and where no shape was tried, the longest sample."""
    group, memory = task.group, task.group.device.memory_bytes
    least = min(
        float((profile.state_bytes + profile.optimizer_bytes).sum()) * ranks / group.gpus
        for ranks, profile in profiles.items()
    )
    head = (
        f"no layout of {task.model.name} on {group.gpus} GPUs of {memory:,.0f} bytes holds its "
        "weights and a step of these samples"
    )
    if least > memory:
        return PlanningError(
            f"{head}: weights, gradients and optimizer states alone, spread evenly, are "
            f"{least:,.0f} bytes a GPU, {least - memory:,.0f} too many. Give at least "
            f"{int(np.ceil(group.gpus * least / memory)):,} GPUs, or freeze modules"
        )
    if not refused:
        return PlanningError(
            f"{head}: the longest has {task.longest_tokens:,} tokens, and {group.gpus} replicas "
            f"take {group.gpus * MICROBATCH_TOKENS[-1]:,} at most. Give more GPUs, or leave it out"
        )
    return PlanningError(f"{head}. The last of {len(refused)} that were tried: {refused[-1]}")


def _choices(
    planner: StepPlanner, best: Candidate, ranked: Sequence[Candidate]
) -> Iterator[Choice]:
    """Every decision beside the best that any other value of it reaches."""
    for name, chosen in best.choices.items():
        other = next((each for each in ranked if each.choices[name] != chosen), None)
        if other is not None:
            yield _choice(best, name, chosen, other.choices[name], other.step_s)
    even = _tried(planner, best, partial(best.cutting.cut, even=True))
    counts = np.diff(best.replica.bounds).tolist()
    yield _choice(best, "stage_entries", counts, "equally many", even)
    everywhere = replace(
        best.replica.recompute, choice=np.full_like(best.replica.recompute.choice, FULL)
    )
    full = _tried(planner, best, lambda: replace(best.replica, recompute=everywhere))
    kinds = np.bincount(best.replica.recompute.choice, minlength=len(RECOMPUTE)).tolist()
    chosen_kinds = dict(zip(RECOMPUTE, kinds, strict=True))
    yield _choice(best, "recompute_entries", chosen_kinds, "full everywhere", full)


def _tried(planner: StepPlanner, best: Candidate, make: Callable[[], Replica]) -> float:
    """Seconds of the best candidate's steps with another replica; infinite where it has no room."""
    tokens = best.microbatch_tokens
    try:
        return planner.full_s(planner.placed(make(), tokens), tokens)
    except PlanningError:
        return np.inf


def _choice(
    best: Candidate, name: str, chosen: object, runner_up: object, runner_up_s: float
) -> Choice:
    return Choice(
        name=name,
        chosen=chosen,
        runner_up=runner_up,
        runner_up_s=runner_up_s,
        gain=runner_up_s / best.step_s - 1.0,
    )
