"""The coordinator refuses, restarts, goes silent: each comes out in the loop, in time."""

import threading

import pytest

from tests.waiting import wait_for
from trainer_client import (
    AccessDenied,
    CursorMismatch,
    Fenced,
    RankAlreadyClaimed,
    RequestRefused,
    ServiceFailed,
    ServiceTimeout,
    ServiceUnreachable,
    ShardDataset,
    UnknownJob,
    WrongWorldSize,
)
from trainer_client.backoff import Backoff


def restart(service, after_s=0.3):
    """Kill the coordinator, forgetting its sessions, and bring it back a little later."""
    service.kill("coordinator")
    service.coordinator.claims.clear()
    threading.Timer(after_s, service.start, ["coordinator"]).start()


def test_an_unreachable_service_is_named_with_what_to_check():
    dataset = ShardDataset("127.0.0.1:1", job="x", rank=0, world_size=1, connect_timeout_s=0.5)
    with pytest.raises(ServiceUnreachable) as caught:
        next(iter(dataset))
    for words in ("127.0.0.1:1", "0.5 s", "dataservice serve", "refused"):
        assert words in str(caught.value)


def test_an_unknown_job_is_refused_in_the_service_s_words(service):
    with pytest.raises(UnknownJob, match="no job 'nope'"):
        next(iter(service.dataset(job="nope")))


@pytest.mark.parametrize(
    ("code", "error_class", "expected"),
    [
        ("FAILED_PRECONDITION", "WorldSizeError", WrongWorldSize),
        ("FAILED_PRECONDITION", "CursorMismatchError", CursorMismatch),
        ("FAILED_PRECONDITION", "ConflictError", RequestRefused),
        ("FAILED_PRECONDITION", "SourceError", ServiceFailed),
        ("ALREADY_EXISTS", "RankClaimedError", RankAlreadyClaimed),
        ("ABORTED", "", Fenced),
        ("UNAUTHENTICATED", "", AccessDenied),
        ("INTERNAL", "ServiceError", ServiceFailed),
        ("INTERNAL", "StateError", ServiceFailed),
        ("DATA_LOSS", "", ServiceFailed),
    ],
)
def test_a_refused_session_raises_the_error_that_fits(
    service, monkeypatch, code, error_class, expected
):
    monkeypatch.setattr("trainer_client.session.CLAIM_GRACE_S", 0.0)
    service.fail("OpenSession", code, "said so", error_class)
    with pytest.raises(expected, match="said so") as caught:
        next(iter(service.dataset()))
    assert type(caught.value) is expected


@pytest.mark.parametrize("code", ["INTERNAL", "UNKNOWN"])
@pytest.mark.parametrize("call", ["OpenSession", "GetShard", "CommitStep"])
def test_a_stream_that_a_proxy_resets_is_opened_again(service, code, call):
    service.fail(call, code, "Received RST_STREAM with error code 2")
    with service.dataset() as dataset:
        steps = [shard.step for shard in dataset]
    assert steps == list(range(service.coordinator.steps))


def test_of_two_clients_of_one_rank_the_second_is_refused(service, monkeypatch):
    monkeypatch.setattr("trainer_client.session.CLAIM_GRACE_S", 0.3)
    first = iter(service.dataset(rank=0))
    next(first)
    with pytest.raises(RankAlreadyClaimed, match="rank 0 is held by another client"):
        next(iter(service.dataset(rank=0)))
    assert next(first).step == 1
    first.close()


def test_a_claim_that_is_about_to_end_is_waited_for(service):
    first = iter(service.dataset(rank=0))
    next(first)

    def end_once_it_is_asked_for():
        wait_for(lambda: len(service.coordinator.opens) > 1)
        service.end_session(0, "ABORTED", "fenced")

    ending = threading.Thread(target=end_once_it_is_asked_for)
    ending.start()
    second = iter(service.dataset(rank=0))
    assert next(second).step == 0
    ending.join()
    second.close()
    first.close()


def test_ranks_wait_for_each_other_and_a_missing_one_ends_the_wait(make_service):
    service = make_service(ranks=2)
    with pytest.raises(ServiceTimeout, match=r"rank 0 of 2 has waited 0.5 s for the other ranks"):
        next(iter(service.dataset(rank=0, timeout_s=0.5)))


def test_two_ranks_train_the_same_steps(make_service):
    service = make_service(ranks=2)
    digests = {}

    def train(rank):
        digests[rank] = [shard.plan.digest for shard in service.dataset(rank=rank)]

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert digests[0] == digests[1] == [f"digest-{step}" for step in range(4)]


def test_a_restarted_coordinator_is_rejoined_and_no_step_is_lost_or_repeated(make_service):
    service = make_service(steps=8)
    dataset = service.dataset(prefetch_steps=1)
    steps = []
    for shard in dataset:
        steps.append(shard.step)
        if shard.step in (1, 4):
            dataset.state_dict()  # waits for commits: one without an answer would be sent again
            restart(service)
    assert steps == list(range(8))
    assert service.coordinator.commits == list(range(8))
    assert {o.rejoin_attempt for o in service.coordinator.opens[1:]} == {1}


