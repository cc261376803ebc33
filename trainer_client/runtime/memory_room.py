"""Whether a device has room for the features of one more wave, by what its steps were seen to take.

    peak of a step = held at its start + rise        the rise of any step so far, without the next
    one wave ahead = what encoders of that wave keep for their backward pass

Encoders that train keep their activations until the backward pass, so those of two waves where one
goes ahead of the decoder. What they keep is measured where they run, by modality and input number,
and grows with the input no faster than that. A step goes ahead where

    held at its start + largest rise + what its largest wave keeps ≤ 90 % of what torch can have

The rest is for memory that the allocator holds in pieces, and for connections made later. Nothing
is known before a whole step was seen; optimizer states made meanwhile are held at the next start.
All figures are the allocator's own, so asking for them waits for no device.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from trainer_client.shard import MODALITIES, Microbatch, ModalityBatch

FILLED = 0.9  # of the memory that torch can have


class DeviceMemory(Protocol):
    """Bytes of a device, as this process has them."""

    def held(self) -> int:
        """In tensors now."""
        ...

    def peak(self) -> int:
        """In tensors at most, so far."""
        ...

    def usable(self) -> int:
        """In tensors if all memory that is free, or that torch keeps, were in them."""
        ...


class CudaMemory:
    """As torch's caching allocator counts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def held(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def usable(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device)


def memory_of(device: torch.device) -> DeviceMemory | None:
    """None for devices whose memory is not counted: those have no room that anyone knows of."""
    return CudaMemory(device) if device.type == "cuda" else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begun:
    memory: DeviceMemory
    held: int
    peak: int
    ahead: int | None
    """Bytes that a wave ahead would keep; None where a modality was not measured yet."""


class MemoryRoom:
    """Of one model on one device, step after step."""

    def __init__(self) -> None:
        self._kept: dict[str, float] = {}  # bytes for a number of an item, at most
        self._rise: int | None = None
        self._usable: int | None = None
        self._begun: _Begun | None = None

    def begin(self, device: torch.device, planned: Sequence[Microbatch]) -> bool:
        """A step begins: whether one wave of it may go ahead, as far as this replica knows."""
        memory = memory_of(device)
        if memory is None:
            return False
        ahead = max((self._wave_keeps(microbatch) for microbatch in planned[1:]), default=0.0)
        known = ahead != float("inf")
        begun = _Begun(
            memory=memory,
            held=memory.held(),
            peak=memory.peak(),
            ahead=int(ahead) if known else None,
        )
        self._begun = begun
        if self._rise is None or begun.ahead is None:
            return False
        if self._usable is None:  # asked for once: all connections of a step are made by now
            self._usable = memory.usable()
        return begun.held + self._rise + begun.ahead <= FILLED * self._usable

    @contextmanager
    def encoding(self, modality: str, batch: ModalityBatch) -> Iterator[None]:
        """The body encodes these items; what it leaves held is what they keep."""
        begun, numbers = self._begun, batch.item_numbers
        if begun is None or not numbers:
            yield
            return
        before = begun.memory.held()
        yield
        kept = (begun.memory.held() - before) / numbers
        self._kept[modality] = max(kept, self._kept.get(modality, 0.0))

    def end(self, *, ahead: bool) -> None:
        """The step's work is queued; ``ahead``: whether its waves went ahead."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        peak = begun.memory.peak()
        if self._rise is not None and peak == begun.peak:
            return  # it took no more than others
        if not ahead:
            self._rise = max(self._rise or 0, peak - begun.held)
        elif self._rise is not None and begun.ahead is not None:
            self._rise = max(self._rise, peak - begun.held - begun.ahead)

    def _wave_keeps(self, microbatch: Microbatch) -> float:
        batches: Mapping[str, ModalityBatch | None] = {
            name: getattr(microbatch, name) for name in MODALITIES
        }
        return sum(
            self._kept.get(name, float("inf")) * batch.item_numbers
            for name, batch in batches.items()
            if batch is not None and batch.item_numbers
        )
