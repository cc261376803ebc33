"""Pipelines fed by a real service: two stages of two replicas, plain and interleaved, learn what
whole models on two replicas do."""

import pytest
import torch

from dataservice.core.errors import SpecError
from dataservice.jobs.job_file import read_job
from demo.chunks import cut_model, sum_tied_gradient
from demo.model import DemoModel, ModelConfig
from tests.service.support import job_file, serving
from tests.trainer_client.runtime.conftest import run_world
from trainer_client import ShardDataset
from trainer_client.runtime import (
    GroupPool,
    HiddenStates,
    PipelineMesh,
    run_pipeline_step,
    run_step,
)

pytestmark = pytest.mark.long

STEPS, STAGES, REPLICAS = 3, 2, 2
VIRTUAL_STAGES = {"pipelined": 1, "interleaved": 2}
CONFIG = ModelConfig(width=32, layers=4, encoder_width=32, vision_layers=1)


def make_model():
    torch.manual_seed(3)
    return DemoModel(CONFIG).double()


def learn(parameters, dataset, step_of):
    """Loss curve of some steps, and what the shards had."""
    optimizer = torch.optim.SGD(parameters, lr=0.5)  # Adam would not mind gradients of a wrong size
    losses, degrees, order, received = [], set(), set(), 0
    with dataset:
        for shard in dataset:
            result = step_of(shard)
            optimizer.step()
            optimizer.zero_grad()
            dataset.commit(shard.step, measured_s=result.seconds, phase_s=result.phase_s)
            losses.append(result.loss)
            degrees |= set(shard.plan.degrees)
            order |= {s.algorithm for s in shard.plan.stages if s.stage == "order"}
            received += shard.size_bytes
            if shard.step + 1 == STEPS:
                break
    return {"losses": losses, "degrees": degrees, "order": order, "received": received}


def whole(rank, address):
    dataset = ShardDataset(address, job="whole", rank=rank, world_size=REPLICAS, timeout_s=60)
    model = make_model()
    with GroupPool(replica=rank, replicas=REPLICAS, lane="whole", timeout_s=60) as pool:
        return learn(model.parameters(), dataset, lambda shard: run_step(model, shard, pool))


def pipeline(rank, size, address, job):
    hidden = HiddenStates(width=CONFIG.width, dtype=torch.float64)
    virtual_stages = VIRTUAL_STAGES[job]
    with PipelineMesh(stages=STAGES, virtual_stages=virtual_stages, lane=job, timeout_s=60) as mesh:
        chunks = cut_model(make_model(), STAGES * virtual_stages)[mesh.stage :: STAGES]
        dataset = ShardDataset(
            address, job=job, rank=rank, world_size=size, parts=mesh.parts, timeout_s=60
        )

        def step(shard):
            result = run_pipeline_step(chunks, shard, mesh, hidden)
            sum_tied_gradient(chunks, mesh)
            return result

        parameters = {id(p): p for chunk in chunks for p in chunk.parameters()}
        return learn(parameters.values(), dataset, step)


def trainers(rank, size, address):
    learned = {job: pipeline(rank, size, address, job) for job in VIRTUAL_STAGES}
    return learned | ({"whole": whole(rank, address)} if rank < REPLICAS else {})


@pytest.fixture(scope="module")
def learned(corpus, tmp_path_factory):
    """rank → job → what it learned."""
    home = tmp_path_factory.mktemp("pipeline")
    # Two replicas hold the longest sample; a step has several waves.
    changes = {"plan": {"memory_tokens": 3456}, "batch": {"samples": 24}}
    with serving(home) as service:
        for job, virtual_stages in {"whole": 0, **VIRTUAL_STAGES}.items():
            topology = {"pipeline_parallel": STAGES, "virtual_stages": virtual_stages}
            more = {"topology": topology} if virtual_stages else {}
            service.cli("job", "submit", str(job_file(corpus, home, job=job, **changes, **more)))
        return run_world(trainers, STAGES * REPLICAS, home, service.address)


@pytest.mark.parametrize("job", VIRTUAL_STAGES)
def test_a_pipeline_has_the_loss_curve_of_whole_models(learned, job):
    expected = learned[0]["whole"]
    assert len(expected["losses"]) == STEPS
    assert expected["losses"][-1] < expected["losses"][0]
    for of_rank in learned.values():
        assert of_rank[job]["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert "search" in of_rank[job]["order"]
        assert of_rank[job]["degrees"] == {1, 2}
    assert expected["order"] == {"as_formed"}


def test_virtual_stages_of_a_single_stage_are_refused(corpus, tmp_path):
    path = job_file(corpus, tmp_path, topology={"virtual_stages": 2})
    with pytest.raises(SpecError, match="virtual_stages is 2 and pipeline_parallel 1"):
        read_job(path.read_text(), tmp_path)


@pytest.mark.parametrize("shares", [[1.0], [0.0, 0.0]])
def test_shares_of_other_stages_are_refused(corpus, tmp_path, shares):
    path = job_file(corpus, tmp_path, topology={"pipeline_parallel": 2, "stage_shares": shares})
    with pytest.raises(SpecError, match="give each of the 2 model chunks"):
        read_job(path.read_text(), tmp_path)


def test_the_last_stages_get_labels_alone(learned):
    for job in VIRTUAL_STAGES:
        first, last = (learned[stage][job]["received"] for stage in range(STAGES))
        assert 0 < last < first / 10
