"""Where a worker or a rank is, for whoever decides which worker decodes what."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Whereabouts:
    """The names of a node, of its zone, and of the folder where what was read or decoded is kept;
    empty where it is not known, or where nothing is kept. They are hints, told by whoever is
    there: nothing but time depends on them."""

    node: str = ""
    zone: str = ""
    cache: str = ""


ANYWHERE = Whereabouts()
