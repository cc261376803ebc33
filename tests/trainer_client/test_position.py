"""Which steps a saved state takes for trained, and that a resumed loop gets exactly the others."""

import pytest

from trainer_client import UncommittedSteps
from trainer_client.position import MOST_AHEAD, Position, Progress


def ahead(shards, by):
    """A loader that fetches so many shards ahead of the one that is trained."""
    held = []
    for shard in shards:
        held.append(shard)
        if len(held) > by:
            yield held.pop(0)
    yield from held


def steps_from(service, state):
    """What a run resumed from this state trains."""
    resumed = service.dataset()
    resumed.load_state_dict(state)
    return [shard.step for shard in resumed]


def test_a_loop_that_never_commits_has_trained_what_it_was_given(service):
    dataset, states = service.dataset(), []
    for _ in dataset:
        states.append(dataset.state_dict())
    assert [state["step"] for state in states] == [1, 2, 3, 4]
    assert states[1]["cursor"] == "cursor-2"
    assert steps_from(service, states[1]) == [2, 3]


def test_a_state_behind_the_data_resumes_with_nothing(service):
    dataset = service.dataset()
    list(dataset)
    assert dataset.state_dict()["step"] == 4
    assert steps_from(service, dataset.state_dict()) == []


@pytest.mark.parametrize("by", [0, 1, 2, 3])
def test_a_loop_that_commits_is_saved_at_what_was_committed_however_far_its_loader_is(
    make_service, by
):
    service = make_service(steps=7)
    dataset, states = service.dataset(), []
    for shard in ahead(dataset, by):
        dataset.commit(shard.step)
        states.append(dataset.state_dict())
    assert [state["step"] for state in states] == [1, 2, 3, 4, 5, 6, 7]
    assert [state["cursor"] for state in states] == [f"cursor-{n}" for n in range(1, 8)]
    assert service.coordinator.commits == list(range(7))


def test_measured_seconds_of_a_loop_whose_loader_runs_ahead_reach_the_service(make_service):
    service = make_service(steps=6)
    dataset = service.dataset()
    dataset.expect_commits()
    for shard in ahead(dataset, 2):
        dataset.commit(shard.step, measured_s=1.0 + shard.step)
    assert service.coordinator.measured_s == {step: 1.0 + step for step in range(6)}


def test_nothing_counts_before_its_commit_where_commits_are_expected(service):
    dataset = service.dataset()
    dataset.expect_commits()
    shards = iter(dataset)
    next(shards), next(shards)
    assert dataset.state_dict()["step"] == 0
    dataset.commit(0)
    assert dataset.state_dict()["step"] == 1
    assert service.coordinator.commits == [0]
    shards.close()


def test_commits_are_still_expected_behind_a_state_that_is_loaded(service):
    dataset = service.dataset()
    dataset.expect_commits()
    dataset.load_state_dict({"version": 1, "job": "vlm-sft", "step": 1, "cursor": "cursor-1"})
    shards = iter(dataset)
    next(shards), next(shards)
    assert dataset.state_dict()["step"] == 1
    shards.close()


def test_a_hook_commits_the_shards_it_does_not_see_in_their_order(service):
    dataset = service.dataset()
    dataset.expect_commits()
    shards = iter(dataset)
    next(shards), next(shards), next(shards)
    dataset.commit_next()
    assert dataset.state_dict()["step"] == 1
    dataset.commit_next(2)
    assert dataset.state_dict()["step"] == 3
    dataset.commit_next()
    assert dataset.state_dict()["step"] == 3
    shards.close()


def test_what_a_framework_has_not_taken_up_is_not_trained(service):
    """Lightning: the next shard is fetched before this one is moved to the device and trained."""
    dataset, states = service.dataset(), []
    for shard in ahead(dataset, 1):
        shard.to("cpu")
        states.append(dataset.state_dict()["step"])
    assert states == [1, 2, 3, 4]


def test_states_taken_by_the_shard_as_accelerate_takes_them(service):
    """Moved, saved, and only then is the next one fetched, ahead of training."""
    dataset, states = service.dataset(), []
    for shard in dataset:
        shard.to("cpu")
        states.append(dataset.state_dict()["step"])
    assert states == [1, 2, 3, 4]


def test_saving_before_the_commit_is_told_once(service):
    dataset = service.dataset()
    shards = iter(dataset)
    dataset.commit(next(shards).step)
    next(shards)
    with pytest.warns(UncommittedSteps, match=r"saved behind step 0.*up to 1.*trains them again"):
        assert dataset.state_dict()["step"] == 1
    dataset.state_dict()
    shards.close()


def test_a_commit_of_what_a_state_had_counted_already_is_told(service, caplog):
    dataset = service.dataset()
    shards = iter(dataset)
    next(shards), next(shards)
    assert dataset.state_dict()["step"] == 2
    with pytest.warns(UncommittedSteps, match="step 0 is only trained now.*behind step 1"):
        dataset.commit(0)
    assert "job 'vlm-sft'" in caplog.text
    assert dataset.state_dict()["step"] == 1
    shards.close()


def test_a_step_that_comes_again_though_a_state_counted_it_is_told(service):
    dataset = service.dataset()
    shards = iter(dataset)
    next(shards)
    dataset.state_dict()
    shards.close()
    shards = iter(dataset)
    with pytest.warns(UncommittedSteps, match="step 0 comes again"):
        assert next(shards).step == 0
    shards.close()


def position(step):
    return Position(step=step, cursor=f"cursor-{step}")


def test_a_long_loop_without_commits_remembers_few_positions():
    progress = Progress(position(0), job="j")
    for step in range(10 * MOST_AHEAD):
        progress.hand(position(step + 1))
        progress.ask()
    assert progress.next_uncommitted(MOST_AHEAD) == progress.last_handed
    assert progress.next_uncommitted(1) == progress.last_handed + 1 - MOST_AHEAD
    assert progress.saved() == position(10 * MOST_AHEAD)


def test_a_commit_from_too_far_behind_is_told_since_it_moves_nothing():
    progress = Progress(position(0), job="j")
    for step in range(10 * MOST_AHEAD):
        progress.hand(position(step + 1))
        progress.ask()
    with pytest.warns(UncommittedSteps, match=r"step 3 is committed .* Call expect_commits\(\)"):
        assert not progress.commit(3)
    assert progress.saved() == position(10 * MOST_AHEAD)


def test_a_loop_that_commits_late_loses_none_of_its_positions():
    progress = Progress(position(0), job="j")
    progress.expect_commits()
    for step in range(3 * MOST_AHEAD):
        progress.hand(position(step + 1))
    assert progress.commit(0)
    assert progress.saved() == position(1)
    assert progress.commit(2 * MOST_AHEAD)
    assert progress.saved() == position(2 * MOST_AHEAD + 1)
    assert not progress.commit(5)
    assert progress.last_handed == 3 * MOST_AHEAD - 1


def test_skipped_steps_between_shards_keep_their_positions():
    progress = Progress(position(0), job="j")
    progress.hand(position(1))
    progress.ask()
    progress.hand(position(8))
    assert progress.commit(7)
    assert progress.saved() == position(8)
