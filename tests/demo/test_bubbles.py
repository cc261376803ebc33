"""Encoder layers inside the bubbles of the demo's pipeline: gradients of the whole model."""

import functools
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from dataservice.planning import (
    BackboneTimes,
    EncoderTimes,
    KernelTimes,
    format_actions,
    schedule_bubbles,
)
from demo.chunks import DemoEncoders, cut_model, sum_tied_gradient
from demo.model import DemoModel, ModelConfig
from tests.demo.scripted_steps import (
    ONE_REPLICA,
    TWO_REPLICAS,
    plain_loop,
    scripted_samples,
    shard_of,
    step_plan,
)
from tests.trainer_client.runtime.conftest import run_world
from trainer_client import NotFetched
from trainer_client.runtime import (
    BubbleSchedule,
    HiddenStates,
    LayoutError,
    PipelineMesh,
    gantt,
    one_forward_one_backward,
    read_bubbles,
    run_pipeline_step,
    simulate,
    spread_encoders,
)

CONFIG = ModelConfig(vocabulary=64, width=32, layers=4, heads=4, kv_heads=2, encoder_width=16)
MICROBATCHES = 3


def even(layers, seconds):
    """A table of one kernel a layer."""
    return KernelTimes(seconds=np.full((layers, 1), seconds), communicates=np.array([False]))


def planned_text(stages, *, frozen=()):
    """What the planner writes for the demo's two encoders over its decoder."""
    backbone = BackboneTimes(
        forward=even(4, 0.1),
        backward=even(4, 0.2),
        microbatches=MICROBATCHES,
        pipeline_parallel=stages,
    )
    encoders = [
        EncoderTimes(
            name=name,
            forward={1: even(layers, 0.03)},
            backward=None if name in frozen else {1: even(layers, 0.06)},
            transfer_s=0.001,
        )
        for name, layers in (("vision", 2), ("audio", 1))
    ]
    return format_actions(schedule_bubbles(backbone, encoders).actions)


# Vision's two layers on different stages, so that what is between them travels, too.
CROSSING = """
0: EF0[0:1] EF1[0:1] EF0.1[0:1] F0 EF2[0:1] EF1.1[0:1] F1 B0 EF2.1[0:1] F2 EB0[0:1] B1 B2 \
EB1[0:1] EB2[0:1] EB0.1[0:1] EB1.1[0:1] EB2.1[0:1]
1: EF0[1:2] EF1[1:2] EF2[1:2] F0 B0 F1 EB0[1:2] B1 F2 EB1[1:2] B2 EB2[1:2]
"""

# name → (stages, replicas, frozen, schedule)
CASES = {
    "planned": (2, 2, (), lambda: read_bubbles(planned_text(2), stages=2)[0]),
    "frozen": (
        2, 1, ("vision",),
        lambda: read_bubbles(planned_text(2, frozen=("vision",)), stages=2)[0],
    ),
    "four stages": (4, 1, (), lambda: read_bubbles(planned_text(4), stages=4)[0]),
    "crossing": (2, 2, (), lambda: BubbleSchedule.parse(CROSSING)),
}  # fmt: skip


def make_model(frozen):
    torch.manual_seed(3)
    model = DemoModel(CONFIG).double()
    for name in frozen:
        model.encoders[name].requires_grad_(False)
    return model


def train_case(rank, name):
    stages, replicas, frozen, schedule = CASES[name]
    samples = scripted_samples()
    packs, encodes = (TWO_REPLICAS, [1, 1, 0, 0, 1, 1]) if replicas == 2 else (ONE_REPLICA, [0] * 6)
    model = make_model(frozen)
    with PipelineMesh(
        stages=stages, rank=rank, world_size=stages * replicas, timeout_s=60, lane=name
    ) as mesh:
        chunks = cut_model(model, stages)[mesh.stage :: stages]
        encoders = DemoEncoders(model)
        shard = shard_of(step_plan(samples, packs, encodes), samples, mesh.replica)
        hidden = HiddenStates(width=CONFIG.width, dtype=torch.float64)
        result = run_pipeline_step(
            chunks, shard, mesh, hidden, schedule=schedule(), encoders=encoders
        )
        sum_tied_gradient(chunks, mesh)
    mine = {id(weight) for part in (*chunks, encoders) for weight in part.parameters()}
    grads = {key: p.grad for key, p in model.named_parameters() if id(p) in mine}
    return {"loss": result.loss, "grads": grads, "timeline": result.timeline, "cores": cores()}


def cores():
    return os.sched_getaffinity(0), torch.get_num_threads()


