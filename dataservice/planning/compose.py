"""All stages of one step, in order: pack → group → assign → order → dispatch → StepPlan.

Every stage reports its cost before and after and a lower bound, in its own unit, and every
stage can be a named baseline, so that a comparison runs through this same code.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.layout import sample_starts
from dataservice.core.plan import StageReport, StepPlan
from dataservice.core.plan_options import IsfLimits, PlanOptions
from dataservice.core.sample import LengthTable
from dataservice.core.topology import Topology
from dataservice.planning.context.check import joined
from dataservice.planning.context.groups import ContextPlan
from dataservice.planning.loads.partition import partition
from dataservice.planning.stages.assign import assign_packs
from dataservice.planning.stages.dispatch import dispatch_items, dispatch_reports, encoder_items
from dataservice.planning.stages.group import PackedStep, group_packs, group_report
from dataservice.planning.stages.order import order_waves
from dataservice.planning.stages.pack import isf_packs, pack_report, pack_samples
from dataservice.planning.validate import check_items, check_packs


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSamples:
    """The samples of a step in draw order: `sample_ids` int64[n], `epoch` int32[n], lengths, and
    `loss_weights` float64[n], None where all are 1."""

    sample_ids: NDArray[np.int64]
    epoch: NDArray[np.int32]
    lengths: LengthTable
    loss_weights: NDArray[np.float64] | None = None


def split_window(
    lengths: LengthTable, *, steps: int, options: PlanOptions, limits: IsfLimits | None = None
) -> NDArray[np.int32]:
    """Which step of a window each drawn sample is trained in: int32[n].

    Packs of the whole window are spread over its steps by tokens, so that all steps cost about
    the same (OmniBal's grouping over many batches). It looks at lengths alone: the split is the
    same at any N.
    """
    if steps <= 1 or len(lengths) == 0:
        return np.zeros(len(lengths), dtype=np.int32)
    pack_of = isf_packs(lengths, options, limits)
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
    """Plan one step. Pure; raises PlanningError where a sample cannot fit. Each part of
    the plan is checked before others are made from it, as `check_plan` does.

    `limits` for ISF are found once a job, over all its samples; without them the paper's rule
    is applied to the step's own.
    """
    lengths, stages, replicas = samples.lengths, options.stages, topology.replicas
    degree = _static_degree(lengths, replicas, options)
    packed = pack_samples(lengths, degree=degree, options=options, limits=limits)
    tokens = lengths.llm_tokens.astype(np.int64)
    packed_step = PackedStep(
        tokens=tokens, packed=packed, degree=degree, topology=topology, options=options
    )
    found = group_packs(packed_step)
    reports = [
        pack_report(lengths, packed[1], found.waves, options),
        group_report(packed_step, found),
    ]
    waves, seated = assign_packs(found.waves, replicas=replicas, algorithm=stages.assign)
    waves, ordered = order_waves(
        waves,
        algorithm=stages.order,
        stages=topology.pipeline_stages,
        virtual_stages=topology.virtual_stages,
    )
    reports += [report for report in (seated, ordered) if report is not None]
    grouped = _grouped_plan(samples, waves, step, replicas, options)
    check_packs(grouped, memory_tokens=options.memory_tokens, sample_count=len(lengths))
    items = encoder_items(grouped, options.cost)
    item_replica = dispatch_items(
        items,
        replicas=replicas,
        replicas_per_node=topology.replicas_per_node,
        algorithm=stages.dispatch,
    )
    check_items(grouped, item_replica)
    encoders = dispatch_reports(items, item_replica, replicas, stages.dispatch)
    return _finished_plan(grouped, item_replica, (*reports, *encoders))


def _static_degree(lengths: LengthTable, replicas: int, options: PlanOptions) -> int:
    """The one degree of static context; 1 where degrees are chosen pack by pack."""
    if options.stages.context != "static":
        return 1
    longest = int(lengths.llm_tokens.max(initial=1))
    return options.static_degree or options.static_degree_for(longest, replicas)


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
        sample_loss_weights=samples.loss_weights,
        pack_offsets=sample_starts(joined([np.diff(w.sample_offsets) for w in waves], np.int64)),
        pack_samples=joined([w.samples for w in waves], np.int32),
        pack_wave=np.repeat(np.arange(len(waves), dtype=np.int32), [len(w.time_s) for w in waves]),
        pack_seconds=joined([w.time_s for w in waves], np.float64),
        replica_offsets=sample_starts(joined([w.degrees for w in waves], np.int64)),
        pack_replicas=joined([w.ranks for w in waves], np.int32),
        item_sample=item_sample,
        item_modality=lengths.item_modality,
        item_encoder_tokens=lengths.item_encoder_tokens,
        item_llm_tokens=lengths.item_llm_tokens,
        item_position=lengths.item_position,
        item_replica=np.zeros(len(item_sample), dtype=np.int32),
    )


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
