"""Steps decoded again to be compared: apart from what is held for training, and told truly."""

import asyncio
from dataclasses import replace

from dataservice.engine.api import ReplayedStep
from dataservice.state import sqlite_ledger
from tests.engine.sessions import shard_of, train
from tests.engine.support import make_coordinator, make_setup
from tests.engine.trained_steps import STEPS, sample_of, trained
from tests.ledger import ledger_of
from tests.state.archiving import ArchivingStore
from tests.waiting import until


async def replayed(coordinator, first=0, last=100, attempt=None) -> list[ReplayedStep]:
    steps = coordinator.replay("job", first, last, attempt, content=True)
    return [step async for step in steps]


def has_content(store, step):
    entry = store.ledger_entry("job", step)
    return entry is not None and entry.content is not None


def verdicts(steps):
    return {step.step: step.content for step in steps}


async def test_steps_that_are_delivered_again_as_they_were_are_the_same(store, books):
    coordinator, _ = await trained(store, books)
    steps = await replayed(coordinator)
    assert verdicts(steps) == dict.fromkeys(range(STEPS), "same")
    assert not any(step.differs for step in steps)
    assert not {key for key in books.held if key in books.replayed}
    await coordinator.stop()


async def test_steps_whose_entries_are_in_files_are_explained_and_replayed_as_before(
    tmp_path, books, monkeypatch
):
    monkeypatch.setattr(sqlite_ledger, "LEAST_ROWS", 1)
    monkeypatch.setattr(sqlite_ledger, "KEPT_STEPS", 0)
    store = ArchivingStore(tmp_path)
    coordinator, _ = await trained(store, books)
    assert store.moved >= STEPS - 1
    steps = await replayed(coordinator)
    assert verdicts(steps) == dict.fromkeys(range(STEPS), "same")
    assert not any(step.differs for step in steps)
    shown = await coordinator.explain("job", 2, None)
    assert (shown.entry.step, shown.entry.plan_digest) == (2, shown.plan.digest)
    await coordinator.stop()
    store.close()


async def test_without_being_asked_to_nothing_is_decoded(store, books):
    coordinator, _ = await trained(store, books)
    ordered = len(books.orders)
    steps = [step async for step in coordinator.replay("job", 0, 100, None)]
    assert {step.content for step in steps} == {""}
    assert len(books.orders) == ordered
    await coordinator.stop()


async def test_what_differs_is_named_by_step_pack_and_samples(store, books):
    coordinator, _ = await trained(store, books)
    sample = sample_of(5, 3)
    books.other_bytes[""] = {sample}
    steps = await replayed(coordinator, 3, 7)
    assert verdicts(steps) == {3: "same", 4: "same", 5: "differs", 6: "same", 7: "same"}
    (wrong,) = (step for step in steps if step.differs)
    assert f"{sample:06d} of pack" in wrong.note
    (pack,) = wrong.packs
    assert any(name.endswith(f"/{sample:06d}") for name in pack.samples)
    await coordinator.stop()


async def test_a_sample_that_can_no_more_be_decoded_is_a_difference(store, books):
    coordinator, _ = await trained(store, books)
    books.masks = {sample_of(2)}
    (step,) = await replayed(coordinator, 2, 2)
    assert step.differs
    assert "1 samples that were delivered cannot be decoded now" in step.note
    assert "cut short" in step.note
    assert store.quarantine("job") == []  # nothing is trained by it
    await coordinator.stop()


async def test_a_sample_that_was_masked_when_it_was_trained_is_left_out(store, books):
    books.masks = {sample_of(2)}
    coordinator, _ = await trained(store, books)
    books.masks = set()
    assert verdicts(await replayed(coordinator, 1, 3)) == {1: "same", 2: "same", 3: "same"}
    books.other_bytes[""] = {sample_of(2, 1)}
    assert verdicts(await replayed(coordinator, 1, 3)) == {1: "same", 2: "differs", 3: "same"}
    await coordinator.stop()


async def test_a_pipeline_that_workers_refuse_is_a_difference_and_no_crash(store, books):
    coordinator, _ = await trained(store, books)
    books.refuses = {sample_of(4)}
    steps = await replayed(coordinator, 3, 5)
    assert verdicts(steps) == {3: "same", 4: "differs", 5: "same"}
    assert steps[1].note == "workers refuse it: the tokenizer is another"
    await coordinator.stop()


async def test_a_step_without_a_record_is_not_known(store, books):
    coordinator, _ = await trained(store, books)
    for entry in ledger_of(store, "job"):
        store.put_ledger(replace(entry, content=None))
    steps = await replayed(coordinator, 3, 4)
    assert {(step.content, step.differs) for step in steps} == {("unknown", False)}
    assert "is not in the ledger" in steps[0].note
    await coordinator.stop()


async def test_a_plan_that_changed_is_not_decoded(store, books):
    coordinator, _ = await trained(store, books)
    await coordinator.stop()
    changed = make_coordinator(store, books, make_setup(strategy="random"))
    await changed.start()
    steps = await replayed(changed, 0, 3)
    assert all(step.differs for step in steps)
    assert {step.content for step in steps} == {""}
    assert books.replayed == []
    await changed.stop()


async def test_training_goes_on_and_keeps_its_packs_meanwhile(store, books):
    coordinator, sessions = await trained(store, books, 4)
    await shard_of(coordinator, sessions[0], 4)
    for ahead in (4, 5, 6):  # ready_steps is 3; what they delivered is noted behind that
        await until(lambda: has_content(store, ahead))  # noqa: B023
    held = {key for key in books.held if key.step == 4}
    assert held
    replaying = asyncio.create_task(replayed(coordinator, 0, 6))
    await train(coordinator, sessions, 4, 1)
    steps = await replaying
    assert {step.content for step in steps} == {"same"}
    assert {key.job for key in books.replayed} == {"job (replay)"}
    assert not held & set(books.replayed)
    assert all(len(books.orders[key]) == 1 for key in held)  # none was decoded again for training
    await train(coordinator, sessions, 5, 100)
    status = await coordinator.job("job")
    assert (status.committed_step, status.quarantined, status.failure) == (STEPS - 1, 0, "")
    await coordinator.stop()


async def test_few_packs_are_held_at_once_and_none_behind_a_replay_that_is_broken_off(store, books):
    coordinator, _ = await trained(store, books)
    await asyncio.gather(*(replayed(coordinator, 0, 5) for _ in range(3)))
    assert 0 < books.most_replayed <= len(books.alive)
    steps = coordinator.replay("job", 0, 5, None, content=True)
    await anext(steps)
    await steps.aclose()
    assert not {key for key in books.held if key in books.replayed}
    await coordinator.stop()


async def test_a_worker_that_is_lost_meanwhile_is_no_difference(store, books):
    coordinator, _ = await trained(store, books, 6)
    books.deaf.add("w0")
    steps = await replayed(coordinator, 0, 5)
    assert {step.content for step in steps} == {"same"}
    await coordinator.stop()
