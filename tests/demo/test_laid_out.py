"""The demo's model as a layout cuts it: gradients of the whole model, on 2 to 4 stages."""

import functools
import itertools

import pytest
import torch

from demo.chunks import DemoEncoders, lay_out_model, sum_tied_gradient
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
from trainer_client.runtime import (
    HiddenStates,
    LayoutError,
    PackedAttention,
    PipelineMesh,
    StageLayout,
    gantt,
    run_pipeline_step,
    simulate,
)

CONFIG = ModelConfig(vocabulary=64, width=32, layers=5, heads=4, kv_heads=2, encoder_width=16)
MODULES = ("vision", "vision", "audio", *["llm"] * 5)
MIXED = ("full", "none", "selective", "none", "full", "selective", "full", "none")
# (stages, virtual stages, replicas) → bounds: unequal chunks; of four, the first only encodes.
BOUNDS = {
    (2, 1, 2): (0, 4, 8),
    (2, 2, 2): (0, 4, 5, 7, 8),
    (3, 1, 1): (0, 6, 7, 8),
    (4, 1, 1): (0, 3, 5, 6, 8),
}
# Encoders spread over all stages: bounds of the decoder's layers alone.
SPREAD = {
    (2, 1, 2): (0, 2, 5),
    (2, 2, 2): (0, 1, 2, 4, 5),
    (4, 1, 1): (0, 2, 3, 4, 5),
}
# Encoders cut over the first chunks. The decoder begins on the last chunk, on the second, on a
# stage's second chunk, and behind two chunks that have an encoder each.
CUT = {
    (2, 1, 2): (0, 1, 8),
    (3, 1, 1): (0, 1, 4, 8),
    (2, 2, 2): (0, 1, 2, 6, 8),
    (4, 1, 1): (0, 2, 3, 6, 8),
}
FROZEN = "cut, vision frozen"
CASES = [
    *((case, "own or first") for case in BOUNDS),
    *((case, "spread") for case in SPREAD),
    *((case, "cut") for case in CUT),
    ((3, 1, 1), FROZEN),
]


def make_model(place):
    torch.manual_seed(3)
    model = DemoModel(CONFIG).double()
    model.encoders["vision"].requires_grad_(place != FROZEN)
    return model


def laid_out(case, place):
    if place in ("cut", FROZEN):
        return StageLayout(
            modules=MODULES, bounds=CUT[case], recompute=MIXED, encoder_stage="cut",
            virtual_stages=case[1],
        )  # fmt: skip
    if place != "spread":
        return StageLayout(modules=MODULES, bounds=BOUNDS[case], recompute=MIXED)
    modules, recompute = MODULES[3:], MIXED[3:]
    bounds = SPREAD[case]
    return StageLayout(modules=modules, bounds=bounds, recompute=recompute, encoder_stage=place)


def train_case(rank, case, place):
    stages, virtual_stages, replicas = case
    samples = scripted_samples()
    packs, encodes = (TWO_REPLICAS, [1, 1, 0, 0, 1, 1]) if replicas == 2 else (ONE_REPLICA, [0] * 6)
    model = make_model(place)
    layout = laid_out(case, place)
    spread, cut = place == "spread", layout.encoder_cut
    with PipelineMesh(
        stages=stages, virtual_stages=virtual_stages, rank=rank, world_size=stages * replicas,
        timeout_s=60, lane=f"{case} {place}", encoder_stage=layout.encoder_stage, encoder_cut=cut,
    ) as mesh:  # fmt: skip
        made = mesh.communicators
        chunks = lay_out_model(model, layout)[mesh.stage :: stages]
        shard = shard_of(step_plan(samples, packs, encodes), samples, mesh.replica)
        hidden = HiddenStates(width=CONFIG.width, dtype=torch.float64)
        encoders = DemoEncoders(model, cut=cut) if spread or cut else None
        result = run_pipeline_step(chunks, shard, mesh, hidden, encoders=encoders)
        once = {p: p.grad.clone() for p in model.parameters() if p.grad is not None}
        run_pipeline_step(chunks, shard, mesh, hidden, encoders=encoders)
        differ = [float((p.grad - 2 * grad).abs().max()) for p, grad in once.items()]
        added = max(differ, default=0.0)  # a stage may hold an encoder that is frozen
        for p, grad in once.items():
            p.grad = grad
        sum_tied_gradient(chunks, mesh)
        made_later = mesh.communicators - made
    held = [*chunks, *([encoders] if spread else [])]
    mine = {id(weight) for part in held for weight in part.parameters()}
    grads = {name: p.grad for name, p in model.named_parameters() if id(p) in mine}
    others = [name for name, p in model.named_parameters() if p.grad is not None]
    return {
        "loss": result.loss, "grads": grads, "stage": mesh.stage, "parts": mesh.parts,
        "added": added, "strange": set(others) - grads.keys(), "made": (made, made_later),
        "schedule": result.schedule, "timeline": result.timeline,
    }  # fmt: skip


