import asyncio
import threading
from dataclasses import replace

import pytest

from benchmarks.cut_microbatches import microbatches
from dataservice.core.cursor import Cursor
from dataservice.core.errors import (
    ConflictError,
    CursorMismatchError,
    FencedError,
    NotFoundError,
    PlanningError,
    RankClaimedError,
    TicketError,
    WorldSizeError,
)
from dataservice.core.orders import RankShard, WantedParts
from dataservice.core.tickets import check_ticket, parts_at, prove
from dataservice.core.topology import ReplicaLayout
from dataservice.engine import loop, records
from dataservice.engine.api import EndOfData
from dataservice.engine.planner import plan_step
from dataservice.state.memory import MemoryStateStore
from tests.engine.sessions import (
    leave,
    only_missing,
    open_all,
    open_rank,
    shard_of,
    started,
    train,
)
from tests.engine.support import make_coordinator, make_setup
from tests.ledger import ledger_of
from tests.waiting import LIMIT_S, until

START = Cursor()


async def test_an_epoch_ends_for_every_rank_and_every_step_is_committed(store, books):
    coordinator = make_coordinator(store, books, make_setup())
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator)
    shards = await train(coordinator, sessions, 0, 100)
    assert len(shards) == 13  # 200 samples in batches of 16
    for opened in sessions:
        assert await shard_of(coordinator, opened, 13) == EndOfData(steps=13)
    status = await coordinator.job("job")
    assert (status.planned_step, status.committed_step) == (12, 12)
    assert all(entry.committed_unix_s is not None for entry in ledger_of(store, "job"))
    await coordinator.stop()


async def test_planning_runs_ahead_only_as_far_as_the_window(store, books):
    coordinator = make_coordinator(store, books, make_setup())
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator)
    await shard_of(coordinator, sessions[0], 0)
    await until(lambda: {key.step for key in books.orders} >= {0, 1, 2})  # ready_steps is 3
    await asyncio.sleep(0.2)
    assert (await coordinator.job("job")).planned_step == 2
    assert {key.step for key in books.orders} == {0, 1, 2}
    await coordinator.stop()


async def test_received_steps_are_released_at_the_workers(store, books):
    coordinator = make_coordinator(store, books, make_setup())
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator)
    await train(coordinator, sessions, 0, 5)
    await until(lambda: books.held and min(key.step for key in books.held) >= 4)
    await coordinator.stop()


async def test_tickets_are_signed_for_the_worker_that_holds_the_pack(store, books):
    coordinator = make_coordinator(store, books, make_setup())
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator)
    shard = await shard_of(coordinator, sessions[1], 0)
    assert isinstance(shard, RankShard)
    ticket = shard.ticket
    assert ticket is not None
    own, other = sessions[1].ticket_key, sessions[0].ticket_key
    for worker in ticket.workers:
        now = {"worker": worker, "now_unix_s": 0.0}
        check_ticket(ticket, prove(ticket, worker, own), b"secret", **now)
        with pytest.raises(TicketError, match="of rank 1"):
            check_ticket(ticket, prove(ticket, worker, other), b"secret", **now)
        keys = {part.key for part in parts_at(ticket, worker)}
        await until(lambda keys=keys: keys <= books.held.keys())
        assert {books.held[key] for key in keys} == {worker}
    wanted = {m.pack for m in microbatches(shard.columns) if m.pack >= 0}
    parts = [part for worker in ticket.workers for part in parts_at(ticket, worker)]
    assert {part.key.pack for part in parts if part.cp_rank >= 0} == wanted
    await coordinator.stop()


