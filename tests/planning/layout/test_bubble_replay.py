"""The checker of schedules catches each way in which one can be broken."""

from dataclasses import replace

import numpy as np
import pytest

from dataservice.planning import format_actions, schedule_bubbles
from tests.planning.layout.bubble_cases import asked as asked_of
from tests.planning.layout.bubble_cases import backbone, encoder
from tests.planning.layout.bubble_replay import faults, read, write

MEMORY = 400.0


@pytest.fixture(scope="module")
def schedule():
    """Actions of a small schedule in which encoders use every kind of bubble, and its question."""
    rng = np.random.default_rng(11)
    given = backbone(
        rng, stages=4, virtual=2, ranks=2, microbatches=8, gather_s=0.5, scatter_s=0.5,
        held_bytes=np.full(4, 100.0),
    )  # fmt: skip
    ours = encoder(
        rng, layers=4, degrees=(2,), scale=0.9, transfer_s=0.01, layer_bytes=np.full(4, 8.0),
        activation_bytes=np.full(4, 4.0),
    )  # fmt: skip
    made = schedule_bubbles(given, [ours], memory_bytes=MEMORY)
    assert made.is_fine
    question = asked_of(made, given, [ours], MEMORY)
    text = format_actions(made.actions)
    assert faults(text, question) == []
    return read(text), question


def first(actions, **wanted):
    """Where the first action lies that is so, and the action."""
    for at, action in enumerate(actions):
        if all(getattr(action, name) == value for name, value in wanted.items()):
            return at, action
    raise AssertionError(wanted)


def changed(actions, at, **values):
    return [*actions[:at], replace(actions[at], **values), *actions[at + 1 :]]


def moved(actions, at, start):
    action = actions[at]
    return changed(actions, at, start=start, end=start + action.end - action.start)


def words_of(actions, question):
    return " / ".join(faults(write(actions), question))


def test_text_written_back_is_the_same_schedule(schedule):
    actions, question = schedule
    assert read(write(actions)) == actions
    assert words_of(actions, question) == ""


@pytest.mark.parametrize("kind", ["forward", "backward", "forward_comm", "backward_comm"])
@pytest.mark.parametrize("number", [0, None])
def test_a_missing_action(schedule, kind, number):
    actions, question = schedule
    at, _ = first(actions, kind=kind, encoder=number)
    assert "runs" in words_of([*actions[:at], *actions[at + 1 :]], question)


@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_a_missing_collective(schedule, kind):
    actions, question = schedule
    at, _ = first(actions, kind=kind)
    assert kind in words_of([*actions[:at], *actions[at + 1 :]], question)


def test_an_action_that_runs_twice(schedule):
    actions, question = schedule
    _, action = first(actions, kind="forward", encoder=0)
    assert "runs 2 times" in words_of([*actions, action], question)


def test_every_encoder_kernel_that_begins_at_a_backbone_kernel_of_its_kind_overlaps(schedule):
    actions, question = schedule
    tried = 0
    for at, action in enumerate(actions):
        if action.encoder is None or action.kind not in ("forward", "backward") or at % 7:
            continue
        _, other = first(actions, device=action.device, encoder=None, kind=action.kind)
        assert "overlaps" in words_of(moved(actions, at, other.start), question)
        tried += 1
    assert tried > 10


def test_encoder_communication_in_a_bubble_of_the_backbones_communication(schedule):
    actions, question = schedule
    at, action = first(actions, kind="forward_comm", encoder=0)
    _, other = first(actions, device=action.device, encoder=None, kind="forward_comm")
    words = words_of(moved(actions, at, other.start), question)
    assert "beside the backbone" in words


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_an_action_on_another_device(schedule, kind):
    actions, question = schedule
    at, action = first(actions, kind=kind, encoder=0)
    devices = question.backbone.pipeline_parallel * question.slices
    found = words_of(changed(actions, at, device=(action.device + 1) % devices), question)
    assert "its stage is" in found or "pipeline" in found


