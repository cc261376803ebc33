"""What shows that a job was tokenized for another model: ids beyond its embeddings, and tokens that
are not its own where features go. Features replace embeddings wherever the plan says, so that these
would be trained without a word. Ids of another tokenizer that lie within the vocabulary show
nothing, and are trained.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from trainer_client.runtime import LayoutError
from trainer_client.shard import Microbatch, ModalityBatch

# What configurations of transformers call the tokens that stand for a modality's features.
_NAMES = {
    "vision": ("image_token_id", "image_token_index", "video_token_id", "video_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
}

_REMEDY = (
    "its pipeline.tokenizer, or a placeholder that it names, is not of this model. Give the job "
    "the tokenizer that lies beside the model, index it again and submit it under another name."
)


class OwnTokens:
    """Compares the microbatches of a model with it: the ids of each, and the first items of each
    kind with its configuration."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._left = set(_NAMES)

    def look_at(self, microbatch: Microbatch) -> None:
        """Raises LayoutError where ids, on the host, are not this model's."""
        ids = vars(microbatch)["input_ids"]  # not counted as read
        if ids is None or ids.device.type != "cpu" or not len(ids):
            return
        if (largest := int(ids.max())) >= self._words:
            raise LayoutError(
                f"the job's tokens go up to {largest:,}, and {self._named} has embeddings of "
                f"{self._words:,}: {_REMEDY}"
            )
        for modality in sorted(self._left):
            batch: ModalityBatch | None = vars(microbatch)[modality]
            exchange = None if batch is None else vars(batch)["exchange"]  # not counted as read
            own = self._own_tokens(_NAMES[modality])
            if exchange is None or not len(exchange.recv_positions) or not own:
                continue
            places = exchange.recv_positions
            told = _varied(ids, vars(microbatch)["position_ids"])[places]
            found = sorted(set(ids[places[told]].tolist()))
            if not found:
                continue
            self._left.discard(modality)
            if strange := [token for token in found if token not in own.values()]:
                said = ", ".join(f"{name} {token}" for name, token in own.items())
                raise LayoutError(
                    f"the job has token {strange[0]} where features of {modality} go, and "
                    f"{self._named} has {said}: {_REMEDY}"
                )

    def _own_tokens(self, names: tuple[str, ...]) -> dict[str, int]:
        """Those of the configuration that the model has embeddings of: a small model of random
        weights keeps the ids of the large one, which tell nothing."""
        found = {name: getattr(self._model.config, name, None) for name in names}
        return {
            name: token
            for name, token in found.items()
            if isinstance(token, int) and 0 <= token < self._words
        }

    @property
    def _words(self) -> int:
        # Asked anew, since embeddings may be resized. Adapters wrap them in ways that have no
        # number of them.
        return getattr(self._model.get_input_embeddings(), "num_embeddings", sys.maxsize)

    @property
    def _named(self) -> str:
        return type(self._model).__name__


def _varied(ids: Tensor, position_ids: Tensor) -> Tensor:
    """Whether each row's chunk has different tokens, bool[rows]. All tokens of a sample that could
    not be decoded are the same, and say nothing of the job's tokenizer."""
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[1:] = position_ids[1:] != position_ids[:-1] + 1
    chunk = begins.cumsum(0) - 1
    varied = torch.zeros(len(ids), dtype=torch.bool)
    varied[chunk[ids != ids[begins][chunk]]] = True
    return varied[chunk]
