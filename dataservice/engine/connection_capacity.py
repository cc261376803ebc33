"""Whether the ranks that come find room among the files and sockets that processes may open.

A rank has a connection to the coordinator and one to each worker. Where they do not fit, accept()
fails: the last ranks of an attempt would wait for ever, and nobody would be told for what. So they
are counted when the first rank comes. tests/service/test_descriptors.py measures the constants.
"""

import logging
from collections.abc import Callable, Iterable

from dataservice.core.descriptor_limit import NEAR_RANKS
from dataservice.core.ports import WorkerPool
from dataservice.engine.running_job import RunningJob

log = logging.getLogger(__name__)

AT_REST = 160
"""Descriptors of a process without ranks, with what jobs, scrapes and the command line may take."""
A_WORKER = 8
"""Descriptors that a worker takes at the coordinator: the link to it, its process, and, where it
shares the coordinator's process, its port and its decoders' nursery."""
A_RANK = 1
"""Connections of a rank to one process."""
A_NEAR_RANK = 2
"""What a rank takes besides at a worker on its own machine, a socket and the memory that both map,
where it is one of NEAR_RANKS."""


class ConnectionCapacity:
    """Counts the ranks of all jobs against the limits of the coordinator and of workers."""

    def __init__(
        self,
        limit: int | None,
        *,
        pool: WorkerPool,
        jobs: Callable[[], Iterable[RunningJob]],
    ) -> None:
        """`limit` is the coordinator's own; None where it is not known."""
        self._limit = limit
        self._pool = pool
        self._jobs = jobs
        self._said = ""

    def note_first_rank(self) -> None:
        """The first rank of an attempt has come: log, once, whether there is room for them all."""
        short = self.shortage()
        if short and short != self._said:
            log.warning("%s", short)
        self._said = short

    def shortage(self) -> str:
        """A sentence about the process that lacks most; empty where there is room for all ranks.
        O(jobs + workers)."""
        workers = self._pool.workers()
        inside = sum(info.descriptors is None for info in workers)
        ranks = sum(map(ranks_of, self._jobs()))
        at_rest = AT_REST + A_WORKER * len(workers)
        at_worker = ranks * A_RANK + min(ranks, NEAR_RANKS) * A_NEAR_RANK
        need = at_rest + ranks * A_RANK + inside * at_worker
        needs = [("the coordinator", self._limit, need)]
        needs += [(each.worker, each.descriptors, AT_REST + at_worker) for each in workers]
        short = [each for each in needs if each[1] is not None and each[2] > each[1]]
        if ranks == 0 or not short:
            return ""
        who, limit, need = max(short, key=lambda each: each[2] - (each[1] or 0))
        others = f" and {len(short) - 1} more" if len(short) > 1 else ""
        return (
            f"{ranks:,} ranks need about {need:,} open files and sockets at {who}{others}, which "
            f"may have {limit:,}: the last ranks are not let in. Raise its hard limit to "
            f"{need:,} or more (LimitNOFILE= of systemd, nofile of a container, ulimit -Hn) and "
            "restart it"
        )


def ranks_of(job: RunningJob) -> int:
    """The number of a job's ranks that train or are to come. An attempt that forms replaces the one
    that runs."""
    coming = [each.topology.world_size for each in job.forming.values() if not each.over]
    attempt = job.attempt
    if attempt is not None and not attempt.over:
        coming.append(attempt.topology.world_size if attempt.connected else 0)
    return max(coming, default=0)
