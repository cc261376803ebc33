"""Gloo for tensors on any device: they travel through host memory.

For ranks that NCCL cannot connect, such as several on one GPU, and for checks of a GPU's results
where there is one GPU alone. The host waits for the device at each message, so it is slow; between
GPUs that NCCL connects, use that.

Contract: as that of gloo. A tensor that is sent may be changed once the call returns; one that is
received is filled when its work has been waited for.
"""

from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
from torch import Tensor


class HostTransport:
    """A gloo process group whose tensors may be on another device.

    Tensors on the host are handed to gloo as they are, unless `always`, by which tests walk the
    other path.
    """

    supports_coalescing = False

    def __init__(self, gloo: Any, *, always: bool = False) -> None:
        self._gloo = gloo
        self._always = always

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> Any:
        """Start sending copies."""
        if self._direct(tensors):
            return self._gloo.send(tensors, peer, tag)
        held = [_on_host(tensor) for tensor in tensors]
        return HostWork(self._gloo.send(held, peer, tag), held, [])

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> Any:
        """Start receiving."""
        if self._direct(tensors):
            return self._gloo.recv(tensors, peer, tag)
        held = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        return HostWork(self._gloo.recv(held, peer, tag), held, tensors)

    def allreduce(self, tensors: list[Tensor], op: object, /) -> Any:
        """Start reducing, in place."""
        if self._direct(tensors):
            return self._gloo.allreduce(tensors, op)
        held = [_on_host(tensor) for tensor in tensors]
        return HostWork(self._gloo.allreduce(held, op), held, tensors)

    def allgather(self, out: list[list[Tensor]], tensors: list[Tensor], /) -> Any:
        """Start gathering every rank's tensor."""
        if self._direct(tensors):
            return self._gloo.allgather(out, tensors)
        given = [_on_host(tensor) for tensor in tensors]
        held = [[torch.empty(t.shape, dtype=t.dtype) for t in of_rank] for of_rank in out]
        work = self._gloo.allgather(held, given)
        # What is given is kept as well, until gloo has read it.
        return HostWork(work, [*chain(*held), *given], [*chain(*out)])

    def _start_coalescing(self) -> None:
        raise NotImplementedError("gloo sends each message by itself")

    def _end_coalescing(self) -> Any:
        raise NotImplementedError("gloo sends each message by itself")

    def shutdown(self) -> None:
        """Gloo closes its connections once nobody holds it."""

    def abort(self) -> None:
        """As `shutdown`."""

    def _direct(self, tensors: Sequence[Tensor]) -> bool:
        return not self._always and all(tensor.device.type == "cpu" for tensor in tensors)


class HostWork:
    """A piece of gloo's work whose results go on to `targets`, where there are any, when it is
    waited for."""

    def __init__(self, work: Any, held: list[Tensor], targets: Sequence[Tensor]) -> None:
        self._work, self._held, self._targets = work, held, targets

    def is_completed(self) -> bool:
        """Whether gloo is done."""
        return bool(self._work.is_completed())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait, and copy. Raises RuntimeError where the transfer fails, or takes longer."""
        done = self._work.wait() if timeout is None else self._work.wait(timeout)
        for target, held in zip(self._targets, self._held, strict=False):
            target.copy_(held)
        self._targets = []
        return bool(done)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
