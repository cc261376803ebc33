"""What a training loop sees when all goes well, and who owns the position."""

import gc
import os
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.waiting import wait_for
from trainer_client import (
    BadArgument,
    CursorMismatch,
    MalformedShard,
    MisuseError,
    RankOutOfRange,
    ShardDataset,
    StateMismatch,
    run,
)
from trainer_client.transport import GrpcTransport


def running_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("shard-")]


def test_a_rank_receives_every_step_in_order_with_the_bytes_that_were_sent(service):
    shards = list(service.dataset(rank=0))
    assert [shard.step for shard in shards] == [0, 1, 2, 3]
    for shard in shards:
        shared, own = shard.microbatches
        for mb, pack, cp_rank in ((shared, 0, 0), (own, 1, 0)):
            expected = service.sequence_of(shard.step, pack, cp_rank)
            for name, array in expected.items():
                tensor = getattr(mb, name)
                assert tensor.dtype == torch.int64
                np.testing.assert_array_equal(tensor.numpy(), array)
        assert (shared.cp_group, shared.cp_rank, shared.wave, shared.idle) == ((0, 1), 0, 0, False)
        assert shared.cu_seqlens.tolist() == [0, 8, 16]
        assert (shared.cu_seqlens.dtype, shared.lengths.dtype) == (torch.int32, torch.int32)
        assert shared.sample_ids.tolist() == [10 * shard.step, 7]
        assert shared.vision.shapes == [(1, 13, 17, 3)]
        assert shared.vision.items[0].dtype == torch.uint8
        np.testing.assert_array_equal(shared.vision.items[0], service.item_of(shard.step, 0, 0))
        assert shared.audio is None


def test_received_bytes_are_counted_while_a_pass_runs_and_once_it_has_ended(service):
    dataset, counts = service.dataset(rank=0), []
    assert dataset.received_bytes == {"grpc": 0, "same_node": 0}
    for _ in dataset:
        counts.append(dataset.received_bytes["grpc"])
    assert counts[0] > 0
    assert counts == sorted(counts)
    assert dataset.received_bytes["grpc"] >= counts[-1]
    assert dataset.received_bytes["same_node"] == 0


def test_an_idle_rank_encodes_for_others_and_joins_the_exchange(service):
    shard = next(iter(service.dataset(rank=1)))
    idle = shard.microbatches[1]
    assert idle.idle
    assert [len(t) for t in (idle.input_ids, idle.labels, idle.position_ids)] == [0, 0, 0]
    np.testing.assert_array_equal(idle.audio.items[0], service.item_of(0, 1, 0))
    assert idle.audio.items[0].dtype == torch.float32
    assert idle.audio.exchange.send_rows.tolist() == [0, 1, 2]
    assert idle.audio.exchange.send_splits == [3, 0]
    assert idle.audio.exchange.recv_positions.tolist() == []


def test_a_rank_without_items_still_has_its_part_in_the_exchange(service):
    own = next(iter(service.dataset(rank=0))).microbatches[1]
    assert own.audio.items == []
    assert own.audio.exchange.recv_splits == [0, 3]
    assert own.audio.exchange.recv_positions.dtype == torch.int64


def test_every_shard_carries_the_plan_of_the_whole_step(service):
    plan = next(iter(service.dataset(rank=1))).plan
    assert (plan.digest, plan.loss_tokens, plan.replicas, plan.samples) == ("digest-0", 18, 2, 3)
    assert plan.degrees == (2, 1)
    assert [[group.replicas for group in wave.groups] for wave in plan.waves] == [[(0, 1)], [(0,)]]
    assert [wave.idle for wave in plan.waves] == [(), (1,)]
    assert [group.tokens for group in plan.groups] == [16, 5]
    assert [wave.predicted_s for wave in plan.waves] == [0.5, 0.25]
    assert plan.stages[0].algorithm == "isf"


def test_rows_come_as_a_multiple_where_that_is_asked_for(service):
    for rank in (0, 1):
        plain, padded = (
            list(service.dataset(rank=rank, rows_multiple=multiple)) for multiple in (1, 16)
        )
        for shard, other in zip(plain, padded, strict=True):
            for mb, longer in zip(shard.microbatches, other.microbatches, strict=True):
                assert longer.local_tokens % 16 == 0
                assert torch.equal(longer.input_ids[: mb.local_tokens], mb.input_ids)
    with pytest.raises(BadArgument, match="rows_multiple is 0"):
        service.dataset(rows_multiple=0)


def test_it_works_inside_a_data_loader(service):
    loader = DataLoader(service.dataset(), batch_size=None)
    assert [shard.step for shard in loader] == [0, 1, 2, 3]


