"""Models of transformers, trained by `run_step`; and the position in its Trainer's checkpoints."""

from trainer_client.adapters.transformers.checkpoints import LibraryCheckpoints
from trainer_client.adapters.transformers.chunks import (
    WholeEncoders,
    hidden_states,
    pipeline_chunks,
    sum_tied_gradient,
)
from trainer_client.adapters.transformers.cut_encoders import CutEncoders
from trainer_client.adapters.transformers.faults import UnsupportedModel
from trainer_client.adapters.transformers.position import DataPosition
from trainer_client.adapters.transformers.trainable import TrainableModel, trainable

__all__ = [
    "CutEncoders",
    "DataPosition",
    "LibraryCheckpoints",
    "TrainableModel",
    "UnsupportedModel",
    "WholeEncoders",
    "hidden_states",
    "pipeline_chunks",
    "sum_tied_gradient",
    "trainable",
]
