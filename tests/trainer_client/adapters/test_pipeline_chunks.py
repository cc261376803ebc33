"""Models of transformers, cut into pipeline chunks by a layout, against the library's own forward
of one sample at a time."""

import itertools
import types

import pytest
import torch
import transformers
from torch.distributed.fsdp import fully_shard

from tests.trainer_client.adapters.foreign_models import (
    FAMILIES,
    PROCESSOR,
    Text,
    one_at_a_time,
)
from tests.trainer_client.adapters.foreign_steps import samples_of, shard_of
from trainer_client.adapters.transformers import (
    CutEncoders,
    UnsupportedModel,
    WholeEncoders,
    hidden_states,
    pipeline_chunks,
    sum_tied_gradient,
    trainable,
)
from trainer_client.adapters.transformers.attention import PackAttention
from trainer_client.runtime import (
    LayoutError,
    PackedAttention,
    PipelineMesh,
    StageLayout,
    run_pipeline_step,
)

EXACT = 1e-10
TIED = Text("LlamaConfig", tie_word_embeddings=True)
DECODER = ("llm",) * 3
SEEING = ("vision",) * 2 + DECODER
MIXED = ("full", "selective", "selective", "full", "none")

# name → (family, replicas, how often to encode, layout)
CASES = {
    "two stages": ("qwen2_5_vl", 2, StageLayout(modules=SEEING, bounds=(0, 3, 5), recompute=MIXED)),
    "four stages, the first encodes": (
        "qwen2_5_vl", 1,
        StageLayout(modules=SEEING, bounds=(0, 2, 3, 4, 5), recompute=MIXED, encoder_stage="own"),
    ),
    "two virtual stages": (
        "qwen2_5_vl", 2,
        StageLayout(modules=SEEING, bounds=(0, 3, 4, 5, 5), recompute=MIXED, virtual_stages=2),
    ),
    "spread": (
        "qwen2_5_vl", 2,
        StageLayout(modules=DECODER, bounds=(0, 1, 3), encoder_stage="spread"),
    ),
    "deepstack": (
        "qwen3_vl", 2, StageLayout(modules=SEEING, bounds=(0, 4, 5), recompute=MIXED)
    ),
    "cut over two stages": (
        "qwen2_5_vl", 2,
        StageLayout(modules=SEEING, bounds=(0, 1, 5), recompute=MIXED, encoder_stage="cut"),
    ),
    "cut over three stages": (
        "qwen2_5_vl", 1,
        StageLayout(modules=SEEING, bounds=(0, 1, 3, 5), recompute=MIXED, encoder_stage="cut"),
    ),
    "cut over chunks of two stages": (
        "qwen2_vl", 2,
        StageLayout(
            modules=SEEING, bounds=(0, 1, 2, 4, 5), recompute=MIXED, encoder_stage="cut",
            virtual_stages=2,
        ),
    ),
    "cut where an encoder ends": (
        "qwen3_vl", 1,
        StageLayout(modules=SEEING, bounds=(0, 2, 4, 5), recompute=MIXED, encoder_stage="cut"),
    ),
    "windows": ("mistral", 1, StageLayout(modules=DECODER, bounds=(0, 1, 3))),
    "tied": ("tied", 1, StageLayout(modules=DECODER, bounds=(0, 1, 2, 3, 3))),
}  # fmt: skip


def family_of(name):
    return TIED if name == "tied" else FAMILIES[name]


def samples_for(name, family):
    if name != "tied":
        return samples_of(name, family.build(), 4)
    return samples_of("llama", family.build(), 4)


def train_case(rank, case):
    name, replicas, layout = CASES[case]
    family = family_of(name)
    samples = samples_for(name, family)
    degrees = (1,) if replicas == 1 else (1, 2)
    model = trainable(family.build(), processor=PROCESSOR)
    spread, cut = layout.encoder_stage == "spread", layout.encoder_cut
    with PipelineMesh(
        stages=layout.stages, virtual_stages=layout.virtual_stages, rank=rank,
        world_size=layout.stages * replicas, timeout_s=60, lane=case,
        encoder_stage=layout.encoder_stage, encoder_cut=cut,
    ) as mesh:  # fmt: skip
        chunks = pipeline_chunks(model, layout)[mesh.stage :: layout.stages]
        encoders = WholeEncoders(model) if spread else None
        if cut is not None:
            encoders = CutEncoders(model, cut)
        shard = shard_of(samples, replicas, mesh.replica, 4, degrees)
        result = run_pipeline_step(chunks, shard, mesh, hidden_states(model), encoders=encoders)
        sum_tied_gradient(chunks, mesh)
    held = [*chunks, *([encoders] if spread else [])]
    mine = {id(weight) for part in held for weight in part.parameters()}
    names = {id(weight): key for key, weight in model.model.named_parameters()}
    assert mine <= names.keys(), "chunks share the model's own weights"
    grads = {key: p.grad for key, p in model.model.named_parameters() if id(p) in mine}
    others = [key for key, p in model.model.named_parameters() if p.grad is not None]
    assert set(others) <= grads.keys(), "gradients are those of the stage's own chunks"
    return result.loss, grads


