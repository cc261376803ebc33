"""Loads one step's shard: asks for it, fetches it, and asks again for parts that did not come.

GetShards ─▶ ticket ──▶ fetch ──all parts──▶ assemble ─▶ Shard
    ▲                     │ some failed, or nothing came for a while
    └─ failed_workers, ───┘ only the missing parts are fetched again
       slow_workers
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import grpc
from dataservice_proto.v1 import coordinator_pb2, coordinator_pb2_grpc

from trainer_client.assemble import assemble_shard
from trainer_client.backoff import Backoff
from trainer_client.errors import (
    AccessDenied,
    CorruptPart,
    MalformedShard,
    MisuseError,
    PlanDigestMismatch,
    ServiceTimeout,
    WorkerUnreachable,
)
from trainer_client.fetch import Part, PartFetcher, PartId, Share, TicketFailure, shares_of
from trainer_client.heartbeat import Heartbeat
from trainer_client.parts import WantedParts
from trainer_client.prefetch import Committer, Trained
from trainer_client.session import Lease, Session
from trainer_client.shard import Shard
from trainer_client.shard_calls import POLL_S, ShardCalls

# Number of rounds with a corrupt part after which a step fails: these are not just flipped bits.
MAX_CORRUPT = 3


@dataclass(frozen=True, slots=True)
class Blame:
    """Workers to report to the coordinator: those that failed, and those that only sent nothing
    for a time and may still be decoding."""

    failed: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()


class StepLoader:
    """Loads steps one after another. Ended by closing its session, channels and `stop`. Calls take
    along what `committer` has to say."""

    def __init__(
        self,
        channel: grpc.Channel,
        session: Session,
        fetcher: PartFetcher,
        *,
        wanted: WantedParts,
        stop: threading.Event,
        timeout_s: float,
    ) -> None:
        self._stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        self._shards = ShardCalls(channel)
        self._session = session
        self._fetcher = fetcher
        self._wanted = wanted
        self._stop = stop
        self._timeout_s = timeout_s
        self.committer: Committer | None = None
        self.heartbeat: Heartbeat | None = None

    def load(self, step: int) -> Shard | None:
        """The shard of a step, or of the first step after it that is not skipped; None after the
        last step. All earlier steps must have arrived.

        Raises WorkerUnreachable where no part came for `timeout_s`, CorruptPart where one stays
        corrupt, PlanDigestMismatch where the plan changes between two tries, and what
        `Session.call` raises.
        """
        held: dict[PartId, Part] = {}
        retry, troubles = Backoff(self._stop, self._timeout_s), _Troubles(step)
        digest, blame = "", Blame()
        while True:
            answer = self._ask(step, blame)
            if answer is None:
                return None
            shard, ticket_key = answer
            step = shard.step
            digest = check_digest(shard, digest)
            shares = self._shares(shard)
            wanted = {part for share in shares for part in share.parts}
            fetched = self._fetcher.fetch(shard.ticket, shares, wanted - held.keys(), ticket_key)
            held |= fetched.parts
            if not fetched.failures:
                return assemble_shard(shard, held, self._wanted, partial(self._summary, step))
            blame = troubles.judge(fetched.failures)
            if fetched.parts:  # the deadline is for the next part, not for the whole step
                retry = Backoff(self._stop, self._timeout_s)
            if not retry.wait():
                raise troubles.verdict(retry, missing=len(wanted - held.keys()))

    @staticmethod
    def _shares(shard: coordinator_pb2.RankShard) -> tuple[Share, ...]:
        return shares_of(shard.ticket, shard.addresses) if shard.HasField("ticket") else ()

    def _summary(self, step: int) -> coordinator_pb2.StepSummary:
        """The groups of a whole step."""

        def rpc(lease: Lease) -> coordinator_pb2.StepSummary:
            request = coordinator_pb2.GetStepSummaryRequest(session=lease.session, step=step)
            return self._stub.GetStepSummary(request, timeout=POLL_S)

        return self._session.call(rpc)

    def commit(self, trained: Trained) -> None:
        """Tell the service that this rank has trained a step, and its measured seconds."""

        def rpc(lease: Lease) -> None:
            request = coordinator_pb2.CommitStepRequest(
                session=lease.session,
                step=trained.step,
                measured_s=trained.measured_s,
                phase_s=trained.phase_s,
            )
            self._stub.CommitStep(request, timeout=POLL_S)

        self._session.call(rpc)

    def _ask(self, step: int, blame: Blame) -> tuple[coordinator_pb2.RankShard, bytes] | None:
        """The shard, and the key of the session that its ticket was given to."""

        riding: tuple[Trained, ...] = ()

        def rpc(lease: Lease) -> tuple[coordinator_pb2.GetShardResponse, bytes]:
            request = coordinator_pb2.GetShardRequest(
                session=lease.session,
                step=step,
                received_step=step - 1,
                failed_workers=blame.failed,
                slow_workers=blame.slow,
                wanted=self._wanted.to_proto(),
                trained=[
                    coordinator_pb2.TrainedStep(
                        step=each.step, measured_s=each.measured_s, phase_s=each.phase_s
                    )
                    for each in riding
                ],
                report=self.heartbeat.along() if self.heartbeat is not None else None,
            )
            return self._shards.ask(request), lease.ticket_key

        while True:
            riding = self.committer.riding() if self.committer is not None else ()
            response, ticket_key = self._session.call(rpc)
            if self.committer is not None and riding:
                self.committer.arrived(riding[-1].step)
            kind = response.WhichOneof("result")
            if kind == "shard" and response.shard.step == step:
                return response.shard, ticket_key
            if kind == "end_of_data":
                return None
            if kind == "shard":
                raise MalformedShard(f"step {step} was asked for, {response.shard.step} came")
            if kind != "skipped" or response.skipped.next_step <= step:
                said = str(response)[:120] or "an answer of another release"
                raise MalformedShard(f"step {step} was asked for, and what came is: {said}")
            step = response.skipped.next_step


def check_digest(shard: coordinator_pb2.RankShard, earlier: str) -> str:
    """The shard's plan digest, the same in its ticket and in an `earlier` answer if any."""
    digests = {shard.plan_digest, earlier or shard.plan_digest}
    if shard.HasField("ticket"):
        digests.add(shard.ticket.plan_digest)
    if len(digests) > 1:
        raise PlanDigestMismatch(
            f"step {shard.step} has plans of different digests: {', '.join(sorted(digests))}. "
            "Ranks must not train on different plans: restart all ranks from the checkpoint."
        )
    return shard.plan_digest


