"""Encoders in the bubbles of the backbone: every schedule is replayed by a checker of its own."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning.layout_bubbles import MEMORY_BYTES, gpt_175b, vision_transformer
from dataservice.core.errors import PlanningError
from dataservice.planning import (
    BackboneTimes,
    EncoderTimes,
    KernelTimes,
    format_actions,
    schedule_bubbles,
)
from dataservice.planning.layout import bubbles
from dataservice.planning.layout.actions import KINDS, join_actions
from tests.planning.layout.bubble_cases import backbone, encoder, faults_of, uniform


@settings(deadline=None, max_examples=60)
@given(
    stages=st.sampled_from([1, 2, 3, 4]),
    virtual=st.integers(1, 3),
    ranks=st.sampled_from([1, 2, 4]),
    microbatches=st.integers(1, 9),
    odd_layers=st.integers(0, 2),
    layers=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    frozen=st.booleans(),
    uneven=st.booleans(),
    collectives=st.sampled_from([(0.0, 0.0), (0.7, 1.9)]),
    transfer_s=st.sampled_from([0.0, 0.05]),
    scale=st.sampled_from([0.02, 0.3, 3.0]),
    seed=st.integers(0, 999),
)
def test_every_schedule_holds(
    stages, virtual, ranks, microbatches, odd_layers, layers, frozen, uneven, collectives,
    transfer_s, scale, seed,
):  # fmt: skip
    rng = np.random.default_rng(seed)
    chunks = stages * virtual
    # The odd layers all in the last chunk, where they are not spread.
    bounds = [*range(chunks), chunks + odd_layers] if uneven else None
    gather_s, scatter_s = collectives
    asked = backbone(
        rng, stages=stages, virtual=virtual, ranks=ranks, microbatches=microbatches,
        odd_layers=odd_layers, gather_s=gather_s, scatter_s=scatter_s, bounds=bounds,
    )  # fmt: skip
    encoders = [
        encoder(
            rng, layers=count, degrees=(1, 2), scale=scale, frozen=frozen and number == 0,
            transfer_s=transfer_s,
        )
        for number, count in enumerate(layers)
    ]  # fmt: skip
    made = schedule_bubbles(asked, encoders)
    assert faults_of(made, asked, encoders) == []
    assert made.lower_bound_s <= made.step_s <= made.coarse_step_s
    assert made.step_s == pytest.approx(made.before_s + made.backbone_s + made.after_s)
    actions = made.actions
    assert actions.end_s.max() - actions.start_s.min() <= made.step_s + 1e-9
    assert 0 <= made.coarse_efficiency <= 1
    assert 0 <= made.efficiency <= 1
    if made.before_s == made.after_s == 0:
        assert made.efficiency == 1


def test_the_same_question_has_the_same_answer():
    rng = np.random.default_rng(5)
    asked = backbone(rng, stages=4, virtual=2, ranks=2, microbatches=8)
    of_one = [encoder(rng, layers=4, degrees=(1, 2))]
    first, second = (format_actions(schedule_bubbles(asked, of_one).actions) for _ in range(2))
    assert first == second


def cut_at_layers(asked, ours, first_s, last_s, need_s, gradient_s, step_s, owner, width):
    """The least step of one split where whole layers run outside the backbone's kernels, for the
    plan with `width` stages. Plain loops, apart from the planner."""
    stages = asked.pipeline_parallel
    parts = np.array_split(np.arange(ours.layers), width)
    forward = [[ours.forward[1].seconds[k].sum() for k in part] for part in parts]
    backward = [[ours.backward[1].seconds[k].sum() for k in part[::-1]] for part in parts]
    before = after = 0.0
    for pipeline in range(stages // width):
        members = [j for j, own in enumerate(owner) if own == pipeline]
        devices = [pipeline * width + k for k in range(width)]
        free_until = [first_s[d] for d in devices]
        for j in reversed(members):
            end = need_s[j]
            for k in reversed(range(width)):
                for seconds in reversed(forward[k]):
                    end = min(end, free_until[k]) - seconds
                    free_until[k] = end
            before = max(before, -end)
        free_from = [last_s[d] for d in devices]
        for j in members:
            start = gradient_s[j]
            for k in reversed(range(width)):
                for seconds in backward[k]:
                    start = max(start, free_from[k]) + seconds
                    free_from[k] = start
            after = max(after, start - step_s)
    return step_s + before + after


@pytest.mark.parametrize("seed", range(30))
def test_coarse_is_the_best_of_all_splits_of_small_cases(seed):
    rng = np.random.default_rng(seed)
    stages, microbatches = (
        (2, int(rng.integers(2, 8))) if seed % 2 else (3, int(rng.integers(2, 6)))
    )
    asked = backbone(
        rng, stages=stages, virtual=1, ranks=1, microbatches=microbatches, gather_s=1.0,
        scatter_s=1.0,
    )  # fmt: skip
    ours = encoder(rng, layers=3, degrees=(1,), scale=rng.choice([0.3, 1.0, 3.0]))
    made = schedule_bubbles(asked, [ours])
    theirs = made.actions.encoder == -1
    start, end = made.actions.start_s - made.before_s, made.actions.end_s - made.before_s
    kernels = theirs & (made.actions.microbatch >= 0)
    device, chunk, microbatch = made.actions.device, made.actions.stage, made.actions.microbatch
    first = device // made.plan.slices
    first_s = [start[kernels & (first == s)].min() for s in range(stages)]
    last_s = [end[kernels & (first == s)].max() for s in range(stages)]
    passes = np.array([name.split("_")[0] for name in KINDS])[made.actions.kind]
    need_s, gradient_s = [], []
    for j in range(microbatches):
        own = kernels & (chunk == 0) & (microbatch == j)
        need_s.append(start[own & (passes == "forward")].min())
        gradient_s.append(end[own & (passes == "backward")].max())
    best = min(
        cut_at_layers(
            asked, ours, first_s, last_s, need_s, gradient_s, made.backbone_s, owner, width
        )
        for width in range(1, stages + 1)
        if stages % width == 0
        for owner in itertools.product(range(stages // width), repeat=microbatches)
    )
    assert made.coarse_step_s == pytest.approx(best, rel=1e-6)


def test_a_paper_sized_step_is_fine_within_a_thousandth_of_its_bound():
    encoders = [vision_transformer(6144, 24576, 48)]
    asked = gpt_175b(16)
    made = schedule_bubbles(asked, encoders, memory_bytes=MEMORY_BYTES)
    assert faults_of(made, asked, encoders, MEMORY_BYTES) == []
    assert made.is_fine
    assert made.step_s <= 1.001 * made.lower_bound_s
    assert made.efficiency >= 0.95 > made.coarse_efficiency + 0.2


def test_several_encoders_share_the_bubbles():
    asked = gpt_175b(16)
    encoders = [vision_transformer(6144, 24576, 48), vision_transformer(3072, 12288, 48)]
    made = schedule_bubbles(asked, encoders, memory_bytes=MEMORY_BYTES)
    assert faults_of(made, asked, encoders, MEMORY_BYTES) == []
    assert made.step_s < made.coarse_step_s


def test_one_encoder_computes_while_another_communicates():
    asked = BackboneTimes(
        forward=uniform(1, [1.0], [False]), backward=uniform(1, [2.0], [False]), microbatches=2,
        pipeline_parallel=1, tensor_parallel=2,
    )  # fmt: skip
    layers = uniform(4, [1.0, 1.0], [False, True])
    encoders = [EncoderTimes(name=name, forward={2: layers}) for name in ("vision", "audio")]
    made = schedule_bubbles(asked, encoders)
    assert faults_of(made, asked, encoders) == []
    assert made.coarse_step_s == made.backbone_s + 32, "one after the other"
    # Compute of both microbatches alone: the last collective runs under the backbone's forward.
    assert made.step_s == made.lower_bound_s == made.backbone_s + 16


def test_a_frozen_encoder_runs_forwards_only_and_takes_no_longer():
    rng = np.random.default_rng(3)
    asked = backbone(rng, stages=4, virtual=2, ranks=1, microbatches=8)
    trained = encoder(rng, layers=4, degrees=(1,))
    frozen = EncoderTimes(name="frozen", forward=trained.forward)
    made = schedule_bubbles(asked, [frozen])
    assert faults_of(made, asked, [frozen]) == []
    ours = made.actions.encoder == 0
    assert {KINDS[kind] for kind in made.actions.kind[ours]} == {"forward", "forward_comm"}
    assert made.step_s <= schedule_bubbles(asked, [trained]).step_s


def test_where_only_the_adapter_trains_backwards_run_on_its_stage_alone():
    rng = np.random.default_rng(4)
    asked = backbone(rng, stages=2, virtual=1, ranks=1, microbatches=4)
    only_last = np.zeros((3, 2))
    only_last[2] = 0.2, 0.1
    adapter = EncoderTimes(
        name="adapter",
        forward={1: uniform(3, [0.3, 0.1], [False, True])},
        backward={1: KernelTimes(seconds=only_last, communicates=[False, True])},
    )
    made = schedule_bubbles(asked, [adapter])
    assert faults_of(made, asked, [adapter]) == []
    back = (made.actions.encoder == 0) & (made.actions.kind >= KINDS.index("backward"))
    assert set(made.actions.layer[back]) == {2}


def test_without_bubbles_between_fine_gains_nothing_and_is_not_worse():
    asked = BackboneTimes(
        forward=uniform(1, [1.0], [False]), backward=uniform(1, [2.0], [False]), microbatches=4,
        pipeline_parallel=1,
    )  # fmt: skip
    one = EncoderTimes(
        name="one",
        forward={1: uniform(1, [1.0], [False])},
        backward={1: uniform(1, [1.0], [False])},
    )
    made = schedule_bubbles(asked, [one])
    assert made.backbone_s == 12
    assert made.step_s == made.coarse_step_s == made.lower_bound_s == 20
    assert made.efficiency == made.coarse_efficiency == 0


def test_encoder_compute_runs_in_tp_bubbles_and_its_communication_under_backbone_compute():
    asked = BackboneTimes(
        forward=uniform(4, [1.0, 0.5, 1.0, 0.5], [False, True, False, True]),
        backward=uniform(4, [2.0, 0.5, 2.0, 0.5], [False, True, False, True]),
        microbatches=8, pipeline_parallel=1, tensor_parallel=2,
    )  # fmt: skip
    forward = uniform(2, [0.5, 0.2], [False, True])
    ours = EncoderTimes(name="vision", forward={2: forward}, backward={2: forward})
    made = schedule_bubbles(asked, [ours])
    assert faults_of(made, asked, [ours]) == []
    # One microbatch must come before, one after: the rest costs no time at all.
    assert made.step_s == pytest.approx(made.backbone_s + 2 * 1.4)
    assert made.step_s == pytest.approx(made.lower_bound_s)
    assert made.coarse_step_s == pytest.approx(made.backbone_s + 16 * 1.4)


def test_less_memory_leaves_plans_with_fewer_pipelines_and_then_none():
    rng = np.random.default_rng(6)
    asked = backbone(rng, stages=4, virtual=1, ranks=2, microbatches=8, held_bytes=np.full(4, 50.0))
    ours = encoder(rng, layers=4, degrees=(1, 2), layer_bytes=np.full(4, 20.0))
    plenty = schedule_bubbles(asked, [ours], memory_bytes=200)
    tight = schedule_bubbles(asked, [ours], memory_bytes=61)
    assert tight.plan.pipelines == 1
    assert plenty.step_s <= tight.step_s
    assert (tight.peak_bytes == 60).all()
    assert faults_of(tight, asked, [ours], 61) == []
    with pytest.raises(PlanningError, match=r"memory_bytes is 55.*need 5 bytes more.*stages"):
        schedule_bubbles(asked, [ours], memory_bytes=55)


@pytest.mark.parametrize("seed", range(12))
def test_activations_are_held_within_memory(seed):
    rng = np.random.default_rng(seed)
    asked = backbone(rng, stages=4, virtual=1, ranks=2, microbatches=8, held_bytes=np.full(4, 10.0))
    ours = encoder(
        rng, layers=4, degrees=(1, 2), layer_bytes=np.full(4, 4.0),
        activation_bytes=np.full(4, 2.0),
    )  # fmt: skip
    free = schedule_bubbles(asked, [ours])
    memory = float(free.peak_bytes.max()) - 1 - seed
    made = schedule_bubbles(asked, [ours], memory_bytes=memory)
    assert made.peak_bytes.max() <= memory
    assert faults_of(made, asked, [ours], memory) == []
    with pytest.raises(PlanningError, match=r"need \d+ bytes more on some device"):
        schedule_bubbles(asked, [ours], memory_bytes=made.peak_bytes.min() - 9)
    assert faults_of(free, asked, [ours], memory) != [], "the checker sees what is too much"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "start_s",
            lambda a: np.where(a.encoder == 0, a.start_s - 0.05, a.start_s),
            "twice|outside",
        ),
        ("end_s", lambda a: a.end_s + 0.01 * (a.kind == KINDS.index("forward")), "computes twice"),
        ("end_s", lambda a: a.end_s + 0.01 * (a.kind == KINDS.index("forward_comm")), "communi"),
        ("microbatch", lambda a: np.where(a.encoder == 0, 7 - a.microbatch, a.microbatch), "come"),
        ("device", lambda a: np.zeros_like(a.device), "twice"),
    ],
)
def test_a_defect_of_the_planner_never_leaves_it(monkeypatch, name, change, words):
    rng = np.random.default_rng(2)
    asked = backbone(rng, stages=2, virtual=2, ranks=2, microbatches=8)
    ours = encoder(rng, layers=4, degrees=(2,), scale=0.6)
    schedule_bubbles(asked, [ours])

    def spoiled(parts):
        made = join_actions(parts)
        return replace(made, **{name: change(made)})

    monkeypatch.setattr(bubbles, "join_actions", spoiled)
    with pytest.raises(PlanningError, match=f"invariant broken.*({words}).*please report"):
        schedule_bubbles(asked, [ours])


def test_a_lost_action_never_leaves_the_planner(monkeypatch):
    monkeypatch.setattr(bubbles, "join_actions", lambda parts: join_actions(parts[1:]))
    asked = BackboneTimes(forward=TIMES, backward=TIMES, microbatches=2, pipeline_parallel=2)
    with pytest.raises(PlanningError, match=r"invariant broken.*12 actions of 16"):
        schedule_bubbles(asked, [EncoderTimes(name="e", forward={1: TIMES})])


TIMES = uniform(2, [1.0], [False])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: KernelTimes(seconds=np.ones(3), communicates=[False] * 3), r"\(3,\)"),
        (lambda: uniform(2, [1.0], [False, True]), r"\(2,\)"),
        (lambda: uniform(2, [-1.0], [False]), r"-1\.0.*≥ 0"),
        (lambda: uniform(2, [np.nan], [False]), "nan"),
        (
            lambda: BackboneTimes(
                forward=TIMES, backward=TIMES, microbatches=0, pipeline_parallel=1
            ),
            "microbatches is 0",
        ),
        (
            lambda: BackboneTimes(
                forward=TIMES, backward=TIMES, microbatches=1, pipeline_parallel=4
            ),
            "2 layers forward.*4 chunks",
        ),
        (
            lambda: BackboneTimes(
                forward=TIMES, backward=TIMES, microbatches=1, pipeline_parallel=1, gather_s=-1
            ),
            "gather_s is -1",
        ),
        (
            lambda: BackboneTimes(
                forward=TIMES,
                backward=TIMES,
                microbatches=1,
                pipeline_parallel=1,
                held_bytes=[1, 2],
            ),
            "held_bytes are",
        ),
        (lambda: EncoderTimes(name="e", forward={}), "at least one"),
        (lambda: EncoderTimes(name="e", forward={1: TIMES}, backward={2: TIMES}), "same"),
        (
            lambda: EncoderTimes(
                name="e", forward={1: TIMES}, backward={1: uniform(3, [1.0], [False])}
            ),
            r"\[2, 3\] layers",
        ),
        (lambda: EncoderTimes(name="e", forward={1: TIMES}, transfer_s=-1), "transfer_s is -1"),
        (lambda: EncoderTimes(name="e", forward={1: TIMES}, layer_bytes=[1]), "layer_bytes of"),
    ],
)
def test_bad_numbers_are_refused_when_given(make, words):
    with pytest.raises(PlanningError, match=words):
        make()


def test_bad_questions_are_refused():
    asked = BackboneTimes(
        forward=TIMES, backward=TIMES, microbatches=2, pipeline_parallel=2, tensor_parallel=4
    )
    with pytest.raises(PlanningError, match="encoders are none"):
        schedule_bubbles(asked, [])
    with pytest.raises(PlanningError, match=r"degrees \[3\].*divide the backbone's 4"):
        schedule_bubbles(asked, [EncoderTimes(name="e", forward={3: TIMES})])
    with pytest.raises(PlanningError, match="memory_bytes is 0"):
        schedule_bubbles(asked, [EncoderTimes(name="e", forward={1: TIMES})], memory_bytes=0)