async def test_ranks_of_a_replica_share_microbatches_and_get_tickets_for_what_they_want(
    store, books
):
    setup = replace(make_setup(), layout=ReplicaLayout(ranks_per_replica=4, pipeline_stages=2))
    coordinator = make_coordinator(store, books, setup)
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator, world=8)
    nothing = WantedParts(tokens=False, media=False, labels=False)
    inputs, labels = replace(nothing, tokens=True, media=True), replace(nothing, labels=True)
    tokens = replace(nothing, tokens=True)
    shards = [
        await shard_of(coordinator, opened, 0, wanted=wanted)
        for opened, wanted in zip(sessions, (inputs, tokens, labels, nothing) * 2, strict=True)
    ]
    for rank, shard in enumerate(shards):
        assert (shard.rank, shard.replica) == (rank, rank // 4)
        numbers = [
            (m.wave, m.pack, m.cp_group, m.sample_ids.tolist()) for m in microbatches(shard.columns)
        ]
        first = microbatches(shards[rank // 4 * 4].columns)
        assert numbers == [(m.wave, m.pack, m.cp_group, m.sample_ids.tolist()) for m in first]
    for replica in (0, 4):
        named = [_named(shard) for shard in shards[replica : replica + 4]]
        sequences = [{("input_ids", "position_ids")}] * 2 + [{("labels",)}, set()]
        assert [tensors for tensors, _ in named] == sequences
        assert [items > 0 for _, items in named] == [True, False, False, False]
        present = [
            any(m.routes for m in microbatches(s.columns)) for s in shards[replica : replica + 4]
        ]
        assert present == [True, True, False, False]
    await coordinator.stop()


def _named(shard: RankShard) -> tuple[set[tuple[str, ...]], int]:
    """Tensors that a shard's ticket names of sequences, and how many items it gives."""
    if shard.ticket is None:
        return set(), 0
    parts = [part for worker in shard.ticket.workers for part in parts_at(shard.ticket, worker)]
    return {p.tensors for p in parts if not p.items}, sum(len(p.items) for p in parts)


async def test_a_restarted_coordinator_gives_the_same_plans(store, books):
    setup = make_setup()
    first = make_coordinator(store, books, setup)
    await first.submit("job", "")
    digests = [s.plan_digest for s in await train(first, await open_all(first), 0, 6)]
    await first.stop()

    second = make_coordinator(store, books, setup)
    await second.start()
    sessions = await open_all(second, rejoin=1)
    assert {opened.attempt for opened in sessions} == {1}
    # Steps of before the restart, asked for again, and steps after it.
    again = [s.plan_digest for s in await train(second, sessions, 3, 10)]
    await second.stop()

    whole = make_coordinator(type(store)(), books, setup)
    await whole.submit("job", "")
    expected = [s.plan_digest for s in await train(whole, await open_all(whole), 0, 13)]
    await whole.stop()
    assert digests == expected[:6]
    assert again == expected[3:]


async def test_the_groups_of_an_old_step_are_planned_once_more_for_all_who_ask(
    store, books, monkeypatch
):
    planned: list[Cursor] = []

    def counted(setup, cursor, *more):
        planned.append(cursor)
        return plan_step(setup, cursor, *more)

    monkeypatch.setattr(loop, "SUMMARIES_KEPT", 4)
    coordinator = make_coordinator(store, books, make_setup())
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator)
    shards = await train(coordinator, sessions, 0, 10)
    monkeypatch.setattr(records, "plan_step", counted)
    asking = [coordinator.summary(sessions[k % 2].session, 2) for k in range(20)]
    found = await asyncio.gather(*asking)
    assert {each.plan_digest for each in found} == {shards[2].plan_digest}
    await coordinator.summary(sessions[0].session, 2)
    assert [cursor.step for cursor in planned].count(2) == 1
    for _ in range(2):
        with pytest.raises(NotFoundError, match="step 99"):
            await coordinator.summary(sessions[0].session, 99)
    await coordinator.stop()


async def test_a_resumed_attempt_takes_up_where_its_checkpoint_was(store, books):
    setup = make_setup()
    coordinator = make_coordinator(store, books, setup)
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator, world=2)
    shards = await train(coordinator, sessions, 0, 6)
    checkpoint = Cursor.from_json(shards[3].cursor_after)
    for opened in sessions:
        coordinator.close_session(opened.session)

    resumed = await open_all(coordinator, world=4, cursor=checkpoint)
    assert {(o.attempt, o.start) for o in resumed} == {(2, checkpoint)}
    after = await train(coordinator, resumed, 4, 100)
    assert [shard.step for shard in after] == list(range(4, 13))
    with pytest.raises(FencedError, match=r"attempt 1 of job .* the newest is 2"):
        await open_rank(coordinator, 0, world=2, rejoin=1)
    await coordinator.stop()


async def test_an_older_attempt_is_fenced_by_a_newer_one(store, books):
    coordinator = make_coordinator(store, books, make_setup())
    await coordinator.submit("job", "")
    old = await open_all(coordinator)
    waiting = asyncio.create_task(coordinator.session_ended(old[1].session))
    # Their connections break unseen: the ranks come back by others, which end.
    leave(coordinator, await open_all(coordinator, rejoin=1))
    await open_all(coordinator)
    with pytest.raises(FencedError, match="Only the newest start"):
        await waiting
    with pytest.raises(FencedError):
        await shard_of(coordinator, old[0], 0)
    await coordinator.stop()


async def test_a_rank_in_use_cannot_be_claimed_by_a_second_client(store, books):
    coordinator = make_coordinator(store, books, make_setup())
    await coordinator.submit("job", "")
    await open_all(coordinator)
    with pytest.raises(RankClaimedError, match="rank 1 of job 'job' is held by host:1"):
        await open_rank(coordinator, 1)
    await coordinator.stop()


async def test_contradicting_ranks_are_refused_before_anything_is_planned(store, books):
    coordinator = make_coordinator(store, books, make_setup())
    await coordinator.submit("job", "")
    first = asyncio.create_task(open_rank(coordinator, 0))
    await only_missing(coordinator, 1)
    with pytest.raises(WorldSizeError, match="world size 3"):
        await open_rank(coordinator, 1, world=3)
    with pytest.raises(WorldSizeError):
        await first
    first = asyncio.create_task(open_rank(coordinator, 0))
    await only_missing(coordinator, 1)
    with pytest.raises(CursorMismatchError):
        await open_rank(coordinator, 1, cursor=Cursor(step=5, position=80))
    with pytest.raises(CursorMismatchError):
        await first
    with pytest.raises(WorldSizeError, match=r"rank 2 is outside 0\.\.1"):
        await open_rank(coordinator, 2)
    assert store.last_attempt("job") is None


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({}, "1 of 1 replicas of .* hold at most"),
        ({"strategy": "packing", "static_degree": 2}, "static_degree is 2, and there are 1"),
    ],
)
async def test_a_sample_that_no_world_of_this_size_holds_is_refused_at_the_start(
    store, books, plan, said
):
    coordinator = make_coordinator(store, books, make_setup(**plan))
    await coordinator.submit("job", "")
    with pytest.raises(PlanningError, match=said):
        await open_rank(coordinator, 0, world=1)


