"""Start-time fair sharing among named claimants: of a worker's slots, of the coordinator's
planning.

Each claimant has a *tag*: the seconds that it was served, over its weight. Of those with work, the
one with the lowest tag is served next (Goyal, Vin and Cheng, "Start-time Fair Queueing", 1996).
Work is charged as estimated when it begins and corrected to what it took when it ends; what runs
longer than was estimated is charged as it goes, so that a hung decoder is not taken for a cheap
one.

A claimant that comes back with work starts at the tag of the one served last: the time that it was
away gives it no credit, and what others took meanwhile costs it nothing. So it is served at once.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Run:
    """Work under way: when it began, and the seconds that were charged for it."""

    started_s: float
    charged_s: float

    def overdue_s(self, now_s: float) -> float:
        """Seconds that it has taken beyond those charged."""
        return max(0.0, now_s - self.started_s - self.charged_s)


@dataclass(kw_only=True, slots=True, eq=False)
class _Account:
    """One claimant's service. `tag` is in seconds a unit of weight."""

    weight: float = 1.0
    tag: float = 0.0
    waiting: bool = False
    running: set[Run] = field(default_factory=set)

    def tag_at(self, now_s: float) -> float:
        """The tag, with the seconds that running work is overdue."""
        overdue_s = sum(run.overdue_s(now_s) for run in self.running)
        return self.tag + overdue_s / self.weight


class FairShare(Generic[Key]):
    """Decides which claimant is served next. Times are seconds of any clock that only goes
    forward."""

    def __init__(self) -> None:
        self._accounts: dict[Key, _Account] = {}
        self._served_tag = 0.0

    def wants(self, key: Key, *, weight: float = 1.0) -> None:
        """This claimant has work waiting; `weight` holds from now on."""
        account = self._accounts.get(key)
        if account is None:
            self._forget_idle()
            account = self._accounts[key] = _Account()
        account.weight = weight
        if not account.waiting:
            account.waiting = True
            account.tag = max(account.tag, self._served_tag)

    def rests(self, key: Key) -> None:
        """This claimant has no work waiting."""
        if key in self._accounts:
            self._accounts[key].waiting = False

    @property
    def wanting(self) -> bool:
        """Whether any claimant has work waiting."""
        return any(each.waiting for each in self._accounts.values())

    def lowest(self, now_s: float) -> Key | None:
        """The claimant with work that is to be served next; of equals, the one that came first.
        O(claimants + their running work)."""
        tags = {key: each.tag_at(now_s) for key, each in self._accounts.items() if each.waiting}
        return min(tags, key=tags.__getitem__) if tags else None

    def begin(self, key: Key, run: Run) -> None:
        """This work of a claimant begins."""
        account = self._accounts[key]
        self._served_tag = max(self._served_tag, account.tag_at(run.started_s))
        account.tag += run.charged_s / account.weight
        account.running.add(run)

    def end(self, key: Key, run: Run, seconds: float) -> None:
        """A piece of its work took these seconds."""
        account = self._accounts[key]
        account.running.remove(run)
        account.tag += (seconds - run.charged_s) / account.weight

    def _forget_idle(self) -> None:
        """Forget idle claimants that would come back at the tag served last, as new ones do."""
        gone = [
            key
            for key, each in self._accounts.items()
            if not each.waiting and not each.running and each.tag <= self._served_tag
        ]
        for key in gone:
            del self._accounts[key]
