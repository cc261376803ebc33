"""The port through which a worker decodes samples."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from dataservice.core.orders import PackSample
from dataservice.core.sample import DecodedSample, SampleRef
from dataservice.workers.byte_cache import NOTHING_KEPT, KeptReads
from dataservice.workers.read_sample import ReadSample

READS = 32  # requests to read ahead that are under way at once
REASON_LIMIT = 1000  # characters of a bad sample's reason that are kept


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOutcome:
    """A sample in its planned shape; or `sample` is None, and `reason` says why. One whose storage
    is `away` is not bad: it may be read later."""

    sample: DecodedSample | None
    reason: str = ""
    seconds: float
    """Seconds spent reading and decoding, failed tries included."""
    read_s: float = 0.0
    """Seconds of the last try spent reading; without those in which it only wanted a processor."""
    cpu_s: float = 0.0
    """CPU seconds of the last try. The rest of its time was spent waiting for storage or a CPU."""
    read_cpu_s: float = 0.0
    """CPU seconds of the last try's reading."""
    read_bytes: int = 0
    """Size of the sample in storage, as far as its location tells; 0 when it could not be read."""
    away: bool = False
    reused: bool = False
    """Whether it had been decoded before, and was found."""
    ahead_s: float = 0.0
    """Seconds that reading it ahead took, in no slot."""
    kept: KeptReads = NOTHING_KEPT
    """What of its bytes was found on this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOutcome:
    """A sample as it was read; or None where its slot is to read it, or where its storage is away,
    for the reason `away`. `read_s` is its part of the seconds that the request took."""

    read: ReadSample | None = None
    away: str = ""
    read_s: float = 0.0
    kept: KeptReads = NOTHING_KEPT


class Decoders(Protocol):
    """Decodes samples on a number of slots, and reads others ahead meanwhile. Every method blocks.
    At most `slots` threads may call at once, and `reads` others `read`."""

    @property
    def slots(self) -> int:
        """How many samples are decoded at once."""
        ...

    @property
    def reads(self) -> int:
        """How many requests to read ahead may be under way at once."""
        ...

    def far_sources(self, pipeline: str) -> Collection[str]:
        """The sources that lie on other machines, which are read ahead."""
        ...

    def start(self) -> None:
        """Make ready. Raises WorkerLostError when decoding cannot start on this machine."""
        ...

    def open(self, pipeline: str) -> int:
        """Build this pipeline, once; its pad token. Raises what building it raises."""
        ...

    def read(self, pipeline: str, refs: Sequence[SampleRef]) -> list[ReadOutcome]:
        """Read these samples of one source, on no slot. Raises WorkerLostError when nothing can be
        read here any more."""
        ...

    def decode(
        self,
        pipeline: str,
        samples: Sequence[PackSample],
        reads: Sequence[ReadSample | None] = (),
    ) -> list[SampleOutcome]:
        """Decode these samples one after another on one slot, of which `reads` has those that were
        read ahead. A failing sample affects only its own outcome. Raises what building the
        pipeline raises, and WorkerLostError when nothing can be decoded here any more."""
        ...

    def close(self) -> None:
        """Stop decoding; calls in progress raise WorkerLostError or finish."""
        ...