async def test_a_checkpoint_of_another_order_of_samples_is_refused(store, books):
    coordinator = make_coordinator(store, books, replace(make_setup(), order="new"))
    await coordinator.submit("job", "")
    with pytest.raises(CursorMismatchError, match="made in sample order old, job 'job' has"):
        await open_rank(coordinator, 0, cursor=Cursor(step=4, position=64, order="old"))
    sessions = await open_all(coordinator)
    (shard,) = await train(coordinator, sessions, 0, 1)
    assert Cursor.from_json(shard.cursor_after).order == "new"
    await coordinator.stop()


async def test_a_forming_attempt_that_everyone_leaves_is_forgotten(store, books):
    coordinator = make_coordinator(store, books, make_setup())
    await coordinator.submit("job", "")
    waiting = asyncio.create_task(open_rank(coordinator, 0, world=3))
    await only_missing(coordinator, 1, 2)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    sessions = await open_all(coordinator, world=2)
    assert {opened.attempt for opened in sessions} == {1}
    await coordinator.stop()


async def test_a_lost_worker_is_replaced_and_its_packs_are_ordered_again(store, books):
    coordinator = make_coordinator(store, books, make_setup())
    await coordinator.submit("job", "")
    books.deaf.add("w0")
    sessions = await open_all(coordinator)
    shard = await shard_of(coordinator, sessions[0], 0)
    await until(lambda: "w0" not in books.alive)
    assert "w0" not in books.held.values()

    books.deaf.update(books.alive)  # all die after decoding; a rank finds out
    failed = shard.ticket.workers
    again = await shard_of(coordinator, sessions[0], 0, failed)
    assert isinstance(again, RankShard)
    assert again.plan_digest == shard.plan_digest
    assert not set(again.ticket.workers) & set(failed)
    await coordinator.stop()


async def test_jobs_are_registered_once_listed_drained_and_deleted(store, books):
    coordinator = make_coordinator(store, books, make_setup())
    await coordinator.submit("job", "")
    await coordinator.submit("job", "")
    assert [status.record.name for status in await coordinator.jobs()] == ["job"]
    sessions = await open_all(coordinator)
    with pytest.raises(ConflictError, match="in use by host:0, host:1"):
        await coordinator.delete("job")
    assert (await coordinator.drain("job")).record.state == "draining"
    with pytest.raises(ConflictError, match="Stop its trainers, or delete it once they have"):
        await coordinator.delete("job")
    for opened in sessions:
        coordinator.close_session(opened.session)
    with pytest.raises(ConflictError, match="draining"):
        await open_rank(coordinator, 0)
    await coordinator.delete("job")
    with pytest.raises(NotFoundError, match="no job 'job'; registered: none"):
        await coordinator.job("job")


async def test_a_job_that_is_deleted_while_jobs_are_listed_is_left_out(books):
    """An error would name it, and other jobs of its team, to whoever asked for the list."""
    reading, go = threading.Event(), threading.Event()

    class SlowStore(MemoryStateStore):
        def quarantined_samples(self, job):
            reading.set()
            assert go.wait(LIMIT_S)
            return super().quarantined_samples(job)

    go.set()
    coordinator = await started("a", "b", store=SlowStore(), books=books)
    go.clear()
    reading.clear()
    listing = asyncio.create_task(coordinator.jobs())
    await until(reading.is_set)
    await coordinator.delete("b")
    go.set()
    assert [status.record.name for status in await listing] == ["a"]
    await coordinator.stop()


async def test_explain_plans_a_step_of_the_ledger_again(store, books):
    coordinator = make_coordinator(store, books, make_setup())
    await coordinator.submit("job", "")
    shards = await train(coordinator, await open_all(coordinator), 0, 4)
    explained = await coordinator.explain("job", 3, None)
    assert explained.plan.digest == explained.entry.plan_digest == shards[3].plan_digest
    assert len(explained.sample_keys) == len(explained.plan.sample_ids)
    with pytest.raises(NotFoundError, match="step 99 of job 'job' has not been planned"):
        await coordinator.explain("job", 99, None)
    await coordinator.stop()


async def test_a_client_that_would_leave_out_loss_weights_is_refused(store, books):
    coordinator = make_coordinator(store, books, replace(make_setup(), loss_weights=(0.5, 1.0)))
    await coordinator.submit("job", "")
    with pytest.raises(
        ConflictError, match=r"'job' weighs its loss .* rank 1 \(host:1\) .*Install"
    ):
        await open_rank(coordinator, 1, reads_loss_weights=False)
    sessions = await open_all(coordinator)
    (shard,) = await train(coordinator, sessions, 0, 1)
    assert shard.weighted_loss_tokens is not None
    await coordinator.stop()


async def test_without_weights_older_clients_train_on(store, books):
    coordinator = make_coordinator(store, books, make_setup(memory_tokens=1024))
    await coordinator.submit("job", "")
    opened = await open_rank(coordinator, 0, world=1, reads_loss_weights=False)
    assert (await shard_of(coordinator, opened, 0)).weighted_loss_tokens is None
    await coordinator.stop()
