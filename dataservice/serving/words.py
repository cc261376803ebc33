"""Words of a fixed set, as another release may have sent them."""

from collections.abc import Mapping
from typing import TypeVar

from dataservice.core.errors import SpecError

Word = TypeVar("Word", bound=str)


def known_word(word: str, known: Mapping[str, Word], what: str) -> Word:
    """`word`, which is one of these. Raises SpecError when it is another release's: `what` begins
    the sentence, as "a worker is"."""
    if word not in known:
        raise SpecError(
            f"{what} {word!r}; this release knows {', '.join(known)}. Use the CLI of the "
            "service's release."
        )
    return known[word]
