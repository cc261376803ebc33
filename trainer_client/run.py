"""One pass over a job, from a cursor on: everything that lives while a dataset is iterated.

    channel ─ Session ─┬─ StepLoader ─ Prefetcher ─▶ next()
                       ├─ Committer ◀─ commit()
                       └─ Heartbeat

`close` may be called at any time, from any thread, more than once; it returns within
seconds, whatever the threads are blocked in.
"""

import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from dataservice_proto.whereabouts import node_and_zone

from trainer_client.alignment import aligned
from trainer_client.device import DeviceCopier
from trainer_client.errors import ClientError, CursorMismatch, MisuseError
from trainer_client.fetch import PartFetcher
from trainer_client.heartbeat import DataWait, Heartbeat
from trainer_client.launch import launch_name
from trainer_client.parts import WantedParts
from trainer_client.position import Position
from trainer_client.prefetch import Committer, Prefetcher, Trained
from trainer_client.renewed_channel import RenewedChannel
from trainer_client.session import Claim, Session
from trainer_client.shard import Shard
from trainer_client.steps import StepLoader
from trainer_client.traces import note
from trainer_client.transport import Transport, wait_until_reachable

# Extra time of the loop's own deadline: the deadline inside a thread passes first, because its
# error says what failed.
GRACE_S = 15.0
CLOSING_FLUSH_S = 5.0
# How long a commit waits for a call for a later step, which takes it along.
RIDE_S = 0.25
JOIN_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """How a rank reaches its job, and the limits of its waits. With `launch` None, the name comes
    from the launcher."""

    address: str
    job: str
    rank: int
    world_size: int
    wanted: WantedParts
    prefetch_steps: int
    parallel_streams: int
    connect_timeout_s: float
    timeout_s: float
    stall_timeout_s: float
    device: torch.device | None
    launch: str | None = None
    rows_multiple: int = 1
    same_node: bool = True


class Run:
    """Opens the session when made; see the module's contract.

    Raises ServiceUnreachable, ServiceTimeout, the service's refusal, and CursorMismatch where
    cursor and step disagree.
    """

    def __init__(self, options: RunOptions, transport: Transport, start: Position) -> None:
        self._options = options
        self._process = os.getpid()
        self._stop = threading.Event()
        self._closing = threading.Lock()
        open_channel = partial(transport.channel, options.address, authorised=True)
        self._renewed = RenewedChannel(open_channel)
        self._channel = self._renewed.channel
        self._copier = DeviceCopier(options.device)
        self._fetcher = PartFetcher(
            transport,
            streams=options.parallel_streams,
            stall_timeout_s=options.stall_timeout_s,
            pin_memory=self._copier.pins,
            same_node=options.same_node,
        )
        node, zone = node_and_zone()
        self._session = Session(
            self._channel,
            options.address,
            Claim(
                job=options.job,
                rank=options.rank,
                world_size=options.world_size,
                cursor=start.cursor,
                client=f"{socket.gethostname()}:{os.getpid()}",
                launch=launch_name(options.launch, world_size=options.world_size),
                node=node,
                zone=zone,
            ),
            stop=self._stop,
            renew=self._renewed.renew,
            connect_timeout_s=options.connect_timeout_s,
            timeout_s=options.timeout_s,
        )
        self._prefetcher: Prefetcher[Shard] | None = None
        self._committer: Committer | None = None
        self._heartbeat: Heartbeat | None = None
        self._waits = DataWait()
        self._begun: dict[int, tuple[str, float]] = {}  # step in training → digest, start time
        try:
            self._open(start)
        except BaseException:
            self.close()
            raise

    @property
    def received_bytes(self) -> dict[str, int]:
        """Bytes of parts that have come until now, by their path."""
        return dict(self._fetcher.received)

    def next(self) -> Shard | None:
        """The next step's shard; None after the last. Raises MisuseError in a forked process."""
        self._require_own_process()
        assert self._prefetcher is not None
        with self._waits.waiting():
            shard = self._prefetcher.next(self._options.timeout_s + GRACE_S)
        if shard is not None:
            self._waits.begin(shard.step)
            self._begun[shard.step] = shard.plan.digest, time.time()
        return shard

    def peek(self, *, wait: bool) -> Shard | None:
        """The shard that `next` will return; without `wait`, None if it is not there yet. Raises
        MisuseError in a forked process."""
        self._require_own_process()
        prefetcher = self._prefetcher
        assert prefetcher is not None
        if not wait:
            return prefetcher.ready()
        with self._waits.waiting():
            return prefetcher.peek(self._options.timeout_s + GRACE_S)

    def commit(self, trained: Trained) -> None:
        """Send the commit of a step in the background. Raises the error of an earlier one."""
        assert self._committer is not None
        for step in [begun for begun in self._begun if begun <= trained.step]:
            self._note("train", step, *self._begun.pop(step))
        self._committer.put(trained)

    def flush(self, timeout_s: float) -> None:
        """Wait until the service has taken all commits."""
        assert self._committer is not None
        self._committer.flush(timeout_s)

    def close(self) -> None:
        """Give up the rank: flush commits briefly, end all calls, stop all threads."""
        if self._forked:
            return  # a forked process inherits this object without its threads and connections
        with self._closing:
            if self._stop.is_set():
                return
            try:
                # The position is in the checkpoint, whatever the service has heard of it.
                with suppress(ClientError):
                    if self._committer is not None:
                        self._committer.flush(CLOSING_FLUSH_S)
            finally:
                self._end()

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._process

    def _require_own_process(self) -> None:
        if self._forked:
            raise MisuseError(
                f"process {os.getpid()} was forked from {self._process}, which iterates this "
                "dataset: its threads and connections stay there. Ask for shards in that process."
            )

    def _note(self, what: str, step: int, digest: str, began_s: float) -> None:
        own = self._options
        note(what, digest, began_s=began_s, job=own.job, step=step, rank=own.rank)

    def _open(self, start: Position) -> None:
        options = self._options
        wait_until_reachable(
            self._channel,
            options.address,
            job=options.job,
            timeout_s=options.connect_timeout_s,
        )
        lease = self._session.open()
        if lease.start_step != start.step:
            raise CursorMismatch(
                f"the state_dict stands before step {start.step}, but the service reads its "
                f"cursor as step {lease.start_step}. Load the state_dict as ShardDataset gave it."
            )
        loader = StepLoader(
            self._channel,
            self._session,
            self._fetcher,
            wanted=options.wanted,
            stop=self._stop,
            timeout_s=options.timeout_s,
        )
        self._committer = loader.committer = Committer(loader.commit, ride_s=RIDE_S)

        step = start.step

        def load() -> Shard | None:
            nonlocal step
            began_s = time.time()
            shard = loader.load(step)
            if shard is None:
                return None
            self._note("receive", shard.step, shard.plan.digest, began_s)
            step = shard.step + 1  # steps before the shard's may have been skipped
            return self._copier.send(aligned(shard, options.rows_multiple))

        self._heartbeat = loader.heartbeat = Heartbeat(
            self._channel,
            self._session,
            self._waits,
            every_s=lease.report_every_s,
            with_questions=lease.reports_along,
            stop=self._stop,
        )
        self._prefetcher = Prefetcher(load, depth=options.prefetch_steps)

    def _end(self) -> None:
        self._stop.set()
        each = (self._session, self._prefetcher, self._committer, self._heartbeat)
        threads = [thread for thread in each if thread is not None]
        for thread in threads:
            thread.close()
        self._fetcher.close()
        self._renewed.close()
        for thread in threads:
            thread.join(JOIN_S)
