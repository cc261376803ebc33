"""The launches of a job's trainers, in the order in which the service first saw them.

A launch is one start of all ranks: one `torchrun`, one step of a cluster's scheduler. Its name
comes from the client and is the same for all its ranks; a launcher that has none gives "".
"""

MOST_LAUNCHES = 1000


class Launches:
    """Names of launches, the newest last. "" is neither newer nor older than another."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def see(self, launch: str) -> None:
        """A rank of this launch is here."""
        if launch and launch not in self._names:
            self._names = [*self._names[-MOST_LAUNCHES:], launch]

    def renew(self, launch: str) -> None:
        """This launch is the newest again: the newer ones have left."""
        if launch in self._names:
            self._names.remove(launch)
        self.see(launch)

    def replaces(self, newer: str, older: str) -> bool:
        """Whether the service first saw `newer` after `older`."""
        if newer not in self._names or older not in self._names:
            return False
        return self._names.index(newer) > self._names.index(older)