def test_a_data_loader_that_would_batch_shards_is_refused_with_the_remedy(service):
    with pytest.raises(MisuseError, match=r"use DataLoader\(dataset, batch_size=None\)"):
        next(iter(DataLoader(service.dataset())))


def test_a_forked_process_is_told_that_it_may_not_iterate_and_the_other_goes_on(service):
    iterator = iter(service.dataset(rank=0))
    assert next(iterator).step == 0
    child = os.fork()
    if child == 0:
        try:
            next(iterator)
        except MisuseError:
            os._exit(3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert [shard.step for shard in iterator] == [1, 2, 3]


def test_asking_for_the_next_shard_commits_the_one_before(service):
    dataset = service.dataset()
    shards = iter(dataset)
    assert dataset.state_dict() == {"version": 1, "job": "vlm-sft", "step": 0, "cursor": ""}
    next(shards)
    assert service.coordinator.commits == []
    next(shards)
    dataset.state_dict()  # waits for the service
    assert service.coordinator.commits == [0]
    shards.close()


@pytest.mark.parametrize(
    ("skipped", "trained"),
    [({0}, [1, 2, 3]), ({1, 2}, [0, 3]), ({2, 3}, [0, 1]), ({0, 1, 2, 3, 4}, [])],
)
def test_skipped_steps_are_passed_over_wherever_they_lie(service, skipped, trained):
    service.coordinator.skipped = skipped
    dataset = service.dataset()
    assert [shard.step for shard in dataset] == trained
    assert service.coordinator.commits == trained
    state = dataset.state_dict()
    assert state["step"] == (trained[-1] + 1 if trained else 0)
    received = {ask.step: ask.received_step for ask in service.coordinator.asks}
    assert all(received[step] == step - 1 for step in trained)

    again = service.dataset()
    again.load_state_dict(state)
    assert list(again) == []


def test_an_answer_that_is_none_is_not_taken_for_the_end_of_the_data(service):
    service.coordinator.skipped = {0}
    service.coordinator.next_of = lambda step: step
    with pytest.raises(MalformedShard, match="step 0 was asked for"):
        next(iter(service.dataset()))


def test_the_end_of_the_data_commits_the_last_step_and_yields_nothing_more(service):
    dataset = service.dataset()
    list(dataset)
    assert service.coordinator.commits == [0, 1, 2, 3]
    assert dataset.state_dict()["cursor"] == "cursor-4"
    assert list(dataset) == []
    assert len(service.coordinator.opens) == 1


def test_questions_for_later_steps_take_commits_along(make_service, monkeypatch):
    monkeypatch.setattr(run, "RIDE_S", 600.0)
    service = make_service(steps=8)
    with service.dataset(prefetch_steps=1) as dataset:
        list(dataset)
    along = [trained.step for ask in service.coordinator.asks for trained in ask.trained]
    assert set(along) >= set(range(5)), "the last ones have no question behind them"
    assert service.coordinator.commits == list(range(8))
    assert service.coordinator.commit_calls == 8 - len(set(along))


def test_commits_arrive_in_order_and_once_however_they_are_called(service):
    dataset = service.dataset()
    for shard in dataset:
        dataset.commit(shard.step)
        dataset.commit(shard.step)
    assert service.coordinator.commits == [0, 1, 2, 3]


def test_the_next_shard_can_be_looked_at_without_taking_or_committing(service):
    dataset = service.dataset()
    with pytest.raises(MisuseError, match="not iterated"):
        dataset.peek()
    shards = iter(dataset)
    next(shards)
    dataset.commit(0)
    upcoming = dataset.peek()
    assert upcoming.step == 1
    assert dataset.state_dict()["step"] == 1
    assert next(shards).microbatches is upcoming.microbatches
    assert [shard.step for shard in shards] == [2, 3]


def test_without_waiting_a_look_ahead_gives_only_what_has_arrived(service):
    dataset, coordinator = service.dataset(), service.coordinator
    with pytest.raises(MisuseError, match="not iterated"):
        dataset.peek(wait=False)
    coordinator.edit = lambda shard: coordinator.planned.clear()  # step 1 is not planned yet
    shards = iter(dataset)
    next(shards)
    assert dataset.peek(wait=False) is None
    coordinator.edit = lambda shard: None
    coordinator.planned.set()
    upcoming = dataset.peek()
    assert dataset.peek(wait=False) is upcoming
    assert next(shards).microbatches is upcoming.microbatches
    assert [shard.step for shard in shards] == [2, 3]


def test_a_step_that_was_not_yielded_cannot_be_committed(service):
    dataset = service.dataset()
    with pytest.raises(MisuseError, match="step 0 cannot be committed"):
        dataset.commit(0)
    shards = iter(dataset)
    next(shards)
    with pytest.raises(MisuseError, match="last step yielded is 0"):
        dataset.commit(1)
    shards.close()


def test_a_shard_in_the_place_of_its_number_cannot_be_committed(service):
    dataset = service.dataset()
    shards = iter(dataset)
    with pytest.raises(MisuseError, match=r"shard\.step"):
        dataset.commit(next(shards))
    shards.close()


@pytest.mark.parametrize("step", [0.0, None, "0", -1, 1.5])
def test_what_is_no_step_cannot_be_committed(service, step):
    dataset = service.dataset()
    shards = iter(dataset)
    next(shards)
    with pytest.raises(MisuseError, match=r"shard\.step"):
        dataset.commit(step)
    dataset.commit(np.int64(0))
    assert dataset.state_dict()["step"] == 1
    shards.close()


def test_measured_seconds_go_with_the_commit_of_their_own_step(service):
    dataset = service.dataset()
    for shard in dataset:
        if shard.step in (1, 3):  # 0 and 2 are committed with them, or by asking for the next
            dataset.commit(shard.step, measured_s=0.5 + shard.step, phase_s={"exchange": 0.25})
    assert service.coordinator.commits == [0, 1, 2, 3]
    assert service.coordinator.measured_s == {1: 1.5, 3: 3.5}
    assert service.coordinator.phase_s == {step: {"exchange": 0.25} for step in (1, 3)}


def test_a_shard_that_was_not_committed_comes_again(service):
    dataset = service.dataset()
    for shard in dataset:
        if shard.step == 1:
            break
    del shard
    assert [shard.step for shard in dataset] == [1, 2, 3]
    assert [o.cursor for o in service.coordinator.opens if not o.rejoin_attempt][-1] == "cursor-1"


def test_a_commit_after_the_loop_still_moves_the_position(service):
    dataset = service.dataset()
    shards = iter(dataset)
    shard = next(shards)
    shards.close()
    dataset.commit(shard.step)
    assert dataset.state_dict()["cursor"] == "cursor-1"


def test_another_process_continues_from_a_state_dict(service):
    first = service.dataset()
    for shard in first:
        first.commit(shard.step)
        if shard.step == 1:
            break
    second = service.dataset(rank=1)
    second.load_state_dict(first.state_dict())
    assert [shard.step for shard in second] == [2, 3]
    assert service.coordinator.opens[-1].cursor == "cursor-2"


def test_a_state_dict_is_not_loaded_in_the_middle_of_a_loop(service):
    dataset = service.dataset()
    shards = iter(dataset)
    next(shards)
    with pytest.raises(MisuseError, match="while the dataset is iterated"):
        dataset.load_state_dict(dataset.state_dict())
    shards.close()
    dataset.load_state_dict(dataset.state_dict())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"job": "other"}, "belongs to job 'other'"),
        ({"version": 9}, "has version 9"),
    ],
)
def test_a_state_dict_of_something_else_is_refused(service, change, complaint):
    dataset = service.dataset()
    with pytest.raises(StateMismatch, match=complaint):
        dataset.load_state_dict({**dataset.state_dict(), **change})
    with pytest.raises(StateMismatch, match="not a state_dict"):
        dataset.load_state_dict({"step": 1})


