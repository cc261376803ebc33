"""How large a request may be, part by part.

gRPC bounds the message as a whole (4 MiB); here each text and each list of it is bounded, so
that none of them costs more than it can be worth. A field that no one thought of has the
smallest bounds.
"""

from dataclasses import dataclass, field

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from dataservice.core.errors import SpecError

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds of requests, and of the calls of one team at a time."""

    text_bytes: int = 512
    """Of any text that is not listed."""
    texts_bytes: dict[str, int] = field(
        default_factory=lambda: {
            "spec_yaml": MIB,
            "cost_json": 64 * KIB,
            "base_directory": 4 * KIB,
            "cursor": 4 * KIB,
        }
    )
    """By name of the field."""
    entries: int = 4096
    """Of any list."""
    ranks: int = 65_536
    """Largest world size."""
    calls_per_team: int = 200_000
    """Open at once; a rank holds one for its session and waits in one or two more."""


def require_within(request: Message, limits: Limits) -> None:
    """Raises SpecError naming the part of a request that is too large."""
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


def _require(name: str, unit: str, seen: int, most: int) -> None:
    if seen > most:
        raise SpecError(
            f"{name} has {seen:,} {unit}; this service takes at most {most:,}. Make it smaller."
        )
