"""How much one job may ask of the coordinator, which plans for all teams.

What a job's file and its ranks decide (the size of a step, of the data, of what is planned
ahead) becomes memory and planning time here. Each has a cap, checked before the work that it
guards: at submission where the job file and the index say it, when an attempt opens where the
world size does, and else when a step is drawn, before it is planned. The operator sets them.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

from dataservice.core.errors import QuotaError, SpecError
from dataservice.core.job import STRICT, BatchSize


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLimits:
    """Caps on one job. What exceeds a cap is refused, and the cap is named."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    max_job_file_bytes: int = 256 * 2**10
    """Size of a job file; parsing 256 KiB of YAML takes about a second."""
    max_sources: int = 1000
    """Sources of one job."""
    max_samples: int = 200_000_000
    """Samples of one epoch: rows of the job's indexes, each counted as often as its source's
    weight shows it, and at least once. Each takes some 2 bytes of the coordinator's memory,
    beside pages of the index that the system takes back when it wants memory."""
    max_epochs: int = 1_000_000
    """Passes over the mixture."""
    max_step_epochs: int = 1000
    """Epochs that one step may span, where a batch is larger than its data. Each is shuffled
    anew."""
    max_step_samples: int = 1_000_000
    """Samples that are drawn to plan one step: its batch, times plan.window_steps. 10,000 ranks
    of 60 samples are 600,000; planning these takes seconds."""
    max_replica_samples: int = 16_384
    """The same for each replica of the trainer. Short texts pack densely in pretraining: 16,384
    samples of 64 tokens are 8 microbatches of 131,072 tokens, which are planned in some 0.1 s."""
    max_step_tokens: int = 2**32
    """LLM tokens that are drawn to plan one step; 10,000 ranks of three times 131,072 tokens."""
    max_replica_tokens: int = 2**24
    """The same for each replica: 128 microbatches of 131,072 tokens."""
    max_step_bytes: int = 2**42
    """Decoded size of one step: tokens, pixels and sound, before workers are asked to hold it."""
    max_replica_bytes: int = 2**36
    """The same for each replica."""
    max_waves: int = 512
    """Microbatches that a replica trains one after another in one step. The coordinator orders
    each by itself."""
    max_ready_samples: int = 4_000_000
    """Samples of all steps that are planned ahead: batch times ready_steps. The coordinator
    keeps some 300 bytes of each."""
    max_dp_replicas: int = 1024
    """Replicas of an attempt whose job has plan.solver dp, whose work grows with their square."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise SpecError(f"job_limits.{name} is {value}; it must be above 0.")

    def check(self, limit: str, value: float, what: str) -> None:
        """Raises QuotaError where `value` is above the limit of that name, or is no number."""
        allowed = getattr(self, limit)
        if not value <= allowed:
            raise QuotaError(
                f"{what}: {value:,.10g} where this service takes at most {allowed:,}. Make it "
                f"smaller, or ask the operator to raise job_limits.{limit} in the service's config."
            )

    def check_epoch(self, rows: Sequence[int], weights: Sequence[float]) -> None:
        """Raises QuotaError where sources of these `rows`, each shown `weights` times in an epoch,
        make an epoch of too many samples."""
        shown = sum(size * max(1.0, weight) for size, weight in zip(rows, weights, strict=True))
        self.check("max_samples", shown, "samples of an epoch")


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochSize:
    """What one epoch of a job holds, on average over its epochs; `tokens` are LLM tokens."""

    samples: float
    tokens: float

    def drawn(self, batch: BatchSize, window_steps: int) -> "DrawnSize":
        """What is drawn to plan one step, on average. Exact in the unit that the batch counts."""
        if batch.samples is not None:
            samples = float(batch.samples) * window_steps
            tokens = samples * self.tokens / self.samples
        else:
            assert batch.tokens is not None, "a batch is one of the two"
            tokens = float(batch.tokens) * window_steps
            # A sample without tokens costs nothing, and at least one is drawn.
            per_sample = max(self.tokens / self.samples, 1e-9)
            samples = max(1.0, tokens / per_sample)
        return DrawnSize(samples=samples, tokens=tokens, epochs=samples / self.samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnSize:
    """What is drawn to plan one step, its whole window included."""

    samples: float
    tokens: float
    epochs: float = 0.0

    def require_step(self, limits: JobLimits) -> None:
        """Raises QuotaError where this is more than one step may take."""
        limits.check("max_step_samples", self.samples, "samples drawn for a step")
        limits.check("max_step_tokens", self.tokens, "tokens drawn for a step")
        limits.check("max_step_epochs", self.epochs, "epochs that a step spans")

    def require_replicas(self, limits: JobLimits, replicas: int) -> None:
        """Raises QuotaError where this is more than these replicas may take together."""
        of_each = f"drawn for a step, for each of {replicas} replicas"
        limits.check("max_replica_samples", self.samples / replicas, f"samples {of_each}")
        limits.check("max_replica_tokens", self.tokens / replicas, f"tokens {of_each}")


DEFAULT_JOB_LIMITS = JobLimits()
