"""`dataservice layout`: TP, PP, virtual stages, encoders' place, stages and recomputation together.

    every parallelism ─► stages ─► recomputation ─► topology, cost, memory ─► steps of the index
                         partition_  choose_          Replica                  compose_step, its
                         stages      recompute                                 evaluator

A candidate costs what the step planner, with the candidate's own seconds and bytes, makes of steps
drawn from the index: so it is judged by balanced steps, and by the one evaluator. All are planned
in one pass (`pack: balanced`), those near the best by strategy `full`, as training will be.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from dataservice.core.errors import PlanningError
from dataservice.core.plan_options import PlanOptions
from dataservice.core.topology import EncoderStage
from dataservice.planning.compose import StepSamples, compose_step
from dataservice.planning.layout.cluster import NodeGroup
from dataservice.planning.layout.costs import LayerShares, Precision, analytic_profile
from dataservice.planning.layout.cut_replica import CutTask
from dataservice.planning.layout.measured_profile import measured_profile, require_measured
from dataservice.planning.layout.microbatches import batch_work, microbatch_work
from dataservice.planning.layout.model import ModelDescription
from dataservice.planning.layout.profile import RECOMPUTE, LayerProfile
from dataservice.planning.layout.recompute import FULL
from dataservice.planning.layout.replica import Parallel, Replica

MICROBATCH_TOKENS = (2048, 4096, 8192, 16_384, 32_768, 65_536)
VIRTUAL_STAGES = (1, 2)
FINALISTS = 8
ENCODER_STAGES: tuple[EncoderStage, ...] = ("first", "own", "spread")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutTask:
    """What is asked: `model` on the GPUs of `group`, trained on steps such as `batches`; its layers
    as they were `measured`, or else computed."""

    model: ModelDescription
    group: NodeGroup
    batches: tuple[StepSamples, ...]
    precision: Precision = field(default_factory=Precision)
    measured: LayerProfile | None = None

    def __post_init__(self) -> None:
        if self.measured is not None:
            require_measured(self.measured, self.model)
        if not self.batches or not all(len(batch.lengths) for batch in self.batches):
            raise PlanningError("a layout is made for steps; give one batch of samples at least")
        names = [encoder.name for encoder in self.model.encoders]
        if strange := [name for name in names if name not in ("vision", "audio")]:
            raise PlanningError(
                f"an encoder is called {strange[0]!r}; the index has lengths for vision and audio: "
                "give it one of these names"
            )
        if self.model.generator:
            raise PlanningError(
                f"{self.model.name} has a generator, for whose work an index has no lengths: leave "
                "it out here, and use allocate_modules with its load"
            )


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
    """The best of the candidates, the others behind it, and what no layout goes below:
    `lower_bound_s`, all work without recomputation spread over all GPUs."""

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
    """The layout whose steps take least. Every combination of the sizes above that divides the GPUs
    is tried. Raises PlanningError where none fits, with what the nearest one lacks."""
    shapes = list(_shapes(task))
    planner = _StepPlanner(task)
    found: list[Candidate] = []
    refused: list[str] = []
    profiles = {ranks: _profile(task, ranks) for ranks in _tensor_ranks(task)}
    bound = min(_least_step_s(task, profile, ranks) for ranks, profile in profiles.items())
    for done, (parallel, tokens) in enumerate(shapes):
        profile = profiles[parallel.tensor_ranks]
        try:
            found.append(_candidate(planner, profile, parallel, tokens))
        except PlanningError as error:
            refused.append(f"{_words(parallel, tokens)}: {error}")
        if progress is not None:
            progress(done + 1, len(shapes), min((each.step_s for each in found), default=np.inf))
    ranked = _ranked(planner, found) if found else []
    if not ranked or not np.isfinite(ranked[0].step_s):
        raise _nothing_fits(task, profiles, refused)
    best = ranked[0]
    return Layout(
        best=best,
        others=tuple(ranked[1:]),
        choices=tuple(_choices(planner, best, ranked)),
        lower_bound_s=min(bound, best.step_s),
        refused=tuple(refused),
    )


def _nothing_fits(
    task: LayoutTask, profiles: Mapping[int, LayerProfile], refused: Sequence[str]
) -> PlanningError:
    """By how many bytes, were the states of all layers spread evenly over all GPUs; or the last
    refusal, where those would fit."""
    group, memory = task.group, task.group.device.memory_bytes
    least = min(
        float((profile.state_bytes + profile.optimizer_bytes * ranks / group.gpus).sum())
        * ranks
        / group.gpus
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
    return PlanningError(f"{head}. The last of {len(refused)} that were tried: {refused[-1]}")


def _tensor_ranks(task: LayoutTask) -> list[int]:
    """Powers of two inside a node that divide the GPUs."""
    powers = (1 << k for k in range(task.group.gpus_per_node.bit_length()))
    return [
        ranks
        for ranks in powers
        if task.group.gpus_per_node % ranks == 0 and task.group.gpus % ranks == 0
    ]


def _shapes(task: LayoutTask) -> Iterator[tuple[Parallel, int]]:
    """Every parallelism, with every size of a microbatch."""
    layers, gpus = task.model.decoder.layers, task.group.gpus
    longest = max(int(batch.lengths.llm_tokens.max()) for batch in task.batches)
    stages = [p for p in range(1, layers + 1) if p & (p - 1) == 0 and gpus % p == 0]
    places = ENCODER_STAGES if task.model.encoders else ENCODER_STAGES[:1]
    for ranks, pipeline, virtual, place in product(
        _tensor_ranks(task), stages, VIRTUAL_STAGES, places
    ):
        if gpus % (ranks * pipeline) or virtual * pipeline > layers:
            continue
        if pipeline == 1 and (virtual > 1 or place != "first"):
            continue
        if place == "own" and virtual > 1:
            continue
        parallel = Parallel(
            tensor_ranks=ranks,
            pipeline_stages=pipeline,
            virtual_stages=virtual,
            replicas=gpus // (ranks * pipeline),
            encoder_stage=place,
        )
        for tokens in MICROBATCH_TOKENS:
            if longest <= tokens * parallel.replicas:
                yield parallel, tokens
            if tokens >= longest:
                break  # a larger one only fills the pipeline worse


def _words(parallel: Parallel, tokens: int) -> str:
    return (
        f"TP {parallel.tensor_ranks}, PP {parallel.pipeline_stages}, {parallel.virtual_stages} "
        f"virtual stages, encoders {parallel.encoder_stage}, {tokens:,} tokens a microbatch"
    )


def _profile(task: LayoutTask, ranks: int) -> LayerProfile:
    if task.measured is not None:
        return measured_profile(
            task.measured, task.model, task.group, tensor_ranks=ranks, precision=task.precision
        )
    shares = LayerShares(tensor_ranks=ranks)
    return analytic_profile(task.model, task.group, shares=shares, precision=task.precision)


def _least_step_s(task: LayoutTask, profile: LayerProfile, ranks: int) -> float:
    """All work of a batch, nothing recomputed, spread over all GPUs; mean over the batches."""
    seconds = []
    for batch in task.batches:
        tokens, squares = batch_work(batch, task.model.module_names).columns(profile.modules)
        both = (
            pace.token_s * tokens + pace.square_s * squares
            for pace in (profile.forward, profile.backward)
        )
        seconds.append(float(sum(each.sum() for each in both)))
    return float(np.mean(seconds)) * ranks / task.group.gpus


def _candidate(
    planner: "_StepPlanner", profile: LayerProfile, parallel: Parallel, tokens: int
) -> Candidate:
    task = planner.task
    decoder, precision = task.model.decoder, task.precision
    filled = microbatch_work(task.batches[0], tokens, parallel.replicas, task.model.module_names)
    cutting = CutTask(
        profile=profile,
        parallel=parallel,
        group=task.group,
        work=filled.work,
        batch_microbatches=filled.in_batch,
        ring_token_bytes=2.0 * decoder.key_width * decoder.layers * precision.kept_bytes,
        row_bytes=decoder.hidden_size * precision.kept_bytes,
    )
    replica = cutting.cut()
    step_s = planner.step_s(replica, tokens, one_pass=True)
    return Candidate(cutting=cutting, replica=replica, microbatch_tokens=tokens, step_s=step_s)


def _ranked(planner: "_StepPlanner", found: Sequence[Candidate]) -> list[Candidate]:
    """Fastest first: the finalists planned in full, behind them the others as they were."""
    rough = sorted(found, key=lambda each: each.step_s)
    finalists = set(range(min(FINALISTS, len(rough))))
    for name in rough[0].choices:  # and the best of every other value, to be named beside it
        values = [each.choices[name] for each in rough]
        finalists |= {values.index(value) for value in set(values)}
    planned = [planner.in_full(rough[k]) for k in sorted(finalists)]
    final = sorted(planned, key=lambda each: each.step_s)
    return final + [each for k, each in enumerate(rough) if k not in finalists]


@dataclass(frozen=True, slots=True)
class _StepPlanner:
    """Asks the step planner for the seconds of a replica's steps."""

    task: LayoutTask

    def step_s(self, replica: Replica, tokens: int, *, one_pass: bool = False) -> float:
        """Mean seconds of the batches' steps. Raises PlanningError."""
        group = self.task.group
        topology = replica.topology(group)
        options = PlanOptions(
            memory_tokens=replica.held_tokens(group, tokens),
            cost=replica.cost(group),
            pack="balanced" if one_pass else None,
            order="mmscale" if one_pass else None,
        )
        batches = self.task.batches
        seconds = [
            compose_step(batch, step=0, topology=topology, options=options).predicted_s
            for batch in (batches[:1] if one_pass else batches)
        ]
        return float(np.mean(seconds))

    def in_full(self, candidate: Candidate) -> Candidate:
        """With the seconds of all batches, planned as in training; infinite where one of them has a
        sample that does not fit."""
        try:
            step_s = self.step_s(candidate.replica, candidate.microbatch_tokens)
        except PlanningError:
            step_s = np.inf
        return replace(candidate, step_s=step_s)


