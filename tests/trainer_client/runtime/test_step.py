"""Whole steps under random plans against a single process that knows no plan at all."""

import pytest
import torch

from tests.trainer_client.runtime.random_steps import (
    Model,
    make_model,
    make_shard,
    random_plan,
    random_samples,
    single_process,
    weighed,
    worst_difference,
)
from tests.trainer_client.runtime.world_device import DEVICE
from trainer_client.runtime import (
    GroupPool,
    LayoutError,
    PlanMismatchError,
    RuntimeFault,
    check_same_plan,
    evaluate_step,
    run_step,
)

LARGEST_WORLD = 6


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_step_where_gradients_are_off_is_refused_by_its_cause(off):
    samples = random_samples(1)
    shard = make_shard(samples, random_plan(samples, 1, (1,), 1), 1, 0, 1)
    with GroupPool() as pool, off(), pytest.raises(RuntimeFault, match="gradients are off here"):
        run_step(make_model(()), shard, pool)


def test_a_forward_that_was_replaced_on_the_model_is_called(monkeypatch):
    samples = random_samples(1)
    shard = make_shard(samples, random_plan(samples, 1, (1,), 1), 1, 0, 1)
    model, called = make_model(()), []
    with GroupPool() as pool:
        expected = run_step(model, shard, pool).loss
        forward = model.forward
        model.forward = lambda *given: called.append(torch.is_grad_enabled()) or forward(*given)
        assert run_step(model, shard, pool).loss == expected
    assert called == [True] * len(shard.microbatches)


def parity_cases(rank, size, cases):
    answer = {}
    for case in cases:
        replicas, seed, degrees, frozen, *weights = case
        if rank >= replicas:
            continue
        with GroupPool(replica=rank, replicas=replicas, lane=str(case), timeout_s=60) as pool:
            samples = random_samples(seed)
            if weights:
                samples = weighed(samples, *weights)
            waves = random_plan(samples, replicas, degrees, seed)
            shard = make_shard(samples, waves, replicas, rank, seed)
            model = make_model(frozen)
            evaluated = evaluate_step(model, shard, pool)
            assert all(parameter.grad is None for parameter in model.parameters())
            result = run_step(model, shard, pool)
            assert evaluated.loss == pytest.approx(result.loss, rel=1e-12)
            assert evaluated.loss_tokens == result.loss_tokens
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


def test_weighed_samples_train_as_their_weighted_mean_in_a_single_process(world):
    every = (1, 2, 3, 5)
    cases = [(6, seed, every, (), seed) for seed in range(20, 24)]
    cases += [(size, 9, (1, 2), (), 9) for size in (1, 2, 3, 4)]
    answers = world(parity_cases, LARGEST_WORLD, cases)
    for rank, answer in answers.items():
        for case, (parameter, difference, _, _) in answer.items():
            assert difference <= 1e-10, (rank, case, parameter, difference)
    losses = {answers[0][case][3] for case in cases if case[1] == 9}
    assert max(losses) - min(losses) < 1e-12, "the same batch on 1 to 4 replicas"


def one_rank_with_another_plan(rank, size):
    samples = random_samples(3)
    waves = random_plan(samples, size, (1, 2), 3)
    digest = ("bb" if rank == 1 else "aa") * 32
    shard, model = make_shard(samples, waves, size, rank, 3, digest), make_model(())
    with GroupPool(timeout_s=60) as pool:
        try:
            run_step(model, shard, pool)
        except PlanMismatchError as error:
            untouched = all(parameter.grad is None for parameter in model.parameters())
            return error.replicas_of, str(error), untouched


def test_a_step_that_replicas_planned_differently_stops_all_of_them_with_both_digests(world):
    answers = world(one_rank_with_another_plan, 3)
    assert len(answers) == 3
    for replicas_of, text, untouched in answers.values():
        assert replicas_of == {"aa" * 32: (0, 2), "bb" * 32: (1,)}
        assert f"digest {'aa' * 32} on replicas [0, 2]" in text
        assert f"digest {'bb' * 32} on replicas [1]" in text
        assert untouched


def compared(rank, size):
    """What each comparison says: of digests all alike, one unlike the others, and all unlike."""
    with GroupPool(timeout_s=60) as pool:
        found = []
        for digests in ("aaa", "aba", "abc"):
            try:
                found.append(check_same_plan(digests[rank] * 16, pool.everyone))
            except PlanMismatchError as error:
                found.append({digest[0]: held for digest, held in error.replicas_of.items()})
        return found


def test_digests_are_compared_in_one_sum_and_named_where_they_differ(world):
    for found in world(compared, 3).values():
        assert found == [None, {"a": (0, 2), "b": (1,)}, {"a": (0,), "b": (1,), "c": (2,)}]


def test_an_encoder_whose_rows_differ_from_the_plan_is_refused():
    class Doubling(Model):
        def encode(self, modality, batch):
            return super().encode(modality, batch).repeat(2, 1)

    samples = random_samples(3)
    shard = make_shard(samples, random_plan(samples, 1, (1,), 3), 1, 0, 3)
    with GroupPool() as pool, pytest.raises(LayoutError, match="patch and merge sizes"):
        run_step(Doubling().double().to(DEVICE), shard, pool)


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
    spent = dict(result.phase_s)
    assert spent.pop("waiting") == 0, "there is nobody to wait for"
    assert spent.pop("exchange") == 0, "and nobody to exchange with"
    assert min(spent.values()) > 0
    assert sum(spent.values()) <= result.seconds
