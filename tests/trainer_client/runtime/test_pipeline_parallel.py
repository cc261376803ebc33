"""Pipelined steps under random plans against a single process that knows no plan at all."""

import itertools
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dataservice.core.topology import Topology
from tests.trainer_client.runtime.conftest import run_world
from tests.trainer_client.runtime.random_chunks import (
    HIDDEN,
    Chunk,
    ChunkWithoutLogits,
    cut,
    only_its_parts,
)
from tests.trainer_client.runtime.random_steps import (
    make_model,
    make_shard,
    one_token,
    random_plan,
    random_samples,
    single_process,
    weighed,
)
from tests.trainer_client.runtime.world_device import DEVICE
from trainer_client import NotFetched
from trainer_client.runtime import (
    GroupFormationError,
    LayoutError,
    PeerError,
    PlanMismatchError,
)
from trainer_client.runtime.phases import PHASES
from trainer_client.runtime.pipeline_mesh import PipelineMesh, place_in_mesh
from trainer_client.runtime.pipeline_parallel import run_pipeline_step
from trainer_client.runtime.pipeline_schedule import PipelineSchedule, one_forward_one_backward

LARGEST_WORLD = 6
# The comparison.


def differences(model, chunks, grads):
    """Largest relative difference of each parameter's gradient in these chunks."""
    mine = {id(p) for chunk in chunks for p in chunk.parameters()}
    found = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in mine:
            continue
        good, grad = grads[name], parameter.grad
        if (good is None) != (grad is None):
            found[name] = 1.0
        elif good is not None:
            found[name] = float((grad - good).norm() / good.norm().clamp_min(1e-3))
        else:
            found[name] = 0.0
    return found


def train_case(rank, case):
    stages, virtual_stages, replicas, seed, degrees, frozen, *weights = case
    with PipelineMesh(
        stages=stages, virtual_stages=virtual_stages, rank=rank, world_size=stages * replicas,
        timeout_s=60, lane=str(case),
    ) as mesh:  # fmt: skip
        samples = random_samples(seed)
        if weights:
            samples = weighed(samples, *weights)
        waves = random_plan(samples, replicas, degrees, seed)
        waves.append([((0,), [len(samples)])])
        samples.append(one_token(seed))
        shard = make_shard(samples, waves, replicas, mesh.replica, seed)
        shard = only_its_parts(shard, mesh.stage, stages)
        model = make_model(frozen)
        chunks = cut(model, stages * virtual_stages)[mesh.stage :: stages]
        result = run_pipeline_step(chunks, shard, mesh, HIDDEN)
        loss, grads = single_process(make_model(frozen), samples)
        return {
            "loss": abs(result.loss - loss) / abs(loss),
            "tokens": result.loss_tokens - sum(int((s.labels != -100).sum()) for s in samples),
            "grads": differences(model, chunks, grads),
            "parameters": len(grads),
            "parts": mesh.parts,
            "degrees": {len(members) for wave in waves for members, _ in wave},
            "idle": any(sum(len(m) for m, _ in wave) < replicas for wave in waves),
            "timeline": result.timeline,
            "phase_s": result.phase_s,
            "seconds": result.seconds,
        }


def pipeline_cases(rank, size, cases):
    return {case: train_case(rank, case) for case in cases if rank < case[0] * case[2]}


CASES = [
    *((2, 1, 3, seed, (1, 2, 3), ()) for seed in range(2)),
    (2, 1, 2, 2, (1, 2), ()),
    (2, 2, 2, 3, (1, 2), ()),
    (2, 2, 3, 4, (1, 2, 3), ("audio",)),
    (3, 1, 2, 5, (1, 2), ("vision", "audio")),
    (1, 1, 2, 6, (1, 2), ()),
    (4, 1, 1, 7, (1,), ()),
    (2, 1, 3, 8, (1, 2, 3), (), 8),  # with loss weights
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """case → what each of its ranks found."""
    answers = run_world(pipeline_cases, LARGEST_WORLD, tmp_path_factory.mktemp("w"), CASES)
    return {case: [answer[case] for answer in answers.values() if case in answer] for case in CASES}


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c[0]}x{c[1]} stages, {c[2]} replicas, {c[3]}"
)
def test_loss_and_gradients_of_a_pipeline_equal_a_single_process(trained, case):
    seen = set()
    assert len(trained[case]) == case[0] * case[2]
    for found in trained[case]:
        assert found["loss"] <= 1e-10
        assert found["tokens"] == 0
        assert max(found["grads"].values()) <= 1e-10, found["grads"]
        seen |= found["grads"].keys()
    assert len(seen) == trained[case][0]["parameters"], "every parameter is on some stage"


