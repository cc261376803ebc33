"""A job survives stray bad samples and stops on a dead source, at the same step each time."""

import asyncio
import random
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from dataservice.core.errors import (
    ErrorBudgetError,
    SampleError,
    SourceError,
    SpecError,
    WorkerLostError,
)
from dataservice.core.job import ErrorBudget
from dataservice.core.limits import DecodeLimits
from dataservice.core.orders import BadSample, PackKey, PackOrder, PackReceipt, PackSample
from dataservice.core.receipts import PackReceipts
from dataservice.core.sample import SampleLengths, SampleLocation, SampleRef
from dataservice.engine import open_orders
from dataservice.engine.error_budget import (
    BudgetTally,
    TrainedSamples,
    reason_example,
    reason_kind,
)
from dataservice.state.memory import MemoryStateStore
from tests.engine.sessions import leave, open_all, shard_of, train, train_until_told
from tests.engine.support import Books, TornSource, make_coordinator, make_setup
from tests.ledger import ledger_of
from tests.waiting import until

LENGTHS = SampleLengths(llm_tokens=8, loss_tokens=4)


def orders_of(step, samples, packs=1):
    """A step's packs; `samples` are (source, sample_id) in training order."""
    size = -(-len(samples) // packs)
    return [
        PackOrder(
            key=PackKey(job="job", step=step, plan_digest="d", pack=pack),
            degree=1,
            pipeline="{}",
            samples=tuple(
                PackSample(
                    ref=SampleRef(
                        sample_id=sample,
                        source=source,
                        key=f"k{sample}",
                        location=SampleLocation(file=f"{source}-{sample % 2}.tar"),
                    ),
                    lengths=LENGTHS,
                )
                for source, sample in samples[pack * size : (pack + 1) * size]
            ),
        )
        for pack in range(packs)
    ]


def trained(orders):
    """Their samples, as columns."""
    refs = [sample.ref for order in orders for sample in order.samples]
    sources = tuple(sorted({ref.source for ref in refs}))
    return TrainedSamples(
        sources=sources,
        sample_ids=np.array([ref.sample_id for ref in refs]),
        source_of=np.array([sources.index(ref.source) for ref in refs]),
    )


def tally_of(**budgets):
    return BudgetTally("job", budgets, files_of=lambda ids: [f"a-{k % 2}.tar" for k in ids])


def receipt_of(order, bad=()):
    return PackReceipt(
        key=order.key,
        size_bytes=1,
        decode_s=0.0,
        bad_samples=tuple(
            BadSample(
                sample_id=s.ref.sample_id, source=s.ref.source, key=s.ref.key,
                reason=f"image {s.ref.key!r} is torn at byte {s.ref.sample_id}. Replace it.",
            )
            for s in order.samples
            if s.ref.sample_id in bad
        ),
    )  # fmt: skip


def stops_at(budget, bad, *, samples=4000, batch=50):
    """The step at which a source of this many samples stops its job; None if it never does."""
    tally = tally_of(a=budget)
    for step in range(samples // batch):
        orders = orders_of(step, [("a", n) for n in range(step * batch, (step + 1) * batch)])
        tally.expect(step, orders, trained(orders))
        if tally.take(PackReceipts.of([receipt_of(orders[0], bad)])) is not None:
            return step
    return None


DEFAULT = ErrorBudget()


@pytest.mark.parametrize(
    ("bad", "step"),
    [
        (range(1), None),
        (range(9), None),  # all of the first nine: too few to judge
        (range(10), 0),
        (range(0, 4000, 150), None),  # stray, at two thirds of the budget
        (range(0, 4000, 90), 16),  # over it: the tenth comes as sample 810
        ([*range(9), *range(1010, 1020)], None),  # two bad spells a window apart
        ([*range(9), *range(990, 1000)], 19),
        (range(2000, 4000), 40),  # dies in the middle
    ],
)
def test_a_source_stops_its_job_once_its_rate_in_the_window_passes_the_budget(bad, step):
    assert stops_at(DEFAULT, set(bad)) == step


def test_a_high_budget_is_not_passed_by_the_first_bad_samples_of_a_window():
    tolerant = ErrorBudget(rate=0.2, window_samples=100, min_bad_samples=5)
    assert stops_at(tolerant, {0, 1, 2, 3}) is None
    assert stops_at(tolerant, {0, 1, 2, 3, 4}) == 0
    assert stops_at(tolerant, {0, 10, 20, 30, 40}) is None  # 5 of 41 is less than a fifth
    assert stops_at(ErrorBudget(rate=1.0), set(range(4000))) is None
    assert stops_at(ErrorBudget(rate=0.0, min_bad_samples=1), {3999}) == 79


@pytest.mark.parametrize(
    "wrong",
    [{"rate": -0.1}, {"rate": 1.1}, {"min_bad_samples": 0}, {"window_samples": 5}],
)
def test_a_budget_that_means_nothing_is_refused(wrong):
    with pytest.raises(SpecError):
        ErrorBudget(**wrong)


def test_the_verdict_falls_at_the_same_step_in_whatever_order_receipts_come():
    budget = ErrorBudget(rate=0.1, window_samples=40, min_bad_samples=3)
    bad = {5, 31, 32, 60, 61, 62, 63, 64}
    verdicts = set()
    for seed in range(20):
        tally = tally_of(a=budget, b=budget)
        receipts = []
        for step in range(8):
            samples = [("ab"[n % 2], step * 12 + n) for n in range(12)]
            orders = orders_of(step, samples, packs=3)
            tally.expect(step, orders, trained(orders))
            receipts += [receipt_of(order, bad) for order in orders]
        random.Random(seed).shuffle(receipts)
        receipts += receipts[:5]  # told twice
        told = [
            str(v)
            for v in (tally.take(PackReceipts.of([each])) for each in receipts)
            if v is not None
        ]
        verdicts.add(told[0])
    assert len(verdicts) == 1


def test_a_step_whose_receipts_never_come_does_not_hold_up_the_rest():
    tally = tally_of(a=ErrorBudget(rate=0.0, min_bad_samples=1))
    first, second = (orders_of(step, [("a", step * 2), ("a", step * 2 + 1)]) for step in (0, 1))
    tally.expect(0, first, trained(first))
    tally.expect(1, second, trained(second))
    assert tally.take(PackReceipts.of([receipt_of(second[0], {2})])) is None
    assert isinstance(tally.give_up(0), ErrorBudgetError)


def test_reasons_of_one_kind_differ_only_in_names_and_numbers():
    first = reason_kind("image 'a/b.jpg' (1,234 bytes) cannot be decoded: no header. Replace it.")
    second = reason_kind("image 'c.png' (9 bytes) cannot be decoded: no header. Replace it.")
    assert first == second == "image … (# bytes) cannot be decoded: no header"
    sums = [f"the bytes of 'a' changed: their checksum is {s}. Restore." for s in ("5cf0", "04d5")]
    assert {reason_kind(each) for each in sums} == {"the bytes of … changed: their checksum is #"}
    assert reason_kind("source /mnt/x.tar cannot be read: gone\nmore") == (
        "source … cannot be read: gone"
    )


def test_limits_in_reasons_are_told_as_numbers_though_reasons_of_one_kind_are_counted_together():
    limits = DecodeLimits(max_video_s=14_400)
    tally = tally_of(a=ErrorBudget(rate=0.0, min_bad_samples=3))
    orders = orders_of(0, [("a", sample_id) for sample_id in range(3)])
    tally.expect(0, orders, trained(orders))
    reasons = []
    for sample_id in range(3):
        with pytest.raises(SampleError) as told:
            limits.check("max_video_s", 20_000 + sample_id, f"video '{sample_id}.mp4': seconds")
        reasons.append(str(told.value))
    receipt = receipt_of(orders[0], {0, 1, 2})
    verdict = tally.take(
        PackReceipts.of(
            [
                replace(
                    receipt,
                    bad_samples=tuple(
                        replace(bad, reason=reason)
                        for bad, reason in zip(receipt.bad_samples, reasons, strict=True)
                    ),
                )
            ]
        )
    )
    assert "seconds is 20,002; the limit max_video_s is 14,400 (3 such)" in str(verdict)
    assert reason_example(reasons[0]) == (
        "video '0.mp4': seconds is 20,000; the limit max_video_s is 14,400"
    )
    assert len(reason_example("x" * 5000)) == 300


# ---- in the loop --------------------------------------------------------------------------


def budgeted(**budget):
    made = ErrorBudget(**{"rate": 0.1, "window_samples": 50, "min_bad_samples": 5, **budget})
    return replace(make_setup(), budgets={"a": made, "b": made})


async def test_every_rank_is_told_which_source_why_and_what_to_do(store):
    coordinator = make_coordinator(store, TornSource(), budgeted())
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator)
    for opened in sessions:
        with pytest.raises(ErrorBudgetError) as told:
            await asyncio.wait_for(coordinator.session_ended(opened.session), 120.0)
        message = str(told.value)
        assert "source 'b' of job 'job': 5 of its last 5 samples are bad, 100.0%" in message
        assert "budget is 10.0% of 50, from 5 on" in message
        assert "' is torn (5 such)" in message
        assert "memory (5)" in message
        assert "job quarantine job" in message
        with pytest.raises(ErrorBudgetError):
            await shard_of(coordinator, opened, 0)
        with pytest.raises(ErrorBudgetError):
            await coordinator.commit(opened.session, 0)
    assert store.last_committed_step("job", 1) == -1
    await coordinator.stop()


async def test_after_a_repair_the_trainers_go_on_and_no_step_is_committed_twice(store):
    books = TornSource(torn="none")
    coordinator = make_coordinator(store, books, budgeted())
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator)
    await train(coordinator, sessions, 0, 3)
    books.torn = "b"
    with pytest.raises(ErrorBudgetError):
        await train_until_told(coordinator, sessions, 3, 7)
    done = store.last_committed_step("job", 1)
    assert done < 12
    await until(lambda: not books.held)  # the workers are told to forget its packs
    books.torn = "none"
    leave(coordinator, sessions)
    resumed = await open_all(coordinator)
    await train(coordinator, resumed, 0, 100)
    second = [e.step for e in ledger_of(store, "job") if e.attempt == 2 and e.committed_unix_s]
    assert second == list(range(13))
    assert store.last_committed_step("job", 1) == done
    await coordinator.stop()