def test_a_state_dict_whose_step_and_cursor_disagree_is_refused(service):
    dataset = service.dataset()
    dataset.load_state_dict({"version": 1, "job": "vlm-sft", "step": 3, "cursor": "cursor-2"})
    with pytest.raises(CursorMismatch, match=r"before step 3.* as step 2"):
        next(iter(dataset))


def test_only_prefetch_steps_shards_are_fetched_ahead(make_service):
    service = make_service(steps=20)
    shards = iter(service.dataset(prefetch_steps=3))
    next(shards)
    pause = threading.Event()
    while service.coordinator.asks[-1].step < 3:
        pause.wait(0.01)
    pause.wait(0.2)
    assert max(ask.step for ask in service.coordinator.asks) == 3
    shards.close()


def test_the_service_hears_how_far_the_bytes_have_arrived(service):
    list(service.dataset())
    assert [ask.received_step for ask in service.coordinator.asks] == [-1, 0, 1, 2, 3]


def test_the_wait_for_a_shard_is_measured(service):
    coordinator = service.coordinator
    coordinator.report_every_s = 0.02
    coordinator.edit = lambda shard: coordinator.planned.clear()  # behind step 0

    def plan_once_the_loop_has_waited():
        wait_for(lambda: coordinator.reports and coordinator.reports[-1].waiting_s > 0.2)
        coordinator.planned.set()

    shards = iter(service.dataset())
    next(shards)
    planning = threading.Thread(target=plan_once_the_loop_has_waited)
    planning.start()
    assert next(shards).wait_s > 0.2
    planning.join()
    shards.close()


