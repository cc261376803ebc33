"""The position of a dataset in the checkpoints of transformers' Trainer.

The Trainer keeps no state of its data: it resumes by fetching everything again and throwing it
away (`skip_first_batches`). This callback commits what the Trainer has trained, keeps the position
in `trainer_state.json`, and resumes from it at once.

    trainer = Trainer(model, TrainingArguments(..., max_steps=1000), train_dataset=dataset,
                      data_collator=collate, callbacks=[DataPosition(dataset)])
    trainer.train(resume_from_checkpoint=path_or_none)

`collate` takes a list of one shard (`per_device_train_batch_size=1`) and gives the model's inputs.
With several processes accelerate would divide the data again: override `get_train_dataloader` to
return `DataLoader(dataset, batch_size=None, collate_fn=...)`, which it leaves alone.
"""

import logging
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainer_client.dataset import ShardDataset
from trainer_client.errors import StateMismatch

STATE_KEY = "dataservice position"

log = logging.getLogger("trainer_client")


class DataPosition(TrainerCallback):
    """Commits the batches of an optimizer step after it, and saves and loads the position.

    Give it to the Trainer when it is made: it sets `ignore_data_skip`, so that nothing is skipped
    on top of the position.
    """

    def __init__(self, dataset: ShardDataset) -> None:
        self._dataset = dataset
        self._batches = 0  # batches since the last optimizer step

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Turn off the Trainer's skipping: the dataset itself starts at the right step."""
        args.ignore_data_skip = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Take the position of the checkpoint that was loaded, if one was.

        Raises StateMismatch where it has none.
        """
        self._batches = 0
        if state.global_step:
            saved = (state.stateful_callbacks or {}).get(STATE_KEY)
            if saved is None:
                raise StateMismatch(
                    f"the checkpoint of step {state.global_step} has no position of the data: its "
                    f"trainer_state.json has no {STATE_KEY!r}. Resume from one that was saved with "
                    "this callback, or without the callback and with ignore_data_skip=False, which "
                    "fetches all steps before again."
                )
            self._dataset.load_state_dict(saved)
            log.info("resumed behind step %d of the data", saved["step"] - 1)
        self._dataset.expect_commits()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Count a batch whose gradients are accumulated."""
        self._batches += 1

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Commit an optimizer step. If the Trainer saves a checkpoint, it does so after this."""
        self._dataset.commit_next(self._batches + 1)
        self._batches = 0
        # Another callback may still decide to save, so the position is always noted.
        saves = control.should_save
        position = self._dataset.state_dict() if saves else self._dataset.position()
        state.stateful_callbacks = {**(state.stateful_callbacks or {}), STATE_KEY: position}
