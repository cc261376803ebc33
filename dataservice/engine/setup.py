"""What one job needs at run time, built by the app from its job file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from dataservice.core.job import BatchSize, ErrorBudget, JobRecord
from dataservice.core.ports import Catalog, SampleStream
from dataservice.core.topology import Topology
from dataservice.planning.options import CostModel, PlanOptions
from dataservice.planning.packs.limits import IsfLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class CostChange:
    """Coefficients that take over at a step."""

    from_step: int
    cost: CostModel


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSetup:
    """A job, opened: its stored record, its data and its options.

    `pipeline` is the text and media pipeline as JSON, passed on to workers unread;
    `ready_steps` is how far planning and decoding may run ahead of the slowest rank; `limits`
    are of all the job's samples, where its options pack by ISF.
    `cost_changes`, by step, replace the options' cost from their step on: see `options_at`.
    `order` names the order of samples, which checkpoints must agree on.
    `budgets` say by source how often its samples may be bad; a source without one never stops
    the job.
    `require_current` raises IndexStaleError or SourceError once the index no longer describes
    its sources; it lists files, so it is called once an attempt.
    """

    record: JobRecord
    stream: SampleStream
    catalog: Catalog
    batch: BatchSize
    options: PlanOptions
    pipeline: str
    ready_steps: int
    order: str = ""
    limits: IsfLimits | None = None
    cost_changes: tuple[CostChange, ...] = ()
    budgets: Mapping[str, ErrorBudget] = field(default_factory=dict)
    require_current: Callable[[], None] = lambda: None
    ranks_per_replica: int = 1
    pipeline_stages: int = 1
    virtual_stages: int = 1
    replicas_per_node: int | None = None

    def options_at(self, step: int) -> PlanOptions:
        """How this step is planned. A step that was planned once is planned so for ever: no
        change begins at or before one."""
        begun = [change.cost for change in self.cost_changes if change.from_step <= step]
        return replace(self.options, cost=begun[-1]) if begun else self.options

    def topology(self, world_size: int) -> Topology:
        """The job's replicas at this world size; WorldSizeError if it cannot be divided."""
        return Topology(
            world_size=world_size,
            ranks_per_replica=self.ranks_per_replica,
            pipeline_stages=self.pipeline_stages,
            virtual_stages=self.virtual_stages,
            replicas_per_node=self.replicas_per_node,
        )
