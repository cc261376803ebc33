"""Lightning fetches one batch ahead of the one it trains, and resumes exactly."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.trainer_client.frameworks.loops import STEPS, everything, ids_of
from trainer_client.adapters.lightning import DataPosition


class Recorder(LightningModule):
    """Writes down what it trains."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.trained = []

    def training_step(self, batch, batch_idx):
        shard = batch["shard"] if isinstance(batch, dict) else batch
        self.trained.append(ids_of(shard))
        return (self.weight * shard.microbatches[0].input_ids.sum()).sum() * 1e-6

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


LOADERS = {
    "dataset": lambda dataset: dataset,
    "DataLoader": lambda dataset: DataLoader(dataset, batch_size=None),
    "StatefulDataLoader": lambda dataset: StatefulDataLoader(dataset, batch_size=None),
    "collated": lambda dataset: DataLoader(
        dataset, batch_size=None, collate_fn=lambda shard: {"shard": shard}
    ),
}


def fit(dataset, folder, *, loader, max_steps, callback=True, accumulate=1, resume=None):
    """What Lightning trains; every optimizer step leaves a checkpoint."""
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    module = Recorder()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[keep, *([DataPosition(dataset)] if callback else [])],
    )
    with dataset:
        trainer.fit(module, LOADERS[loader](dataset), ckpt_path=resume)
    return module.trained


@pytest.mark.parametrize(
    ("loader", "callback", "accumulate"),
    [
        ("DataLoader", True, 1),
        ("DataLoader", True, 2),
        ("StatefulDataLoader", True, 1),
        ("dataset", True, 1),
        ("collated", True, 1),
        ("StatefulDataLoader", False, 1),
        ("dataset", False, 1),
    ],
)
def test_lightning_resumes_exactly(service, tmp_path, loader, callback, accumulate):
    options = {"loader": loader, "callback": callback, "accumulate": accumulate}
    all_steps = STEPS // accumulate
    assert fit(service.dataset(), tmp_path / "whole", max_steps=-1, **options) == everything()
    first = fit(service.dataset(), tmp_path / "first", max_steps=2, **options)
    for saved in (1, 2):
        checkpoint = tmp_path / "first" / f"step={saved}.ckpt"
        rest = fit(
            service.dataset(), tmp_path / "rest", max_steps=all_steps, resume=checkpoint, **options
        )
        assert first[: saved * accumulate] + rest == everything()


def test_a_resumed_run_commits_nothing_before_its_optimizer_steps(service, tmp_path, monkeypatch):
    options = {"loader": "DataLoader", "accumulate": 2}
    fit(service.dataset(), tmp_path / "first", max_steps=1, **options)
    dataset, committed = service.dataset(), []
    monkeypatch.setattr(dataset, "commit_next", committed.append)
    saved = tmp_path / "first" / "step=1.ckpt"
    fit(dataset, tmp_path / "rest", max_steps=STEPS // 2, resume=saved, **options)
    assert committed == [2, 2]
