"""How large a request may be, part by part.

gRPC bounds the message as a whole (4 MiB); here each text and each list in it is bounded, so that
no field costs more than it needs. A field that is not listed has the smallest bounds.
"""

from dataclasses import dataclass, field
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from dataservice.core.errors import SpecError

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of a request, and of the calls that one team may have open."""

    text_bytes: int = 512
    """Longest text in a field that is not listed below."""
    texts_bytes: dict[str, int] = field(
        default_factory=lambda: {
            "spec_yaml": MIB,
            "cost_json": 64 * KIB,
            "base_directory": 4 * KIB,
            "cursor": 4 * KIB,
            "errand": 2 * MIB,
        }
    )
    """Longest text by name of the field."""
    entries: int = 4096
    """Longest list in any field."""
    ranks: int = 65_536
    """Largest world size."""
    calls_per_team: int = 60_000
    """Calls of one team that may be open at once; a rank has one for its session and waits in one
    or two more. Each takes some 30 kB."""

    least: int = field(init=False)
    """The smallest bound of a text or list."""

    def __post_init__(self) -> None:
        least = min(self.text_bytes, self.entries, *self.texts_bytes.values())
        object.__setattr__(self, "least", least)


def require_within(request: Message, limits: Limits) -> None:
    """Raises SpecError where a part of the request is too large."""
    # No part of a request is larger than all of it, and an entry takes a byte at least.
    if request.ByteSize() <= limits.least and not _names_ranks(request.DESCRIPTOR):
        return
    for descriptor, value in request.ListFields():
        name = descriptor.name
        values = [value]
        if descriptor.is_repeated:
            values = list(value)
            _require(name, "entries", len(values), limits.entries)
        if descriptor.message_type and descriptor.message_type.GetOptions().map_entry:
            values = [part for pair in value.items() for part in pair]
        texts = [each for each in values if isinstance(each, str)]
        for text in texts:
            most_bytes = limits.texts_bytes.get(name, limits.text_bytes)
            _require(name, "bytes", len(text.encode()), most_bytes)
        if descriptor.type == FieldDescriptor.TYPE_MESSAGE:
            for part in values:
                if isinstance(part, Message):
                    require_within(part, limits)
        elif name == "world_size":
            _require(name, "ranks", value, limits.ranks)


@cache
def _names_ranks(messages: Descriptor) -> bool:
    """Whether messages of this type have a world size. Rank by rank it would be looked up anew."""
    return "world_size" in messages.fields_by_name


def _require(name: str, unit: str, seen: int, most: int) -> None:
    if seen > most:
        raise SpecError(
            f"{name} has {seen:,} {unit}; this service takes at most {most:,}. Make it smaller."
        )
