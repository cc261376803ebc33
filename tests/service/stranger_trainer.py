"""A stranger's trainer in float64, which tells what each step was. LOOP is the front page's, or
that of transformers' Trainer or of Lightning, as docs/trainers.md has them.

torchrun ... stranger_trainer.py LOOP ADDRESS MODEL OUT
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import AutoModelForImageTextToText

from trainer_client import ShardDataset
from trainer_client.adapters.transformers import trainable
from trainer_client.runtime import GroupPool, run_step

loop, address, folder, out = sys.argv[1:]
STEPS, TIMEOUT_S = 3, 120
told = []


def trained(model, shard, groups):
    """One step's gradients."""
    result = run_step(model, shard, groups)
    firsts = [mb for mb in shard.microbatches if not mb.idle and mb.cp_rank == 0]
    samples = [sample for mb in firsts for sample in mb.sample_ids.tolist()]
    told.append({"loss": result.loss, "samples": samples, "degrees": shard.plan.degrees})
    return result.loss


def a_loop(model, optimizer, dataset):
    dist.init_process_group("gloo")
    with GroupPool(timeout_s=TIMEOUT_S) as groups:
        for shard in dataset:
            trained(model, shard, groups)
            optimizer.step()
            optimizer.zero_grad()
            dataset.commit(shard.step)


def transformers_trainer(model, optimizer, dataset):
    from transformers import Trainer, TrainingArguments

    from trainer_client.adapters.transformers import DataPosition, LibraryCheckpoints

    class ShardTrainer(LibraryCheckpoints, Trainer):
        def get_train_dataloader(self):
            return DataLoader(dataset, batch_size=None, collate_fn=lambda s: {"shard": s})

        def training_step(self, model, inputs, num_items_in_batch=None):
            return torch.tensor(trained(model, inputs["shard"], groups))

    settings = TrainingArguments(
        f"{out}.trainer", max_steps=STEPS, use_cpu=True, ddp_find_unused_parameters=True,
        report_to="none", max_grad_norm=0, disable_tqdm=True,
    )  # fmt: skip
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = ShardTrainer(
        model,
        settings,
        train_dataset=dataset,
        callbacks=[DataPosition(dataset)],
        optimizers=(optimizer, constant),
    )
    with GroupPool(timeout_s=TIMEOUT_S) as groups:
        trainer.train()


def lightning(model, optimizer, dataset):
    from lightning.pytorch import LightningModule, Trainer

    from trainer_client.adapters.lightning import DataPosition

    class ShardModule(LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.model = model

        def training_step(self, shard, index):
            trained(self.model, shard, self.groups)
            self.optimizers().step()
            self.optimizers().zero_grad()

        def on_fit_start(self):
            self.groups = GroupPool(timeout_s=TIMEOUT_S)

        def on_fit_end(self):
            self.groups.close()

        def configure_optimizers(self):
            return optimizer

    trainer = Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_steps=STEPS,
        callbacks=[DataPosition(dataset)], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(ShardModule(), DataLoader(dataset, batch_size=None))


def main():
    model = trainable(AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with ShardDataset(address, job="stranger", timeout_s=TIMEOUT_S) as dataset:
        {"loop": a_loop, "Trainer": transformers_trainer, "Lightning": lightning}[loop](
            model, optimizer, dataset
        )
    Path(f"{out}.{dist.get_rank()}").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
