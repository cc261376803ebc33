"""The launches of a job's trainers, in the order in which the service first saw them.

A launch is one start of all ranks: one `torchrun`, one step of a cluster's scheduler. Its name
comes from the client and is the same for all its ranks; a launcher that has none gives "".
"""

import math

MOST_LAUNCHES = 1000


class Launches:
    """Names of launches, the newest last. "" is neither newer nor older than another."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}  # when each was, counted

    def see(self, launch: str) -> None:
        """A rank of this launch is here."""
        if launch and launch not in self._seen:
            self.renew(launch)

    def renew(self, launch: str) -> None:
        """This launch is the newest, or is so again: the newer ones have left."""
        if not launch:
            return
        self._seen.pop(launch, None)
        self._seen[launch] = 1 + next(reversed(self._seen.values()), 0)
        if len(self._seen) > MOST_LAUNCHES:
            del self._seen[next(iter(self._seen))]

    def replaces(self, newer: str, older: str) -> bool:
        """Whether the service first saw `newer` after `older`. O(1)."""
        return self._seen.get(newer, 0) > self._seen.get(older, math.inf)
