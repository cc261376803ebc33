"""What workers are asked for an index, and what they answer.

Neither the coordinator nor a worker reads an errand or what comes of it: both are for the process
that carries it out, and for whoever writes the index (see sources/index_errands.py).
"""

from dataclasses import dataclass

SLOTS_A_PLACE = 4
"""Of so many slots of a worker, one indexes beside them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexOrder:
    """An errand over one source; `pipeline` is what a worker needs of its job, as JSON."""

    pipeline: str
    errand: str


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexWaiting:
    """No worker serves, for which the errand waits. `why`, in words."""

    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexPlaces:
    """An errand has begun. So many of the team's may be under way at once."""

    places: int


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexProgress:
    """Rows and bytes of source files that are done beyond those of the answers before."""

    rows: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexResult:
    """What came of the file at this `place` of the errand: `size_bytes` follow. Where its `damage`
    is named, there are none."""

    place: int
    size_bytes: int
    damage: str = ""


IndexAnswer = IndexWaiting | IndexPlaces | IndexProgress | IndexResult | bytes


def index_places(slots: int) -> int:
    """How many errands a worker of so many slots carries out at once."""
    return max(1, slots // SLOTS_A_PLACE)
