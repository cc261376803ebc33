"""Numbers between the host and the device: the only places where a step waits for a GPU.

The host should run ahead of the device, so that there is always work queued. It waits when it
reads a number. ``HostCopy`` waits for what computes the number, and for nothing that was queued
after it; ``sum_numbers`` does not wait for what the current stream has queued at all.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer_client.runtime.peers import PeerGroup


class HostCopy:
    """Numbers on their way to the host, after the work queued so far."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._copied: torch.cuda.Event | None = None
        if numbers.device.type == "cuda":
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(numbers.device))

    def read(self) -> list[float]:
        """The numbers [n], once they have arrived."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._numbers.cpu().tolist()


def to_device(numbers: Sequence[float], device: torch.device) -> Tensor:
    """The numbers as float64 [n] there, without waiting for it."""
    there = torch.tensor(numbers, dtype=torch.float64)
    if device.type == "cuda":
        there = there.pin_memory()
    return there.to(device, non_blocking=True)


def sum_numbers(numbers: Sequence[float], group: PeerGroup, *, action: str) -> list[float]:
    """The sum over the group of each of these numbers; exact for integers whose sum is below 2⁵³.

    Raises PeerError. Collective over ``group``: one small all-reduce, and one wait of the host.
    """
    return list(numbers) if group.size == 1 else start_sum(numbers, group, action=action).read()


def start_sum(numbers: Sequence[float], group: PeerGroup, *, action: str) -> HostCopy:
    """As ``sum_numbers``, on their way: reading them is the wait."""
    with group.aside():
        summed = to_device(numbers, group.device)
        group.post_sum(summed, action=action).wait()
        return HostCopy(summed)