def test_the_cases_mix_degrees_and_idle_replicas(trained):
    every = [found for of_case in trained.values() for found in of_case]
    assert set().union(*(found["degrees"] for found in every)) == {1, 2, 3}
    assert any(found["idle"] for found in every)
    assert {found["parts"] for found in every} == {
        ("inputs",),
        ("labels",),
        (),
        ("inputs", "labels"),
    }


def test_the_timeline_has_every_action_of_the_row_in_the_order_of_the_schedule(trained):
    for (stages, virtual_stages, *_), of_case in trained.items():
        for found in of_case:
            timeline = found["timeline"]
            assert timeline.start_s.shape[1:] == (stages * virtual_stages, 2)
            assert (timeline.end_s >= timeline.start_s).all()
            for stage in range(stages):
                mine = np.s_[:, stage::stages, :]
                begun, ended = timeline.start_s[mine].ravel(), timeline.end_s[mine].ravel()
                order = np.argsort(begun)
                assert (ended[order][:-1] <= begun[order][1:]).all(), "one action at a time"
            assert 0 <= timeline.bubble_fraction < 1


def test_each_stage_says_what_its_seconds_went_to(trained):
    for (stages, *_), of_case in trained.items():
        for found in of_case:
            spent = found["phase_s"]
            assert set(spent) == set(PHASES)
            assert min(spent["llm"], spent["gradients"]) > 0
            assert (spent["waiting"] > 0) or stages == 1
            encodes = max(spent[name] for name in ("vision", "audio", "exchange")) > 0
            assert encodes == ("inputs" in found["parts"]), stages
            assert min(found["phase_s"].values()) >= 0
            assert sum(found["phase_s"].values()) <= found["seconds"]


WAYS = ("sharded", "sharded, without logits", "without logits", "all forward first")


def sharded_then_failing(rank, size):
    """FSDP2 on every column, another schedule, then plans that differ, then a rank that dies."""
    answer = {}
    samples, replicas = random_samples(20), size // 2
    waves = random_plan(samples, replicas, (1, 2), 20)
    loss, grads = single_process(make_model(()), samples)
    torch.distributed.barrier()
    with PipelineMesh(stages=2, timeout_s=20) as mesh:
        shard = make_shard(samples, waves, replicas, mesh.replica, 20)
        for way in WAYS:
            model = make_model(())
            kind = ChunkWithoutLogits if "without logits" in way else Chunk
            chunk = cut(model, 2, kind)[mesh.stage]
            schedule = None
            if "sharded" in way:
                columns = init_device_mesh(
                    DEVICE.type, (replicas, 2), mesh_dim_names=("column", "row")
                )
                for part in (*chunk.layers, chunk):
                    fully_shard(part, mesh=columns["column"])
            elif way == "all forward first":
                schedule = all_forward_first(2, len(shard.microbatches))
            result = run_pipeline_step([chunk], shard, mesh, HIDDEN, schedule=schedule)
            for parameter in chunk.parameters():
                if isinstance(parameter.grad, DTensor):
                    parameter.grad = parameter.grad.full_tensor()
            answer[way] = abs(result.loss - loss), differences(model, [chunk], grads)

        other = replace(shard, plan=replace(shard.plan, digest="cd" if rank == 3 else "ab"))
        with pytest.raises(PlanMismatchError) as mismatch:
            run_pipeline_step([chunk], other, mesh, HIDDEN)
        answer["mismatch"] = mismatch.value.replicas_of

        if rank == 3:
            chunk.body = die_at_second_call(chunk.body)
        with pytest.raises(PeerError) as lost:
            run_pipeline_step([chunk], shard, mesh, HIDDEN)
        answer["lost"] = lost.value.__notes__
    return answer


def all_forward_first(stages, microbatches):
    line = " ".join(f"{kind}{m}" for kind in "FB" for m in range(microbatches))
    return PipelineSchedule.parse("\n".join(f"{stage}: {line}" for stage in range(stages)))


def die_at_second_call(body):
    calls = itertools.count()

    def run(*arguments):
        if next(calls):
            os._exit(9)
        return body(*arguments)

    return run


