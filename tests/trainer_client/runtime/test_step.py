"""Whole steps under random plans against a single process that knows no plan at all."""

import pytest

from tests.trainer_client.runtime.random_steps import (
    Model,
    make_model,
    make_shard,
    random_plan,
    random_samples,
    single_process,
    worst_difference,
)
from trainer_client.runtime import (
    GroupPool,
    LayoutError,
    PlanMismatchError,
    check_same_plan,
    run_step,
)

LARGEST_WORLD = 6


def parity_cases(rank, size, cases):
    answer = {}
    for case in cases:
        replicas, seed, degrees, frozen = case
        if rank >= replicas:
            continue
        with GroupPool(
            replica=rank, replicas=replicas, lane=str(case), timeout_s=60, max_groups=4
        ) as pool:
            samples = random_samples(seed)
            waves = random_plan(samples, replicas, degrees, seed)
            shard = make_shard(samples, waves, replicas, rank, seed)
            model = make_model(frozen)
            result = run_step(model, shard, pool, upcoming=shard)
            loss, grads = single_process(make_model(frozen), samples)
            used = {len(members) for wave in waves for members, _ in wave}
            answer[case] = (*worst_difference(result, model, loss, grads), used, result.loss)
    return answer


def test_any_plan_gives_the_loss_and_gradients_of_a_single_process(world):
    every = (1, 2, 3, 5)
    cases = [(6, seed, every, ()) for seed in range(5)]
    cases += [(4, seed, (1, 2, 3), ()) for seed in range(5, 8)]
    cases += [(6, 8, every, ("audio",)), (3, 9, (1,), ()), (1, 9, (1,), ()), (2, 9, (2,), ())]
    answers = world(parity_cases, LARGEST_WORLD, cases)
    seen = set()
    for rank, answer in answers.items():
        for case, (parameter, difference, degrees, _) in answer.items():
            assert difference <= 1e-10, (rank, case, parameter, difference)
            seen |= degrees
    assert seen >= {1, 2, 3, 5}
    losses = {answers[0][case][3] for case in cases if case[1] == 9}
    assert max(losses) - min(losses) < 1e-12, "the same batch on 1, 2 and 3 replicas"


def different_digests(rank, size):
    with GroupPool(timeout_s=30) as pool:
        check_same_plan("aa" * 8, pool.everyone)
        try:
            check_same_plan("aa" * 8 if rank != 1 else "bb" * 8, pool.everyone)
        except PlanMismatchError as error:
            return error.replicas_of, str(error)


def test_replicas_with_different_plans_stop_with_both_digests(world):
    for replicas_of, text in world(different_digests, 3).values():
        assert replicas_of == {"aa" * 8: (0, 2), "bb" * 8: (1,)}
        assert "bb" * 8 in text


def test_an_encoder_whose_rows_differ_from_the_plan_is_refused():
    class Doubling(Model):
        def encode(self, modality, batch):
            return super().encode(modality, batch).repeat(2, 1)

    samples = random_samples(3)
    shard = make_shard(samples, random_plan(samples, 1, (1,), 3), 1, 0, 3)
    with GroupPool() as pool, pytest.raises(LayoutError, match="patch and merge sizes"):
        run_step(Doubling().double(), shard, pool)


@pytest.mark.parametrize("frozen", [(), ("vision", "audio")])
def test_a_single_replica_needs_no_torch_distributed(frozen):
    samples = random_samples(3)
    waves = random_plan(samples, 1, (1,), 3)
    model = make_model(frozen)
    with GroupPool() as pool:
        result = run_step(model, make_shard(samples, waves, 1, 0, 3), pool)
    loss, grads = single_process(make_model(frozen), samples)
    assert worst_difference(result, model, loss, grads)[1] <= 1e-10
    assert result.loss_tokens == sum(int((s.labels != -100).sum()) for s in samples)
    assert len(result.microbatch_seconds) == len(waves)