def test_a_stream_that_ends_by_itself_is_opened_again(make_service):
    service = make_service(steps=6)
    steps = []
    for shard in service.dataset(prefetch_steps=1):
        steps.append(shard.step)
        if shard.step == 2:
            service.end_session(0)
    assert steps == list(range(6))
    assert service.coordinator.opens[-1].rejoin_attempt == 1


def test_a_claim_that_the_broken_stream_still_holds_is_waited_for(make_service):
    service = make_service(steps=6)
    shards = iter(service.dataset(prefetch_steps=1))
    next(shards)
    service.fail("OpenSession", "ALREADY_EXISTS", "rank 0 is held", "RankClaimedError")
    service.end_session(0)
    assert [shard.step for shard in shards] == [1, 2, 3, 4, 5]


def test_a_coordinator_that_stays_away_stops_training_with_an_error(make_service, monkeypatch):
    service = make_service(steps=20)
    shards = iter(service.dataset())
    next(shards)
    for module in ("session", "steps"):
        monkeypatch.setattr(f"trainer_client.{module}.Backoff", lambda stop, _: Backoff(stop, 1.0))
    service.kill("coordinator")
    with pytest.raises(ServiceUnreachable):
        list(shards)


def test_a_newer_attempt_fences_the_loop(make_service):
    service = make_service(steps=20)
    dataset = service.dataset()
    shards = iter(dataset)
    next(shards)
    service.end_session(0, "ABORTED", "attempt 2 has replaced attempt 1", "FencedError")
    with pytest.raises(Fenced, match="attempt 2 has replaced attempt 1"):
        list(shards)


def test_a_fenced_trainer_saves_no_checkpoint(make_service):
    service = make_service(steps=20)
    dataset = service.dataset()
    shards = iter(dataset)
    next(shards)
    service.end_session(0, "ABORTED", "replaced", "FencedError")
    dataset.commit(0)
    with pytest.raises(Fenced, match="replaced"):
        dataset.state_dict()
    shards.close()


@pytest.mark.parametrize(("streams", "asks"), [(True, 1), (False, 3)])
def test_a_step_that_is_never_planned_stops_the_wait(service, monkeypatch, streams, asks):
    monkeypatch.setattr("trainer_client.shard_calls.POLL_S", 0.2)
    coordinator = service.coordinator
    coordinator.streams = streams
    coordinator.edit = lambda shard: coordinator.planned.clear()  # behind step 0
    shards = iter(service.dataset(timeout_s=60.0))
    next(shards)
    wait_for(lambda: sum(ask.step == 1 for ask in coordinator.asks) >= asks)
    monkeypatch.setattr("trainer_client.run.GRACE_S", 1.0 - 60.0)  # the loop's own wait alone
    with pytest.raises(ServiceTimeout, match="did not come within 1 s"):
        next(shards)


def test_a_slow_step_is_asked_for_again_until_it_is_planned(service, monkeypatch):
    monkeypatch.setattr("trainer_client.shard_calls.POLL_S", 0.2)
    service.coordinator.streams = False  # of an open call the service sees one question alone
    service.coordinator.planned.clear()

    def plan_once_it_was_asked_for_again():
        wait_for(lambda: len(service.coordinator.asks) > 2)
        service.coordinator.planned.set()

    planning = threading.Thread(target=plan_once_it_was_asked_for_again)
    planning.start()
    shards = iter(service.dataset())
    assert next(shards).step == 0
    planning.join()
    shards.close()


def test_a_commit_that_fails_for_a_moment_is_sent_again_in_order(service):
    for _ in range(2):
        service.fail("CommitStep", "UNAVAILABLE", "busy")
    list(service.dataset())
    assert service.coordinator.commits == [0, 1, 2, 3]


def test_a_commit_that_is_refused_stops_the_loop(make_service):
    service = make_service(steps=20)
    service.fail("CommitStep", "FAILED_PRECONDITION", "not your step", "ConflictError")
    shards = iter(service.dataset())
    next(shards)
    with pytest.raises(RequestRefused, match="not your step"):  # along with a call, or by itself
        list(shards)


def test_a_checkpoint_does_not_wait_for_a_coordinator_that_is_away(make_service, monkeypatch):
    monkeypatch.setattr("trainer_client.dataset.CHECKPOINT_FLUSH_S", 0.2)
    service = make_service(steps=6)
    dataset = service.dataset()
    shards = iter(dataset)
    next(shards)
    service.kill("coordinator")
    service.coordinator.claims.clear()
    dataset.commit(0)
    assert dataset.state_dict()["step"] == 1
    service.start("coordinator")
    assert [shard.step for shard in shards] == [1, 2, 3, 4, 5]
    assert service.coordinator.commits == list(range(6))


def test_the_wrong_step_or_another_plan_is_never_trained(service):
    def another_step(shard):
        shard.head.step += 1

    service.coordinator.edit = another_step
    with pytest.raises(Exception, match="step 0 was asked for, 1 came"):
        next(iter(service.dataset()))
