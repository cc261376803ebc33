"""Workers die, stall, refuse and send wrong bytes; the shard still comes whole, or an error."""

import threading
import time
import types
from contextlib import suppress

import numpy as np
import pytest

from soak.gate import Gate, through_gate
from soak.rank import GatedTransport
from tests.waiting import wait_for
from trainer_client import (
    CorruptPart,
    MalformedShard,
    MisuseError,
    PlanDigestMismatch,
    WorkerUnreachable,
)
from trainer_client.backoff import Backoff


def check(service, shards):
    shard = next(shards)
    for mb, pack in zip(shard.microbatches, (0, 1), strict=True):
        expected = service.sequence_of(shard.step, pack, 0)["input_ids"]
        np.testing.assert_array_equal(mb.input_ids, expected)
    item = shard.microbatches[0].vision.items[0]
    np.testing.assert_array_equal(item, service.item_of(shard.step, 0, 0))
    shards.close()


def named(service):
    return [list(ask.failed_workers) for ask in service.coordinator.asks if ask.step == 0]


def test_a_dead_worker_is_reported_and_its_parts_come_from_another(service):
    service.kill("w0")
    check(service, iter(service.dataset()))
    assert named(service) == [[], ["w0"]]
    assert service.workers["w0-spare"].calls >= 1


def test_what_arrived_before_a_stream_broke_is_not_fetched_again(service):
    service.workers["w0"].drop_after = [3]  # the sequence came whole, the image did not
    check(service, iter(service.dataset(prefetch_steps=1)))
    assert named(service) == [[], ["w0"]]
    assert service.workers["w1"].steps.count(0) == 1


def test_a_worker_that_lost_the_pack_is_reported(service):
    service.fail("w1", "NOT_FOUND", "no such pack", "NotFoundError")
    check(service, iter(service.dataset()))
    assert named(service) == [[], ["w1"]]


def test_an_expired_ticket_is_renewed_without_blaming_the_worker(service):
    service.fail("w0", "PERMISSION_DENIED", "the ticket expired", "TicketError")
    check(service, iter(service.dataset()))
    assert named(service) == [[], []]


def test_a_worker_that_refuses_every_ticket_is_reported_in_the_end(service):
    for _ in range(2):
        service.fail("w0", "PERMISSION_DENIED", "forged", "TicketError")
    check(service, iter(service.dataset()))
    assert named(service) == [[], [], ["w0"]]


def test_a_flipped_bit_is_noticed_and_the_part_fetched_again(service):
    service.workers["w0"].corrupt = 1
    check(service, iter(service.dataset()))
    assert named(service) == [[], []]


def test_a_part_that_stays_corrupt_stops_training_by_name(service):
    service.workers["w1"].corrupt = service.workers["w1-spare"].corrupt = 100
    with pytest.raises(CorruptPart, match=r"step 0, worker w1 .*sequence 0 of pack 1: crc32"):
        next(iter(service.dataset()))


@pytest.fixture
def time_passes_for_w0_alone(service, monkeypatch):
    """Called with when w0 has begun to be silent: from then on, and only while its first stream is
    all that is waited for, time passes for the stalls of streams. So no other one stalls, however
    long a busy machine keeps it waiting."""

    def since(silent):
        now_s, looked_s = 0.0, time.monotonic()

        def w0_alone():
            streams = [t for t in threading.enumerate() if t.name == "shard-fetch"]
            others_ended = service.workers["w1"].calls == 1 and len(streams) == 1
            return others_ended and len(named(service)) == 1 and bool(silent())

        def monotonic():
            nonlocal now_s, looked_s
            spent_s, looked_s = time.monotonic() - looked_s, time.monotonic()
            now_s += spent_s * w0_alone()
            return now_s

        clock = types.SimpleNamespace(monotonic=monotonic)
        monkeypatch.setattr("trainer_client.fetch.time", clock)

    return since


def test_a_worker_that_stops_sending_is_given_up(service, time_passes_for_w0_alone):
    time_passes_for_w0_alone(lambda: service.workers["w0"].calls)
    service.workers["w0"].release.clear()
    check(service, iter(service.dataset(stall_timeout_s=0.5)))
    assert named(service) == [[], []]  # it may be decoding still: it is named as slow
    assert [list(ask.slow_workers) for ask in service.coordinator.asks if ask.step == 0] == [
        [],
        ["w0"],
    ]


@pytest.fixture
def gate(service):
    """Real sockets between the client and the workers, which can fail as a network does."""
    with Gate() as made:
        for name in service.workers:
            through_gate(made.control, service.addresses[name])
        yield made


