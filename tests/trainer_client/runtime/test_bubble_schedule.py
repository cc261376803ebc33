"""Schedules with encoders print and parse, and are read from the lists that the planner writes."""

import numpy as np
import pytest

from dataservice.planning import format_actions, schedule_bubbles, simulate_1f1b
from tests.planning.layout.bubble_cases import backbone, encoder
from trainer_client.runtime import (
    BubbleSchedule,
    EncoderAction,
    LayoutError,
    one_forward_one_backward,
    read_bubbles,
    simulate,
    spread_encoders,
)

SPREAD = """\
0: EF0[0:4] EF2[0:4] F0 F1 B0 F2 B1 B2 EB0[0:4] EB2[0:4]
1: EF1[0:4] F0 B0 F1 B1 F2 B2 EB1[0:4]"""


def spread(**changed):
    given = {"layers": [4], "trains": [True], **changed}
    return spread_encoders(one_forward_one_backward(2, 1, 3), **given)


def test_a_schedule_prints_as_one_line_a_stage_and_parses():
    assert str(spread()) == SPREAD
    assert BubbleSchedule.parse(SPREAD) == spread()
    two = spread(layers=[4, 1], trains=[False, True])
    assert "0: EF0[0:4] EF0.1[0:1] EF2[0:4]" in str(two)
    assert BubbleSchedule.parse(str(two)) == two
    assert (two.encoder_layers, two.returns(0), two.returns(1)) == ((4, 1), False, True)


def test_stages_share_the_work_of_encoding():
    shared = spread(work=[1.0, 5.0, 3.0])
    assert str(shared).splitlines() == [
        "0: EF1[0:4] F0 F1 B0 F2 B1 B2 EB1[0:4]",
        "1: EF0[0:4] EF2[0:4] F0 B0 F1 B1 F2 B2 EB0[0:4] EB2[0:4]",
    ]


@pytest.mark.parametrize("seed", range(8))
def test_what_the_planner_writes_is_read_in_its_own_order(seed):
    rng = np.random.default_rng(seed)
    stages, virtual = ((2, 1), (4, 1), (2, 2), (4, 2))[seed % 4]
    bone = backbone(rng, stages=stages, virtual=virtual, ranks=1, microbatches=2 * stages)
    shape = {"layers": stages, "degrees": (1,), "frozen": seed == 5}
    encoders = [encoder(rng, **shape) for _ in range(1 + seed // 4)]
    made = schedule_bubbles(bone, encoders)
    schedule, planned = read_bubbles(format_actions(made.actions), stages=stages)
    assert BubbleSchedule.parse(str(schedule)) == schedule
    assert schedule.backbone.virtual_stages == virtual
    assert planned.makespan_s <= made.step_s * (1 + 1e-9)
    assert schedule.encoders == len(encoders)
    for stage, actions in enumerate(schedule.actions):
        spans = [span for span in planned.encoders if span.stage == stage]
        assert [span.action for span in spans] == [
            action for action in actions if isinstance(action, EncoderAction)
        ]
        assert [span.start_s for span in spans] == sorted(span.start_s for span in spans)


def test_a_simulated_schedule_has_the_times_of_the_planner_s_simulator():
    rng = np.random.default_rng(0)
    for stages, virtual, microbatches in ((1, 1, 3), (2, 1, 5), (3, 2, 7), (4, 1, 2)):
        forward, backward = rng.uniform(0.1, 1.0, (2, microbatches, stages * virtual))
        schedule = one_forward_one_backward(stages, virtual, microbatches)
        ours = simulate(schedule, forward, backward)
        theirs = simulate_1f1b(forward, backward, virtual_stages=virtual)
        np.testing.assert_allclose(ours.start_s, theirs.start_s, rtol=1e-12)
        np.testing.assert_allclose(ours.end_s, theirs.end_s, rtol=1e-12)


def test_a_simulated_schedule_takes_its_encoders_seconds_before_and_after_the_pipeline():
    schedule = spread(layers=[2])
    ones = np.ones((3, 2))
    seconds = {
        (stage, action): 0.5
        for stage, action in schedule.walk()
        if isinstance(action, EncoderAction)
    }
    found = simulate(schedule, ones, 2 * ones, seconds)
    assert found.start_s[0, 0, 0] == 1.0  # behind two forwards of the encoder
    assert found.makespan_s == 1.0 + simulate_1f1b(ones, 2 * ones).makespan_s + 1.0
    assert found.encoder_s == seconds


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0: EF0[0:0] F0 B0", "'EF0\\[0:0\\]' is no encoder action"),
        ("0: EG0[0:1] F0 B0", "'EG0\\[0:1\\]' is no encoder action"),
        ("0: EF0[0:1] F0 B0 F1 B1", "no stage encodes microbatch 1 of encoder 0"),
        ("0: EF0[0:1] EF1[1:2] F0 B0 F1 B1", "microbatch 0 runs EF0\\[0:1\\] of encoder 0"),
        ("0: EF0[0:2] F0 B0 EB0[0:1]", "microbatch 0 runs EF0\\[0:2\\] EB0\\[0:1\\]"),
        ("0: EF0[0:1] EF1[0:1] F0 B0 F1 B1 EB0[0:1]", "microbatch 1 runs EF1"),
        ("0: F0 EF0[0:1] B0", "wait for one another for ever at F0 of stage 0"),
        ("0: EF0[0:1] F0 EB0[0:1] B0", "wait for one another for ever at EB0"),
        ("0: EF5[0:1] EF0[0:1] F0 B0", "has a microbatch 5"),
        ("1: EF0[0:1] F0 B0", "one line a stage"),
    ],
)
def test_schedules_that_no_pipeline_can_run_are_refused(text, words):
    with pytest.raises(LayoutError, match=words):
        BubbleSchedule.parse(text)


def test_encoders_that_a_list_has_are_numbered_from_0_on():
    lines = ["0 forward 1 0 0 0 0 0.0 1.0", "0 forward - 0 0 0 0 1.0 2.0"]
    lines += ["0 backward - 0 0 0 0 2.0 3.0"]
    schedule, planned = read_bubbles(HEAD + "\n".join(lines), stages=1)
    assert str(schedule) == "0: EF0[0:1] F0 B0"
    assert [span.action.encoder for span in planned.encoders] == [0]


HEAD = "bubbles 1\ndevice kind encoder microbatch stage layer kernel start_s end_s\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bubbles 2\n", "begins with"),
        (HEAD + "0 forward 0 0 0 0 0 0.0", "line 3 is .* an action is 9 words"),
        (HEAD + "0 sideways 0 0 0 0 0 0.0 1.0", "line 3 is"),
        (HEAD + "3 forward 0 0 0 0 0 0.0 1.0", "line 3 is of device 3, and there are 2 stages"),
        (HEAD + "0 forward - 0 1 0 0 0.0 1.0", "has model chunk 1 on device 0"),
    ],
)
def test_a_list_that_cannot_be_read_is_refused_with_its_line(text, words):
    with pytest.raises(LayoutError, match=words):
        read_bubbles(text, stages=2)
