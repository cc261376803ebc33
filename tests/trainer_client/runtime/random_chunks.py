"""The small model of ``random_steps`` cut into pipeline chunks, and what a stage fetches."""

from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.trainer_client.runtime.random_steps import WIDTH
from trainer_client.runtime import LinearLogits, forward_microbatch, scatter_rows
from trainer_client.runtime.pipeline_parallel import HiddenStates

HIDDEN = HiddenStates(width=WIDTH, dtype=torch.float64)


# The small model, cut into chunks that share its parameters.


class Chunk(nn.Module):
    """Some of: embedding (with encoders), layer 0, layer 1, head."""

    def __init__(self, model, pieces):
        super().__init__()
        self.trains = model.encoder_trains
        self.dummy_item = model.dummy_item
        if "embed" in pieces:
            self.tokens, self.places, self.encoders = model.tokens, model.places, model.encoders
        self.layers = nn.ModuleList(model.layers[p] for p in pieces if isinstance(p, int))
        self.head = model.head if "head" in pieces else nn.Identity()

    def encode(self, modality, batch):
        return self.encoders[modality](torch.cat(batch.items))

    def encoder_trains(self, modality):
        return self.trains(modality)

    def decode(self, microbatch, features, attention):
        x = self.tokens(microbatch.input_ids)
        for found in features.values():
            x = scatter_rows(x, found.rows, found.positions)
        return self.body(x + self.places(microbatch.position_ids), attention)

    def forward(self, microbatch, *rest):
        if hasattr(self, "tokens"):
            return forward_microbatch(self, microbatch, *rest)
        hidden, attention = rest
        return self.body(hidden, attention)

    def body(self, x, attention):
        for layer in self.layers:
            x = layer(x, attention)
        return self.head(x)


class ChunkWithoutLogits(Chunk):
    """The last one's loss is taken by its head. Where it is sharded, in its own forward."""

    def forward(self, microbatch, *rest):
        if not isinstance(self.head, nn.Linear):
            return super().forward(microbatch, *rest)
        head, self.head = self.head, nn.Identity()
        hidden = super().forward(microbatch, *rest)
        self.head = head
        logits = LinearLogits(hidden=hidden, head=head)
        return logits.loss_sum(microbatch) if isinstance(self, FSDPModule) else logits


def cut(model, chunks, kind=Chunk):
    """The model as this many chunks, in order."""
    return [kind(model, list(p)) for p in np.array_split(np.array(PIECES, dtype=object), chunks)]


PIECES = ["embed", 0, 1, "head"]


def only_its_parts(shard, stage, stages):
    """What a rank has that asked for the parts of its stage alone."""

    def stripped(microbatch):
        if stage > 0:
            microbatch = replace(
                microbatch,
                input_ids=None,
                vision=None,
                audio=None,
                labels=microbatch.labels,
            )
        if stage < stages - 1:
            ids = microbatch.input_ids if stage == 0 else None
            microbatch = replace(microbatch, input_ids=ids, labels=None)
        return microbatch

    return replace(shard, microbatches=tuple(map(stripped, shard.microbatches)))
