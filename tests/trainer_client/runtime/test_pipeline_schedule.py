"""Schedules print and parse, are those that the planner simulates, and can always be run."""

import numpy as np
import pytest

from dataservice.planning.pipeline_parallel.simulator import make_program, simulate_1f1b
from trainer_client.runtime import LayoutError
from trainer_client.runtime.pipeline_schedule import (
    BACKWARD,
    FORWARD,
    Action,
    PipelineSchedule,
    one_forward_one_backward,
)
from trainer_client.runtime.pipeline_timeline import Timeline, gantt

GRID = [(p, v, m) for p in range(1, 5) for v in (1, 2, 3) for m in range(10) if p > 1 or v == 1]


@pytest.mark.parametrize(("stages", "virtual_stages", "microbatches"), GRID)
def test_the_schedule_is_the_one_that_the_planner_simulates(stages, virtual_stages, microbatches):
    schedule = one_forward_one_backward(stages, virtual_stages, microbatches)
    assert (schedule.stages, schedule.microbatches) == (stages, microbatches)
    assert schedule.chunks == stages * virtual_stages
    if microbatches == 0:
        assert schedule.actions == ((),) * stages
        return
    program = make_program(microbatches, stages, virtual_stages)
    for stage, actions in enumerate(schedule.actions):
        simulated = [
            Action((FORWARD, BACKWARD)[kind], position, chunk // stages)
            for kind, position, chunk in zip(
                program.kind.tolist(),
                program.position.tolist(),
                program.chunk.tolist(),
                strict=True,
            )
            if chunk % stages == stage
        ]
        assert list(actions) == simulated


def test_a_schedule_prints_as_one_line_a_stage_and_parses():
    assert str(one_forward_one_backward(2, 1, 3)) == "0: F0 F1 B0 F2 B1 B2\n1: F0 B0 F1 B1 F2 B2"
    assert "F1.1 F2 B0.1" in str(one_forward_one_backward(2, 2, 4))
    for stages, virtual_stages, microbatches in GRID:
        if microbatches:
            schedule = one_forward_one_backward(stages, virtual_stages, microbatches)
            assert PipelineSchedule.parse(str(schedule)) == schedule


def test_every_message_has_one_sender_and_one_receiver():
    schedule = one_forward_one_backward(3, 2, 4)
    for stage, actions in enumerate(schedule.actions):
        for action in actions:
            target = schedule.target(stage, action)
            if target is not None:
                assert schedule.source(*target) == (stage, action)
    assert schedule.source(0, Action("F", 1, 0)) is None
    assert schedule.source(0, Action("F", 1, 1)) == (2, Action("F", 1, 0))
    assert schedule.source(2, Action("B", 1, 1)) is None
    assert schedule.target(0, Action("B", 1, 1)) == (2, Action("B", 1, 0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0: F0 B0 G1", "'G1' is no action"),
        ("1: F0 B0", "one line a stage"),
        ("0: F0 B0\n1: F0", r"stage 1 must run 1 microbatches .* missing or too many: B0"),
        ("0: F0 B0 B0\n1: F0 B0", "stage 0 .* one that is there twice"),
        ("0: F0 B0 F1 B1\n1: F0 F1 B0 B1", "wait for one another for ever at B0 of stage 0"),
        ("0: B0 F0\n1: F0 B0", "wait for one another for ever at B0 of stage 0"),
        ("0: F0 F1 B0 B1\n1: F1 B1 F0 B0", "takes the F messages of stage 0 in another order"),
        ("0: F0 F0.1 B0.1 B0", "one stage cannot have 2 virtual stages"),
    ],
)
def test_a_schedule_that_cannot_be_run_is_refused(text, message):
    with pytest.raises(LayoutError, match=message):
        PipelineSchedule.parse(text)


def test_a_pipeline_without_stages_is_refused():
    with pytest.raises(LayoutError, match="0 stages"):
        one_forward_one_backward(0, 1, 3)


def test_the_simulator_s_times_make_a_timeline_and_a_chart():
    forward = np.array([[1.0, 1.0], [3.0, 3.0]])
    times = simulate_1f1b(forward, 2 * forward)
    simulated = Timeline(stages=2, start_s=times.start_s, end_s=times.end_s)
    assert simulated.makespan_s == times.makespan_s == 19.0
    assert simulated.bubble_fraction == pytest.approx(times.bubble_fraction)
    np.testing.assert_allclose(simulated.forward_s, forward)
    np.testing.assert_allclose(simulated.backward_s, 2 * forward)
    later = Timeline(stages=2, start_s=times.start_s + 5, end_s=times.end_s + 5)
    assert gantt({"measured": later, "simulated": simulated}, columns=19).splitlines() == [
        "stage 0  measured   0111aa·······bbbbbb",
        "         simulated  0111aa·······bbbbbb",
        "stage 1  measured   ·0aa111bbbbbb······",
        "         simulated  ·0aa111bbbbbb······",
        "measured: 19 s, 36.8% bubble",
        "simulated: 19 s, 36.8% bubble",
    ]
    assert gantt({}) == ""


def test_a_step_without_microbatches_has_an_empty_timeline():
    nothing = Timeline(stages=2, start_s=np.zeros((0, 2, 2)), end_s=np.zeros((0, 2, 2)))
    assert (nothing.makespan_s, nothing.bubble_fraction) == (0.0, 0.0)
    assert gantt({"measured": nothing}, columns=4).splitlines()[0] == "stage 0  measured  ····"
