"""Models of transformers, trained by `run_step`; and the position in its Trainer's checkpoints."""

from trainer_client.adapters.transformers.faults import UnsupportedModel
from trainer_client.adapters.transformers.position import DataPosition
from trainer_client.adapters.transformers.trainable import TrainableModel, trainable

__all__ = ["DataPosition", "TrainableModel", "UnsupportedModel", "trainable"]
