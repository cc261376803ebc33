"""Each module on GPUs of its own, for the samples of an index: `allocate_modules` asked.

    samples ─► loads at every TP ─► allocate_modules ─► GPUs, TP, DP, PP of encoders, decoder,
               (one recomputation                        generator; seconds by MMScale's formula
                for all, the best)                                      │
                                                                        ▼
                         the step planner's seconds, as of a pipeline whose first stages encode

The formula takes a mean sample for each microbatch. A job's ranks all belong to replicas of one
shape, so such a layout is a figure to compare with, and not one that a job can name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dataservice.core.cost import ContextCost, PhaseCost, StepCost
from dataservice.core.errors import PlanningError
from dataservice.core.plan_options import CostModel, PlanOptions
from dataservice.core.topology import Topology
from dataservice.planning.compose import StepSamples, compose_step
from dataservice.planning.layout.allocate import Allocation, ModuleAllocation, allocate_modules
from dataservice.planning.layout.allocate_mix import NodeKind, allocate_mix
from dataservice.planning.layout.cluster import NodeGroup
from dataservice.planning.layout.costs import LayerShares, Precision, analytic_profile
from dataservice.planning.layout.microbatches import sample_work
from dataservice.planning.layout.model import ModelDescription
from dataservice.planning.layout.module_load import ModuleLoad, load_of_modules
from dataservice.planning.layout.profile import RECOMPUTE, LayerProfile, LayerWork, Recompute
from dataservice.planning.layout.replica import (
    DECODER,
    Parallel,
    Replica,
    ring_seconds,
    row_seconds,
)
from dataservice.planning.layout.search_shapes import MICROBATCH_TOKENS
from dataservice.planning.layout.task import (
    LayoutTask,
    require_lengths,
    require_steps,
    tensor_ranks_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleLayout:
    """The allocation with the least seconds by its formula, for `batch` samples a step, all layers
    recomputed as `recompute` says."""

    allocation: Allocation
    recompute: Recompute
    batch: int


def lay_out_modules(
    model: ModelDescription,
    group: NodeGroup,
    batches: Sequence[StepSamples],
    *,
    generator_tokens: int | None = None,
    precision: Precision | None = None,
    profile: Callable[[int], LayerProfile] | None = None,
) -> ModuleLayout:
    """GPUs for every module of `model`. `generator_tokens`: what its generator makes of a sample;
    an index has no lengths for it. `profile`: of the model over so many tensor-parallel ranks,
    computed where it is left out. Several encoders share their GPUs. Raises PlanningError."""
    if model.generator and not generator_tokens:
        raise PlanningError(
            f"{model.name} has a generator, and an index has no lengths for what it makes: say how "
            "many tokens of it a sample has, as generator_tokens (--generator-tokens)"
        )
    if generator_tokens and not model.generator:
        raise PlanningError(
            f"generator_tokens is {generator_tokens}, and {model.name} has no generator: leave "
            "generator_tokens (--generator-tokens) out"
        )
    require_steps(batches)
    require_lengths(model)
    made = profile or (lambda ranks: _computed(model, group, ranks, precision))
    profiles = {ranks: made(ranks) for ranks in tensor_ranks_of(group)}
    work = _work(model, batches, generator_tokens)
    batch = round(float(np.mean([len(each.lengths) for each in batches])))
    found: list[ModuleLayout] = []
    refused: list[PlanningError] = []
    for kind in RECOMPUTE:
        try:
            made_by = _allocated(model, group, profiles, work, kind, batch)
            found.append(ModuleLayout(allocation=made_by, recompute=kind, batch=batch))
        except PlanningError as error:
            refused.append(error)
    if not found:
        raise refused[-1]
    return min(found, key=lambda each: each.allocation.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedLayout:
    """Encoders and decoder on the kinds of nodes on which a step takes least, by the formula."""

    modules: ModuleLayout
    encoder_group: NodeGroup
    decoder_group: NodeGroup


def lay_out_mix(tasks: Sequence[LayoutTask]) -> MixedLayout:
    """Encoders and decoder on GPUs of their own, of any kind of nodes: the same question for each
    of these kinds. Exact by MMScale's formula. Raises PlanningError where nothing fits, and where
    the model has no encoder."""
    model, batches = tasks[0].model, tasks[0].batches
    names = [encoder.name for encoder in model.encoders]
    if not names or model.generator:
        raise PlanningError(
            f"{model.name} has {len(names)} encoders and "
            f"{'a' if model.generator else 'no'} generator; over a mix of nodes a decoder and its "
            "encoders are laid out: leave one kind of nodes in the cluster file"
        )
    work = _work(model, batches, None)
    batch = round(float(np.mean([len(each.lengths) for each in batches])))
    found: list[MixedLayout] = []
    refused: list[PlanningError] = []
    for recompute in RECOMPUTE:
        kinds = [_kind(task, names, work, recompute) for task in tasks]
        try:
            made = allocate_mix(kinds, batch=batch)
        except PlanningError as error:
            refused.append(error)
            continue
        found.append(
            MixedLayout(
                modules=ModuleLayout(allocation=made.allocation, recompute=recompute, batch=batch),
                encoder_group=tasks[made.encoder_kind].group,
                decoder_group=tasks[made.decoder_kind].group,
            )
        )
    if not found:
        raise refused[-1]
    return min(found, key=lambda each: each.modules.allocation.seconds)


def _kind(
    task: LayoutTask, encoders: Sequence[str], work: LayerWork, recompute: Recompute
) -> NodeKind:
    group = task.group
    profiles = {ranks: task.profile(ranks) for ranks in tensor_ranks_of(group)}
    link = group.link_bytes_per_s(group.gpus)

    def load(names: Sequence[str]) -> ModuleLoad:
        return load_of_modules(names, profiles, work, recompute, link_bytes_per_s=link)

    return NodeKind(
        gpus=group.gpus,
        memory_bytes=group.device.memory_bytes,
        encoder=load(encoders),
        decoder=load((DECODER,)),
    )


def _computed(
    model: ModelDescription, group: NodeGroup, ranks: int, precision: Precision | None
) -> LayerProfile:
    shares = LayerShares(tensor_ranks=ranks)
    return analytic_profile(model, group, shares=shares, precision=precision)


def _work(
    model: ModelDescription, batches: Sequence[StepSamples], generator_tokens: int | None
) -> LayerWork:
    known = [name for name in model.module_names if not _generates(model, name)]
    work = sample_work(batches, known)
    if not model.generator:
        return work
    made = np.full(sum(len(batch.lengths) for batch in batches), float(generator_tokens or 0))
    named = {name: (work.tokens[name], work.squares[name]) for name in known}
    # Its operations are known a token alone.
    return LayerWork.of(**named, **{model.generator.name: (made, np.zeros_like(made))})


def _generates(model: ModelDescription, name: str) -> bool:
    return model.generator is not None and name == model.generator.name


def _allocated(
    model: ModelDescription,
    group: NodeGroup,
    profiles: dict[int, LayerProfile],
    work: LayerWork,
    recompute: Recompute,
    batch: int,
) -> Allocation:
    def load(names: Sequence[str]) -> ModuleLoad | None:
        if not names:
            return None
        link = group.link_bytes_per_s(group.gpus)
        return load_of_modules(names, profiles, work, recompute, link_bytes_per_s=link)

    backbone = load((DECODER,))
    assert backbone is not None
    return allocate_modules(
        backbone,
        gpus=group.gpus,
        batch=batch,
        memory_bytes=group.device.memory_bytes,
        encoder=load([encoder.name for encoder in model.encoders]),
        generator=load([model.generator.name] if model.generator else []),
    )


def formula_s(task: LayoutTask, replica: Replica, batch: int) -> float:
    """What MMScale's formula makes of a replica's layout: a microbatch is the mean sample, the
    first fills the pipeline, each further one takes the slowest stage; then gradients."""
    cost, parallel = replica.cost(task.group), replica.parallel
    work = sample_work(task.batches, task.model.module_names)
    tokens, squares = (
        {name: float(each.mean()) for name, each in of.items()}
        for of in (work.tokens, work.squares)
    )
    llm = cost.llm
    decoder_s = llm.group_s + llm.linear_s_per_token * tokens[DECODER]
    decoder_s += llm.attention_s_per_token2 * squares[DECODER]
    topology = replica.topology(task.group)
    chunk_s = decoder_s * np.array(topology.chunk_shares)
    outside_s = 0.0
    for name, phase, shares in zip(
        ("vision", "audio"), (cost.vision, cost.audio), topology.encoder_shares, strict=True
    ):
        if name not in tokens:
            continue
        encoding_s = phase.batch_s + phase.linear_s_per_token * tokens[name]
        encoding_s += phase.quadratic_s_per_token2 * squares[name]
        if replica.outside:
            outside_s += encoding_s / parallel.pipeline_stages
        else:
            chunk_s += encoding_s * np.array(shares)
    stage_s = chunk_s.reshape(-1, parallel.pipeline_stages).sum(axis=0)
    microbatches = -(-batch // parallel.replicas)
    slowest_s = float(stage_s.max())
    fill_s = slowest_s + (float(stage_s.sum()) - slowest_s) / parallel.virtual_stages
    steady_s = (microbatches - 1) * slowest_s
    return fill_s + steady_s + microbatches * outside_s + cost.step.gradient_s


def planned_s(task: LayoutTask, made: ModuleLayout) -> float:
    """Mean seconds of the batches' steps by the step planner, as of a pipeline whose first stages
    are the encoders' and take as much longer as they have fewer data-parallel ranks; at the size of
    a microbatch that suits it best. Infinite where no size has room. Raises PlanningError where a
    module generates, which no step has."""
    if task.model.generator:
        raise PlanningError(f"{task.model.name} has a generator, which the step planner does not")
    plans = _Planned(task, made)
    rough = [(plans.step_s(tokens, rough=True), tokens) for tokens in plans.sizes()]
    if not rough or not np.isfinite(min(rough)[0]):
        return np.inf
    return plans.step_s(min(rough)[1], rough=False)


class _Planned:
    """An allocation as the evaluator can have it."""

    def __init__(self, task: LayoutTask, made: ModuleLayout) -> None:
        self._task, self._recompute = task, made.recompute
        allocation = made.allocation
        self._decoder = allocation[DECODER]
        others = [each for each in allocation.modules if each.name != DECODER]
        self._encoder: ModuleAllocation | None = others[0] if others else None
        self._gradients_s = allocation.gradients_s
        self._profile = task.profile(self._decoder.tensor_ranks)
        self._topology, self._cost = self._as_topology(), self._as_cost()

    def sizes(self) -> list[int]:
        """Tokens of a microbatch for which the decoder's first stage has room."""
        decoder, profile = self._decoder, self._profile
        mine = profile.entries_of(DECODER)
        optimizer = profile.optimizer_bytes / decoder.data_ranks
        states = float((profile.state_bytes + optimizer)[mine].sum()) / decoder.pipeline_stages
        # It keeps as many microbatches as there are stages, of its part of the layers.
        kept = float(profile.kept_token_bytes[self._recompute][mine].sum())
        free = self._task.group.device.memory_bytes - states
        room = free / kept if kept > 0 else np.inf  # a frozen decoder keeps nothing
        enough = self._task.longest_tokens / decoder.data_ranks
        return [tokens for tokens in MICROBATCH_TOKENS if enough <= tokens <= room]

    def step_s(self, tokens: int, *, rough: bool) -> float:
        options = PlanOptions(
            memory_tokens=tokens,
            cost=self._cost,
            pack="balanced" if rough else None,
            order="mmscale" if rough else None,
        )
        batches = self._task.batches[:1] if rough else self._task.batches
        try:
            plans = [
                compose_step(batch, step=0, topology=self._topology, options=options)
                for batch in batches
            ]
        except PlanningError:
            return np.inf
        return float(np.mean([plan.predicted_s for plan in plans]))

    def _as_topology(self) -> Topology:
        decoder, encoder = self._decoder, self._encoder
        ahead = encoder.pipeline_stages if encoder else 0
        stages = ahead + decoder.pipeline_stages
        shares = (1.0,) * ahead + (0.0,) * decoder.pipeline_stages
        group = self._task.group
        return Topology(
            world_size=stages * decoder.data_ranks,
            ranks_per_replica=stages,
            pipeline_stages=stages,
            replicas_per_node=self._parallel().replicas_per_node(group),
            replicas_meet="step",
            encoder_stage="cut" if encoder else "first",
            encoders_train=any(not each.frozen for each in self._task.model.encoders),
            stage_shares=(0.0,) * ahead + self._decoder_shares(),
            vision_shares=shares if encoder else (),
            audio_shares=shares if encoder else (),
        )

    def _decoder_shares(self) -> tuple[float, ...]:
        """Whole layers, as many a stage as the formula has in the fullest."""
        stages, layers = self._decoder.pipeline_stages, self._task.model.decoder.layers
        most = -(-layers // stages)
        return tuple(float(max(0, min(most, layers - most * stage))) for stage in range(stages))

    def _parallel(self) -> Parallel:
        decoder = self._decoder
        return Parallel(
            tensor_ranks=decoder.tensor_ranks,
            pipeline_stages=decoder.pipeline_stages,
            virtual_stages=1,
            replicas=decoder.data_ranks,
        )

    def _as_cost(self) -> CostModel:
        task, encoder = self._task, self._encoder
        encoding = task.profile(encoder.tensor_ranks) if encoder else self._profile
        intra_s, inter_s = ring_seconds(self._parallel(), task.group, task.ring_token_bytes)
        row_intra_s, row_inter_s = row_seconds(self._parallel(), task.group, task.row_bytes)
        token_s, square_s, constant_s = self._paces(self._profile, DECODER)
        return CostModel(
            llm=ContextCost(
                linear_s_per_token=token_s,
                attention_s_per_token2=square_s,
                group_s=constant_s,
                ring_intra_s_per_token=intra_s,
                ring_inter_s_per_token=inter_s,
            ),
            vision=self._phase("vision", encoding),
            audio=self._phase("audio", encoding),
            step=StepCost(
                feature_intra_s_per_token=row_intra_s,
                feature_inter_s_per_token=row_inter_s,
                gradient_s=self._gradients_s,
            ),
        )

    def _phase(self, name: str, profile: LayerProfile) -> PhaseCost:
        encoder = self._encoder
        if encoder is None or name not in encoder.name.split("+"):
            return PhaseCost(linear_s_per_token=0.0)
        served = self._decoder.data_ranks / encoder.data_ranks
        token_s, square_s, constant_s = self._paces(profile, name)
        return PhaseCost(
            linear_s_per_token=token_s * served,
            quadratic_s_per_token2=square_s * served,
            batch_s=constant_s * served,
        )

    def _paces(self, profile: LayerProfile, module: str) -> tuple[float, float, float]:
        """Both passes of a module and what it makes again: seconds a token, a squared one, once."""
        mine, recompute = profile.entries_of(module), RECOMPUTE.index(self._recompute)
        token_s, square_s, constant_s = (
            float(profile.both_passes(of, recompute)[mine].sum())
            for of in ("token_s", "square_s", "constant_s")
        )
        return token_s, square_s, constant_s
