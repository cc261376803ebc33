"""The Coordinator service over engine.api.CoordinatorApi: converts, logs and maps errors.

A session's claim lives exactly as long as its OpenSession call. However the call ends (the
client closes it, dies, is cut off and misses its keepalive pings, is fenced, or the service
stops), `close_session` runs once.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from dataservice_proto.v1 import coordinator_pb2, coordinator_pb2_grpc

from dataservice.core.cursor import Cursor
from dataservice.core.orders import EVERYTHING
from dataservice.core.plan import StepPlan
from dataservice.engine.api import CoordinatorApi, EndOfData, SessionOpened
from dataservice.serving import wire
from dataservice.serving.errors import ServiceUnreachableError, answered

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServicer):
    """One method a call; the engine decides."""

    def __init__(self, api: CoordinatorApi) -> None:
        self._api = api
        self._closing = asyncio.Event()
        self._summary: tuple[tuple[str, str], coordinator_pb2.StepSummary] | None = None

    def close(self) -> None:
        """End all sessions: their clients are told to come back."""
        self._closing.set()

    # ---- jobs --------------------------------------------------------------------------

    async def SubmitJob(
        self, request: coordinator_pb2.SubmitJobRequest, context: Context
    ) -> coordinator_pb2.JobInfo:
        """Validate and register a job."""
        async with answered(context, "SubmitJob"):
            status = await self._api.submit(request.spec_yaml, request.base_directory)
        logger.info("job %s submitted", status.record.name)
        return wire.job_status_to_proto(status)

    async def ListJobs(
        self, request: coordinator_pb2.ListJobsRequest, context: Context
    ) -> coordinator_pb2.ListJobsResponse:
        """All jobs by name."""
        async with answered(context, "ListJobs"):
            jobs = await self._api.jobs()
        return coordinator_pb2.ListJobsResponse(jobs=map(wire.job_status_to_proto, jobs))

    async def GetJob(
        self, request: coordinator_pb2.JobRequest, context: Context
    ) -> coordinator_pb2.JobInfo:
        """One job."""
        async with answered(context, "GetJob"):
            status = await self._api.job(request.job)
        return wire.job_status_to_proto(status)

    async def DrainJob(
        self, request: coordinator_pb2.JobRequest, context: Context
    ) -> coordinator_pb2.JobInfo:
        """Refuse new attempts of a job."""
        async with answered(context, "DrainJob"):
            status = await self._api.drain(request.job)
        logger.info("job %s drains", request.job)
        return wire.job_status_to_proto(status)

    async def DeleteJob(
        self, request: coordinator_pb2.JobRequest, context: Context
    ) -> coordinator_pb2.DeleteJobResponse:
        """Forget a job."""
        async with answered(context, "DeleteJob"):
            await self._api.delete(request.job)
        logger.info("job %s deleted", request.job)
        return coordinator_pb2.DeleteJobResponse()

    async def ListQuarantine(
        self, request: coordinator_pb2.JobRequest, context: Context
    ) -> AsyncIterator[coordinator_pb2.QuarantinedSample]:
        """Samples that were masked."""
        async with answered(context, "ListQuarantine"):
            entries = await self._api.quarantine(request.job)
        for entry in entries:
            yield wire.quarantine_entry_to_proto(entry)

    async def RecostJob(
        self, request: coordinator_pb2.RecostJobRequest, context: Context
    ) -> coordinator_pb2.RecostJobResponse:
        """Plan with other coefficients from a step on."""
        from_step = request.from_step if request.HasField("from_step") else None
        async with answered(context, "RecostJob"):
            record = await self._api.recost(request.job, request.cost_json, from_step)
        return coordinator_pb2.RecostJobResponse(
            from_step=record.from_step, cost_version=record.cost_version
        )

    async def ExplainStep(
        self, request: coordinator_pb2.ExplainStepRequest, context: Context
    ) -> coordinator_pb2.ExplainStepResponse:
        """Plan a step of the ledger again."""
        async with answered(context, "ExplainStep"):
            explained = await self._api.explain(request.job, request.step, request.attempt or None)
        return wire.explanation_to_proto(explained)

    # ---- sessions ----------------------------------------------------------------------

    async def OpenSession(  # type: ignore[override]  # gRPC allows writing in place of yielding
        self, request: coordinator_pb2.OpenSessionRequest, context: Context
    ) -> None:
        """Hold a rank's claim while the call lasts."""
        # Not a generator: one that is cancelled while suspended closes only when collected,
        # and the claim must not outlive its client.
        async with answered(context, "OpenSession"):
            opened = await self._api.open_session(
                job=request.job,
                rank=request.rank,
                world_size=request.world_size,
                cursor=Cursor.from_json(request.cursor) if request.cursor else Cursor(),
                client=request.client,
                rejoin_attempt=request.rejoin_attempt,
            )
            logger.info("%s rank %d: %s opened", request.job, request.rank, opened.session)
            try:
                await context.write(_session_event(opened))
                await self._session_over(opened.session)
            finally:
                self._api.close_session(opened.session)
                logger.info("%s rank %d: %s closed", request.job, request.rank, opened.session)

    async def GetShard(
        self, request: coordinator_pb2.GetShardRequest, context: Context
    ) -> coordinator_pb2.GetShardResponse:
        """One rank's part of a step; waits until it is planned."""
        async with answered(context, "GetShard"):
            answer = await self._api.shard(
                request.session,
                request.step,
                received_step=request.received_step,
                failed_workers=tuple(request.failed_workers),
                wanted=(
                    wire.wanted_parts_from_proto(request.wanted)
                    if request.HasField("wanted")
                    else EVERYTHING
                ),
            )
        if isinstance(answer, EndOfData):
            return coordinator_pb2.GetShardResponse(
                end_of_data=coordinator_pb2.EndOfData(steps=answer.steps)
            )
        shard, plan = answer
        summary = self._summary_of((shard.job, shard.plan_digest), plan)
        return coordinator_pb2.GetShardResponse(shard=wire.rank_shard_to_proto(shard, summary))

    async def CommitStep(
        self, request: coordinator_pb2.CommitStepRequest, context: Context
    ) -> coordinator_pb2.CommitStepResponse:
        """A rank has trained a step."""
        async with answered(context, "CommitStep"):
            measured_s = wire.measured_from_proto(request)
            await self._api.commit(request.session, request.step, measured_s=measured_s)
        return coordinator_pb2.CommitStepResponse()

    async def _session_over(self, session: str) -> None:
        """Raises what ends the session: the api's error, or that the service stops."""
        ended = asyncio.ensure_future(self._api.session_ended(session))
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait({ended, closing}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                raise ServiceUnreachableError(
                    "the coordinator is stopping. Open the session again, rejoining its attempt."
                )
            await ended
        finally:
            ended.cancel()
            closing.cancel()
            await asyncio.gather(ended, closing, return_exceptions=True)

    def _summary_of(
        self, job_and_digest: tuple[str, str], plan: StepPlan
    ) -> coordinator_pb2.StepSummary:
        # All ranks ask for the same step at about the same time. Two jobs may come to one
        # digest by other stages, whose reports are not part of it.
        if self._summary is None or self._summary[0] != job_and_digest:
            self._summary = job_and_digest, wire.step_summary_to_proto(plan)
        return self._summary[1]


def _session_event(opened: SessionOpened) -> coordinator_pb2.SessionEvent:
    return coordinator_pb2.SessionEvent(
        attempt=opened.attempt, session=opened.session, start_step=opened.start.step
    )
