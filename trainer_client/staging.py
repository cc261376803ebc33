"""Tensors in one buffer on the host, and each buffer in one copy on the device.

    numbers of a microbatch ─ bundled ─▶ one buffer, views of it ─┐ one copy a buffer
    items, where they arrived ─────────▶ a part's buffer ─────────┴▶ views of it on the device

A copy costs the host a call, and from memory that is not pinned also the wait until it is done; a
microbatch at CP degree 16 has some 60 small tensors. `bundled` gathers them, and `BufferCopies`
moves what they are views of.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

ALIGNED_BYTES = 64

Value = TypeVar("Value")
Move = Callable[[Tensor], Tensor]
Mapped = Callable[[Move], Value]
"""A value with a function applied to each of its tensors, always in the same order."""


def with_tensors(value: Value, move: Move) -> Value:
    """`value` with `move` applied to the tensors of its dataclasses and tuples, however deep."""
    changed: Any = value
    if isinstance(changed, Tensor):
        changed = move(changed)
    elif type(changed) is tuple and not all(type(each) is int for each in changed):
        changed = tuple(with_tensors(each, move) for each in changed)
    elif is_dataclass(changed) and not isinstance(changed, type):
        held = {field.name: getattr(changed, field.name) for field in fields(changed)}
        changed = replace(changed, **{name: with_tensors(of, move) for name, of in held.items()})
    found: Value = changed
    return found


def bundled(mapped: Mapped[Value], *, pin: bool) -> Value:
    """The value of `mapped` with its tensors copied into one buffer on the host, in their order.

    With `pin` the buffer is pinned, so that a copy from it need not be waited for; tensors that are
    pinned already stay where they are.
    """
    sizes: list[int] = []

    def measure(tensor: Tensor) -> Tensor:
        sizes.append(0 if _stays(tensor, pin) else -(-tensor.nbytes // ALIGNED_BYTES))
        return tensor

    mapped(measure)
    buffer = torch.empty(sum(sizes) * ALIGNED_BYTES, dtype=torch.uint8, pin_memory=pin)
    end = 0

    def place(tensor: Tensor) -> Tensor:
        nonlocal end
        if _stays(tensor, pin):
            return tensor
        start, end = end, end + -(-tensor.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        placed = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return placed.copy_(tensor)

    return mapped(place)


def _stays(tensor: Tensor, pin: bool) -> bool:
    return tensor.numel() == 0 or (pin and tensor.is_contiguous() and tensor.is_pinned())


class BufferCopies:
    """Moves tensors by moving the buffers that they are views of, each once.

    `copy` gets a buffer as bytes, uint8 [n], and gives it on the device. For contiguous tensors
    whose buffers hold nothing else, as `bundled` and the parts of a shard are. `buffers` are the
    copies that were made.
    """

    def __init__(self, copy: Move, device: torch.device) -> None:
        self._copy, self._device = copy, device
        self._found: dict[int, Tensor] = {}

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers on the device."""
        return list(self._found.values())

    def __call__(self, tensor: Tensor) -> Tensor:
        """The same tensor on the device."""
        if tensor.numel() == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._found:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._found[storage.data_ptr()] = self._copy(whole)
        start = tensor.storage_offset() * tensor.itemsize
        there = self._found[storage.data_ptr()]
        return there[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def copied_once(value: Value, device: torch.device) -> Value:
    """A dataclass with its tensors on `device`, by one copy that the host does not wait for."""
    if device.type == "cpu":
        return value
    packed = bundled(lambda move: with_tensors(value, move), pin=device.type == "cuda")
    copies = BufferCopies(lambda whole: whole.to(device, non_blocking=True), device)
    return with_tensors(packed, copies)
