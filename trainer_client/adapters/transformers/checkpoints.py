"""Checkpoints of transformers' Trainer that `from_pretrained` reads.

The Trainer saves a model of transformers by `save_pretrained`, and of anything else the bare state
dict: without config.json, under the wrapper's names, and with an error where embeddings are tied.
What it is given here is a TrainableModel, and what is saved is the library's model inside.

    class ShardTrainer(LibraryCheckpoints, Trainer):
        ...

    model = AutoModelForCausalLM.from_pretrained("trainer-out/checkpoint-500")
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module

from trainer_client.adapters.transformers.trainable import TrainableModel


class LibraryCheckpoints:
    """Stands before `Trainer` among the bases of a Trainer that trains a TrainableModel.

    Each checkpoint is that of the library's model, or of PEFT's adapters where it has some.
    ``trainer.train(resume_from_checkpoint=...)`` takes its weights from it, and so does the end of
    a training with ``load_best_model_at_end=True``.
    """

    model: Any
    state: Any

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """What the Trainer writes of a model of transformers."""
        if state_dict is not None:  # gathered from the wrapped model, so under the wrapper's names
            state_dict = {name.removeprefix("model."): w for name, w in state_dict.items()}
        with self._library_model():
            super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Take the weights of a checkpoint.

        Files may name weights otherwise than modules do (Qwen-VL, LLaVA): only `from_pretrained`
        translates, where the Trainer's own loading would go on with what it has, and warn.
        """
        library = self.model.model
        if hasattr(library, "peft_config"):
            with self._library_model():
                super()._load_from_checkpoint(resume_from_checkpoint)  # type: ignore[misc]
            return
        saved = type(library).from_pretrained(resume_from_checkpoint, dtype="auto")
        library.load_state_dict(saved.state_dict())

    def _load_best_model(self) -> None:
        """Take the weights of the best checkpoint: the Trainer's own loading looks for the files
        and the attributes of a model of transformers."""
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    @contextmanager
    def _library_model(self) -> Iterator[None]:
        """The Trainer has the library's model meanwhile."""
        trained: Module = self.model
        assert isinstance(trained, TrainableModel)
        self.model = trained.model
        try:
            yield
        finally:
            self.model = trained
