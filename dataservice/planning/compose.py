"""All stages of one step, in order: pack → group → assign → order → dispatch → StepPlan.

Every stage reports its cost before and after and a lower bound, in its own unit, and every
stage can be a named baseline, so that a comparison runs through this same code.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dataservice.core.layout import padded_tokens, sample_starts
from dataservice.core.plan import StageReport, StepPlan
from dataservice.core.sample import LengthTable, Modality
from dataservice.core.topology import Topology
from dataservice.planning.context.groups import ContextPlan, ContextWaves, plan_context_waves
from dataservice.planning.context.many import plan_many_waves
from dataservice.planning.context.static import static_waves
from dataservice.planning.context.units import Degrees
from dataservice.planning.dispatch import dispatch_items, dispatch_reports, encoder_items
from dataservice.planning.loads.partition import partition
from dataservice.planning.options import PlanOptions
from dataservice.planning.packs.bfd import pack_bfd
from dataservice.planning.packs.isf import pack_isf
from dataservice.planning.packs.limits import IsfLimits, isf_limits
from dataservice.planning.packs.padded import pack_padded, padded_sum, padded_to_longest
from dataservice.planning.pipeline.waves import order_waves
from dataservice.planning.seats import seat_packs

# Packs that level many samples are quick. Those formed jointly with their groups take longer and
# are tried where the quick ones end this far from the bound: few samples, and many.
FEW_SAMPLES = 8192
WORTH_TRYING = (1.003, 1.03)

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSamples:
    """The samples of a step in draw order: `sample_ids` int64[n], `epoch` int32[n], lengths."""

    sample_ids: NDArray[np.int64]
    epoch: NDArray[np.int32]
    lengths: LengthTable


def split_window(
    lengths: LengthTable, *, steps: int, options: PlanOptions, limits: IsfLimits | None = None
) -> NDArray[np.int32]:
    """Which step of a window each drawn sample is trained in: int32[n].

    Packs of the whole window are spread over its steps by tokens, so that steps cost alike
    (OmniBal's grouping over many batches). It looks at lengths alone: the same at any N.
    """
    if steps <= 1 or len(lengths) == 0:
        return np.zeros(len(lengths), dtype=np.int32)
    pack_of = _pack_isf(lengths, limits or step_limits(lengths, options))
    pack_tokens = np.bincount(pack_of, weights=lengths.llm_tokens)
    return partition(pack_tokens, steps).rank_of[pack_of]


def compose_step(
    samples: StepSamples,
    *,
    step: int,
    topology: Topology,
    options: PlanOptions,
    limits: IsfLimits | None = None,
) -> StepPlan:
    """Plan one step. Pure; raises PlanningError where a sample cannot fit.

    `limits` for ISF are found once a job, over all its samples; without them the paper's rule
    is applied to the step's own.
    """
    lengths, stages = samples.lengths, options.stages
    replicas, replicas_per_node = topology.replicas, topology.replicas_per_node
    degree = _static_degree(lengths, replicas, options)
    pack_of, charged = _pack(lengths, degree, options, limits)
    waves, bound_s = _group(lengths, pack_of, charged, degree, replicas, replicas_per_node, options)
    reports = [
        _pack_report(lengths, charged, waves, options),
        _group_report(lengths, waves, bound_s, replicas, options),
    ]
    if stages.assign == "balanced":
        waves, report = seat_packs(waves, replicas=replicas)
        reports.append(report)
    waves, report = order_waves(
        waves,
        algorithm=stages.order,
        stages=topology.pipeline_stages,
        virtual_stages=topology.virtual_stages,
    )
    reports.append(report)
    grouped = _grouped_plan(samples, waves, step, replicas, options)
    items = encoder_items(grouped, options.cost)
    item_replica = dispatch_items(
        items,
        replicas=replicas,
        replicas_per_node=replicas_per_node,
        algorithm=stages.dispatch,
    )
    encoders = dispatch_reports(items, item_replica, replicas, stages.dispatch)
    return _finished_plan(grouped, item_replica, (*reports, *encoders))


def _static_degree(lengths: LengthTable, replicas: int, options: PlanOptions) -> int:
    """The one degree of static context; 1 where degrees are chosen pack by pack."""
    if options.stages.context != "static":
        return 1
    longest = int(lengths.llm_tokens.max(initial=1))
    return options.static_degree or options.static_degree_for(longest, replicas)


def _pack(
    lengths: LengthTable,
    degree: int,
    options: PlanOptions,
    limits: IsfLimits | None,
) -> tuple[NDArray[np.int32] | None, NDArray[np.int64]]:
    """Packs (None: left to the group stage) and the lengths that are paid for, int64[n].

    A pack fills the memory of `degree` replicas, its samples padded for that degree.
    """
    tokens = padded_tokens(lengths.llm_tokens, degree)
    room_tokens = options.memory_tokens * degree
    match options.stages.pack:
        case "auto" | "joint" | "balanced":
            return None, tokens
        case "isf":
            return _pack_isf(lengths, limits or step_limits(lengths, options)), tokens
        case "bfd":
            no_vision = np.zeros_like(tokens)
            packing = pack_bfd(tokens, no_vision, max_text=room_tokens, max_vision=1)
            return packing.pack_of, tokens
        case "padded":
            pack_of = pack_padded(tokens, max_tokens=room_tokens, by_length=False)
            return pack_of, padded_to_longest(tokens, pack_of)
        case _:
            pack_of = pack_padded(tokens, max_tokens=room_tokens, by_length=True)
            return pack_of, padded_to_longest(tokens, pack_of)


def step_limits(lengths: LengthTable, options: PlanOptions, method: str = "paper") -> IsfLimits:
    """ISF limits within a replica's memory: `search` is worth its tenths of a second once a job."""
    return isf_limits(
        lengths.llm_tokens,
        lengths.encoder_tokens(Modality.VISION),
        method=method,
        cap_text=options.memory_tokens,
    )


def _pack_isf(lengths: LengthTable, limits: IsfLimits) -> NDArray[np.int32]:
    return pack_isf(
        lengths.llm_tokens,
        lengths.encoder_tokens(Modality.VISION),
        max_text=limits.max_text,
        max_vision=limits.max_vision,
        min_text=limits.min_text,
        min_vision=limits.min_vision,
    ).pack_of


def _group(
    lengths: LengthTable,
    pack_of: NDArray[np.int32] | None,
    charged: NDArray[np.int64],
    degree: int,
    replicas: int,
    replicas_per_node: int | None,
    options: PlanOptions,
) -> tuple[tuple[ContextPlan, ...], float]:
    """Waves of CP groups, and a lower bound of their summed makespans."""
    tokens = lengths.llm_tokens.astype(np.int64)
    if options.stages.context == "static":
        assert pack_of is not None, "options refuse static context without packs"
        waves = static_waves(
            tokens, pack_of, charged, replicas=replicas, degree=degree, cost=options.cost.llm
        )
        return waves, float(options.cost.llm.work_s(tokens).sum()) / replicas
    many = joint = None
    degrees: Degrees = "power_of_two" if options.stages.context == "power_of_two" else "any"
    if options.stages.pack in ("auto", "balanced"):
        many = plan_many_waves(
            tokens,
            ranks=replicas,
            memory_tokens=options.memory_tokens,
            cost=options.cost.llm,
            ranks_per_node=replicas_per_node,
            degrees=degrees,
        )
    if many is None or (options.stages.pack == "auto" and _far(many, len(tokens))):
        joint = plan_context_waves(
            tokens,
            ranks=replicas,
            memory_tokens=options.memory_tokens,
            cost=options.cost.llm,
            ranks_per_node=replicas_per_node,
            solver=options.solver,
            degrees=degrees,
            packs=pack_of,
        )
    made = min((m for m in (joint, many) if m is not None), key=lambda m: m.makespan_s)
    return made.waves, made.lower_bound_s


def _far(waves: ContextWaves, samples: int) -> bool:
    """Are the waves so far from their bound that the slower search is worth its time?"""
    return waves.makespan_s > waves.lower_bound_s * WORTH_TRYING[samples > FEW_SAMPLES]


def _pack_report(
    lengths: LengthTable,
    charged: NDArray[np.int64],
    waves: tuple[ContextPlan, ...],
    options: PlanOptions,
) -> StageReport:
    """Tokens that are paid for: padded microbatches in draw order before, packs after."""
    packed = sum(int(wave.padded_tokens.sum()) for wave in waves)
    return StageReport(
        stage="pack",
        algorithm=options.stages.pack,
        unit="tokens",
        before=float(padded_sum(lengths.llm_tokens, options.memory_tokens)),
        after=float(max(packed, int(charged.sum()))),
        lower_bound=float(lengths.llm_tokens.sum(dtype=np.int64)),
    )


def _group_report(
    lengths: LengthTable,
    waves: tuple[ContextPlan, ...],
    bound_s: float,
    replicas: int,
    options: PlanOptions,
) -> StageReport:
    """Before: every sample alone, in draw order, at the static degree that holds the longest."""
    tokens = lengths.llm_tokens.astype(np.int64)
    degree = options.static_degree_for(int(tokens.max(initial=1)), replicas)
    # The longest of each wave is its slowest.
    longest = np.maximum.reduceat(tokens, np.arange(0, len(tokens), replicas // degree))
    slowest = options.cost.llm.alone_s(longest, degree)
    return StageReport(
        stage="group",
        algorithm=options.stages.context,
        unit="s",
        before=float(slowest.sum()),
        after=sum(wave.makespan_s for wave in waves),
        lower_bound=bound_s,
    )


def _grouped_plan(
    samples: StepSamples,
    waves: tuple[ContextPlan, ...],
    step: int,
    replicas: int,
    options: PlanOptions,
) -> StepPlan:
    """The plan with its packs and groups, encoder items not yet given to anyone."""
    lengths = samples.lengths
    item_sample = np.repeat(np.arange(len(lengths), dtype=np.int32), np.diff(lengths.item_offsets))
    return StepPlan(
        step=step,
        replicas=replicas,
        waves=len(waves),
        cost_version=options.cost.version,
        predicted_s=float(sum(wave.makespan_s for wave in waves)),
        sample_ids=samples.sample_ids,
        sample_epoch=samples.epoch,
        sample_tokens=lengths.llm_tokens,
        sample_loss_tokens=lengths.loss_tokens,
        pack_offsets=sample_starts(_joined([np.diff(w.sample_offsets) for w in waves], np.int64)),
        pack_samples=_joined([w.samples for w in waves], np.int32),
        pack_wave=np.repeat(np.arange(len(waves), dtype=np.int32), [len(w.time_s) for w in waves]),
        pack_seconds=_joined([w.time_s for w in waves], np.float64),
        replica_offsets=sample_starts(_joined([w.degrees for w in waves], np.int64)),
        pack_replicas=_joined([w.ranks for w in waves], np.int32),
        item_sample=item_sample,
        item_modality=lengths.item_modality,
        item_encoder_tokens=lengths.item_encoder_tokens,
        item_llm_tokens=lengths.item_llm_tokens,
        item_position=lengths.item_position,
        item_replica=np.zeros(len(item_sample), dtype=np.int32),
    )


def _joined(arrays: list[NDArray[Scalar]], dtype: type[Scalar]) -> NDArray[Scalar]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)


def _finished_plan(
    plan: StepPlan, item_replica: NDArray[np.int32], reports: tuple[StageReport, ...]
) -> StepPlan:
    """Items in place. A wave costs its slowest group and, before it, each slowest encoder."""
    values = {name: getattr(plan, name) for name in StepPlan.__dataclass_fields__}
    encoder_s = sum(report.after for report in reports if report.stage.startswith("dispatch"))
    values.update(
        item_replica=item_replica, stages=reports, predicted_s=plan.predicted_s + encoder_s
    )
    return StepPlan(**values)