class _Troubles:
    """What went wrong while a step was fetched, and which workers to name for it.

    An expired ticket or a corrupt part may not be the worker's fault, so the worker is reported
    from the second time on. One that cannot be reached, lost the pack or stalls is reported at
    once.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._doubts: Counter[str] = Counter()
        self._tried: Counter[str] = Counter()
        self._corrupt_rounds = 0
        self._last: TicketFailure | None = None

    def judge(self, failures: Sequence[TicketFailure]) -> Blame:
        """The workers to report. Raises an error that a retry cannot repair."""
        failed, slow = [], []
        for failure in failures:
            self._last = failure
            self._tried[failure.worker] += 1
            if isinstance(failure.error, MisuseError):
                raise failure.error
            doubtful = isinstance(failure.error, AccessDenied | CorruptPart)
            self._doubts[failure.worker] += doubtful
            if isinstance(failure.error, ServiceTimeout):
                slow.append(failure.worker)
            elif not doubtful or self._doubts[failure.worker] > 1:
                failed.append(failure.worker)
        corrupt = [f for f in failures if isinstance(f.error, CorruptPart)]
        self._corrupt_rounds += bool(corrupt)
        if corrupt and self._corrupt_rounds >= MAX_CORRUPT:
            raise CorruptPart(
                f"step {self._step}, {_place(corrupt[0])}: {corrupt[0].error}. It happened "
                f"{self._corrupt_rounds} times in a row: check that machine's memory and network."
            )
        return Blame(tuple(failed), tuple(slow))

    def verdict(self, retry: Backoff, missing: int) -> WorkerUnreachable:
        """The error to raise at the deadline."""
        last = self._last
        assert last is not None
        tried = ", ".join(f"{name} {times}×" for name, times in self._tried.most_common(8))
        return WorkerUnreachable(
            f"step {self._step}: {missing} parts did not come in {retry.spent_s:.0f} s "
            f"({retry.attempts + 1} attempts; failed or silent: {tried}); last, {_place(last)}: "
            f"{last.error}. Check that the workers' addresses can be reached from this machine."
        )


def _place(failure: TicketFailure) -> str:
    return f"worker {failure.worker} at {failure.address}"
