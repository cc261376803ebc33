"""What packs or CP groups cannot give exactly is refused, with the remedy."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import peft
import pytest
import torch
import transformers

from tests.trainer_client.adapters.foreign_models import (
    FAMILIES,
    PROCESSOR,
    VOCABULARY,
    one_at_a_time,
    text,
)
from tests.trainer_client.adapters.foreign_steps import samples_of, shard_of
from trainer_client.adapters.transformers import UnsupportedModel, trainable
from trainer_client.positions import MropeRule, local_positions
from trainer_client.runtime import GroupPool, LayoutError, PackedAttention, RuntimeFault, run_step
from trainer_client.runtime.loads import make_microbatch
from trainer_client.shard import PackItems

# It asks a model by the older name.
PEFT_ASKS = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated")


def model_of(config, **settings):
    """A causal model of transformers with these settings."""
    known = {**text(), **settings}
    made = getattr(transformers, config)(**known)
    return transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager")


def one_step(model, name="llama", seed=1):
    """A step of a single replica on samples of a family."""
    samples = samples_of(name, FAMILIES[name].build(), seed)
    with GroupPool() as pool:
        return run_step(model, shard_of(samples, 1, 0, seed, (1,)), pool)


@pytest.mark.parametrize(
    ("config", "settings", "said"),
    [
        ("MixtralConfig", {"output_router_logits": True}, "output_router_logits=False"),
        ("MambaConfig", {}, "attention interface.* mixes neighbouring tokens"),
        ("Qwen3NextConfig", {}, "layers of .'linear_attention'.; exact are"),
        ("FalconH1Config", {}, "mixes neighbouring tokens outside of attention"),
        ("RobertaConfig", {"is_decoder": True}, "counts positions from the id of its padding"),
        ("CamembertConfig", {"is_decoder": True}, "counts positions from the id of its padding"),
    ],
)
def test_a_decoder_that_packs_would_change_is_refused(config, settings, said):
    with pytest.raises(UnsupportedModel, match=said):
        trainable(model_of(config, **settings))


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ("GPT2Config", {"attn_pdrop": 0}),
        ("OPTConfig", {"word_embed_proj_dim": 32, "ffn_dim": 48}),
        ("BertConfig", {"is_decoder": True, "attention_probs_dropout_prob": 0}),
    ],
)
def test_a_sample_that_is_longer_than_the_learned_positions_is_refused(config, settings):
    def step(positions):
        one_step(trainable(model_of(config, **settings, max_position_embeddings=positions)))

    longest = max(len(each.ids) for each in samples_of("llama", FAMILIES["llama"].build(), 1))
    step(longest + longest % 2)
    said = rf"has {longest + longest % 2} tokens.* learned 8 positions.*max_sample_tokens .*to 8$"
    with pytest.raises(LayoutError, match=said):
        step(8)


def test_queries_that_are_scaled_by_their_place_in_a_pack_are_refused_with_what_is_the_same():
    settings = {
        "no_rope_layers": [1, 0, 1],
        "layer_types": ["full_attention"] * 3,
        "moe_layers": [],
    }

    def made(**tuning):
        torch.manual_seed(3)
        return model_of("Llama4TextConfig", **settings, **tuning)

    with pytest.raises(UnsupportedModel, match=r"8192 tokens.*attn_temperature_tuning=False"):
        trainable(made())
    samples = samples_of("llama", FAMILIES["llama"].build(), 1)
    own, _ = one_at_a_time(FAMILIES["llama"], made(), samples)
    assert one_step(trainable(made(attn_temperature_tuning=False))).loss == pytest.approx(own)


@pytest.mark.parametrize(
    ("config", "settings", "said"),
    [
        ("Gemma2Config", {"sliding_window": 512}, "softcap"),
        ("GptOssConfig", {"sliding_window": 512, "num_local_experts": 2}, "attention sinks"),
        ("LlamaConfig", {"attention_dropout": 0.1}, "set attention_dropout to 0"),
        (
            "LlamaConfig",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
             "max_position_embeddings": 8},
            "'dynamic' change their frequencies beyond 8 tokens.* max_sample_tokens",
        ),
    ],
)  # fmt: skip
def test_a_layer_that_asks_for_more_than_the_ring_computes_is_refused(config, settings, said):
    with pytest.raises(UnsupportedModel, match=said):
        one_step(trainable(model_of(config, **settings)))


def test_a_model_whose_layers_attend_twice_is_refused_by_their_number():
    model = trainable(model_of("DiffLlamaConfig"))
    with pytest.raises(UnsupportedModel, match=r"the 3 layers of DiffLlama\w+ .* 6 times.*a layer"):
        one_step(model)


def test_layers_that_do_not_ask_the_interface_are_refused_with_what_they_may_do():
    model = trainable(model_of("LlamaConfig"))
    left_out = model.model.get_decoder().layers[1]
    left_out.forward = lambda hidden, **_: hidden
    with pytest.raises(UnsupportedModel, match=r"^2 of the 3 layers .* left out, .*own.*compiled"):
        one_step(model)


def test_layers_that_do_not_pass_the_pack_on_are_refused_with_either_cause():
    model = trainable(model_of("NemotronConfig"))
    said = (
        r"NemotronAttention .*does not pass on.* cannot be trained.*evaluate or generate.*\"sdpa\""
    )
    with pytest.raises(UnsupportedModel, match=said):
        one_step(model)


@PEFT_ASKS
@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (peft.LoraConfig, {"alora_invocation_tokens": [3, 4]}, "aLoRA"),
        (peft.AdaLoraConfig, {"total_step": 300}, "AdaLora"),
        (peft.PolyConfig, {}, "Poly"),
    ],
)
def test_adapters_that_work_in_peft_s_forward_are_refused_with_those_that_do_not(
    kind, settings, said
):
    settings = kind(target_modules=["q_proj"], task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(model_of("LlamaConfig"), settings)
    with pytest.raises(UnsupportedModel, match=rf"^{said} .*PEFT's own forward.* LoRA.*supported"):
        trainable(model)


@PEFT_ASKS
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("kind", [peft.LoraConfig, peft.LoHaConfig, peft.LoKrConfig])
def test_adapters_that_work_in_the_layers_alone_are_trained(kind, mixed):
    settings = kind(target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model_of("LlamaConfig"), settings, mixed=mixed)
    one_step(trainable(model))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    assert any(weight.grad.any() for weight in trained)


def test_a_library_s_model_that_is_compiled_as_a_whole_is_refused_with_what_compiles():
    said = r"as a whole.*model\.model\.get_decoder\(\)\.layers"
    with pytest.raises(RuntimeFault, match=said):
        trainable(torch.compile(model_of("LlamaConfig"), backend="eager"))
    model = model_of("LlamaConfig")
    model.compile(backend="eager")
    with pytest.raises(RuntimeFault, match=said):
        trainable(model)


def test_an_unknown_family_of_images_is_refused_with_those_that_are_known():
    config = transformers.PaliGemmaConfig(text_config={**text(), "model_type": "gemma"})
    with torch.device("meta"):
        model = transformers.PaliGemmaForConditionalGeneration(config)
    with pytest.raises(UnsupportedModel, match=r"family 'paligemma'.* known are gemma3, internvl"):
        trainable(model)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Idefics", {"vision_config": {"embed_dim": 32, "num_attention_heads": 2}}),
        ("Phi4Multimodal", {"pad_token_id": 0}),
        ("KyutaiSpeechToText", {"audio_pad_token_id": 0, "pad_token_id": 0}),
    ],
)
def test_an_unknown_family_whose_whole_config_is_its_text_is_refused_too(name, settings):
    config = getattr(transformers, f"{name}Config")(**{**text(), **settings})
    with torch.device("meta"):
        model = transformers.AutoModelForMultimodalLM.from_config(config)
    with pytest.raises(UnsupportedModel, match=rf"^{name}\w+ is of the family .* not known here"):
        trainable(model)


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, trainable])
def test_a_wrapper_is_refused_with_where_it_belongs(wrap):
    with pytest.raises(UnsupportedModel, match=r"Parallel\(trainable\(model\)\)\.$"):
        trainable(wrap(model_of("LlamaConfig")))


def test_a_model_whose_decoder_is_not_found_is_refused():
    ids = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
    with pytest.raises(UnsupportedModel, match=r"^ModernBert\w+ gives a Linear as its decoder"):
        trainable(model_of("ModernBertDecoderConfig", **ids))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("LlamaModel", r"LlamaForCausalLM, as AutoModelForCausalLM\.from_pretrained"),
        ("LlamaForSequenceClassification", "LlamaForCausalLM"),
        ("LlamaForTokenClassification", "LlamaForCausalLM"),
        ("LlamaForQuestionAnswering", "LlamaForCausalLM"),
    ],
)
def test_a_model_without_a_language_head_is_refused_with_the_class_that_has_one(made, said):
    config = transformers.LlamaConfig(**text(), num_labels=text()["vocab_size"])
    with pytest.raises(UnsupportedModel, match=rf"^{made} has no language head.* {said}"):
        trainable(getattr(transformers, made)(config))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration, as AutoModelForImageTextToText"),
        ("qwen2_audio", "Qwen2AudioForConditionalGeneration, as AutoModelForMultimodalLM"),
    ],
)
def test_a_family_without_its_language_head_is_refused_with_the_class_that_has_one(name, said):
    with pytest.raises(UnsupportedModel, match=rf"Model has no language head.* {said}"):
        trainable(FAMILIES[name].build().model, processor=PROCESSOR)


def test_a_text_decoder_cut_out_of_its_family_is_refused():
    with pytest.raises(UnsupportedModel, match=r"^Qwen2_5_VLTextModel has no language head"):
        trainable(FAMILIES["qwen2_5_vl"].build().get_decoder())


def test_a_vision_encoder_without_a_processor_is_refused():
    with pytest.raises(UnsupportedModel, match=r"processor=AutoProcessor"):
        trainable(FAMILIES["llava"].build())


def test_the_processor_is_found_where_the_model_came_from(tmp_path):
    FAMILIES["llava"].build().save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_processor_type": "CLIPImageProcessor", "image_mean": [0.4, 0.5, 0.6], '
        '"image_std": [0.3, 0.2, 0.25]}'
    )
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
    found = one_step(trainable(loaded.double()), "llava")
    given = one_step(trainable(FAMILIES["llava"].build(), processor=PROCESSOR), "llava")
    assert found.loss == pytest.approx(given.loss, rel=1e-6)  # saved weights are float64 as well


def test_images_for_a_model_of_text_are_refused():
    with pytest.raises(UnsupportedModel, match="no vision encoder, but the job has vision items"):
        one_step(trainable(FAMILIES["llama"].build()), "llava")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llava", r"squares of \d+×9 pixels, .* takes 8×8.* kind siglip with its side"),
        ("qwen2_vl", r"\d+×9 pixels, and Qwen2VL\w+ takes multiples of 8.* family"),
        ("qwen3_vl", r"\d+×9 pixels, and Qwen3VL\w+ takes multiples of 8.* family"),
    ],
)
def test_pictures_of_another_familys_size_are_refused_with_the_jobs_key(name, said):
    samples = samples_of(name, FAMILIES[name].build(), 1)
    microbatches = shard_of(samples, 1, 0, 1, (1,)).microbatches
    batch = next(mb.vision for mb in microbatches if mb.vision is not None)
    wide = [torch.zeros(*item.shape[:2], 9, 3, dtype=torch.uint8) for item in batch.items]
    model = trainable(FAMILIES[name].build(), processor=PROCESSOR)
    with pytest.raises(LayoutError, match=said):
        model.encode("vision", replace(batch, items=wide))


def test_positions_of_another_family_are_refused_either_way():
    samples = samples_of("qwen2_vl", FAMILIES["qwen2_vl"].build(), 1)
    microbatches = shard_of(samples, 1, 0, 1, (1,)).microbatches
    with_images = next(mb for mb in microbatches if mb.vision is not None)
    qwen = trainable(FAMILIES["qwen2_vl"].build(), processor=PROCESSOR)
    attention = PackedAttention(with_images.cu_seqlens)
    with pytest.raises(LayoutError, match=r"gives 1 position.* takes 3.*positions: auto"):
        qwen.decode(replace(with_images, mrope=None), {}, attention)
    llama = trainable(FAMILIES["llama"].build())
    with pytest.raises(LayoutError, match=r"gives 3 position.* takes 1.*positions: sequence"):
        llama.decode(with_images, {}, attention)


@pytest.mark.parametrize("past_time", [False, True])
def test_clips_that_the_job_places_by_another_clock_are_refused(past_time):
    model = trainable(FAMILIES["qwen2_5_vl"].build(), processor=PROCESSOR)
    assert model.model.config.vision_config.tokens_per_second == 4
    bounds = np.array([0, 14])
    items = PackItems(  # two patches in time, a second each, of 2 × 2 tokens
        modality=np.zeros(1, np.int8),
        kind=np.ones(1, np.int8),
        start=np.array([3]),
        tokens=np.array([8]),
        grid=np.array([[2, 4, 4, 2]]),
        seconds_per_patch=np.ones(1),
    )

    def decode(tokens_per_second):
        rule = MropeRule(tokens_per_second=tokens_per_second, past_time=past_time)
        mrope = local_positions(bounds, items, rule, degree=1, cp_rank=0)
        pack = make_microbatch((14,), (0,), 0, torch.device("cpu"))
        return model.decode(
            replace(pack, mrope=mrope, items=items), {}, PackedAttention(pack.cu_seqlens)
        )

    with pytest.raises(
        LayoutError, match=r"another clock.* beside `vision` `tokens_per_second: 4`"
    ):
        decode(2)
    assert decode(4).isfinite()


def test_images_without_their_grids_are_refused_where_the_family_needs_them():
    samples = samples_of("llava_next", FAMILIES["llava_next"].build(), 1)
    microbatches = shard_of(samples, 1, 0, 1, (1,)).microbatches
    batch = next(mb.vision for mb in microbatches if mb.vision is not None)
    model = trainable(FAMILIES["llava_next"].build(), processor=PROCESSOR)
    with pytest.raises(LayoutError, match="vision processor of this model's family"):
        model.encode("vision", replace(batch, notes=None))


def test_a_recording_that_is_too_long_is_refused():
    samples = samples_of("qwen2_audio", FAMILIES["qwen2_audio"].build(), 1)
    microbatches = shard_of(samples, 1, 0, 1, (1,)).microbatches
    batch = next(mb.audio for mb in microbatches if mb.audio is not None)
    model = trainable(FAMILIES["qwen2_audio"].build())
    long = replace(batch, items=[torch.zeros(160 * 101)])
    with pytest.raises(ValueError, match=r"16,160 samples.*lower the job's chunk_s"):
        model.encode("audio", long)


def test_a_window_is_refused_in_a_cp_group():
    samples = samples_of("mistral", FAMILIES["mistral"].build(), 1)
    (first, *_) = shard_of(samples, 1, 0, 1, (1,)).microbatches
    pair = PackedAttention([0, 28], group=SimpleNamespace(size=2, index=0))
    model = trainable(FAMILIES["mistral"].build())
    with pytest.raises(LayoutError, match=r"window of 5 tokens.*at CP degree 1.*static_degree: 1"):
        model.decode(first, {}, pair)


def test_a_kernel_that_cannot_compute_the_layers_is_refused():
    with pytest.raises(LayoutError, match="'flash' cannot compute this attention"):
        one_step(trainable(FAMILIES["llama"].build(), kernel="flash"))


def test_gemma_3_is_refused_in_a_cp_group():
    samples = samples_of("gemma3", FAMILIES["gemma3"].build(), 1)
    (first, *_) = shard_of(samples, 1, 0, 1, (1,)).microbatches
    model = trainable(FAMILIES["gemma3"].build(), processor=PROCESSOR)
    with pytest.raises(UnsupportedModel, match=r"exact at CP degree 1 only.*static_degree: 1"):
        model.decode(replace(first, cp_group=(0, 1)), {}, PackedAttention(first.cu_seqlens))


def test_a_model_is_evaluated_with_its_own_attention_and_trains_with_the_ring_again():
    library = FAMILIES["llama"].build()
    model = trainable(library)
    before = one_step(model).loss
    ids = torch.arange(5)[None]
    with pytest.raises(UnsupportedModel, match=r'set_attn_implementation\("sdpa"\)'):
        library(input_ids=ids)
    library.set_attn_implementation("sdpa")
    torch.testing.assert_close(library(ids).logits, FAMILIES["llama"].build()(ids).logits)
    assert one_step(model).loss == before


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("qwen2_5_vl", "image_token_id"),
        ("internvl", "image_token_id"),
        ("llava", "image_token_id"),
        ("gemma3", "image_token_id"),
        ("qwen2_audio", "audio_token_id"),
    ],
)
def test_items_at_tokens_that_are_not_the_model_s_are_refused(name, token):
    model = FAMILIES[name].build()
    own = getattr(model.config, token) + 1
    for other in ("image_token_id", "image_token_index", "video_token_id", "audio_token_id"):
        if hasattr(model.config, other):
            setattr(model.config, other, own)
    with pytest.raises(
        LayoutError, match=rf"token {own - 1} where .* has {token} {own}.*tokenizer"
    ):
        one_step(trainable(model, processor=PROCESSOR), name)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("pad", [0, 7])
def test_samples_that_could_not_be_decoded_tell_nothing_of_the_tokenizer(pad, degree):
    plain = FAMILIES["qwen2_5_vl"].build()
    samples = samples_of("qwen2_5_vl", plain, 1)
    plain.config.image_token_id = plain.config.video_token_id = 3
    model = trainable(plain, processor=PROCESSOR)
    masked = [
        replace(
            each,
            ids=torch.full_like(each.ids, pad),
            unshifted=torch.full_like(each.unshifted, -100),
        )
        for each in samples
    ]
    for microbatch in shard_of(masked, degree, 0, 1, (degree,)).microbatches:
        model.require_own_tokens(microbatch)
    whole = shard_of(samples, degree, 0, 1, (degree,)).microbatches
    with pytest.raises(LayoutError, match="has image_token_id 3"):
        list(map(model.require_own_tokens, whole))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_ids_that_a_small_model_has_no_embeddings_of_tell_nothing(name):
    model = FAMILIES[name].build()
    model.config.image_token_id = model.config.video_token_id = 262_144
    found = one_step(trainable(model, processor=PROCESSOR), name)
    known = one_step(trainable(FAMILIES[name].build(), processor=PROCESSOR), name)
    assert found.loss == known.loss


def test_tokens_beyond_the_embeddings_are_refused_before_they_are_looked_up():
    model = FAMILIES["llama"].build()
    model.resize_token_embeddings(4)
    with pytest.raises(LayoutError, match=r"tokens go up to \d+, and .* embeddings of 4"):
        one_step(trainable(model))


def test_tokens_beyond_the_embeddings_are_refused_however_late_they_come():
    model = trainable(FAMILIES["llama"].build())
    one_step(model)
    samples = samples_of("llama", model.model, 2)
    shard = shard_of(samples, 1, 0, 2, (1,))
    *first, last = shard.microbatches
    late = replace(last, input_ids=torch.full_like(last.input_ids, VOCABULARY))
    with GroupPool() as pool, pytest.raises(LayoutError, match=f"tokens go up to {VOCABULARY}"):
        run_step(model, replace(shard, microbatches=(*first, late)), pool)


def test_tokens_are_compared_with_embeddings_that_were_resized_meanwhile():
    model = trainable(FAMILIES["llama"].build())
    model.model.resize_token_embeddings(VOCABULARY + 1)
    (first, *_) = shard_of(samples_of("llama", model.model, 1), 1, 0, 1, (1,)).microbatches
    model.require_own_tokens(replace(first, input_ids=torch.full_like(first.input_ids, VOCABULARY)))