def test_a_kernel_that_is_shorter_than_it_takes(schedule):
    actions, question = schedule
    at, action = first(actions, kind="backward", encoder=0)
    assert "it takes" in words_of(
        changed(actions, at, end=0.5 * (action.start + action.end)), question
    )


def test_features_that_come_after_the_backbone_needs_them(schedule):
    actions, question = schedule
    for microbatch in range(8):
        _, need = first(actions, kind="forward", encoder=None, microbatch=microbatch, stage=0)
        own = [
            at
            for at, a in enumerate(actions)
            if a.encoder == 0 and a.pass_ == "forward" and a.microbatch == microbatch
        ]
        last = max(own, key=lambda at: actions[at].end)
        late = moved(actions, last, need.start - 1e-3)
        assert "its output has come" in words_of(late, question)


def test_backward_passes_that_begin_before_their_gradients_are_there(schedule):
    actions, question = schedule
    for microbatch in range(8):
        own = [
            at
            for at, a in enumerate(actions)
            if a.encoder == 0 and a.pass_ == "backward" and a.microbatch == microbatch
        ]
        at = min(own, key=lambda at: actions[at].start)
        gradient = max(
            a.end
            for a in actions
            if (a.encoder, a.pass_, a.microbatch, a.stage) == (None, "backward", microbatch, 0)
        )
        assert "its output has come" in words_of(moved(actions, at, gradient - 1e-3), question)


def test_two_microbatches_that_change_names(schedule):
    actions, question = schedule
    ours = sorted({(a.start, a.microbatch) for a in actions if a.encoder == 0})
    early, late = ours[0][1], next(m for _, m in reversed(ours) if m != ours[0][1])
    names = {early: late, late: early}
    swapped = [
        replace(a, microbatch=names.get(a.microbatch, a.microbatch)) if a.encoder == 0 else a
        for a in actions
    ]
    assert "its output has come" in words_of(swapped, question)


@pytest.mark.parametrize("number", [0, None])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_kernels_of_a_stage_that_change_places(schedule, number, pass_):
    actions, question = schedule
    _, one = first(actions, encoder=number, pass_=pass_)
    own = [
        at
        for at, a in enumerate(actions)
        if (a.device, a.encoder, a.pass_, a.microbatch, a.stage)
        == (one.device, number, pass_, one.microbatch, one.stage)
    ]
    own.sort(key=lambda at: actions[at].start)
    swapped = moved(actions, own[0], actions[own[-1]].end)
    assert "has ended" in words_of(swapped, question)


def test_a_backbone_stage_that_runs_before_the_one_that_feeds_it(schedule):
    actions, question = schedule
    way = [a for a in actions if (a.encoder, a.pass_, a.microbatch) == (None, "forward", 3)]
    feeding = min(a.start for a in way if a.stage == 4)
    early = [
        replace(a, start=a.start - shift, end=a.end - shift)
        if (a.encoder, a.pass_, a.microbatch, a.stage) == (None, "forward", 3, 5)
        else a
        for shift in [min(b.start for b in way if b.stage == 5) - feeding]
        for a in actions
    ]
    assert "has ended" in words_of(early, question)


@pytest.mark.parametrize(("kind", "by"), [("gather", 0.1), ("scatter", -0.1)])
def test_collectives_that_run_beside_the_backbones_kernels(schedule, kind, by):
    actions, question = schedule
    of_kind = [at for at, a in enumerate(actions) if a.kind == kind]
    assert any(
        f"kind='{kind}'" in words_of(moved(actions, at, actions[at].start + by), question)
        for at in of_kind
    )


def test_memory_that_is_not_there(schedule):
    actions, question = schedule
    small = type(question)(
        question.backbone, question.encoders, question.pipeline_parallel,
        question.tensor_parallel, memory_bytes=105.0,
    )  # fmt: skip
    assert "holds" in words_of(actions, small)
