"""The Coordinator service over engine.api.CoordinatorApi: converts, logs and maps errors.

The engine knows jobs by their full names, callers know them by the names that `identity.py`
defines; names are translated here, in requests and in answers. A request for another team's job or
session reaches the engine under a name that does not exist, so the answer is the same as for one
that never existed.

A session's claim ends with its OpenSession call. However the call ends (the client closes it,
dies, is cut off and misses its keepalive pings, is fenced, or the service stops), `close_session`
runs once.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
from dataservice_proto.v1 import coordinator_pb2, coordinator_pb2_grpc
from dataservice_proto.whereabouts import NAME_CHARACTERS
from google.protobuf.message import DecodeError

from dataservice.core.cursor import Cursor
from dataservice.core.errors import SpecError
from dataservice.core.health import ServiceHealth
from dataservice.core.orders import EVERYTHING
from dataservice.core.visible import visible
from dataservice.core.whereabouts import Whereabouts
from dataservice.engine.api import (
    CoordinatorApi,
    EndOfData,
    JobStatus,
    SessionOpened,
    SkippedSteps,
)
from dataservice.engine.waiters import Waiters
from dataservice.serving import wire_health, wire_index, wire_jobs, wire_shards
from dataservice.serving.access_control import AccessControl, Context, Visit
from dataservice.serving.status_codes import ServiceUnreachableError

log = logging.getLogger(__name__)

# Longest time for which a session may outlive the token that opened it.
TOKEN_CHECK_S = 30.0
CLIENT_CHARS = 512  # longest name that a client may give itself


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServicer):
    """One method for each RPC; the engine decides."""

    def __init__(self, api: CoordinatorApi, access: AccessControl) -> None:
        self._api = api
        self._access = access
        self._job_of_session: dict[str, str] = {}
        self._closing = False
        self._closed = Waiters()
        self._listening: set[asyncio.Task[Any]] = set()

    def close(self) -> None:
        """End all sessions, and the calls that wait for a rank's next question, with a status that
        makes their clients reconnect."""
        self._closing = True
        self._closed.wake()
        for call in self._listening:
            call.cancel()

    # ---- jobs --------------------------------------------------------------------------

    async def SubmitJob(
        self, request: coordinator_pb2.SubmitJobRequest, context: Context
    ) -> coordinator_pb2.JobInfo:
        """Validate and register a job."""
        async with self._access.call(context, "SubmitJob", request) as visit:
            team = visit.caller.identity.team
            status = await self._api.submit(
                request.spec_yaml,
                request.base_directory,
                team=team,
                max_jobs=self._access.team(team).max_jobs,
            )
            visit.job = status.record.name
        log.info("job %s submitted", status.record.name)
        return _job_info(visit, status)

    async def ListJobs(
        self, request: coordinator_pb2.ListJobsRequest, context: Context
    ) -> coordinator_pb2.ListJobsResponse:
        """All jobs by name."""
        async with self._access.call(context, "ListJobs", request) as visit:
            jobs = [job for job in await self._api.jobs() if visit.caller.sees(job.record.name)]
        return coordinator_pb2.ListJobsResponse(jobs=[_job_info(visit, job) for job in jobs])

    async def GetJob(
        self, request: coordinator_pb2.JobRequest, context: Context
    ) -> coordinator_pb2.JobInfo:
        """One job."""
        async with self._access.call(context, "GetJob", request) as visit:
            status = await self._api.job(visit.named(request.job))
        return _job_info(visit, status)

    async def DrainJob(
        self, request: coordinator_pb2.JobRequest, context: Context
    ) -> coordinator_pb2.JobInfo:
        """Refuse new attempts of a job."""
        async with self._access.call(context, "DrainJob", request) as visit:
            status = await self._api.drain(visit.named(request.job))
        log.info("job %s drains", visit.job)
        return _job_info(visit, status)

    async def DeleteJob(
        self, request: coordinator_pb2.JobRequest, context: Context
    ) -> coordinator_pb2.DeleteJobResponse:
        """Forget a job."""
        async with self._access.call(context, "DeleteJob", request) as visit:
            await self._api.delete(visit.named(request.job))
        log.info("job %s deleted", visit.job)
        return coordinator_pb2.DeleteJobResponse()

    async def ListQuarantine(
        self, request: coordinator_pb2.JobRequest, context: Context
    ) -> AsyncIterator[coordinator_pb2.QuarantinedSample]:
        """Samples that were masked."""
        async with self._access.call(context, "ListQuarantine", request) as visit:
            job, last = visit.named(request.job), None
            while page := await self._api.quarantine(job, last):
                for entry in page:
                    yield wire_jobs.quarantine_entry_to_proto(entry)
                last = page[-1]

    async def RecostJob(
        self, request: coordinator_pb2.RecostJobRequest, context: Context
    ) -> coordinator_pb2.RecostJobResponse:
        """Plan with other coefficients from a step on."""
        from_step = request.from_step if request.HasField("from_step") else None
        async with self._access.call(context, "RecostJob", request) as visit:
            job = visit.named(request.job)
            record = await self._api.recost(job, request.cost_json, from_step)
        return coordinator_pb2.RecostJobResponse(
            from_step=record.from_step, cost_version=record.cost_version
        )

    async def ChangeMixture(
        self, request: coordinator_pb2.ChangeMixtureRequest, context: Context
    ) -> coordinator_pb2.ChangeMixtureResponse:
        """Draw by other weights from a step on."""
        from_step = request.from_step if request.HasField("from_step") else None
        async with self._access.call(context, "ChangeMixture", request) as visit:
            job = visit.named(request.job)
            change = await self._api.change_mixture(job, dict(request.weights), from_step)
        return coordinator_pb2.ChangeMixtureResponse(from_step=change.from_step or 0)

    async def ExplainStep(
        self, request: coordinator_pb2.ExplainStepRequest, context: Context
    ) -> coordinator_pb2.ExplainStepResponse:
        """Plan a step of the ledger again."""
        async with self._access.call(context, "ExplainStep", request) as visit:
            job = visit.named(request.job)
            explained = await self._api.explain(job, request.step, request.attempt or None)
        return await asyncio.to_thread(wire_jobs.explanation_to_proto, explained)

    async def FindSample(
        self, request: coordinator_pb2.FindSampleRequest, context: Context
    ) -> coordinator_pb2.FindSampleResponse:
        """Where a sample lies, and which steps it was in."""
        async with self._access.call(context, "FindSample", request) as visit:
            job = visit.named(request.job)
            found = await self._api.find_sample(job, request.sample_id, request.from_step)
        return wire_jobs.found_sample_to_proto(found)

    async def ReplaySteps(  # type: ignore[override]  # gRPC allows writing in place of yielding
        self, request: coordinator_pb2.ReplayStepsRequest, context: Context
    ) -> None:
        """Plan a range of steps again, or decode it again; each step is sent once it is done."""
        async with self._access.call(context, "ReplaySteps", request) as visit:
            steps = self._api.replay(
                visit.named(request.job),
                request.first_step,
                request.last_step,
                request.attempt or None,
                content=request.content,
            )
            async with aclosing(steps):  # the client may leave before the end
                async for step in steps:
                    await context.write(wire_jobs.replayed_step_to_proto(step))

    async def SkipSteps(
        self, request: coordinator_pb2.SkipStepsRequest, context: Context
    ) -> coordinator_pb2.SkipStepsResponse:
        """Have future attempts skip steps, or train them after all."""
        async with self._access.call(context, "SkipSteps", request) as visit:
            records = await self._api.skip(
                visit.named(request.job),
                [(each.first_step, each.last_step) for each in request.ranges],
                "train" if request.undo else "skip",
            )
        return coordinator_pb2.SkipStepsResponse(skips=map(wire_jobs.skip_record_to_proto, records))

    # ---- workers -----------------------------------------------------------------------

    async def ListWorkers(
        self, request: coordinator_pb2.ListWorkersRequest, context: Context
    ) -> coordinator_pb2.ListWorkersResponse:
        """The workers as they are now."""
        async with self._access.call(context, "ListWorkers", request):
            workers = await self._api.workers()
        return coordinator_pb2.ListWorkersResponse(
            workers=map(wire_jobs.worker_status_to_proto, workers)
        )

    async def RestartWorkers(
        self, request: coordinator_pb2.RestartWorkersRequest, context: Context
    ) -> coordinator_pb2.RestartWorkersResponse:
        """Begin to replace workers."""
        async with self._access.call(context, "RestartWorkers", request):
            workers = await self._api.restart_workers(tuple(request.workers))
        return coordinator_pb2.RestartWorkersResponse(workers=workers)

    async def GetHealth(
        self, request: coordinator_pb2.GetHealthRequest, context: Context
    ) -> coordinator_pb2.GetHealthResponse:
        """The current state of running jobs, and the findings about them."""
        async with self._access.call(context, "GetHealth", request) as visit:
            who = visit.caller.identity
            if request.job:
                jobs = [visit.named(request.job)]
            else:
                jobs = [name for name in self._api.job_names() if visit.caller.sees(name)]
            health = await self._api.health(jobs, team=None if who.role == "admin" else who.team)
        health = _named_plainly(visit, health)
        return await asyncio.to_thread(wire_health.health_to_proto, health)  # ranks by the thousand

    async def Index(  # type: ignore[override]  # gRPC allows writing in place of yielding
        self, request: coordinator_pb2.IndexRequest, context: Context
    ) -> None:
        """Have a worker do something for an index."""
        async with self._access.call(context, "Index", request) as visit:
            answers = self._api.index(
                request.spec_yaml,
                request.base_directory,
                team=visit.caller.identity.team,
                source=request.source,
                errand=request.errand,
            )
            async with aclosing(answers):  # the client may leave before the end
                async for answer in answers:
                    await context.write(wire_index.index_answer_to_proto(answer))

    # ---- sessions ----------------------------------------------------------------------

    async def OpenSession(  # type: ignore[override]  # gRPC allows writing in place of yielding
        self, request: coordinator_pb2.OpenSessionRequest, context: Context
    ) -> None:
        """Hold a rank's claim while the call lasts."""
        # Not a generator: one that is cancelled while suspended closes only when collected,
        # and the claim must not outlive its client.
        async with self._access.call(context, "OpenSession", request) as visit:
            client = visible(request.client, CLIENT_CHARS)
            wire_shards.require_columns_read(request, client)
            opened = await self._api.open_session(
                job=visit.named(request.job),
                rank=request.rank,
                world_size=request.world_size,
                cursor=Cursor.from_json(request.cursor) if request.cursor else Cursor(),
                client=client,
                rejoin_attempt=request.rejoin_attempt,
                launch=visible(request.launch, CLIENT_CHARS),
                reads_loss_weights=request.loss_weights,
                where=Whereabouts(
                    node=request.node[:NAME_CHARACTERS], zone=request.zone[:NAME_CHARACTERS]
                ),
            )
            about = visit.job, request.rank, client
            self._job_of_session[opened.session] = visit.job
            log.info("%s rank %d: session of %s opened", *about)
            self._access.note_session(visit, "opened", f"rank {request.rank}, {client}")
            try:
                await context.write(_session_event(opened))
                await self._session_over(opened.session, visit, context)
            finally:
                self._api.close_session(opened.session)
                del self._job_of_session[opened.session]
                log.info("%s rank %d: session of %s closed", *about)
                self._access.note_session(visit, "closed", f"rank {request.rank}, {client}")

    async def GetShard(  # type: ignore[override]  # answered in bytes, see add_to_server
        self, request: coordinator_pb2.GetShardRequest, context: Context
    ) -> bytes:
        """One rank's part of a step; waits until it is planned."""
        async with self._access.call(context, "GetShard", request) as visit:
            return await self._shard(visit, request)

    async def GetShards(  # type: ignore[override]  # gRPC allows reading and writing by the context
        self, _requests: AsyncIterator[coordinator_pb2.GetShardRequest], context: Context
    ) -> None:
        """One rank's parts of steps, each answered before the next is read."""
        async with self._access.call(context, "GetShards") as visit:
            loop = asyncio.get_running_loop()
            checked_s = loop.time()
            while (request := await self._next_question(context)) is not None:
                if loop.time() - checked_s > TOKEN_CHECK_S:
                    self._access.require_still(visit, context)
                    checked_s = loop.time()
                self._access.require_within(request)
                await context.write(await self._shard(visit, request))

    async def _next_question(self, context: Context) -> coordinator_pb2.GetShardRequest | None:
        """What a rank asks next; None where it asks no more. Raises SpecError on bytes that are no
        question, ServiceUnreachableError where the service stops meanwhile."""
        task = asyncio.current_task()
        assert task is not None, "gRPC runs each call in a task"
        if self._closing:
            raise _stopping()
        self._listening.add(task)
        try:
            request = await context.read()
        except asyncio.CancelledError:
            if not self._closing:
                raise
            task.uncancel()
            raise _stopping() from None
        except DecodeError as error:
            raise SpecError(
                "what a rank asked for is no GetShardRequest. Run one release of the client, and "
                "nothing between it and the service that changes bytes."
            ) from error
        finally:
            self._listening.discard(task)
        return None if request is grpc.aio.EOF else request

    async def _shard(self, visit: Visit, request: coordinator_pb2.GetShardRequest) -> bytes:
        session = self._own_session(visit, request.session)
        for trained in request.trained:
            await self._commit(session, trained)
        if request.HasField("report"):
            await self._api.report(session, wire_health.report_from_proto(request.report))
        answer = await self._api.shard(
            session,
            request.step,
            received_step=request.received_step,
            failed_workers=tuple(request.failed_workers),
            slow_workers=tuple(request.slow_workers),
            wanted=(
                wire_shards.wanted_parts_from_proto(request.wanted)
                if request.HasField("wanted")
                else EVERYTHING
            ),
        )
        if isinstance(answer, EndOfData):
            return coordinator_pb2.GetShardResponse(
                end_of_data=coordinator_pb2.EndOfData(steps=answer.steps)
            ).SerializeToString()
        if isinstance(answer, SkippedSteps):
            return coordinator_pb2.GetShardResponse(
                skipped=coordinator_pb2.SkippedSteps(next_step=answer.next_step)
            ).SerializeToString()
        return wire_shards.shard_answer(answer, visit.caller.plain(answer.job))

    async def GetStepSummary(  # type: ignore[override]  # answered in bytes, as GetShard is
        self, request: coordinator_pb2.GetStepSummaryRequest, context: Context
    ) -> bytes:
        """The groups of a whole step."""
        async with self._access.call(context, "GetStepSummary", request) as visit:
            session = self._own_session(visit, request.session)
            summary = await self._api.summary(session, request.step)
        return wire_shards.step_summary_message(summary)

    async def CommitStep(
        self, request: coordinator_pb2.CommitStepRequest, context: Context
    ) -> coordinator_pb2.CommitStepResponse:
        """A rank has trained a step."""
        async with self._access.call(context, "CommitStep", request) as visit:
            await self._commit(self._own_session(visit, request.session), request)
        return coordinator_pb2.CommitStepResponse()

    async def _commit(
        self,
        session: str,
        trained: coordinator_pb2.CommitStepRequest | coordinator_pb2.TrainedStep,
    ) -> None:
        await self._api.commit(
            session,
            trained.step,
            measured_s=wire_health.measured_from_proto(trained),
            phase_s=wire_health.phases_from_proto(trained),
        )

    async def Report(
        self, request: coordinator_pb2.ReportRequest, context: Context
    ) -> coordinator_pb2.ReportResponse:
        """A rank reports how it fares."""
        async with self._access.call(context, "Report", request) as visit:
            session = self._own_session(visit, request.session)
            await self._api.report(session, wire_health.report_from_proto(request))
        return coordinator_pb2.ReportResponse()

    def _own_session(self, visit: Visit, session: str) -> str:
        """The session, or "" where it belongs to a job that the caller may not see."""
        visit.job = self._job_of_session.get(session, "")
        if visit.job and not visit.caller.sees(visit.job):
            visit.foreign = True
            return ""
        return session

    async def _until_closing(self) -> None:
        while not self._closing:
            await self._closed.next_change()

    async def _session_over(self, session: str, visit: Visit, context: Context) -> None:
        """Wait until the session ends and raise the reason: the engine's error, or
        ServiceUnreachableError where the service stops or the token is no longer valid."""
        ended = asyncio.ensure_future(self._api.session_ended(session))
        closing = asyncio.ensure_future(self._until_closing())
        either = {ended, closing}
        # Without tokens none can expire, and thousands of sessions would be woken for nothing.
        check_s = None if self._access.open else TOKEN_CHECK_S
        try:
            while not any(end.done() for end in either):
                self._access.require_still(visit, context)
                await asyncio.wait(either, timeout=check_s, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                raise _stopping()
            await ended
        finally:
            ended.cancel()
            closing.cancel()
            await asyncio.gather(ended, closing, return_exceptions=True)


def add_to_server(servicer: CoordinatorServicer, server: grpc.aio.Server) -> None:
    """Serve all methods; of those that tell a rank of its step the answers are bytes already."""
    question = coordinator_pb2.GetShardRequest.FromString
    one: Any = grpc.unary_unary_rpc_method_handler(servicer.GetShard, request_deserializer=question)
    many: Any = grpc.stream_stream_rpc_method_handler(
        servicer.GetShards, request_deserializer=question
    )
    summary: Any = grpc.unary_unary_rpc_method_handler(
        servicer.GetStepSummary,
        request_deserializer=coordinator_pb2.GetStepSummaryRequest.FromString,
    )
    name = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"].full_name
    # Handlers are asked in turn: this one knows these methods alone.
    known = grpc.method_handlers_generic_handler(
        name, {"GetShard": one, "GetShards": many, "GetStepSummary": summary}
    )
    server.add_generic_rpc_handlers((known,))
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(servicer, server)


def _stopping() -> ServiceUnreachableError:
    return ServiceUnreachableError(
        "the coordinator is stopping. Open the session again, rejoining its attempt."
    )


def _job_info(visit: Visit, status: JobStatus) -> coordinator_pb2.JobInfo:
    """A job under the name that the caller knows it by."""
    return wire_jobs.job_status_to_proto(_plainly(visit, status))


def _plainly(visit: Visit, status: JobStatus) -> JobStatus:
    record = replace(status.record, name=visit.caller.plain(status.record.name))
    held_out = status.validation
    validation = None if held_out is None else _plainly(visit, held_out)
    return replace(status, record=record, validation=validation)


def _session_event(opened: SessionOpened) -> coordinator_pb2.SessionEvent:
    return coordinator_pb2.SessionEvent(
        attempt=opened.attempt,
        session=opened.session,
        start_step=opened.start.step,
        report_every_s=opened.report_every_s,
        reports_along=True,
        ticket_key=opened.ticket_key,
    )


def _named_plainly(visit: Visit, health: ServiceHealth) -> ServiceHealth:
    """Jobs under the names that the caller knows them by."""
    jobs = tuple(
        replace(each, health=replace(each.health, job=visit.caller.plain(each.health.job)))
        for each in health.jobs
    )
    return replace(health, jobs=jobs)
