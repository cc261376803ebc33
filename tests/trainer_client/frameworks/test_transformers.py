"""transformers' Trainer fetches what an optimizer step takes, accelerate one batch more; with the
callback it resumes exactly and at once, and without it exactly."""

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from tests.trainer_client.frameworks.loops import STEPS, everything, ids_of
from trainer_client import StateMismatch
from trainer_client.adapters.transformers import DataPosition


class Recording(Trainer):
    """Writes down what it trains, with a loader of accelerate's or one of its own."""

    own_loader = False

    def get_train_dataloader(self):
        if not self.own_loader:
            return super().get_train_dataloader()
        collate = self.data_collator
        return DataLoader(
            self.train_dataset, batch_size=None, collate_fn=lambda shard: collate([shard])
        )

    def compute_loss(self, model, inputs, **options):
        self.trained.append(inputs.pop("ids").flatten().tolist())
        return super().compute_loss(model, inputs, **options)


def collate(shards):
    """Reads everything while it is fetched, long before it is trained."""
    (shard,) = shards
    tokens = shard.microbatches[0].input_ids[None] % 64
    return {"input_ids": tokens, "labels": tokens, "ids": torch.tensor([ids_of(shard)])}


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop |= state.global_step >= self.step


def train(
    dataset, folder, *, own_loader, accumulate=1, stop_at=99, resume=None, callback=True, **options
):
    """What transformers' Trainer trains; every optimizer step leaves a checkpoint."""
    torch.manual_seed(0)
    size = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=1, **size)
    arguments = TrainingArguments(
        str(folder),
        max_steps=STEPS // accumulate,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=accumulate,
        save_strategy="steps",
        save_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    position = [DataPosition(dataset)] if callback else []
    trainer = Recording(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=dataset,
        data_collator=collate,
        callbacks=[*position, StopAt(stop_at)],
    )
    trainer.own_loader, trainer.trained = own_loader, []
    with dataset:
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer.trained


@pytest.mark.parametrize(
    ("own_loader", "accumulate", "callback"),
    [(True, 1, True), (True, 2, True), (False, 1, True), (False, 2, True), (True, 1, False)],
)
def test_transformers_trainer_resumes_exactly(service, tmp_path, own_loader, accumulate, callback):
    options = {"own_loader": own_loader, "accumulate": accumulate, "callback": callback}
    assert train(service.dataset(), tmp_path / "whole", **options) == everything()
    first = train(service.dataset(), tmp_path / "first", stop_at=2, **options)
    for saved in (1, 2):
        checkpoint = tmp_path / "first" / f"checkpoint-{saved}"
        opened = len(service.coordinator.opens)
        rest = train(service.dataset(), tmp_path / f"rest-{saved}", resume=checkpoint, **options)
        assert first[: saved * accumulate] + rest == everything()
        cursor = f"cursor-{saved * accumulate}" if callback else ""  # else fetched and thrown away
        assert service.coordinator.opens[opened].cursor == cursor


def test_a_trainers_checkpoint_without_a_position_is_refused(service, tmp_path):
    train(service.dataset(), tmp_path, own_loader=True, stop_at=1, callback=False)
    with pytest.raises(StateMismatch, match="has no position of the data"):
        train(service.dataset(), tmp_path, own_loader=True, resume=tmp_path / "checkpoint-1")