def every_case(rank, size):
    torch.set_num_threads(1)
    return {
        (case, place): train_case(rank, case, place)
        for case, place in CASES
        if rank < case[0] * case[2]
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run_world(every_case, 4, tmp_path_factory.mktemp("w"))


@functools.cache
def whole(place):
    """Loss and gradients of the model that nobody cut."""
    model = make_model(place)
    loss = plain_loop(model, scripted_samples())
    return loss, {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_a_step_are_added_to_those_of_the_one_before(trained, case):
    assert all(answer[case]["added"] <= 1e-12 for answer in trained.values() if case in answer)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_laid_out_pipeline_has_the_gradients_of_the_whole_model(trained, case):
    loss, expected = whole(FROZEN if case[1] == FROZEN else "")
    assert sum(case in answer for answer in trained.values()) == case[0][0] * case[0][2]
    seen = set()
    for answer in trained.values():
        if case not in answer:
            continue
        assert answer[case]["loss"] == pytest.approx(loss, rel=1e-10)
        for name, grad in answer[case]["grads"].items():
            seen.add(name)
            if expected[name] is None:
                assert grad is None, name
            else:
                assert (grad - expected[name]).norm() <= 1e-10 * expected[name].norm(), name
        assert not answer[case]["strange"], "gradients are those of the stage's own chunks"
    assert seen == expected.keys()


def test_all_communicators_are_made_with_the_mesh_wherever_encoders_run(trained):
    for answer in trained.values():
        for ((stages, virtual_stages, replicas), _), found in answer.items():
            channels = 4 if stages > 2 or virtual_stages > 1 else 2
            made, made_later = found["made"]
            assert made <= channels + 1 + (replicas > 1)
            assert made_later == 0


def test_a_stage_reads_inputs_where_it_encodes_or_embeds(trained):
    for answer in trained.values():
        for (case, place), found in answer.items():
            encoding = {"spread": case[0], "own or first": 1}.get(place)
            if encoding is None:
                encoding = 3 if CUT[case] == (0, 2, 3, 6, 8) else 2
            assert ("inputs" in found["parts"]) == (found["stage"] < encoding)


def test_a_stage_encodes_its_part_of_the_layers_just_before_its_part_of_the_decoder(trained):
    found = trained[0][(3, 1, 1), "cut"]
    schedule, lived = found["schedule"], found["timeline"]
    lines = str(schedule).splitlines()
    assert lines[0].split()[1:] == [
        "EF0[0:1]", "EF1[0:1]", "EF2[0:1]", "EB0[0:1]", "EB1[0:1]", "EB2[0:1]",
    ]  # fmt: skip
    assert lines[1].startswith("1: EF0[1:2] EF0.1[0:1] F0 ")
    assert lines[1].endswith(" B2 EB2.1[0:1] EB2[1:2]")
    assert not any("E" in line for line in lines[2:])
    assert not lived.end_s[:, 0].any()
    assert lived.begin_s == min(span.start_s for span in lived.encoders if span.stage == 0)
    ideal = simulate(schedule, lived.forward_s, lived.backward_s, lived.encoder_s)
    assert 0 < ideal.makespan_s <= lived.makespan_s
    drawn = gantt({"measured": lived, "simulated": ideal}).splitlines()
    assert set(drawn[0][20:]) <= {"E", "G", "·"}
    assert set(drawn[1][20:]) <= {"E", "G", "·"}


def kept_bytes(how):
    """What the first decoder layer's forward keeps for its backward, and its gradients."""
    model = make_model("")
    lay_out_model(model, StageLayout(modules=MODULES, bounds=(0, 4, 8), recompute=(how,) * 8))
    weights = {id(weight) for weight in model.parameters()}
    x = torch.randn(50, CONFIG.width, dtype=torch.float64, generator=torch.manual_seed(1))
    x.requires_grad_()
    kept = {}

    def keep(tensor):
        if id(tensor) not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    layer = model.layers[0]
    angles = torch.ones(50, 1, layer.head_dim // 2).double(), torch.zeros(50, 1, 4).double()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        given = layer(x, angles, PackedAttention([0, 50]))
    given.square().sum().backward()
    return sum(kept.values()), [weight.grad for weight in layer.parameters()]


def test_what_recomputes_more_keeps_less_and_has_the_same_gradients():
    found = {how: kept_bytes(how) for how in ("none", "selective", "full")}
    kept = [found[how][0] for how in ("none", "selective", "full")]
    assert all(more > 1.5 * less for more, less in itertools.pairwise(kept))
    for how in ("selective", "full"):
        for grad, expected in zip(found[how][1], found["none"][1], strict=True):
            torch.testing.assert_close(grad, expected, rtol=1e-12, atol=0)


def test_a_layout_counts_encoder_layers_as_the_planner_does():
    layout = StageLayout(modules=MODULES, bounds=(0, 3, 5, 6, 8), recompute=MIXED)
    assert layout.decoder_bounds == (0, 0, 2, 3, 5)
    assert layout.recompute_of("vision", 2) == ("full", "none")
    assert layout.recompute_of("llm", 5) == MIXED[3:]
    assert StageLayout(modules=MODULES, bounds=(0, 8)).recompute_of("audio", 1) == ("none",)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bounds": (0, 4, 4, 8)}, "rise from 0 to 8"),
        ({"bounds": (0, 4)}, "rise from 0 to 8"),
        ({"bounds": (0, 2, 8)}, "layer 2 is audio's and lies behind the first cut, 2"),
        ({"recompute": ("full",)}, "names 1 layers of 8"),
        ({"recompute": ("some",) * 8}, "'some'"),
        ({"modules": ("vision", "llm", "audio", *["llm"] * 5)}, "follows the decoder's first"),
    ],
)
def test_layouts_that_no_pipeline_can_run_are_refused(change, words):
    given = {"modules": MODULES, "bounds": (0, 4, 8), "recompute": MIXED} | change
    with pytest.raises(LayoutError, match=words):
        StageLayout(**given)


def test_a_layout_of_another_model_is_refused():
    layout = StageLayout(modules=("vision", *["llm"] * 5), bounds=(0, 3, 6))
    with pytest.raises(LayoutError, match=r"1 layers of vision and the model 2|0 layers of audio"):
        lay_out_model(make_model(""), layout)