@pytest.mark.parametrize("leave", ["close", "break", "collect", "with"])
def test_leaving_a_loop_in_any_way_gives_up_the_rank_and_stops_all_threads(service, leave):
    dataset = service.dataset()
    shards = iter(dataset)
    next(shards)
    assert running_threads()
    if leave == "close":
        dataset.close()
        with pytest.raises(MisuseError, match="closed while"):
            next(shards)
    elif leave == "break":
        del shards
    elif leave == "collect":
        del shards, dataset
        gc.collect()
    else:
        with dataset:
            pass
    assert not running_threads()


@pytest.fixture
def unraisable(monkeypatch):
    """What nobody could raise, as of a finalizer."""
    found = []
    monkeypatch.setattr("sys.unraisablehook", lambda about: found.append(about.exc_value))
    gc.disable()  # it runs where a test says
    yield found
    gc.enable()


class Trainer:
    """Holds its loop, and itself, so that only the collector finds it."""

    def __init__(self, dataset):
        self.own, self.dataset, self.shards = self, dataset, iter(dataset)


def test_a_loop_that_is_collected_by_its_own_thread_gives_up_the_rank(
    service, monkeypatch, unraisable
):
    dropped = threading.Event()

    def collected_at_the_second(shard, rows_multiple):
        if shard.step == 1:
            dropped.wait()
            gc.collect()
        return shard

    monkeypatch.setattr("trainer_client.run.aligned", collected_at_the_second)
    next(Trainer(service.dataset(prefetch_steps=1)).shards)
    dropped.set()
    wait_for(lambda: not running_threads())
    assert not unraisable


def test_a_loop_that_is_collected_while_a_worker_is_connected_gives_up_the_rank(
    service, monkeypatch, unraisable
):
    monkeypatch.setattr("trainer_client.run.JOIN_S", 0.1)  # of the threads that wait for this one
    dropped = threading.Event()

    class Collecting(GrpcTransport):
        def channel(self, address, *, authorised):
            if address == service.addresses["w0-spare"]:
                dropped.wait()
                gc.collect()
            return super().channel(address, authorised=authorised)

    service.workers["w0"].drop_after = [None, 0]  # of the second step nothing comes from it
    next(Trainer(service.dataset(prefetch_steps=1, transport=Collecting())).shards)
    dropped.set()
    wait_for(lambda: not running_threads(), limit_s=30.0)
    assert not unraisable


def test_an_interrupt_in_the_loop_leaves_nothing_behind(service):
    def train():
        for _ in service.dataset():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert not running_threads()


def test_a_dataset_is_iterated_by_one_loop_at_a_time(service):
    dataset = service.dataset()
    shards = iter(dataset)
    next(shards)
    with pytest.raises(MisuseError, match="already iterates"):
        next(iter(dataset))
    assert next(shards).step == 1
    shards.close()


def test_rank_and_world_size_come_from_the_environment(monkeypatch, service):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with ShardDataset(service.address, job="vlm-sft") as dataset:
        assert next(iter(dataset)).rank == 1
    monkeypatch.delenv("RANK")
    with pytest.raises(BadArgument, match="RANK is not set"):
        ShardDataset(service.address, job="vlm-sft")
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(BadArgument, match="not a whole number"):
        ShardDataset(service.address, job="vlm-sft")


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused_before_anything_is_opened(rank, world_size):
    with pytest.raises(RankOutOfRange, match=f"rank {rank} is outside"):
        ShardDataset("127.0.0.1:1", job="x", rank=rank, world_size=world_size)


@pytest.mark.parametrize(
    ("address", "options"),
    [
        ("localhost", {}),
        ("host:port", {}),
        ("127.0.0.1:1", {"prefetch_steps": 0}),
        ("127.0.0.1:1", {"timeout_s": 0}),
    ],
)
def test_impossible_arguments_are_refused(address, options):
    with pytest.raises(BadArgument):
        ShardDataset(address, job="x", rank=0, world_size=1, **options)


@pytest.mark.parametrize("address", ["::1:50051", "::1"])
def test_an_ipv6_address_without_brackets_is_refused_with_what_to_write(address):
    with pytest.raises(BadArgument, match=r"Write \[::1\]:50051"):
        ShardDataset(address, job="x", rank=0, world_size=1)
    ShardDataset("[::1]:50051", job="x", rank=0, world_size=1).close()
