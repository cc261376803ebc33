"""How the ranks of a communicator meet in the job's store, before it is made.

    every rank   appends its line to the roster, and counts itself
    the last     reads the roster, and writes whether all lines say the same
    every rank   waits for that verdict inside the store, and reads it

A rank makes four store operations, and the last one six, whatever their number. Who is missing
after the limit, or unlike the others, is read from the roster at once.
"""

from collections.abc import Sequence

from torch._C._distributed_c10d import Store

from trainer_client.runtime.fault_board import append_to, as_timedelta
from trainer_client.runtime.faults import TransportMismatchError

ROSTER, ARRIVED, VERDICT = "roster", "arrived", "verdict"
PARTED, ALL_PARTED = "parted", "all parted"
ALIKE, UNLIKE = "alike", "unlike"


def meet(store: Store, *, replica: int, ranks: int, statement: str, limit_s: float) -> None:
    """Wait until all ranks are there, and made the same statement of how they communicate.

    Raises RuntimeError (the store's) where not all come within the limit, and
    TransportMismatchError, on every rank, where their statements differ.
    """
    append_to(store, ROSTER, f"{replica} {statement}\n")
    if store.add(ARRIVED, 1) == ranks:
        store.set(VERDICT, ALIKE if len(set(_read(store).values())) == 1 else UNLIKE)
    store.wait([VERDICT], as_timedelta(limit_s))
    if store.get(VERDICT).decode() == UNLIKE:
        replicas_of: dict[str, list[int]] = {}
        for other, said in sorted(_read(store).items()):
            replicas_of.setdefault(said, []).append(other)
        raise TransportMismatchError(replicas_of)


def missing(store: Store, members: Sequence[int]) -> tuple[int, ...]:
    """Members that did not come to the meeting."""
    try:
        there = _read(store) if store.check([ROSTER]) else {}
    except RuntimeError:  # the store's host is gone
        return ()
    return tuple(member for member in members if member not in there)


def part(store: Store, *, ranks: int, limit_s: float) -> None:
    """Wait until all ranks come here, but no longer than the limit: some may have ended in another
    way."""
    try:
        if store.add(PARTED, 1) == ranks:
            store.set(ALL_PARTED, "")
        store.wait([ALL_PARTED], as_timedelta(limit_s))
    except RuntimeError:
        return  # not all came, or the store's host is gone


def _read(store: Store) -> dict[int, str]:
    lines = store.get(ROSTER).decode().splitlines()
    return {int(replica): said for replica, said in (line.split(" ", 1) for line in lines)}
