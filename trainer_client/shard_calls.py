"""Questions for a rank's parts of steps, in one call that stays open: a message costs the service a
third of what a call costs.

    ask(request) ─▶ GetShards, opened by the first question ─▶ answer
                        │ refused or broken: the error is raised, the next question opens another
                        └ not known: a service of an earlier release is asked by GetShard

A question may wait for as long as its step takes to be planned. A service that vanishes is noticed
by unanswered pings; closing the channel ends the call.
"""

import queue
from collections.abc import Iterator

import grpc
from dataservice_proto.v1 import coordinator_pb2, coordinator_pb2_grpc

# Longest time that one GetShard waits for its step to be planned; then the call is repeated.
POLL_S = 30.0


class ShardCalls:
    """Asks for the parts of one rank, one question at a time."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        self._streams = True
        self._open: _OpenCall | None = None

    def ask(self, request: coordinator_pb2.GetShardRequest) -> coordinator_pb2.GetShardResponse:
        """The answer. Raises grpc.RpcError with the service's refusal, ValueError where the channel
        is closed."""
        if self._streams:
            call = self._open = self._open or _OpenCall(self._stub)
            try:
                answer = call.ask(request)
            except grpc.RpcError as error:
                self._open = None
                call.close()
                if not _is_unknown(error):
                    raise
                self._streams = False
            else:
                if answer is not None:
                    return answer
                self._open = None  # somebody between us and the service has ended it
        return self._stub.GetShard(request, timeout=POLL_S)


class _OpenCall:
    def __init__(self, stub: "coordinator_pb2_grpc.CoordinatorStub") -> None:
        self._questions: queue.SimpleQueue[coordinator_pb2.GetShardRequest | None] = (
            queue.SimpleQueue()
        )
        self._answers = stub.GetShards(self._asked())
        # gRPC has a thread that waits for questions; it ends with the call.
        if not self._answers.add_callback(self._no_more):
            self._no_more()

    def ask(
        self, request: coordinator_pb2.GetShardRequest
    ) -> coordinator_pb2.GetShardResponse | None:
        """The answer; None where the call has ended without a refusal."""
        self._questions.put(request)
        return next(self._answers, None)

    def close(self) -> None:
        """Nothing more is asked."""
        self._no_more()
        self._answers.cancel()

    def _no_more(self) -> None:
        self._questions.put(None)

    def _asked(self) -> Iterator[coordinator_pb2.GetShardRequest]:
        while (request := self._questions.get()) is not None:
            yield request


def _is_unknown(error: grpc.RpcError) -> bool:
    return isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED
