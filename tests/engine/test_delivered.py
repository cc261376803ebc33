"""What is delivered again must be what was delivered before: by another copy, another attempt,
another coordinator."""

import pytest

from dataservice.core.content import StepContent
from dataservice.core.cursor import Cursor
from dataservice.core.errors import StateError
from dataservice.core.ports import NoMetrics
from dataservice.core.receipts import PackReceipts
from dataservice.engine.delivered import Delivered
from dataservice.state import sqlite_ledger
from dataservice.state.sqlite import SqliteStateStore
from tests.engine.scripted_workers import ORDERS, PLAN
from tests.engine.sessions import open_all, shard_of, train, train_until_told
from tests.engine.support import Books, make_coordinator, make_setup
from tests.engine.trained_steps import STEPS, sample_of, trained
from tests.ledger import ledger_of
from tests.waiting import until


class Counts(NoMetrics):
    def __init__(self) -> None:
        self.otherwise = 0

    def delivered_otherwise(self, job: str) -> None:
        self.otherwise += 1


@pytest.fixture
def store(each_store):
    return each_store


def contents(store, attempt=1):
    return [entry.content for entry in ledger_of(store, "job") if entry.attempt == attempt]


def cursor_of(store, step):
    return Cursor.from_json(store.ledger_entry("job", step, 1).cursor)


async def test_the_ledger_keeps_what_every_step_delivered(store):
    coordinator, _ = await trained(store, Books())
    await coordinator.stop()
    found = contents(store)
    assert len(found) == STEPS
    assert None not in found
    assert len(set(found)) == STEPS
    assert {len(content) for content in found} == {20}


async def test_another_world_size_delivers_the_same_in_other_packs(store):
    coordinator, _ = await trained(store, Books(), 6)
    await coordinator.stop()
    again, _ = await trained(store, Books(), world=3, start=cursor_of(store, 2))
    await again.stop()
    assert contents(store, 2)[:4] == contents(store, 1)[2:6]
    assert len(contents(store, 2)) == STEPS - 2
    first, second = (store.ledger_entry("job", 3, attempt) for attempt in (1, 2))
    assert first.plan_digest != second.plan_digest


async def test_a_step_that_comes_out_otherwise_in_a_later_attempt_ends_it(store, caplog):
    books, counts = Books(), Counts()
    coordinator, _ = await trained(store, books, 6)
    await coordinator.stop()
    books.other_bytes[""] = {sample_of(3, 5)}
    start = cursor_of(store, 2)
    for _ in range(2):  # nor does trying again make it right
        with pytest.raises(StateError, match="step 3 of job 'job' is not what attempt 1 delivered"):
            await trained(store, books, world=3, start=start, metrics=counts)
    last = store.last_attempt("job").attempt
    assert store.ledger_entry("job", 3, last).content is None
    assert counts.otherwise == 2
    assert f"{sample_of(3, 5):06d} of pack" in caplog.text
    assert "tokenizer" in caplog.text
    books.other_bytes.clear()
    again, _ = await trained(store, books, world=3, start=start)
    await again.stop()
    assert contents(store, last + 1)[:4] == contents(store, 1)[2:6]


async def test_steps_that_no_attempt_delivered_may_come_out_as_they_like(store):
    books = Books()
    coordinator, _ = await trained(store, books, 3)
    await coordinator.stop()
    books.other_bytes[""] = {sample_of(9)}
    again, _ = await trained(store, books, start=cursor_of(store, 2))
    await again.stop()
    assert None not in contents(store, 2)


async def test_a_coordinator_that_restarts_hands_out_no_other_bytes(store):
    books = Books()
    coordinator, sessions = await trained(store, books, 4)
    await shard_of(coordinator, sessions[0], 4)  # rank 0 has it, rank 1 has not
    await until(lambda: store.ledger_entry("job", 4).content is not None)
    await coordinator.stop()
    books.held.clear()
    books.other_bytes[""] = {sample_of(4, 1)}
    counts = Counts()
    successor = make_coordinator(store, books, make_setup(), metrics=counts)
    await successor.start()
    back = await open_all(successor, rejoin=1)
    with pytest.raises(StateError, match="not what attempt 1 delivered"):
        await train_until_told(successor, back, 4, 3)
    assert counts.otherwise == 1
    assert (await successor.job("job")).failure.startswith("step 4 of job")
    await successor.stop()