def every_case(rank, size):
    """One thread a rank, pinned where there are several cores."""
    torch.set_num_threads(1)
    have = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {have[rank % len(have)]})
    return {
        name: train_case(rank, name)
        for name, (stages, replicas, *_) in CASES.items()
        if rank < stages * replicas
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run_world(every_case, 4, tmp_path_factory.mktemp("w"))


@functools.cache
def of_the_whole_model(frozen):
    """Its loss and gradients."""
    whole = make_model(frozen)
    loss = plain_loop(whole, scripted_samples())
    return loss, {key: weight.grad for key, weight in whole.named_parameters()}


@pytest.mark.parametrize("name", CASES)
def test_encoders_in_bubbles_leave_the_gradients_of_the_whole_model(trained, name):
    stages, replicas, frozen, _ = CASES[name]
    loss, expected = of_the_whole_model(frozen)
    seen = set()
    for answer in list(trained.values())[: stages * replicas]:
        assert answer[name]["loss"] == pytest.approx(loss, rel=1e-10)
        for key, grad in answer[name]["grads"].items():
            seen.add(key)
            if expected[key] is None:
                assert grad is None, key
            else:
                assert (grad - expected[key]).norm() <= 1e-10 * expected[key].norm(), key
    assert seen == expected.keys()


def test_every_rank_had_one_thread_on_one_core(trained):
    found = [trained[rank]["planned"]["cores"] for rank in range(2)]
    assert all(len(core) == 1 and threads == 1 for core, threads in found)
    assert os.cpu_count() == 1 or found[0][0] != found[1][0]


@pytest.mark.parametrize("name", CASES)
def test_each_stage_ran_its_actions_in_the_order_of_the_list(trained, name):
    schedule, timeline = CASES[name][3](), trained[0][name]["timeline"]
    for stage, actions in enumerate(schedule.actions):
        assert order(timeline, stage) == [str(action) for action in actions]


def order(timeline, stage):
    """What a stage ran, by its start."""
    began = {str(span.action): span.start_s for span in timeline.encoders if span.stage == stage}
    for at in np.ndindex(timeline.start_s.shape):
        if at[1] % timeline.stages == stage:
            began[f"{'FB'[at[2]]}{at[0]}"] = timeline.start_s[at]
    return sorted(began, key=began.get)


def test_measured_planned_and_simulated_steps_have_the_same_actions_and_are_drawn_together(trained):
    schedule, planned = read_bubbles(planned_text(2), stages=2)
    measured = trained[0]["planned"]["timeline"]
    simulated = simulate(schedule, measured.forward_s, measured.backward_s, measured.encoder_s)
    for stage in range(2):
        listed = [str(action) for action in schedule.actions[stage]]
        assert order(measured, stage) == order(planned, stage) == order(simulated, stage) == listed
    assert simulated.encoder_s == pytest.approx(measured.encoder_s)
    lines = gantt({"measured": measured, "simulated": simulated}).splitlines()
    assert [line[:18].split() for line in lines[:4]] == [
        ["stage", "0", "measured"], ["simulated"], ["stage", "1", "measured"], ["simulated"],
    ]  # fmt: skip
    drawn = gantt({"planned": planned}).splitlines()
    assert {"E", "G", "0", "a"} <= set("".join(line[9:] for line in drawn[:2]))


class Misshapen(DemoEncoders):
    def shape_of(self, modality, batch, layer):
        rows, width = super().shape_of(modality, batch, layer)
        return rows + 1, width


def spread(layers, trains):
    return spread_encoders(one_forward_one_backward(1, 1, MICROBATCHES), layers, trains=trains)


@pytest.mark.parametrize(
    ("schedule", "kind", "words"),
    [
        (
            spread([2, 2], [True, False]), DemoEncoders,
            r"of \(2, 2\) layers, and these \(vision, audio\) have \(2, 1\)",
        ),
        (
            spread([2, 1], [True, True]), DemoEncoders,
            "has a backward of the audio encoder, which is frozen",
        ),
        (spread([2, 1], [True, False]), None, "a BubbleSchedule goes with `encoders`"),
        (one_forward_one_backward(1, 1, MICROBATCHES), DemoEncoders, "goes with `encoders`"),
        (spread([2, 1], [True, False]), Misshapen, "layer 0 of the vision encoder gave"),
    ],
)  # fmt: skip
def test_schedules_that_do_not_fit_the_encoders_are_refused(schedule, kind, words):
    model = make_model(("audio",))
    samples = scripted_samples()
    shard = shard_of(step_plan(samples, ONE_REPLICA, [0] * 6), samples, 0)
    hidden = HiddenStates(width=CONFIG.width, dtype=torch.float64)
    encoders = None if kind is None else kind(model)
    with PipelineMesh(stages=1) as mesh, pytest.raises(LayoutError, match=words):
        run_pipeline_step([model], shard, mesh, hidden, schedule=schedule, encoders=encoders)


def test_a_stage_that_encodes_and_did_not_fetch_its_inputs_is_told():
    samples = scripted_samples()
    shard = shard_of(step_plan(samples, ONE_REPLICA, [0] * 6), samples, 0)
    bare = {"input_ids": None, "vision": None, "audio": None}
    shard = replace(shard, microbatches=tuple(replace(m, **bare) for m in shard.microbatches))
    hidden = HiddenStates(width=CONFIG.width, dtype=torch.float64)
    model = make_model(())
    with PipelineMesh(stages=1) as mesh, pytest.raises(NotFetched, match="input_ids"):
        run_pipeline_step([model], shard, mesh, hidden, encoders=DemoEncoders(model))
