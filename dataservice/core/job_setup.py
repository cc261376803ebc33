"""What one job needs at run time, built by the app from its job file."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from dataservice.core.job import BatchSize, ErrorBudget, JobRecord
from dataservice.core.job_limits import DEFAULT_JOB_LIMITS, EpochSize, JobLimits
from dataservice.core.mixture_tree import MixtureTree
from dataservice.core.plan_options import CostModel, IsfLimits, PlanOptions
from dataservice.core.ports import Catalog, SampleStream
from dataservice.core.positions import IN_SEQUENCE, PositionRule
from dataservice.core.topology import ReplicaLayout, Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class CostChange:
    """Coefficients that take over at a step."""

    from_step: int
    cost: CostModel


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSetup:
    """A job, opened: its stored record, its data and its options.

    `pipeline` is the text and media pipeline as JSON, passed on to workers unread;
    `ready_steps` is the number of steps that planning and decoding may run ahead of the slowest
    rank; `limits` gives those of packing by ISF, over all samples of the first so many sources,
    where its options pack so: see `limits_at`.
    `cost_changes`, by step, replace the options' cost from their step on: see `options_at`.
    `order` identifies the order of samples, which checkpoints must agree on; `earlier_orders` are
    those that it has grown from by appended sources and changes, whose checkpoints fit too.
    `budgets` are the error budgets by source; a source without one never stops the job.
    `revise` gives the same data under another version of the job file.
    `require_current` raises IndexStaleError or SourceError where the index no longer describes
    its sources; it lists files, so it is called once per attempt.
    `job_limits` are the operator's; `epoch_size` gives the mean size of a step before any is
    drawn. Without it a step is judged once it is drawn. `mixture` says what each source gives.
    `positions` says how the model counts its tokens. `loss_weights` are those of the sources, in
    the order of the job file; empty where neither a source nor its records weigh the loss.
    `unit_frames` are the frames that the vision encoder takes together, between which items may be
    cut; 0 where they are whole. `notes` say what the job's owner should know, a sentence each.
    """

    record: JobRecord
    stream: SampleStream
    catalog: Catalog
    batch: BatchSize
    options: PlanOptions
    pipeline: str
    ready_steps: int
    order: str = ""
    earlier_orders: Collection[str] = ()
    limits: "LimitsOver | None" = None
    cost_changes: tuple[CostChange, ...] = ()
    budgets: Mapping[str, ErrorBudget] = field(default_factory=dict)
    require_current: Callable[[], None] = lambda: None
    revise: "Revise" = lambda setup, record: replace(setup, record=record)
    layout: ReplicaLayout = field(default_factory=ReplicaLayout)
    epoch_size: EpochSize | None = None
    mixture: MixtureTree | None = None
    job_limits: JobLimits = DEFAULT_JOB_LIMITS
    positions: PositionRule = IN_SEQUENCE
    loss_weights: tuple[float, ...] = ()
    unit_frames: int = 0
    notes: tuple[str, ...] = ()

    def options_at(self, step: int) -> PlanOptions:
        """The options that this step is planned with. They never change once the step was planned:
        no change of cost begins at or before a planned step."""
        begun = [change.cost for change in self.cost_changes if change.from_step <= step]
        return replace(self.options, cost=begun[-1]) if begun else self.options

    def limits_at(self, begun: str) -> IsfLimits | None:
        """The limits of packing by ISF where these changes of the mixture have begun. Sources at
        the end that were never drawn from by then do not count, so that adding one splits no window
        of steps otherwise before it is brought in."""
        return self.limits(self.stream.sources_met(begun)) if self.limits else None

    def topology(self, world_size: int) -> Topology:
        """The job's replicas at this world size. Raises WorldSizeError where it cannot be
        divided."""
        return self.layout.over(world_size)


LimitsOver = Callable[[int], IsfLimits]
"""The ISF limits over the samples of the first so many sources; found when first asked for."""
Revise = Callable[[JobSetup, JobRecord], JobSetup]
"""The same data under this version of the job file. Raises SpecError where the file is not
valid."""
