"""The loop that docs/trainers.md has for transformers' Trainer: what it saves is what the library
loads, and it goes on from there."""

import ast

import peft
import pytest
import torch
import transformers
from safetensors import safe_open
from torch.utils.data import DataLoader

from tests.documents import ROOT, blocks
from tests.trainer_client.adapters.foreign_models import FAMILIES, PROCESSOR
from tests.trainer_client.adapters.foreign_steps import samples_of, shard_of
from trainer_client.adapters.transformers import LibraryCheckpoints, trainable
from trainer_client.runtime import GroupPool, RuntimeFault, run_step

STEPS = 3
# What transformers 5.23 calls activation checkpointing was gradient checkpointing before.
CHECKPOINTING = next(
    setting
    for setting in ("activation_checkpointing", "gradient_checkpointing")
    if setting in transformers.TrainingArguments.__dataclass_fields__
)
LOADED_BY = {
    "llama": transformers.AutoModelForCausalLM,
    "qwen2_5_vl": transformers.AutoModelForImageTextToText,
}


@pytest.fixture(scope="module")
def recipe():
    """`ShardTrainer` as the page has it, in a module of its own."""
    page = ROOT / "docs" / "trainers.md"
    (text,) = (block.text for block in blocks(page) if block.file_name == "train_trainer.py")
    (made,) = (part for part in ast.parse(text).body if isinstance(part, ast.ClassDef))
    module = {
        "DataLoader": DataLoader,
        "LibraryCheckpoints": LibraryCheckpoints,
        "Trainer": transformers.Trainer,
        "run_step": run_step,
    }
    exec(ast.unparse(made), module)
    with GroupPool() as module["groups"]:
        yield module["ShardTrainer"]


def tiny(name, tied):
    """A family's model in float32, whose embeddings are its head's where they are tied."""
    model = FAMILIES[name].build().float()
    if tied:
        model.config.get_text_config().tie_word_embeddings = True
        model.config.tie_word_embeddings = True
        model.tie_weights()
    return model


def train(recipe, model, name, folder, *, steps=STEPS, resume=None, beside=None, **options):
    """The wrapped model after the Trainer's steps; each of them leaves a checkpoint. The steps that
    a checkpoint is behind are passed over, as a dataset at its position would."""
    samples = samples_of(name, FAMILIES[name].build(), 1)
    seeds = range(2 if resume else 0, STEPS)
    shards = [shard_of(samples, 1, 0, seed, (1,)) for seed in seeds]
    settings = transformers.TrainingArguments(
        str(folder), max_steps=steps, save_strategy="steps", save_steps=1, learning_rate=1e-2,
        lr_scheduler_type="constant", ignore_data_skip=True, use_cpu=True, report_to="none",
        disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = recipe(
        trainable(model, processor=PROCESSOR),
        settings,
        train_dataset=shards,
        eval_dataset=shards,
        processing_class=beside,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model


def weights_of(model):
    return dict(model.named_parameters())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", LOADED_BY)
def test_the_library_loads_what_its_trainer_saved(recipe, tmp_path, name, tied):
    model = train(recipe, tiny(name, tied), name, tmp_path)
    loaded = LOADED_BY[name].from_pretrained(tmp_path / f"checkpoint-{STEPS}")
    assert type(loaded) is type(model.model)
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied
    torch.testing.assert_close(weights_of(loaded), weights_of(model.model), rtol=0, atol=0)


def test_a_processor_beside_the_weights_makes_the_checkpoint_trainable(recipe, tmp_path):
    name = "qwen2_5_vl"
    processor = transformers.Qwen2VLImageProcessorPil(image_mean=[0.1, 0.2, 0.3])
    train(recipe, tiny(name, False), name, tmp_path, steps=1, beside=processor)
    trainable(LOADED_BY[name].from_pretrained(tmp_path / "checkpoint-1"))  # refused without one


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", LOADED_BY)
def test_a_run_that_resumes_ends_with_the_weights_of_one_that_went_through(
    recipe, tmp_path, name, tied
):
    whole = train(recipe, tiny(name, tied), name, tmp_path)
    fresh = tiny(name, tied)
    with torch.no_grad():
        fresh.get_input_embeddings().weight.zero_()  # it is the checkpoint's weights that count
    resumed = train(recipe, fresh, name, tmp_path / "on", resume=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(weights_of(resumed), weights_of(whole), rtol=0, atol=0)


def with_adapters():
    torch.manual_seed(5)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(tiny("llama", False), settings)


def test_adapters_are_saved_and_resumed_alone(recipe, tmp_path):
    whole = train(recipe, with_adapters(), "llama", tmp_path)
    with safe_open(tmp_path / f"checkpoint-{STEPS}" / "adapter_model.safetensors", "pt") as saved:
        assert all("lora" in name for name in saved.keys())  # noqa: SIM118 - it is no dictionary
    loaded = peft.PeftModel.from_pretrained(
        tiny("llama", False), tmp_path / f"checkpoint-{STEPS}", is_trainable=True
    )
    torch.testing.assert_close(weights_of(loaded), weights_of(whole.model), rtol=0, atol=0)
    resumed = train(
        recipe, with_adapters(), "llama", tmp_path / "on", resume=str(tmp_path / "checkpoint-2")
    )
    torch.testing.assert_close(weights_of(resumed), weights_of(whole), rtol=0, atol=0)


@pytest.mark.parametrize("made", [lambda: tiny("llama", False), with_adapters])
def test_training_ends_with_the_best_weights_where_the_settings_ask_for_them(
    recipe, tmp_path, made
):
    class SecondIsBest(recipe):
        def evaluate(self, *_, **__):
            return {"eval_loss": abs(self.state.global_step - 2.0)}

    options = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    judged = train(SecondIsBest, made(), "llama", tmp_path / "judged", **options)
    last, second = (
        weights_of(train(recipe, made(), "llama", tmp_path / str(steps), steps=steps))
        for steps in (STEPS, 2)
    )
    assert any(not torch.equal(last[name], second[name]) for name in second)
    torch.testing.assert_close(weights_of(judged), second, rtol=0, atol=0)


def test_a_trainer_that_compiles_the_whole_model_is_told_what_compiles(
    recipe, tmp_path, monkeypatch
):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # the settings write it
    with pytest.raises(RuntimeFault, match=r"torch_compile=True.*layer\.compile\("):
        train(recipe, tiny("llama", False), "llama", tmp_path, torch_compile_backend="eager")


@pytest.mark.parametrize("adapted", [False, True])
def test_layers_are_computed_again_where_the_settings_ask_for_it(recipe, tmp_path, adapted):
    def step(name, **options):
        model = tiny("qwen2_5_vl", False)
        if adapted:
            torch.manual_seed(5)
            model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
        return train(recipe, model, "qwen2_5_vl", tmp_path / name, steps=1, **options)

    plain = step("plain")
    again = step("again", **{CHECKPOINTING: True})
    assert any(getattr(part, "gradient_checkpointing", False) for part in again.modules())
    torch.testing.assert_close(weights_of(again), weights_of(plain), rtol=1e-5, atol=1e-5)
    again.activation_checkpointing_disable()
    assert not any(getattr(part, "gradient_checkpointing", False) for part in again.modules())


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_layers_are_computed_again_by_the_older_name_too():
    model = trainable(tiny("llama", False))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert all(layer.gradient_checkpointing for layer in model.model.get_decoder().layers)
    model.gradient_checkpointing_disable()
    assert not any(layer.gradient_checkpointing for layer in model.model.get_decoder().layers)
