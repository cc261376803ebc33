"""The position of a dataset in Lightning's checkpoints.

If the number of batches is unknown, Lightning fetches one batch ahead of the one it trains, and
saves the state that a stateful loader has at that moment. This callback commits what Lightning has
trained, and puts the position into the checkpoint with every kind of loader.

    trainer = Trainer(callbacks=[DataPosition(dataset)], ...)
    trainer.fit(module, DataLoader(dataset, batch_size=None), ckpt_path=path_or_none)
"""

from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # Lightning is also released under this name
    from pytorch_lightning import Callback, LightningModule, Trainer

from trainer_client.dataset import ShardDataset


class DataPosition(Callback):
    """Commits a batch once the optimizer has stepped with it, and saves and loads the position.

    A batch is a shard, as from `DataLoader(dataset, batch_size=None)`, with any `collate_fn`. With
    `accumulate_grad_batches` the batches of an optimizer step are committed together. Resuming
    works on another number of ranks; the position is the same on all of them.
    """

    def __init__(self, dataset: ShardDataset) -> None:
        self._dataset = dataset
        self._batches = 0  # batches since the last optimizer step
        self._optimizer_steps = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on only this callback's commits move the position."""
        self._dataset.expect_commits()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from the optimizer steps of the checkpoint, which Lightning has restored by now."""
        self._batches, self._optimizer_steps = 0, trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any
    ) -> None:
        """Called before Lightning's own checkpoint callbacks, which come last."""
        self._batches += 1
        if trainer.global_step > self._optimizer_steps:
            self._dataset.commit_next(self._batches)
            self._batches, self._optimizer_steps = 0, trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        """The position, for the checkpoint."""
        return dict(self._dataset.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position from the checkpoint, before the loader is used."""
        self._dataset.load_state_dict(state_dict)
