"""Replays what ranks posted to a communicator, and finds what would never end.

A rank's batches are done in the order in which it posted them, as NCCL does a stream's group calls.
A batch is a list of ("send" or "recv", peer), and ends when each of its messages has met its
counterpart in the batch that the peer is at; or a name, for a collective that all ranks take part
in. Messages between two ranks in one direction match in order.
"""


def unmatched(posted):
    """The batches at which ranks would wait for ever, by rank; empty where all of them end.

    posted: rank → its batches, in order.
    """
    at = dict.fromkeys(posted, -1)
    waiting = {}
    for rank in posted:
        step(posted, at, waiting, rank)
    begun = True
    while begun:
        begun = advance(posted, at, waiting)
    return {rank: posted[rank][at[rank]] for rank in posted if at[rank] < len(posted[rank])}


def advance(posted, at, waiting):
    """Match what can be matched now; whether anything was."""
    current = {r: posted[r][at[r]] for r in posted if at[r] < len(posted[r])}
    names = {batch for batch in current.values() if isinstance(batch, str)}
    if (
        len(current) == len(posted)
        and len(names) == 1
        and len(set(map(str, current.values()))) == 1
    ):
        for rank in posted:
            step(posted, at, waiting, rank)
        return True
    moved = False
    for rank, batch in current.items():
        if isinstance(batch, str):
            continue
        for kind, peer in tuple(waiting[rank]):
            other = current.get(peer)
            counterpart = ("recv" if kind == "send" else "send", rank)
            if other is None or isinstance(other, str) or counterpart not in waiting[peer]:
                continue
            waiting[rank].remove((kind, peer))
            waiting[peer].remove(counterpart)
            moved = True
    for rank, batch in current.items():
        if not isinstance(batch, str) and not waiting[rank]:
            step(posted, at, waiting, rank)
            moved = True
    return moved


def step(posted, at, waiting, rank):
    at[rank] += 1
    following = posted[rank][at[rank]] if at[rank] < len(posted[rank]) else []
    waiting[rank] = [] if isinstance(following, str) else list(following)
