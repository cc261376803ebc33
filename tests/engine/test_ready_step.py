"""What ranks are told is the same, whether it is made for many of them at once or for one."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from dataservice_proto.v1 import coordinator_pb2

from dataservice.core.cursor import Cursor
from dataservice.core.orders import EVERYTHING, RankShard, ShardsMade, WantedParts
from dataservice.core.positions import PositionRule
from dataservice.core.tickets import check_ticket, holder_key, prove
from dataservice.core.topology import Topology
from dataservice.engine import ready_step
from dataservice.engine.attempt import Attempt
from dataservice.engine.planner import plan_step
from dataservice.engine.ready_step import TICKET_LIFE_S, CommonPart, RankShards, ReadyStep
from dataservice.engine.shards import cut_step, packs_of
from dataservice.engine.ticket_rows import StepTickets
from dataservice.serving.wire_packs import ticket_from_proto, ticket_to_proto
from dataservice.serving.wire_shards import shard_answer
from tests.engine.support import Held, make_setup

RANKS = 14
PAIRS = Topology(world_size=RANKS, ranks_per_replica=2)
MEDIA = WantedParts(tokens=False, media=True, labels=False)
NOTHING = WantedParts(tokens=False, media=False, labels=False)
IN_SEQUENCE = PositionRule()
SECRET = b"a secret of 32 bytes for testing"


async def attempt() -> Attempt:
    return Attempt(job="job", number=1, topology=PAIRS, start=Cursor())


class Asked:
    """A ready step of an attempt whose ranks all have a claim, and who is told what of it."""

    def __init__(self) -> None:
        planned = plan_step(make_setup(samples=300, batch=40), Cursor(), PAIRS)
        assert planned is not None
        self.held = Held(planned.plan.packs, 3)
        parts = cut_step(planned.plan)
        self.ready = ReadyStep(
            planned=planned,
            digest=planned.plan.digest,
            parts=parts,
            common=CommonPart.of(planned, planned.plan.digest),
            dispatched=self.held,
            tickets=StepTickets(parts, self.held),
            size_bytes=0,
        )
        self.attempt = asyncio.run(attempt())
        for rank in range(RANKS):
            self.attempt.claim(rank, "client")
        self.shards = RankShards(self.attempt, SECRET)

    def told(self, rank: int, wanted: WantedParts = EVERYTHING, **more: PositionRule) -> RankShard:
        packs = packs_of(self.ready.parts, PAIRS.replica_of(rank), wanted)
        holders = self.held.holder[packs]
        positions = more.get("positions", IN_SEQUENCE)
        claim = self.attempt.claims[rank]
        return self.shards.of(self.ready, claim, wanted, holders, positions)

    def alone(self, rank: int, wanted: WantedParts = EVERYTHING) -> RankShard:
        """What the rank is told where none other has a claim."""
        claims, made = dict(self.attempt.claims), dict(self.ready.made)
        self.attempt.claims = {rank: claims[rank]}
        self.ready.made.clear()
        shard = self.told(rank, wanted)
        self.attempt.claims = claims
        self.ready.made.update(made)
        return replace(shard, made_with=None)


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=1e9)
    monkeypatch.setattr(ready_step, "time", SimpleNamespace(time=lambda: clock.now_s))
    return clock


@pytest.fixture
def asked(clock) -> Asked:
    return Asked()


def together(shard: RankShard) -> ShardsMade:
    """What the rank's part was made with."""
    made = shard.made_with()
    assert made is not None
    return made


def opens(shard: RankShard, asked: Asked, clock: SimpleNamespace, after_s: float = 0.0) -> bool:
    """Whether a rank can use its ticket, as it is sent, at each worker that it names."""
    key = holder_key(asked.attempt.claims[shard.rank].holder, SECRET)
    assert shard.ticket is not None
    ticket = ticket_from_proto(ticket_to_proto(shard.ticket))
    for worker in ticket.workers:
        proof, then_s = prove(ticket, worker, key), clock.now_s + after_s
        check_ticket(ticket, proof, SECRET, worker=worker, now_unix_s=then_s)
    return True


@pytest.mark.parametrize("wanted", [EVERYTHING, MEDIA, NOTHING], ids=str)
def test_what_is_made_for_all_ranks_at_once_is_what_each_would_be_told_alone(asked, clock, wanted):
    for claim in asked.attempt.claims.values():
        claim.wanted = wanted
    told = [asked.told(rank, wanted) for rank in range(RANKS)]
    assert {together(shard) for shard in told} == {together(told[0])}
    assert told == [asked.alone(rank, wanted) for rank in range(RANKS)]
    assert all(wanted is NOTHING or opens(shard, asked, clock) for shard in told)


def test_what_is_written_for_all_ranks_at_once_is_what_is_written_for_one(asked):
    told = [asked.told(rank) for rank in range(RANKS)]
    for _ in range(2):  # a rank may ask again
        answers = [shard_answer(shard, "plain") for shard in told]
        for rank, answer in enumerate(answers):
            shard = coordinator_pb2.GetShardResponse.FromString(answer).shard
            assert (shard.job, shard.rank) == ("plain", rank)
            assert answer == shard_answer(asked.alone(rank), "plain")
    assert shard_answer(told[0], "team/plain") == shard_answer(asked.alone(0), "team/plain")


def test_each_answer_is_kept_only_until_it_is_asked_for(asked):
    told = [asked.told(rank) for rank in range(RANKS)]
    for shard in told:
        shard_answer(shard, "plain")
    assert together(told[0]).written == {"plain": {}}


def test_an_answer_is_written_though_the_step_has_left_the_window_meanwhile(asked):
    told = asked.told(3)
    asked.ready.made.clear()
    assert told.made_with() is None
    assert shard_answer(told, "plain") == shard_answer(asked.alone(3), "plain")


def test_who_has_claimed_a_rank_since_gets_a_ticket_of_its_own(asked, clock):
    before = asked.told(3)
    assert together(before) is together(asked.told(4))
    asked.attempt.claim(4, "another client")
    after = asked.told(4)
    assert after.ticket.holder == asked.attempt.claims[4].holder
    assert opens(after, asked, clock)
    assert shard_answer(after, "job") == shard_answer(asked.alone(4), "job")


def test_a_rank_is_told_where_its_packs_are_now(asked):
    asked.told(0)
    asked.held.holder = ((asked.held.holder + 1) % 3).astype(np.int32)
    for rank in range(RANKS):
        assert asked.told(rank).ticket == asked.alone(rank).ticket


def test_a_rank_that_wants_other_parts_than_the_last_time_gets_those_and_is_known_by_them(asked):
    asked.told(0)
    for wanted in (MEDIA, NOTHING):
        assert asked.told(5, wanted) == asked.alone(5, wanted)
        assert asked.attempt.claims[5].wanted is wanted


def test_a_job_that_counts_positions_otherwise_by_now_says_so(asked):
    asked.told(0)
    other = PositionRule(scheme="mrope")
    assert asked.told(1, positions=other).positions == other


def test_a_ticket_that_was_made_long_ago_is_made_anew(asked, clock):
    asked.told(0)
    clock.now_s += TICKET_LIFE_S // 2
    assert opens(asked.told(1), asked, clock, after_s=TICKET_LIFE_S)
