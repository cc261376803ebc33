"""Ranks without trainers: some thousands in a process, each with its session and its calls.

Every step begins for all ranks at once, as training does: each asks for its shard along a call that
stays open, and says in the same message that it has trained the step before and how it fares, which
trainers say of every second or third step at this pace. As many calls of a method that does nothing
are what the machine, gRPC and this program take by themselves, and somewhat more: each is a whole
call, not a message on an open one.
"""

import asyncio
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio
from dataservice_proto.columns import VERSION, read_shard
from dataservice_proto.v1 import coordinator_pb2, coordinator_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.scale.made_job import JOB

# One connection of a process carries so many ranks.
RANKS_A_CHANNEL = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Of one step: the seconds of each rank's call for its shard, and the bytes of the answers."""

    asked_s: list[float] = field(default_factory=list)
    size_bytes: int = 0
    packs: int = 0
    items: int = 0


def play(address: str, world_size: int, first: int, stop: int, line: Connection) -> None:
    """Play the ranks from `first` to `stop` - 1: each word of the line is "step" or "empty"."""
    asyncio.run(_play(address, world_size, range(first, stop), line))


async def _play(address: str, world_size: int, ranks: range, line: Connection) -> None:
    channels = [
        grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(-(-len(ranks) // RANKS_A_CHANNEL))
    ]
    players = [
        Player(channels[k // RANKS_A_CHANNEL], rank, world_size) for k, rank in enumerate(ranks)
    ]
    await asyncio.gather(*(player.open() for player in players))
    line.send("open")
    loop = asyncio.get_running_loop()
    while (word := await loop.run_in_executor(None, line.recv)) is not None:
        await asyncio.sleep(max(0.0, word[1] - time.time()))
        if word[0] == "step":
            seen = await asyncio.gather(*(player.step() for player in players))
        else:
            seen = await asyncio.gather(*(player.empty() for player in players))
        line.send(
            Seen(
                asked_s=[each[0] for each in seen],
                size_bytes=sum(each[1] for each in seen),
                packs=sum(each[2] for each in seen),
                items=sum(each[3] for each in seen),
            )
        )
    for channel in channels:
        await channel.close()


class Player:
    """One rank."""

    def __init__(self, channel: grpc.aio.Channel, rank: int, world_size: int) -> None:
        self._stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)
        self._rank, self._world_size = rank, world_size
        self._session, self._step, self._begun = "", 0, False
        self._stream: object = None
        self._shards: Any = None

    async def open(self) -> None:
        """Claim the rank."""
        request = coordinator_pb2.OpenSessionRequest(
            job=JOB,
            rank=self._rank,
            world_size=self._world_size,
            client="played",
            launch="one",
            loss_weights=True,
            columns=VERSION,
        )
        self._stream = stream = self._stub.OpenSession(request)
        event: Any = await stream.read()
        self._session, self._step = event.session, event.start_step
        self._shards = self._stub.GetShards()

    async def step(self) -> tuple[float, int, int, int]:
        """Seconds and bytes of the next shard, its packs and items."""
        trained = coordinator_pb2.TrainedStep(
            step=self._step - 1, measured_s=1.0, phase_s={"llm": 1.0}
        )
        request = coordinator_pb2.GetShardRequest(
            session=self._session,
            step=self._step,
            received_step=self._step - 1,
            wanted=coordinator_pb2.WantedParts(tokens=True, media=True, labels=True),
            trained=[trained] if self._begun else (),
            report=coordinator_pb2.ReportRequest(
                step=self._step - 1, steps=self._step, waited_s=0.1 * self._step
            ),
        )
        began_s = time.perf_counter()
        await self._shards.write(request)
        answer = await self._shards.read()
        asked_s = time.perf_counter() - began_s
        assert answer.shard.step == self._step
        self._step, self._begun = self._step + 1, True
        return asked_s, answer.ByteSize(), *held(answer.shard)

    async def empty(self) -> tuple[float, int, int, int]:
        """Seconds of a call that does nothing. It is dearer than a message on an open stream."""
        began_s = time.perf_counter()
        await self._health.Check(health_pb2.HealthCheckRequest())
        return time.perf_counter() - began_s, 0, 0, 0


def held(shard: coordinator_pb2.RankShard) -> tuple[int, int]:
    """Packs and items of a shard: those of its packs, and those that it encodes."""
    of = read_shard(shard.columns)
    return int((of["wave_pack"] >= 0).sum()), len(of["item_start"]) + len(of["place"])
