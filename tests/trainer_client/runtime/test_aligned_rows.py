"""Rows that were added for alignment change neither loss nor gradients, alone and in rings."""

import pytest

from tests.trainer_client.runtime.random_chunks import HIDDEN, Chunk, cut, only_its_parts
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
from trainer_client.alignment import aligned
from trainer_client.runtime import GroupPool, PipelineMesh, run_pipeline_step, run_step


class Measuring(Model):
    """Notes how many rows its decoder gets."""

    def decode(self, microbatch, features, attention):
        self.rows.append((len(microbatch.input_ids), microbatch.idle))
        return super().decode(microbatch, features, attention)


def aligned_cases(rank, size, cases):
    found = {}
    with GroupPool(timeout_s=60) as pool:
        for seed, multiple in cases:
            samples = weighed(random_samples(seed), seed)
            waves = random_plan(samples, size, (1, 2, 3), seed)
            shard = make_shard(samples, waves, size, rank, seed)
            model = make_model(())
            model.__class__, model.rows = Measuring, []
            result = run_step(model, aligned(shard, multiple), pool)
            loss, grads = single_process(make_model(()), samples)
            planned = sum(mb.local_tokens for mb in shard.microbatches)
            found[seed, multiple] = (
                worst_difference(result, model, loss, grads), model.rows, planned
            )  # fmt: skip
    return found


def test_aligned_rows_give_the_loss_and_gradients_of_a_single_process(world):
    answers = world(aligned_cases, 4, [(20, 8), (21, 16), (22, 3)])
    idle_rows, added = set(), 0
    for found in answers.values():
        for case, ((parameter, difference), rows, planned) in found.items():
            assert difference <= 1e-10, (case, parameter, difference)
            assert all(count % case[1] == 0 for count, _ in rows)
            idle_rows |= {(count, case[1]) for count, idle in rows if idle}
            added += sum(count for count, idle in rows if not idle) - planned
    assert added > 0
    assert idle_rows
    assert all(count == multiple for count, multiple in idle_rows), "no more than one multiple"


@pytest.mark.parametrize("ahead", [True, False])
def test_aligned_rows_of_one_replica(ahead):
    samples = random_samples(9)
    shard = make_shard(samples, random_plan(samples, 1, (1,), 9), 1, 0, 9)
    model = make_model(())
    with GroupPool() as pool:
        result = run_step(model, aligned(shard, 32), pool, features_ahead=ahead)
    loss, grads = single_process(make_model(()), samples)
    assert worst_difference(result, model, loss, grads)[1] <= 1e-10


class MeasuringChunk(Chunk):
    """Notes how many rows its layers get, and whether a loss of its own would find as many."""

    def decode(self, microbatch, *given):
        self.note(microbatch)
        return super().decode(microbatch, *given)

    def forward(self, microbatch, *rest):
        if not hasattr(self, "tokens"):
            self.note(microbatch)
        return super().forward(microbatch, *rest)

    def note(self, microbatch):
        self.idle = microbatch.idle
        assert len(microbatch.loss_weights) == len(microbatch.position_ids)

    def body(self, x, attention):
        self.__dict__.setdefault("rows", []).append((len(x), self.idle))
        return super().body(x, attention)


def aligned_stages(rank, size, multiple):
    seed, replicas = 21, size // 2
    samples = weighed(random_samples(seed), seed)
    waves = random_plan(samples, replicas, (1, 2), seed)
    with PipelineMesh(stages=2, timeout_s=60) as mesh:
        shard = aligned(make_shard(samples, waves, replicas, mesh.replica, seed), multiple)
        model = make_model(())
        chunk = cut(model, 2, MeasuringChunk)[mesh.stage]
        stripped = only_its_parts(shard, mesh.stage, 2)
        result = run_pipeline_step([chunk], stripped, mesh, HIDDEN)
    loss, grads = single_process(make_model(()), samples)
    worst = abs(result.loss - loss) / abs(loss)
    for name, parameter in model.named_parameters():
        if any(parameter is own for own in chunk.parameters()):
            difference = (parameter.grad - grads[name]).norm() / grads[name].norm().clamp_min(1e-3)
            worst = max(worst, float(difference))
    return worst, chunk.rows


def test_idle_stages_of_a_pipeline_run_as_many_rows_as_are_aligned_to(world):
    answers = world(aligned_stages, 6, 8)
    assert max(worst for worst, _ in answers.values()) <= 1e-10
    for stage in range(2):
        of_stage = [rows for rank in range(stage, 6, 2) for rows in answers[rank][1]]
        assert all(count % 8 == 0 for count, _ in of_stage)
        assert {count for count, idle in of_stage if idle} == {8}
