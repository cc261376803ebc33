"""Copies shards to the device that trains while the step before computes.

    prefetch thread                                        training loop
    pinned buffers ═ non-blocking copies on a side stream ═▶ Sent ─ arrive ─▶ Shard
                                             copied: event ──┘  the loop's stream waits for it

The plan's numbers (`cu_seqlens`, `lengths`, `sample_ids`, splits) stay on the host, where
groups and attention layouts are worked out from them.

The thread only starts copies; it never waits for the device. A buffer lives until its copy is
done (torch's pinned allocator sees to it), and memory on the device until the loop's stream has
used it (`record_stream`). Other devices than CUDA get plain copies, the host none.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trainer_client.shard import Shard


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sent:
    """A shard whose copies have been started, and the CUDA event after the last of them."""

    shard: Shard
    copied: torch.cuda.Event | None = None


class DeviceCopier:
    """Sends shards to `device`; None leaves them where they are, unpinned."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device is not None and device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def pins(self) -> bool:
        """Whether bytes should arrive in pinned memory."""
        return self._stream is not None

    def send(self, shard: Shard) -> Sent:
        """Start copying; called by the prefetch thread."""
        device, stream = self._device, self._stream
        if device is None or device.type == "cpu":
            return Sent(shard=shard)
        if stream is None:
            return Sent(shard=shard.mapped(lambda tensor: tensor.to(device)))
        with torch.cuda.stream(stream):
            on_device = shard.mapped(lambda tensor: _pinned(tensor).to(device, non_blocking=True))
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(stream)
        return Sent(shard=on_device, copied=copied)

    def arrive(self, sent: Sent) -> Shard:
        """The shard, for work on the calling thread's current stream."""
        if sent.copied is not None:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(sent.copied)
            for tensor in _tensors(sent.shard):
                tensor.record_stream(computing)
        return sent.shard


def resolve_device(device: torch.device | str | None) -> torch.device | None:
    """`device` with its index: threads other than the caller's would take "cuda" for cuda:0."""
    if device is None:
        return None
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    # Tokens were widened and indices made on the host; items are views of pinned buffers.
    return tensor if tensor.is_pinned() else tensor.pin_memory()


def _tensors(shard: Shard) -> Iterator[torch.Tensor]:
    """What `send` moved."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    shard.mapped(note)
    yield from found
