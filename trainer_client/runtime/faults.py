"""The errors of the runtime inside a rank.

    RuntimeFault (RuntimeError)
    ├── LayoutError         a pack that cannot be cut, or rows that do not add up; also a ValueError
    ├── GroupPoolError      the pool was asked for something it cannot give
    ├── PlanMismatchError   replicas opened the same step with different plans
    ├── TransportMismatchError   replicas would communicate in different ways
    └── PeerError           a peer died, hung or closed its connection
        └── GroupFormationError   members never arrived when a group was being made

Errors of the transport (gloo, NCCL, the store) are translated once, in ``peers.py`` and
``group_pool.py``. After a ``PeerError`` the attempt cannot go on: the trainer should exit and be
started again from its checkpoint.
"""

import sys
from collections.abc import Mapping, Sequence


class RuntimeFault(RuntimeError):
    """Base of every error this package raises on purpose."""


class LayoutError(RuntimeFault, ValueError):
    """Lengths, splits or positions contradict each other or the group's degree."""


class GroupPoolError(RuntimeFault):
    """A group was requested that this replica is not in, or connections were used that are closed,
    or in a way that they do not serve."""


class PlanMismatchError(RuntimeFault):
    """Replicas hold different plans for one step.

    Attributes: ``replicas_of``, digest → replicas that hold it.
    """

    def __init__(self, replicas_of: Mapping[str, Sequence[int]]) -> None:
        self.replicas_of = {digest: tuple(replicas) for digest, replicas in replicas_of.items()}
        held = "; ".join(
            f"digest {digest} on replicas {list(replicas)}"
            for digest, replicas in self.replicas_of.items()
        )
        super().__init__(
            f"the replicas hold {len(self.replicas_of)} different plans for this step: {held}. "
            "Training stops here, because their groups would not match. "
            "Restart all ranks from one checkpoint against one service."
        )


class TransportMismatchError(RuntimeFault):
    """Replicas that cannot communicate, because they would do it in different ways.

    Attributes: ``replicas_of``, what replicas said of themselves → those that said it.
    """

    def __init__(self, replicas_of: Mapping[str, Sequence[int]]) -> None:
        self.replicas_of = {said: tuple(replicas) for said, replicas in replicas_of.items()}
        held = "; ".join(
            f"{said} on replicas {list(replicas)}" for said, replicas in self.replicas_of.items()
        )
        super().__init__(
            f"the replicas would communicate in {len(self.replicas_of)} different ways: {held}. "
            "Start all ranks from one environment, with one backend."
        )


class PeerError(RuntimeFault):
    """A member of a group stopped answering.

    Attributes
    ----------
    action: what was being done, in words.
    members: replicas of the group. ``replica``: this one.
    awaited: replica this one was waiting for, or None where the transport does not tell.
    culprits: replicas that look dead or hung, after asking the other survivors whom they
        were waiting for; equal to ``(awaited,)`` if nobody answered.
    """

    def __init__(
        self,
        *,
        action: str,
        members: Sequence[int],
        replica: int,
        awaited: int | None,
        culprits: Sequence[int],
        timeout_s: float,
        cause: str,
    ) -> None:
        self.action = action
        self.members = tuple(members)
        self.replica = replica
        self.awaited = awaited
        self.culprits = tuple(culprits)
        self.timeout_s = timeout_s
        named = " and ".join(f"replica {culprit}" for culprit in self.culprits) or "some replica"
        waiting = f", awaiting replica {awaited}" if awaited is not None else ""
        super().__init__(
            f"{named} of group {list(self.members)} died or hung during {action} "
            f"(noticed by replica {replica}{waiting}; limit {timeout_s:g} s). "
            "Look at that replica's own log first; then restart all ranks from the last "
            f"checkpoint. Transport said: {cause}"
        )

    if sys.version_info < (3, 11):

        def add_note(self, note: str) -> None:
            """As later Pythons have it; they also print notes, so here the message takes them."""
            self.__notes__ = [*getattr(self, "__notes__", []), note]
            self.args = (f"{self.args[0]}\n{note}",)


class GroupFormationError(PeerError):
    """Members of a group did not arrive to form it within the limit."""
