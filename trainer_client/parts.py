"""Which bytes of its microbatches a rank asks for.

A rank that computes a whole replica needs all of them. Tensor- and pipeline-parallel peers
name what they read; groups, lengths, routes and sample ids come to every rank in any case, and
`position_ids` follow from those.

    name      brings
    inputs    tokens and media
    tokens    input_ids
    media     encoder items
    labels    labels
"""

from collections.abc import Collection
from dataclasses import dataclass

from dataservice_proto.v1 import coordinator_pb2

from trainer_client.errors import BadArgument

EVERYTHING = ("inputs", "labels")

_FLAGS: dict[str, tuple[str, ...]] = {
    "inputs": ("tokens", "media"),
    "tokens": ("tokens",),
    "media": ("media",),
    "labels": ("labels",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedParts:
    """One flag for each kind of tensor; all of them are set by default."""

    tokens: bool = True
    media: bool = True
    labels: bool = True

    @staticmethod
    def named(names: Collection[str]) -> "WantedParts":
        """The parts with these names; none for no names. Raises BadArgument where one is
        unknown."""
        unknown = [name for name in names if name not in _FLAGS]
        if unknown or isinstance(names, str):
            raise BadArgument(
                f"parts={names!r}; give a tuple of {', '.join(map(repr, _FLAGS))}, or () for the "
                "plan alone."
            )
        flags = {flag for name in names for flag in _FLAGS[name]}
        return WantedParts(**{flag: flag in flags for flag in WantedParts.__dataclass_fields__})

    @property
    def sequence(self) -> tuple[str, ...]:
        """Names of the sequence tensors that come."""
        return ("input_ids", "position_ids") * self.tokens + ("labels",) * self.labels

    def to_proto(self) -> coordinator_pb2.WantedParts:
        """The message for the coordinator."""
        return coordinator_pb2.WantedParts(tokens=self.tokens, media=self.media, labels=self.labels)
