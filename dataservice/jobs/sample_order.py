"""The name of a job's order of samples, and the names that it had before the job file grew.

    file 1   a 1, b 0.5                          order X
    file 2   a 1, b 0.5, c 0                     order Y     grown from X
    file 3   a 1, b 0.5, c 0; a change: c 0.3    order Z     grown from X and Y

A name is a digest of all that decides which samples come in which order, and of what they are: the
content of every source is part of it. A source that is appended with weight 0 gives nothing, and
its samples have the ids behind all others; a change of the mixture that is appended begins where
the job goes on, or later. So neither moves a sample of before, and a place in an order that this
one has grown from is the same place in this one.

Which files those are follows from the file alone: it ends earlier, by sources of weight 0 and by
changes of the mixture. Nothing needs to be remembered of the files that there were.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dataservice.decode.sample_pipeline import AUGMENT
from dataservice.jobs.job_file import JobSpec
from dataservice.sources.catalog import index_fingerprint
from dataservice.sources.mixture import ORDER_VERSION

# Names of earlier orders are made beforehand: this bounds them, to a third of a second for a job of
# a thousand sources and 64 large changes.
MOST_ADDED_SOURCES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """`name` is that of a file's order; `earlier` are those of the orders it may have grown from.
    `data` identifies what is trained, in whatever order."""

    name: str
    data: str
    earlier: frozenset[str]

    @staticmethod
    def of(
        spec: JobSpec, fingerprints: Sequence[str], pipeline: Mapping[str, str]
    ) -> "SampleOrder":
        """The order of a job file over sources of these contents, in its order, with these digests
        of its pipeline."""
        data = data_fingerprint(index_fingerprint(fingerprints), pipeline)
        return SampleOrder(
            name=order_name(data, spec),
            data=data,
            earlier=frozenset(_earlier(spec, fingerprints, pipeline)),
        )


def data_fingerprint(index: str, pipeline: Mapping[str, str]) -> str:
    """Changes when what is trained does: the index's fingerprint, with the augmentation that an
    index knows nothing of."""
    augmented = pipeline.get(AUGMENT)
    if augmented is None:
        return index
    return hashlib.blake2b(f"{index} {augmented}".encode(), digest_size=16).hexdigest()


def order_name(data: str, spec: JobSpec) -> str:
    """The name of a job file's order over these data."""
    return _names(data, spec, len(spec.sources))[-1]


def _earlier(
    spec: JobSpec, fingerprints: Sequence[str], pipeline: Mapping[str, str]
) -> Iterator[str]:
    """The orders of the files that this one may have grown from; mostly none or few."""
    count = len(spec.sources)
    weighed = (place for place, source in enumerate(spec.sources, start=1) if source.weight)
    settled = max(weighed, default=count)
    for sources in range(max(settled, count - MOST_ADDED_SOURCES), count + 1):
        data = data_fingerprint(index_fingerprint(fingerprints[:sources]), pipeline)
        known = {source.name for source in spec.sources[:sources]}
        others = (
            place for place, each in enumerate(spec.mixture_changes) if each.weights.keys() - known
        )
        names = _names(data, spec, sources)[: next(others, len(spec.mixture_changes)) + 1]
        yield from names if sources < count else names[:-1]


def _names(data: str, spec: JobSpec, sources: int) -> list[str]:
    """The names of the orders of the file that ends with so many sources, and with none of its
    changes of the mixture, the first one, and so on. O(sources + changes)."""
    drawn = [(source.weight, source.max_passes) for source in spec.sources[:sources]]
    decides = (ORDER_VERSION, data, spec.seed, drawn, spec.weights)
    so_far = hashlib.blake2b(f"{repr(decides)[:-1]}, [".encode(), digest_size=6)
    names = [_ended(so_far)]
    for place, each in enumerate(spec.mixture_changes):
        change = (sorted(each.weights.items()), each.from_epoch, each.from_step)
        so_far.update(f"{', ' if place else ''}{change!r}".encode())
        names.append(_ended(so_far))
    return names


def _ended(so_far: "hashlib.blake2b") -> str:
    whole = so_far.copy()
    whole.update(b"])")
    return whole.hexdigest()