def slow_ones(service):
    return [list(ask.slow_workers) for ask in service.coordinator.asks if ask.step == 0]


def gated(service, gate, **options):
    transport = GatedTransport(gate.control, token=None)
    return iter(service.dataset(transport=transport, prefetch_steps=1, **options))


def test_a_worker_behind_a_silent_network_costs_one_stall(service, gate, time_passes_for_w0_alone):
    time_passes_for_w0_alone(lambda: True)
    # It accepts connections, and nothing comes: neither an answer nor an end.
    gate.silence(lambda address: address == service.addresses["w0"])
    check(service, gated(service, gate, stall_timeout_s=0.5))
    assert slow_ones(service) == [[], ["w0"]]
    assert named(service) == [[], []]
    assert service.workers["w0"].calls == 0


def test_a_stream_that_the_network_drops_in_its_midst_costs_one_stall(
    service, gate, time_passes_for_w0_alone
):
    time_passes_for_w0_alone(gate.holds)
    gate.hold(lambda address: address == service.addresses["w0"], after_bytes=400)
    check(service, gated(service, gate, stall_timeout_s=0.5))
    assert slow_ones(service) == [[], ["w0"]]
    assert service.workers["w0"].steps.count(0) == 1


def test_a_network_that_is_slow_but_alive_is_borne(service, gate):
    # A connection and its first message take many times what a stream may be silent at first; for
    # two rounds so long that none can get through, though a busy machine looks at them late.
    def delay(delay_s):
        gate.delay(lambda address: address != service.address, delay_s)

    delay(60.0)
    service.coordinator.edit = lambda shard: delay(0.15) if len(slow_ones(service)) > 2 else None
    check(service, gated(service, gate, stall_timeout_s=0.06))
    assert not any(named(service))
    assert len(slow_ones(service)) > 2


def test_workers_that_never_deliver_stop_training_with_the_last_reason(service, monkeypatch):
    monkeypatch.setattr("trainer_client.steps.Backoff", lambda stop, _: Backoff(stop, 0.5))
    for name in service.workers:
        service.kill(name)
    with pytest.raises(WorkerUnreachable, match=r"step 0: 3 parts did not come .* worker w") as e:
        next(iter(service.dataset()))
    assert "refused" in str(e.value)
    assert "failed or silent: w" in str(e.value)


class CountedRetries:
    """A deadline that passes with the seventh retry."""

    spent_s = 0.0

    def __init__(self, stop, deadline_s):
        self.attempts = 0

    def wait(self):
        self.attempts += 1
        return self.attempts < 7


def test_the_deadline_is_for_the_next_part_and_not_for_all_of_a_step(service, monkeypatch):
    monkeypatch.setattr("trainer_client.steps.Backoff", CountedRetries)
    # No part, then the first of two, then both: each in less than the deadline, not together.
    script = [1] * 5 + [3] * 5
    service.workers["w0"].drop_after = service.workers["w0-spare"].drop_after = script
    check(service, iter(service.dataset(prefetch_steps=1)))
    assert len(named(service)) == 11


def test_a_loop_is_left_at_once_while_a_worker_is_silent(service):
    for worker in service.workers.values():
        worker.release.clear()
    dataset = service.dataset()
    shards = iter(dataset)

    def iterated():
        with suppress(MisuseError):
            dataset.peek(wait=False)
            return True
        return False

    def leave():
        wait_for(lambda: service.workers["w0"].calls and iterated())
        dataset.close()

    leaving = threading.Thread(target=leave)
    leaving.start()
    with pytest.raises(Exception, match="closed"):
        next(shards)
    leaving.join()


def test_a_plan_that_changes_between_two_tries_is_refused(service):
    def other_plan(shard):
        if len(service.coordinator.asks) > 1:
            shard.head.plan_digest = "another"

    service.coordinator.edit = other_plan
    service.kill("w0")
    with pytest.raises(PlanDigestMismatch, match="another, digest-0"):
        next(iter(service.dataset()))


def test_a_ticket_of_another_plan_is_refused(service):
    def wrong_ticket(shard):
        shard.ticket_digest = "stray"

    service.coordinator.edit = wrong_ticket
    with pytest.raises(PlanDigestMismatch, match="digest-0, stray"):
        next(iter(service.dataset()))


def test_a_shard_whose_ticket_leaves_something_out_is_refused(service):
    def forget(shard):
        shard.parts = [part for part in shard.parts if part.worker == "w0"]

    service.coordinator.edit = forget
    with pytest.raises(MalformedShard, match="the sequence of pack 1, member 0"):
        next(iter(service.dataset()))
