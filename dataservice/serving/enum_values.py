"""Checks values of a fixed set, which a peer of another release may extend."""

from collections.abc import Mapping
from typing import TypeVar

from dataservice.core.errors import SpecError

Word = TypeVar("Word", bound=str)


def known_value(word: str, known: Mapping[str, Word], what: str) -> Word:
    """`word`, checked to be one of `known`. Raises SpecError where it is not, as from another
    release; `what` begins the message's sentence, such as "a worker is"."""
    if word not in known:
        raise SpecError(
            f"{what} {word!r}; this release knows {', '.join(known)}. Use the CLI of the "
            "service's release."
        )
    return known[word]
