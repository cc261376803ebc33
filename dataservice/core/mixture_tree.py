"""A job's mixture in figures: what each source holds, and how much of an epoch it makes up.

    job ── epochs; samples and LLM tokens of an epoch
     ├─ source ── fingerprint, samples, tokens, weight ─▶ shares of an epoch, times seen
     └─ ...

Figures of an epoch are means over the epochs: a weight that is no whole number takes a sample more
or less from one epoch to the next.
"""

from dataclasses import dataclass

from dataservice.core.job import MixtureChange
from dataservice.core.job_limits import EpochSize


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureSource:
    """One source. `samples` and `tokens` (LLM tokens) are those of its index, each counted once;
    `passes` over them make an epoch, as `weight` says, and at most `max_passes` all epochs.
    `fingerprint` identifies its samples and their lengths: another content has another."""

    source: str
    fingerprint: str
    samples: int
    tokens: int
    weight: float
    passes: float
    max_passes: float | None = None

    @property
    def epoch(self) -> EpochSize:
        """What an epoch draws from this source."""
        return EpochSize(samples=self.passes * self.samples, tokens=self.passes * self.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureTree:
    """The sources of a job, in the order of its file, over this number of epochs. Figures are those
    of its beginning; `changes` of its file, and then those recorded later, take over from there."""

    epochs: int
    sources: tuple[MixtureSource, ...]
    changes: tuple[MixtureChange, ...] = ()

    @property
    def epoch(self) -> EpochSize:
        """What an epoch draws from all sources together."""
        parts = [source.epoch for source in self.sources]
        return EpochSize(
            samples=sum(part.samples for part in parts), tokens=sum(part.tokens for part in parts)
        )

    def sample_share(self, source: MixtureSource) -> float:
        """The part of an epoch's samples that this source gives: 0 to 1."""
        return source.epoch.samples / self.epoch.samples

    def token_share(self, source: MixtureSource) -> float:
        """The part of an epoch's LLM tokens that this source gives: 0 to 1; 0 where none has
        any."""
        return source.epoch.tokens / self.epoch.tokens if self.epoch.tokens else 0.0

    def times_seen(self, source: MixtureSource) -> float:
        """How often each sample of this source is drawn over all epochs, on average: no sample is
        drawn twice more than another."""
        times = self.epochs * source.passes
        return times if source.max_passes is None else min(times, source.max_passes)