async def test_steps_whose_old_entries_are_in_a_lost_file_are_trained_again(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(sqlite_ledger, "LEAST_ROWS", 1)
    monkeypatch.setattr(sqlite_ledger, "KEPT_STEPS", 1)
    store, books = SqliteStateStore(tmp_path), Books()
    coordinator, _ = await trained(store, books)
    await coordinator.stop()
    start = cursor_of(store, 2)
    assert store.archive_ledger(float("inf")) == STEPS - 2
    for file in (tmp_path / "ledger").iterdir():
        file.unlink()
    again = make_coordinator(store, books, make_setup())
    await again.start()
    sessions = await open_all(again, cursor=start)
    assert len(await train(again, sessions, 2, 100)) == STEPS - 2
    await until(lambda: all(store.ledger_entry("job", s, 2).content for s in range(2, STEPS)))
    assert "not compared" in caplog.text
    await again.stop()
    store.close()


@pytest.mark.parametrize("masked_first", [True, False])
async def test_a_sample_that_was_masked_once_is_no_difference(store, masked_first):
    books = Books()
    bad = {sample_of(3), sample_of(4, 2)}
    books.masks = set(bad) if masked_first else set()
    coordinator, _ = await trained(store, books, 6)
    await coordinator.stop()
    books.masks = set() if masked_first else set(bad)
    again, _ = await trained(store, books, world=3, start=cursor_of(store, 2))
    books.masks = set()
    third, _ = await trained(store, books, start=cursor_of(store, 2))
    await again.stop()
    await third.stop()
    assert len(contents(store, 3)) == STEPS - 2
    if masked_first:  # the others of the step are compared all the same
        books.other_bytes[""] = {sample_of(3, 7)}
        with pytest.raises(StateError, match="step 3 of job"):
            await trained(store, books, start=cursor_of(store, 2))


async def test_a_worker_that_decodes_a_pack_otherwise_than_another_ends_the_attempt(store, caplog):
    books, counts = Books(), Counts()
    coordinator = make_coordinator(store, books, make_setup(), metrics=counts)
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator)
    shard = await shard_of(coordinator, sessions[0], 0)
    lost = shard.ticket.workers[0]
    books.other_bytes["w2"] = {sample_of(0, place) for place in range(16)}
    books.alive[books.alive.index(lost)] = "w2"  # it decodes anew what the lost one held
    await shard_of(coordinator, sessions[1], 0, failed=(lost,))
    await until(lambda: counts.otherwise)
    assert "was decoded more than once" in (await coordinator.job("job")).failure
    assert "Ranks may have got either" in caplog.text
    await coordinator.stop()


async def receipts_of(order, books=None, worker="w0"):
    books = books or Books(alive=[worker])
    info = next(info for info in books.workers() if info.worker == worker)
    return await books.prepare(info, order)


async def test_copies_of_a_pack_are_compared_where_both_could_decode():
    delivered = Delivered(PLAN, ORDERS)
    books = Books(alive=["w0", "w1"])
    order = max(ORDERS, key=lambda each: len(each.samples))
    first, second = (s.ref for s in order.samples[:2])
    books.masks = {first.sample_id}
    delivered.take(PackReceipts.of([await receipts_of(order, books)]))
    books.masks = set()
    delivered.take(PackReceipts.of([await receipts_of(order, books, "w1")]))
    assert delivered.otherwise == {}
    books.other_bytes["w1"] = {first.sample_id, second.sample_id}
    delivered.take(PackReceipts.of([await receipts_of(order, books, "w1")]))
    assert delivered.otherwise == {
        order.key.pack: [f"{ref.source}/{ref.key}" for ref in (first, second)]
    }
    assert set(delivered.masked) == {first.sample_id}


async def test_a_step_is_known_once_every_pack_is_told():
    delivered = Delivered(PLAN, ORDERS)
    for order in ORDERS:
        assert not delivered.complete
        delivered.take(PackReceipts.of([await receipts_of(order)]))
    assert delivered.complete
    recorded = delivered.content()
    assert StepContent.from_bytes(recorded.to_bytes()) == recorded
    assert delivered.compared(recorded, set()).verdict == "same"


async def test_what_differs_is_named_by_sample_and_pack_or_by_all_packs():
    books = Books(alive=["w0"])
    recorded = await told(ORDERS, books)
    order = ORDERS[-1]
    one = order.samples[-1].ref
    books.other_bytes["w0"] = {one.sample_id}
    found = (await told(ORDERS, books)).compared(recorded.content(), set())
    assert found.verdict == "differs"
    assert f"sample {one.source}/{one.key} of pack {order.key.pack} " in found.note
    (pack,) = found.packs
    assert pack.samples == tuple(f"{s.ref.source}/{s.ref.key}" for s in order.samples)
    books.other_bytes["w0"] = {s.ref.sample_id for order in ORDERS for s in order.samples}
    found = (await told(ORDERS, books)).compared(recorded.content(), set())
    assert "more than one of its" in found.note
    assert [pack.pack for pack in found.packs] == list(range(min(8, len(ORDERS))))


async def told(orders, books):
    delivered = Delivered(PLAN, orders)
    for order in orders:
        delivered.take(PackReceipts.of([await receipts_of(order, books)]))
    return delivered
