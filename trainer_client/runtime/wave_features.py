"""The features of a wave: encoded by whoever was given the items, and sent to whoever computes.

    encode ─ rows in the order of their destinations ─ post ─ …on their way… ─ take ─ decoder

Where encoders have a stream of their own (``encoder_stream.py``), the first three run on it, and
``take`` is where the computing stream waits.
"""

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer_client.runtime.clock import switch_in_backward, switch_phase
from trainer_client.runtime.encoder_stream import EncoderStream, EncoderTimes, tell_encoded
from trainer_client.runtime.exchange import Arriving, start_exchange
from trainer_client.runtime.faults import LayoutError
from trainer_client.runtime.group_pool import GroupPool
from trainer_client.runtime.phases import BACKWARD, EXCHANGE, FORWARD, OfWave, Place, moves_rows
from trainer_client.shard import MODALITIES, Microbatch, ModalityBatch

if TYPE_CHECKING:  # which decodes what is made here
    from trainer_client.runtime.step import MultimodalModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """Feature rows that arrived for a microbatch, [R, width], and their local tokens [R].

    Put them in with ``scatter_rows(embeddings, features.rows, features.positions)``, also when
    there are none.
    """

    rows: Tensor
    positions: Tensor


class WaveFeatures:
    """The features of one microbatch on their way to the decoder, by modality.

    ``stream``: where encoders run; None for where everything does. Making one encodes.
    """

    def __init__(
        self,
        model: "MultimodalModel",
        microbatch: Microbatch,
        *,
        groups: GroupPool,
        stream: EncoderStream | None,
        post: bool,
    ) -> None:
        """``post``: each modality at once, so that it travels under the next one's encoder."""
        self._stream = stream
        self._previous: Tensor | None = None
        self._of: dict[str, _OneModality] = {}
        encode = partial(_OneModality, model, microbatch, groups=groups, stream=stream)
        with self._beside():
            for modality in MODALITIES:
                if getattr(microbatch, modality) is not None:  # else on no replica
                    self._of[modality] = encode(modality)
                    if post:
                        self._post(self._of[modality])

    def post(self) -> None:
        """Start to exchange what is not on its way yet; in the same place on all replicas."""
        waiting = [each for each in self._of.values() if not each.posted]
        if waiting:
            with self._beside():
                for each in waiting:
                    self._post(each)

    def take(self) -> dict[str, Features]:
        """The rows, once they are here."""
        return {modality: each.take() for modality, each in self._of.items()}

    def _post(self, each: "_OneModality") -> None:
        self._previous = each.post(after=self._previous)

    def _beside(self) -> AbstractContextManager[None]:
        return nullcontext() if self._stream is None else self._stream.entered()


class _OneModality:
    def __init__(
        self,
        model: "MultimodalModel",
        microbatch: Microbatch,
        modality: str,
        *,
        groups: GroupPool,
        stream: EncoderStream | None,
    ) -> None:
        self._stream = stream
        self._groups = groups
        self._modality = modality
        self._own = OfWave(microbatch.wave)
        self._arriving: Arriving | None = None
        batch: ModalityBatch = getattr(microbatch, modality)
        self._plan = batch.exchange
        moves = moves_rows(self._plan, replica=groups.replica)  # else there is nothing to exchange
        self._forward = Place(modality, microbatch.wave, FORWARD) if moves else None
        back = (EXCHANGE, Place(modality, microbatch.wave, BACKWARD))
        self._backward: tuple[str, Hashable] = (
            back if moves else (f"{modality}_backward", self._own)
        )
        self._trains = model.encoder_trains(modality)
        switch_phase(f"{modality}_forward", self._own)
        began = None if stream is None else stream.mark()
        with (
            groups.room.encoding(modality, batch),
            torch.set_grad_enabled(self._trains and torch.is_grad_enabled()),
        ):
            encoded = encoded_rows(model, modality, batch)
            self._sent = encoded.index_select(0, self._plan.send_rows.to(encoded.device))
        self._encoded = None if stream is None else stream.mark()
        self._posted = self._encoded
        if began is not None and self._encoded is not None:
            tell_encoded(
                EncoderTimes(
                    modality=modality, wave=microbatch.wave, began=began, ended=self._encoded
                )
            )

    @property
    def posted(self) -> bool:
        """Whether the rows are on their way."""
        return self._arriving is not None

    def post(self, *, after: Tensor | None) -> Tensor | None:
        """Start to exchange; ``after``: the rows of the exchange before, of which these are the
        next where gradients flow back."""
        if self._forward is not None:
            switch_phase(EXCHANGE, self._forward)
        self._arriving = start_exchange(
            switch_in_backward(self._sent, f"{self._modality}_backward", self._own),
            self._plan.send_splits,
            self._plan.recv_splits,
            self._groups.everyone,
            after=after,
            differentiable=self._trains,
        )
        self._posted = None if self._stream is None else self._stream.mark()
        return self._arriving.rows if self._trains else after

    def take(self) -> Features:
        """The rows, for work on the current stream."""
        assert self._arriving is not None, "posted before it is taken"
        if self._stream is not None and self._encoded is not None:
            switch_phase(f"{self._modality}_forward", self._own)  # what no decoder hid of it
            self._stream.wait(self._encoded)
        if self._forward is not None:
            switch_phase(EXCHANGE, self._forward)
        if self._stream is not None and self._posted is not None:
            self._stream.wait(self._posted)  # own rows were put in place there
            self._stream.hand_over(self._arriving.rows)
        rows = switch_in_backward(self._arriving.wait(), *self._backward)
        return Features(rows=rows, positions=self._plan.recv_positions)


def keeps_for_backward(model: "MultimodalModel", microbatch: Microbatch) -> bool:
    """Whether encoding this microbatch keeps anything; the same on all replicas."""
    encoded = [name for name in MODALITIES if getattr(microbatch, name) is not None]
    return torch.is_grad_enabled() and any(map(model.encoder_trains, encoded))


def encoded_rows(model: "MultimodalModel", modality: str, batch: ModalityBatch) -> Tensor:
    """Feature rows of the batch's items; no rows where a dummy item was encoded.

    Raises LayoutError where there are others than the plan counts.
    """
    if not batch.items:
        return model.encode(modality, replace(batch, items=[model.dummy_item(modality)]))[:0]
    encoded = model.encode(modality, batch)
    planned = len(batch.exchange.send_rows)
    if encoded.shape[0] != planned:
        raise LayoutError(
            f"the {modality} encoder gave {encoded.shape[0]} rows for {len(batch.items)} items "
            f"whose tokens the plan counts as {planned}; check that the model's patch and merge "
            "sizes are those of the job's processor"
        )
    return encoded
