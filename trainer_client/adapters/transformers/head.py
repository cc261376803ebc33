"""The loss of a model's own output head, without its logits.

    model's forward ─▶ decoder ─ hidden states ─▶ head ─▶ scale, softcap ─▶ logits
                                                   └ here the loss is taken, by chunks of rows

The model runs its own forward, in which its head takes the loss instead of giving logits. What a
model makes of the head's output (Cohere scales it, Gemma 2 caps it) must be known to the loss. So
in the first microbatch the model runs once more, and its head gives known numbers: what comes out
says what the model does with them. One that does something else, or does it by weights of its own,
is trained with its logits.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer_client.runtime import linear_cross_entropy
from trainer_client.runtime.linear_loss import instead_of_forward, is_plain_linear
from trainer_client.shard import Microbatch

NUMBERS = (0.25, -1.5, 40.0)  # a softcap bends the last
ROUNDINGS = 4  # of the type that the logits are computed in

log = logging.getLogger("trainer_client")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shaping:
    """What a model makes of its head's output: softcap · tanh(scale · output / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    def of(self, output: Tensor) -> Tensor:
        """The logits of some outputs, in fp64."""
        logits = output.double() * self.scale
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap


class HeadLoss:
    """Runs a model of transformers up to its loss; its head is asked for anew in every call."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._shaping: Shaping | None = None
        self._needs_logits = False

    def of(self, run: Callable[[], Tensor], microbatch: Microbatch) -> Tensor:
        """The sum of the microbatch's loss, a scalar, or logits [1, rows, vocabulary] where the
        loss cannot be taken without. ``run``: the model's forward, which gives logits."""
        head = self._model.get_output_embeddings()
        if self._needs_logits or not is_plain_linear(head):
            return run()
        if self._shaping is None:
            return self._first(run, head, microbatch)
        taken: list[Tensor] = []

        def take(hidden: Tensor) -> Tensor:
            taken.append(self._loss(hidden, head, microbatch))
            return taken[-1]

        with instead_of_forward(head, take):
            run()
        return taken[0]

    def _first(self, run: Callable[[], Tensor], head: Any, microbatch: Microbatch) -> Tensor:
        types: list[torch.dtype] = []

        def show(hidden: Tensor) -> Tensor:
            types.append(hidden.dtype)
            return _numbers(head.out_features, hidden)

        with torch.enable_grad(), instead_of_forward(head, show):
            shown = run()
        self._shaping = self._found(shown, types[0], head.out_features)
        if self._shaping is None:
            log.info(
                "the logits of %s are more than a scaled or capped output of its head, so they are "
                "held in memory",
                type(self._model).__name__,
            )
            self._needs_logits = True
        del shown
        return self.of(run, microbatch)

    def _loss(self, hidden: Tensor, head: Any, microbatch: Microbatch) -> Tensor:
        assert self._shaping is not None
        return linear_cross_entropy(
            hidden[0],
            head.weight,
            microbatch.labels,
            None if microbatch.weights is None else microbatch.loss_weights,
            bias=head.bias,
            scale=self._shaping.scale,
            softcap=self._shaping.softcap,
        )

    def _found(self, shown: Tensor, computed_in: torch.dtype, width: int) -> Shaping | None:
        """What makes of the head's numbers what came out of the model, without weights."""
        given = _numbers(width, shown.double())
        if shown.requires_grad or shown.shape != given.shape:
            return None
        rounding = max(torch.finfo(kind).eps for kind in (computed_in, shown.dtype))
        for shaping in self._known():
            expected = shaping.of(given)
            if shown.double().allclose(expected, rtol=ROUNDINGS * rounding, atol=0.0):
                return shaping
        return None

    def _known(self) -> Iterator[Shaping]:
        """None, and those that its config has numbers for."""
        yield Shaping()
        config = self._model.config.get_text_config()
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            yield Shaping(softcap=cap)
        if (scale := getattr(config, "logit_scale", None)) is not None:
            yield Shaping(scale=scale)
        if (divisor := getattr(config, "logits_scaling", None)) is not None:
            yield Shaping(scale=1 / divisor)


def _numbers(width: int, like: Tensor) -> Tensor:
    """A row of known outputs of a head, [1, 1, width]."""
    times = -(-width // len(NUMBERS))
    return like.new_tensor(NUMBERS).repeat(times)[:width].reshape(1, 1, width)