def train_cases(rank, size, cases):
    torch.set_num_threads(1)
    return {
        case: train_case(rank, case)
        for case in cases
        if rank < CASES[case][2].stages * CASES[case][1]
    }


QUICK = ("two stages", "four stages, the first encodes", "cut over three stages")


def test_a_pipeline_of_chunks_trains_what_transformers_trains(world):
    trained = world(train_cases, 4, QUICK)
    for case in QUICK:
        check(trained, case)


@pytest.mark.long
def test_so_it_does_in_every_place_of_encoders_with_virtual_stages_and_tied_weights(world):
    trained = world(train_cases, 4, [case for case in CASES if case not in QUICK])
    for case in CASES:
        if case not in QUICK:
            check(trained, case)


def check(trained, case):
    name, replicas, layout = CASES[case]
    family = family_of(name)
    model = family.build()
    loss, expected = one_at_a_time(family, model, samples_for(name, family))
    answers = [answer[case] for answer in trained.values() if case in answer]
    assert len(answers) == layout.stages * replicas
    seen = set()
    for found, grads in answers:
        assert found == pytest.approx(loss, rel=EXACT)
        for key, grad in grads.items():
            good = expected[key]
            assert (grad is None) == (good is None), key
            if good is not None:
                assert (grad - good).norm() <= EXACT * good.norm().clamp_min(1e-3), key
        seen |= grads.keys()
    assert seen == expected.keys()


def chunks_of(family, layout, **changed):
    model = family.build()
    for name, value in changed.items():
        setattr(model.config, name, value)
    return pipeline_chunks(trainable(model, processor=PROCESSOR), layout)


def for_another_model(rank, size):
    """What a stage that embeds says of tokens that are not its model's."""
    family, layout = FAMILIES["qwen2_5_vl"], StageLayout(modules=SEEING, bounds=(0, 3, 5))
    chunks = chunks_of(family, layout, image_token_id=1, video_token_id=1)
    shard = shard_of(samples_for("qwen2_5_vl", family), 1, 0, 4, (1,))
    hidden = hidden_states(trainable(family.build(), processor=PROCESSOR))
    with PipelineMesh(stages=2, timeout_s=60) as mesh, pytest.raises(LayoutError) as refused:
        run_pipeline_step(chunks[:1], shard, mesh, hidden)
    return str(refused.value)


def test_a_job_tokenized_for_another_model_is_refused_by_the_stage_that_embeds(world):
    for said in world(for_another_model, 2).values():
        assert "image_token_id 1, video_token_id 1: its pipeline.tokenizer" in said


def test_each_chunk_has_the_weights_of_its_own_layers_alone():
    layout = StageLayout(modules=SEEING, bounds=(0, 3, 4, 5))
    chunks = chunks_of(FAMILIES["qwen2_5_vl"], layout)
    weights = [set(map(id, chunk.parameters())) for chunk in chunks]
    assert not any(one & other for one, other in itertools.combinations(weights, 2))
    names = [{name for name, _ in chunk.named_parameters()} for chunk in chunks]
    assert any("visual" in name for name in names[0])
    assert not any("visual" in name or "embed_tokens" in name for name in names[1] | names[2])
    assert [any("lm_head" in name for name in each) for each in names] == [False, False, True]
    for each in names:
        assert {name.split("layers.")[1][0] for name in each if "layers." in name} == {"0"}


def test_a_head_that_the_library_left_apart_from_its_embeddings_is_not_added_to_them():
    model = TIED.build()
    assert model.config.tie_word_embeddings
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    layout = StageLayout(modules=DECODER, bounds=(0, 1, 2, 3))
    chunks = pipeline_chunks(trainable(model), layout)
    assert [chunk.tied for chunk in chunks] == [None, None, None]


