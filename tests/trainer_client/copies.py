"""What crosses between host and device while something runs, counted as torch dispatches it."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CountedCopies(TorchDispatchMode):
    """`blocking` and `started` are copies to another device, which the host waits for or not;
    `read` are values that the host waits for."""

    def __init__(self):
        super().__init__()
        self.blocking, self.started, self.read = [], [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = str(func)
        if name == "aten._to_copy.default":
            self._note(args[0], kwargs.get("device"), kwargs.get("non_blocking", False))
        elif name == "aten.copy_.default":
            waits_not = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            self._note(args[1], args[0].device, waits_not)
        elif name == "aten._local_scalar_dense.default" and args[0].device.type != "cpu":
            self.read.append(args[0].shape)
        return func(*args, **kwargs)

    def _note(self, source, device, non_blocking):
        device = source.device if device is None else torch.device(device)
        if device.type == source.device.type:
            return
        if device.type == "cpu":
            self.read.append(source.shape)
        else:
            (self.started if non_blocking else self.blocking).append(source.nbytes)


class Loopback:
    """In the place of a CP group whose other members are elsewhere: what would arrive is what is
    sent."""

    def __init__(self, size, index):
        self.size, self.index = size, index

    def post(self, sends, receives, **_):
        for (sent, _to), (arriving, _from) in zip(sends, receives, strict=True):
            arriving.copy_(sent)
        return self

    def wait(self):
        pass