async def test_other_budgets_hold_from_the_next_attempt_on(store):
    lenient = budgeted(rate=1.0)
    strict = replace(budgeted(), revise=lambda _, record: replace(lenient, record=record))

    def read_job(text, _base, _team):
        return [replace(strict.record, spec_json=text)]

    coordinator = make_coordinator(store, TornSource(), strict, read_job=read_job)
    await coordinator.submit(strict.record.spec_json, "")
    sessions = await open_all(coordinator)
    with pytest.raises(ErrorBudgetError):
        await train_until_told(coordinator, sessions, 0, 100)
    leave(coordinator, sessions)
    other = '{"error_budget": 1}'
    status = await coordinator.submit(other, "")
    assert status.record.spec_json == store.job("job").spec_json == other
    assert len(await train(coordinator, await open_all(coordinator), 0, 100)) == 13
    await coordinator.stop()


async def test_a_pack_that_no_worker_can_make_ends_the_attempt_for_all_ranks(store, monkeypatch):
    monkeypatch.setattr(open_orders, "ORDER_TRIES", 2)

    class Refusing(Books):
        async def prepare(self, worker, order):
            raise SourceError("source 'a' cannot be read: its bucket is gone.")

    coordinator = make_coordinator(store, Refusing(), make_setup())
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator)

    async def ask_until_told() -> None:
        while True:
            with suppress(WorkerLostError):
                await shard_of(coordinator, sessions[0], 0)
            await asyncio.sleep(0)  # others have a turn, as between two calls of a client

    with pytest.raises(SourceError, match="bucket is gone"):
        await asyncio.wait_for(ask_until_told(), 120.0)
    with pytest.raises(SourceError, match="bucket is gone"):
        await asyncio.wait_for(coordinator.session_ended(sessions[1].session), 120.0)
    await coordinator.stop()


@pytest.fixture
def store() -> MemoryStateStore:
    return MemoryStateStore()
