"""How ranks meet in the job's store, before they make a mesh or a communicator.

    every rank   appends its line to the roster, and counts itself
    the last     reads the roster, and writes whether all lines say the same
    every rank   waits for that verdict inside the store, and reads it

A rank makes four store operations, and the last one six, whatever their number. Who is missing
after the limit, or unlike the others, is read from the roster at once.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch._C._distributed_c10d import Store

from trainer_client.runtime.fault_board import append_to, as_timedelta, grace_s
from trainer_client.runtime.faults import GroupFormationError, LayoutError

ROSTER, ARRIVED, VERDICT = "roster", "arrived", "verdict"
PARTED, ALL_PARTED = "parted", "all parted"
ALIKE, UNLIKE = "alike", "unlike"
NAMED = 8  # ranks that an error lists of those that gave the same


def meet(
    store: Store, *, replica: int, ranks: int, statement: str, limit_s: float
) -> dict[str, list[int]]:
    """Wait until all ranks are there. What they said of themselves → those that said it, on every
    rank, where their statements (of one line) differ; empty where all said the same.

    Raises RuntimeError (the store's) where not all come within the limit.
    """
    append_to(store, ROSTER, f"{replica} {statement}\n")
    if store.add(ARRIVED, 1) == ranks:
        store.set(VERDICT, ALIKE if len(set(_read(store).values())) == 1 else UNLIKE)
    store.wait([VERDICT], as_timedelta(limit_s))
    said_by: dict[str, list[int]] = {}
    if store.get(VERDICT).decode() == UNLIKE:
        for other, said in sorted(_read(store).items()):
            said_by.setdefault(said, []).append(other)
    return said_by


def agree(
    store: Store, shape: Mapping[str, object], *, rank: int, ranks: int, timeout_s: float
) -> None:
    """Compare the shape of the pipeline's mesh that each rank is about to make.

    Raises LayoutError, on all of them, with each value that differs and who gave it, and
    GroupFormationError where a rank does not come.
    """
    statement = json.dumps({name: repr(value) for name, value in shape.items()})
    limit_s = timeout_s - grace_s(timeout_s)
    try:
        unlike = meet(store, replica=rank, ranks=ranks, statement=statement, limit_s=limit_s)
    except RuntimeError as error:
        everyone = tuple(range(ranks))
        lost = GroupFormationError(
            action="making the pipeline's mesh (did all ranks begin?)",
            members=everyone,
            replica=rank,
            awaited=None,
            culprits=missing(store, everyone),
            timeout_s=timeout_s,
            cause=str(error),
        )
        lost.add_note("The numbers above are ranks, not replicas.")
        raise lost from error
    if unlike:
        given = {other: json.loads(said) for said, others in unlike.items() for other in others}
        raise LayoutError(
            f"ranks make different meshes: {'; '.join(_differences(shape, given))}. Give "
            "PipelineMesh the same on all ranks, such as those of one layout file"
        )


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


def _differences(names: Iterable[str], given: Mapping[int, Mapping[str, str]]) -> Iterator[str]:
    """Each thing of which ranks gave different values, in words; the rarer value first."""
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, values in sorted(given.items()):
            ranks_of.setdefault(values[name], []).append(rank)
        if len(ranks_of) > 1:
            rarest = sorted(ranks_of.items(), key=lambda each: len(each[1]))
            yield " and ".join(f"{name}={value} on {_listed(ranks)}" for value, ranks in rarest)


def _listed(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:NAMED]))}{more}"


def _read(store: Store) -> dict[int, str]:
    lines = store.get(ROSTER).decode().splitlines()
    return {int(replica): said for replica, said in (line.split(" ", 1) for line in lines)}
