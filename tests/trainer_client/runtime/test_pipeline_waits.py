"""What a step of a pipeline waits for, and what its ranks post between two steps.

The device is played (see ``fake_device.py``), also its clock, whose times are known only later; the
ranks are processes that talk over gloo.
"""

import pytest
import torch

from tests.trainer_client.runtime.fake_device import THERE, FakeDevice
from tests.trainer_client.runtime.model_there import (
    IN_A_PIPELINE_STEP,
    PlayedStream,
    model_there,
    play_a_stream,
    play_a_transport,
)
from tests.trainer_client.runtime.posted_order import stuck
from tests.trainer_client.runtime.random_chunks import cut, only_its_parts
from tests.trainer_client.runtime.random_steps import (
    WIDTH,
    make_model,
    make_shard,
    random_plan,
    random_samples,
    single_process,
)
from trainer_client.runtime import (
    GroupPool,
    HiddenStates,
    PeerGroup,
    PipelineMesh,
    clock,
    pipeline_timeline,
    run_pipeline_step,
    sum_of_stages,
)
from trainer_client.runtime.agreement import COMPARING

STAGES, RANKS = 3, 6  # the stage between the ends shares no weight with them
SEEDS = (2, 3, 5)  # of the steps, which have different numbers of microbatches
HIDDEN = HiddenStates(width=WIDTH, dtype=torch.float64, device=THERE)
LOSS, TIMELINE = "sharing the loss", "sharing the timeline"
LARGEST_NORM = 0.1


def noted_sums(mesh):
    """From here on, what this rank sums along its row, in order."""
    sums, post_sum = [], PeerGroup.post_sum

    def noted(group, tensor, *, action):
        if group is mesh.row:
            sums.append((action, tensor.numel()))
        return post_sum(group, tensor, action=action)

    PeerGroup.post_sum = noted
    return sums


def tied_gradient(mesh):
    """What the ends have of a tied weight's, added up; the stage between them has none."""
    if mesh.stage not in (0, STAGES - 1):
        return None
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.full((3,), 1.0 + mesh.stage)
    sum_of_stages(weight, mesh)
    return weight.grad.tolist()


def clipped(weights, replicas, everyone):
    """Clip gradients over all stages, and their norm; each rank waits for all others."""
    grads = [weight.grad.held for weight in weights if weight.grad is not None]
    squares = sum((grad**2).sum() for grad in grads) / replicas  # each has the sum over replicas
    everyone.post_sum(squares, action="the norm").wait()
    norm = float(squares) ** 0.5
    for grad in grads:
        grad.mul_(min(1.0, LARGEST_NORM / norm))
    return norm


def clipped_steps(rank, size, asks):
    """By step: what waited in it, and the errors of its loss and norm; what the rank's row summed,
    and the tied gradients. `asks` says which ranks ask for a step's timeline, once it is over."""
    play_a_stream()
    play_a_transport()
    waited, errors, tied, timelines = [], [], [], []
    with (
        GroupPool(timeout_s=60, lane="all ranks") as ranks,
        FakeDevice() as device,
        PipelineMesh(stages=STAGES, timeout_s=60) as mesh,
    ):
        mesh.column.device = mesh.row.device = THERE
        sums = noted_sums(mesh)
        for seed in SEEDS:
            samples = random_samples(seed)
            waves = random_plan(samples, mesh.replicas, (1, 2), seed)
            shard = make_shard(samples, waves, mesh.replicas, mesh.replica, seed)
            on_device = only_its_parts(shard, mesh.stage, STAGES).to(THERE)
            chunk = cut(model_there(), STAGES)[mesh.stage]
            device.reads.clear()
            device.copies.clear()
            result = run_pipeline_step([chunk], on_device, mesh, HIDDEN)
            waited.append((len(shard.microbatches), list(device.reads), list(device.copies)))
            tied.append(tied_gradient(mesh))
            norm = clipped(chunk.parameters(), mesh.replicas, ranks.everyone)
            if asks == "all" or (asks == "the first" and rank == 0):
                timelines.append(result.timeline)
            loss, grads = single_process(make_model(()), samples)
            whole = sum(float((grad**2).sum()) for grad in grads.values() if grad is not None)
            errors.append((abs(result.loss / loss - 1), abs(norm / whole**0.5 - 1)))
    timelines.append(result.timeline)  # as it was shared when the mesh was closed, or before
    return waited, errors, sums, tied, timelines


@pytest.mark.parametrize(
    "asks", ["nobody", "the first", pytest.param("all", marks=pytest.mark.full)]
)
def test_no_microbatch_of_a_pipeline_makes_the_host_wait_nor_does_its_loss(world, asks):
    answers = world(clipped_steps, RANKS, asks)
    assert len(answers) == RANKS
    for rank, (waited, errors, sums, tied, timelines) in answers.items():
        assert len({microbatches for microbatches, *_ in waited}) > 1
        for _, reads, copies in waited:
            assert reads == ["a copy to the host"] * IN_A_PIPELINE_STEP
            assert not copies
        assert max(error for each in errors for error in each) <= 1e-10
        assert tied == [None if rank % STAGES == 1 else [4.0] * 3] * len(SEEDS)
        assert [action for action, _ in sums] == [COMPARING, LOSS, TIMELINE] * len(SEEDS)
        first_of_row = answers[rank - rank % STAGES]
        assert sums == first_of_row[2], "one order along the row, whoever asked when"
        assert (timelines[-1].start_s == first_of_row[4][-1].start_s).all()
        assert timelines[-1].makespan_s > 0


def queues_of_clipped_steps(recorder):
    """What the stages of a replica post in two steps, tied and clipped."""
    samples, queues = random_samples(2), {}
    waves = random_plan(samples, 1, (1,), 2)
    for rank in range(STAGES):
        queues[rank] = recorder.begin()
        everyone = GroupPool(replica=rank, replicas=STAGES, lane="all ranks").everyone
        with PipelineMesh(stages=STAGES, rank=rank, world_size=STAGES) as mesh:
            shard = only_its_parts(make_shard(samples, waves, 1, 0, 2), rank, STAGES)
            for _ in range(2):
                chunks = [cut(make_model(()), STAGES)[rank]]
                hidden = HiddenStates(width=WIDTH, dtype=torch.float64)
                run_pipeline_step(chunks, shard, mesh, hidden)
                tied_gradient(mesh)
                everyone.post_sum(torch.zeros(1), action="the norm").wait()
    return queues


def test_gradients_may_be_tied_and_clipped_over_stages_before_the_timeline_is_shared(
    recorder, monkeypatch
):
    monkeypatch.setattr(pipeline_timeline, "start_clock", PlayedStream)
    monkeypatch.setattr(clock, "start_clock", PlayedStream)
    assert not stuck(queues_of_clipped_steps(recorder))


def test_a_timeline_that_goes_before_the_next_use_of_the_row_would_deadlock(recorder, monkeypatch):
    monkeypatch.setattr(pipeline_timeline, "start_clock", PlayedStream)
    monkeypatch.setattr(clock, "start_clock", PlayedStream)
    monkeypatch.setattr(PipelineMesh, "defer", lambda mesh, work: mesh.row.defer(work))
    assert set(stuck(queues_of_clipped_steps(recorder))) == {0, 1, 2}
