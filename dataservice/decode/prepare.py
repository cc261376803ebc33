"""The user's own code, which every sample passes through between its source and the pipeline.

It runs wherever samples are measured or decoded, so it must give the same for the same sample: what
then differs from the index is refused like a file that changed.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Protocol, cast

from dataservice.core.errors import SampleError, SpecError
from dataservice.core.job import CodeSpec
from dataservice.core.own_code import made_of, running, version_of
from dataservice.core.quoting import quoted
from dataservice.core.sample import MediaBlob, RawSample


class Preparer(Protocol):
    """A class of the user's own, made with the `options` of the job.

    `version`, where the class has one, says that its results changed; otherwise the source of its
    module does.
    """

    def prepare(self, sample: RawSample) -> RawSample | None:
        """The sample to train on, made of this one, whose record may be changed in place; None
        leaves it out. Raises SampleError with the reason why it cannot be used."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """A job's preparers by name, in their order."""

    steps: tuple[tuple[str, Preparer], ...] = ()

    def __call__(self, raw: RawSample) -> RawSample:
        """The sample behind all of them. Raises SampleError where one leaves it out or fails."""
        if not self.steps:
            return raw
        # They may change the record, which is measured and decoded again.
        made = replace(raw, record=deepcopy(dict(raw.record)))
        for name, preparer in self.steps:
            made = _prepared(name, preparer, made)
        return replace(made, key=raw.key, piece=raw.piece)

    @property
    def sources(self) -> tuple[tuple[str, str], ...]:
        """(Name, the version that its class declares or the source of its module) of each."""
        return tuple((name, version_of(type(preparer))) for name, preparer in self.steps)


def _prepared(name: str, preparer: Preparer, sample: RawSample) -> RawSample:
    with running(name):
        made = preparer.prepare(sample)
    if made is None:
        raise SampleError(f"{quoted(name)} leaves it out.")
    if not _is_sample(made):
        raise SampleError(
            f"{quoted(name)} returned {quoted(type(made).__name__)}, or a sample whose record is "
            "no mapping or whose media are no tuple of MediaBlob. Return the RawSample, a copy of "
            "it by dataclasses.replace, or None."
        )
    return made


def _is_sample(made: object) -> bool:
    return (
        isinstance(made, RawSample)
        and isinstance(made.record, Mapping)
        and isinstance(made.media, tuple)
        and all(isinstance(blob, MediaBlob) for blob in made.media)
    )


def choose_preparation(specs: Sequence[CodeSpec], custom: Mapping[str, type]) -> Preparation:
    """Make a job's preparers. Raises SpecError where one is not in the config or cannot be made."""
    steps = []
    for spec in specs:
        made = made_of(custom, spec.name, spec.options, what="preparer")
        if not callable(getattr(made, "prepare", None)):
            raise SpecError(
                f"preparer {quoted(spec.name)} is a {type(made).__name__} without a method "
                "prepare(sample). See Preparer in dataservice/decode/prepare.py."
            )
        steps.append((spec.name, cast(Preparer, made)))
    return Preparation(steps=tuple(steps))
