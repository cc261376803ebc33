"""Replays what ranks posted to communicators, and finds what would never end.

It knows nothing of plans, rings or schedules. As with NCCL, a rank's queue of work posts a batch of
messages to a communicator, or waits for one that it posted. A communicator does a rank's batches
one after the other. A batch ends when each of its messages has met its counterpart in the batch
that the peer is at, or, where it is the name of a collective, when all ranks are at it.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple


class Post(NamedTuple):
    """The number that names a batch to its rank, the communicator and this rank's place among its
    ranks, and the batch: ("send" or "recv", peer's place) each, or a collective's name."""

    number: int
    communicator: str
    place: int
    ranks: int
    batch: Sequence[tuple[str, int]] | str


class Wait(NamedTuple):
    """The rank's queue goes on once its batch of this number is over."""

    number: int


def stuck(queues):
    """Rank → what it would wait for without end; empty where all of them come through.

    queues: rank → its Posts and Waits, in order.
    """
    replay = _Replay(queues)
    while replay.advance():
        pass
    return replay.stuck()


class _Replay:
    def __init__(self, queues):
        self._queues = {rank: deque(queue) for rank, queue in queues.items()}
        self._over = {rank: set() for rank in queues}
        # communicator → place → (rank, Post) in order, the first of which is being done
        self._posted = {}

    def advance(self):
        """Do what can be done now; whether there was anything."""
        moved = [self._run(rank) for rank in self._queues]
        done = [self._match(posted) for posted in self._posted.values()]
        return any(moved) or any(done)

    def stuck(self):
        found = {rank: queue[0] for rank, queue in self._queues.items() if queue}
        for posted in self._posted.values():
            for rank, post in (batches[0] for batches in posted.values() if batches):
                found.setdefault(rank, post)
        return found

    def _run(self, rank):
        queue, over, moved = self._queues[rank], self._over[rank], False
        while queue and (isinstance(queue[0], Post) or queue[0].number in over):
            if isinstance(post := queue.popleft(), Post):
                places = self._posted.setdefault(post.communicator, {})
                places.setdefault(post.place, deque()).append((rank, post))
            moved = True
        return moved

    def _match(self, posted):
        heads = {place: batches[0][1] for place, batches in posted.items() if batches}
        ended = [place for place in heads if self._ends(place, heads)]
        for place in ended:
            rank, post = posted[place].popleft()
            self._over[rank].add(post.number)
        return bool(ended)

    def _ends(self, place, heads):
        """Whether this batch and those of all peers that it reaches are there and fit together."""
        post = heads[place]
        if isinstance(post.batch, str):
            return [head.batch for head in heads.values()] == [post.batch] * post.ranks
        reached, following = {place}, [place]
        while following:
            here = following.pop()
            if here not in heads or isinstance(heads[here].batch, str):
                return False
            for peer in {peer for _, peer in heads[here].batch} - reached:
                reached.add(peer)
                following.append(peer)
        return all(_fits(a, heads[a].batch, b, heads[b].batch) for a in reached for b in reached)


def _fits(a, of_a, b, of_b):
    """Whether what one sends to the other is what the other receives from it."""
    sent = Counter(peer for kind, peer in of_a if kind == "send")[b]
    received = Counter(peer for kind, peer in of_b if kind == "recv")[a]
    return sent == received
