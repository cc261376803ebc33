"""Tensor, context, pipeline and data parallelism in one step, against a single process."""

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.trainer_client.runtime.random_chunks import HIDDEN, cut, only_its_parts
from tests.trainer_client.runtime.random_steps import (
    make_shard,
    random_plan,
    random_samples,
    single_process,
)
from tests.trainer_client.runtime.random_tensor_parallel import make_split_model, over_tensor_ranks
from tests.trainer_client.runtime.world_device import DEVICE
from trainer_client.runtime import PipelineMesh, run_pipeline_step

TENSOR, STAGES, REPLICAS = 2, 2, 4
RANKS = TENSOR * STAGES * REPLICAS
DEGREES = (1, 2, 2)  # of CP groups; replicas that are in none beside them are data parallel


def whole_of(grad):
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def all_at_once(rank, size, cases):
    """By case: the worst difference of loss and gradients, and the degrees of each wave."""
    # A replica's ranks follow one another; nodes of two replicas share what HSDP shards.
    mesh = init_device_mesh(
        DEVICE.type,
        (2, REPLICAS // 2, STAGES, TENSOR),
        mesh_dim_names=("node", "shard", "stage", "tensor"),
    )
    found = {}
    for how, virtual_stages, seed in cases:
        samples = random_samples(seed)
        waves = random_plan(samples, REPLICAS, DEGREES, seed)
        loss, grads = single_process(make_split_model(), samples)
        with PipelineMesh(
            stages=STAGES,
            virtual_stages=virtual_stages,
            tensor_ranks=TENSOR,
            timeout_s=100,
            lane=f"{how} {virtual_stages}",
        ) as pipeline:
            shard = make_shard(samples, waves, REPLICAS, pipeline.replica, seed)
            shard = only_its_parts(shard, pipeline.stage, STAGES)
            model = over_tensor_ranks(make_split_model(), mesh["tensor"])
            names = {id(p): name for name, p in model.named_parameters()}
            chunks = cut(model, STAGES * virtual_stages)[pipeline.stage :: STAGES]
            names_of = [[names[id(p)] for p in chunk.parameters()] for chunk in chunks]
            if how == "hsdp":
                for chunk in chunks:
                    for part in (*chunk.layers, chunk):
                        fully_shard(part, mesh=mesh["node", "shard"])
            result = run_pipeline_step(chunks, shard, pipeline, HIDDEN)
        worst = {"loss": abs(result.loss - loss) / abs(loss)}
        for chunk, own in zip(chunks, names_of, strict=True):
            for name, parameter in zip(own, chunk.parameters(), strict=True):
                good = grads[name]
                difference = (whole_of(parameter.grad) - good).norm() / good.norm().clamp_min(1e-3)
                worst[name] = float(difference)
        degrees = [sorted(len(members) for members, _ in wave) for wave in waves]
        found[how, virtual_stages, seed] = worst, degrees
    return found


@pytest.mark.long
def test_tensor_context_pipeline_and_data_parallel_ranks_train_as_a_single_process_does(world):
    cases = [("hsdp", 1, 31), ("hsdp", 2, 32), ("plain", 1, 33)]
    answers = world(all_at_once, RANKS, cases)
    assert len(answers) == RANKS
    every = set(dict(make_split_model().named_parameters()))
    for case in cases:
        compared = set()
        for rank, found in answers.items():
            worst, degrees = found[case]
            assert max(worst.values()) <= 1e-10, (rank, case, worst)
            compared |= set(worst)
            assert [2, 2] in degrees or [1, 1, 2] in degrees, "CP beside DP in one wave"
        assert compared == every | {"loss"}