def test_a_frozen_weight_that_is_tied_gets_no_gradient():
    model = TIED.build()
    model.lm_head.weight.requires_grad_(False)
    chunks = pipeline_chunks(trainable(model), StageLayout(modules=DECODER, bounds=(0, 1, 3)))
    for stage, chunk in enumerate(chunks):
        assert chunk.tied is model.lm_head.weight
        alone = types.SimpleNamespace(stage=stage, stages=2, embedding_stage=0)
        sum_tied_gradient([chunk], alone)
    assert model.lm_head.weight.grad is None


def ends_sharded_apart(rank, size):
    """Of each chunk, whether the weight that is added up is the one that takes gradients."""
    chunks = pipeline_chunks(
        trainable(TIED.build()), StageLayout(modules=DECODER, bounds=(0, 1, 3))
    )
    ends = [chunks[0].family.decoder.embed_tokens, chunks[1].model.get_output_embeddings()]
    for chunk, end in zip(chunks, ends, strict=True):
        fully_shard(end)
        fully_shard(chunk)
    return [chunk.tied is end.weight for chunk, end in zip(chunks, ends, strict=True)]


def test_what_is_added_up_of_tied_ends_that_are_sharded_apart_is_what_trains(world):
    assert world(ends_sharded_apart, 1) == {0: [True, True]}


def kept_by(how):
    """Elements that a decoder layer's forward keeps for its backward."""
    layout = StageLayout(modules=DECODER, bounds=(0, 1, 3), recompute=(how,) * 3)
    chunk = chunks_of(FAMILIES["llama"], layout)[0]
    layer = chunk.model.model.layers[0]
    x = torch.randn(1, 9, 32, dtype=torch.float64, generator=torch.manual_seed(0))
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    packed = PackAttention(ring=PackedAttention([0, 9]))
    angles = (torch.ones(1, 9, 8).double(), torch.zeros(1, 9, 8).double())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x.requires_grad_(), position_embeddings=angles, attention_mask=None, packed=packed)
    weights = {weight.data_ptr() for weight in layer.parameters()}
    return sum(count for place, count in kept.items() if place not in weights)


def test_a_layer_that_recomputes_more_keeps_less():
    none, selective, full = (kept_by(how) for how in ("none", "selective", "full"))
    assert none > 1.3 * selective > 1.3 * full


@pytest.mark.parametrize(
    ("name", "layout", "error", "words"),
    [
        (
            "qwen3_vl", StageLayout(modules=SEEING, bounds=(0, 3, 5)), LayoutError,
            "1 decoder layers, and Qwen3VL.* adds features behind its first 2",
        ),
        (
            "llama", StageLayout(modules=SEEING, bounds=(0, 3, 5)), LayoutError,
            "2 layers of vision and the model 0",
        ),
        (
            "llama", StageLayout(modules=("llm",) * 4, bounds=(0, 3, 4)), LayoutError,
            "4 layers of llm and the model 3",
        ),
        ("llama", StageLayout(modules=DECODER, bounds=(0, 3)), LayoutError, "which is one chunk"),
        (
            "qwen3_vl",
            StageLayout(modules=SEEING, bounds=(0, 1, 4, 5), encoder_stage="cut"), UnsupportedModel,
            "cuts the encoder of Qwen3VL.* behind layer 0; encoders of Qwen2-VL and Qwen2.5-VL can",
        ),
        (
            "gemma3", StageLayout(modules=SEEING, bounds=(0, 3, 5)), UnsupportedModel,
            "lets the tokens of an image see one another",
        ),
        (
            "qwen2_audio",
            StageLayout(
                modules=("audio", "audio", *DECODER), bounds=(0, 3, 5), recompute=("selective",) * 5
            ),
            UnsupportedModel, "cannot recompute in part",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused(name, layout, error, words):
    with pytest.raises(error, match=words):
        chunks_of(FAMILIES[name], layout)


def test_a_decoder_that_scales_its_embeddings_is_refused():
    class Scaled(Text):
        def settings(self):
            return {**super().settings(), "embedding_multiplier": 12.0}

    layout = StageLayout(modules=DECODER, bounds=(0, 1, 3))
    assert hasattr(transformers, "GraniteConfig")
    with pytest.raises(UnsupportedModel, match="changes what it takes before its first layer"):
        chunks_of(Scaled("GraniteConfig"), layout)