def _choices(
    planner: "_StepPlanner", best: Candidate, ranked: Sequence[Candidate]
) -> Iterator[Choice]:
    """Every decision beside the best that any other value of it reaches."""
    for name, chosen in best.choices.items():
        other = next((each for each in ranked if each.choices[name] != chosen), None)
        if other is not None:
            yield _choice(best, name, chosen, other.choices[name], other.step_s)
    even = _tried(planner, best, lambda: best.cutting.cut(even=True))
    counts = np.diff(best.replica.bounds).tolist()
    yield _choice(best, "stage_entries", counts, "equally many", even)
    everywhere = replace(
        best.replica.recompute, choice=np.full_like(best.replica.recompute.choice, FULL)
    )
    full = _tried(planner, best, lambda: replace(best.replica, recompute=everywhere))
    kinds = np.bincount(best.replica.recompute.choice, minlength=len(RECOMPUTE)).tolist()
    chosen_kinds = dict(zip(RECOMPUTE, kinds, strict=True))
    yield _choice(best, "recompute_entries", chosen_kinds, "full everywhere", full)


def _tried(planner: "_StepPlanner", best: Candidate, make: Callable[[], Replica]) -> float:
    """Seconds of the best candidate's steps with another replica; infinite where it has no room."""
    try:
        return planner.step_s(make(), best.microbatch_tokens)
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