@pytest.mark.long
def test_chunks_may_be_sharded_schedules_given_and_failures_end_in_errors(world):
    answers = world(sharded_then_failing, 4)
    assert sorted(answers) == [0, 1, 2]
    for answer in answers.values():
        for way in WAYS:
            loss, grads = answer[way]
            assert loss <= 1e-10
            assert max(grads.values()) <= 1e-10, (way, grads)
        assert answer["mismatch"] == {"ab": (0, 1), "cd": (1,)}
        assert answer["lost"][-1].endswith("went silent first: rank 3 (replica 1, stage 1).")
    assert "pipeline stages of replica 1" in answers[2]["lost"][0]


def unlike_meshes(rank, size):
    """What each rank is told where one has another number of virtual stages, and where one does not
    come; afterwards all make a mesh."""
    told = []
    with pytest.raises(LayoutError) as error:
        PipelineMesh(stages=2, virtual_stages=2 if rank == 3 else 1, timeout_s=60)
    told.append(str(error.value))
    if rank != 2:
        with pytest.raises(GroupFormationError) as lost:
            PipelineMesh(stages=2, timeout_s=4, lane="incomplete")
        told.append((lost.value.culprits, *lost.value.__notes__))
    with PipelineMesh(stages=2, timeout_s=60) as mesh:
        return told, mesh.communicators


def test_ranks_that_make_different_meshes_are_all_told_whose_value_differs(world):
    answers = world(unlike_meshes, 4)
    assert len(answers) == 4
    for rank, ((differs, *missing), communicators) in answers.items():
        words = "virtual_stages=2 on rank 3 and virtual_stages=1 on ranks 0, 1, 2. Give"
        assert differs.startswith(f"ranks make different meshes: {words}")
        came = [((2,), "The numbers above are ranks, not replicas.")]
        assert missing == (came if rank != 2 else [])
        assert communicators == 4


# What needs no second rank.


@pytest.fixture
def alone():
    """A mesh of one rank, a shard for it, and the whole model as one chunk."""
    samples = random_samples(3)
    shard = make_shard(samples, random_plan(samples, 1, (1,), 3), 1, 0, 3)
    with PipelineMesh(stages=1) as mesh:
        yield mesh, shard, cut(make_model(()), 1)


def test_a_rank_without_the_parts_of_its_stage_says_so(alone):
    mesh, shard, chunks = alone
    for stage, name in ((1, "input_ids"), (0, "labels")):
        with pytest.raises(NotFetched, match=f"{name} did not come to this rank"):
            run_pipeline_step(chunks, only_its_parts(shard, stage, 2), mesh, HIDDEN)


def test_arguments_that_contradict_each_other_are_refused(alone):
    mesh, shard, chunks = alone
    with pytest.raises(LayoutError, match="2 chunks, 1 stages"):
        run_pipeline_step(chunks * 2, shard, mesh, HIDDEN)
    with pytest.raises(LayoutError, match="and 99 microbatches"):
        run_pipeline_step(chunks, shard, mesh, HIDDEN, schedule=one_forward_one_backward(1, 1, 99))
    with pytest.raises(LayoutError, match="replica 1 of 1, this rank is of replica 0 of 1"):
        run_pipeline_step(chunks, replace(shard, replica=1), mesh, HIDDEN)
    wrapped = object.__new__(DistributedDataParallel)
    with pytest.raises(LayoutError, match="shard it with fully_shard"):
        run_pipeline_step([wrapped], shard, mesh, HIDDEN)
    with pytest.raises(LayoutError, match="rank 0 of 3 cannot stand in replicas of 2 stages"):
        PipelineMesh(stages=2, rank=0, world_size=3)


def test_places_are_those_of_the_planner_s_topology():
    topology = Topology(world_size=24, ranks_per_replica=6, pipeline_stages=3)
    for rank in range(24):
        assert place_in_mesh(rank, stages=3, tensor_ranks=2) == (
            topology.replica_of(rank),
            topology.stage_of(rank),
            topology.tensor_rank_of(rank),
        )
    with PipelineMesh(stages=1, tensor_ranks=2, rank=1, world_size=2) as mesh:
        assert (mesh.replica, mesh.stage, mesh.tensor_rank, mesh.replicas) == (0, 0, 1, 1)
        assert mesh.parts == ("inputs", "labels")


def test_a_step_without_microbatches_has_a_loss_of_zero(alone):
    mesh, shard, chunks = alone
    result = run_pipeline_step(chunks, replace(shard, microbatches=()), mesh, HIDDEN)
    assert (result.loss, result.loss_tokens, result.timeline.makespan_s) == (0.0, 0, 0.0)
