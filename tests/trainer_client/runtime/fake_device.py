"""A device that computes as the CPU does, and counts what would make the host wait for it.

Tensors "there" say that they are on the meta device, which autograd knows and torch has no storage
for; each holds its numbers in a tensor of the CPU. Every operation on them goes through
``DeviceTensor.__torch_dispatch__``, and so does every copy to and from them. What reads their
numbers on the host (item, tolist, bool, nonzero, a copy to the CPU, a mask as an index) is noted.
"""

import torch
from torch._C import _DisableTorchDispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

THERE = torch.device("meta")
NUMBERS = {"_local_scalar_dense", "equal", "is_nonzero"}  # which end up in Python
SIZES = {"nonzero", "masked_select", "_unique2", "unique_dim"}  # of results, known there only
INDEXED = {"index", "index_put", "index_put_"}


def name_of(operation):
    """As in "add" of "aten.add.Tensor"."""
    return str(operation).split(".")[1]


class DeviceTensor(torch.Tensor):
    """A tensor there; ``held`` has its numbers."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=THERE,
            requires_grad=held.requires_grad,
        )

    def __init__(self, held):
        self.held = held.detach()

    def __repr__(self):
        return f"DeviceTensor({self.held})"

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return computed(operation, args, kwargs or {})


class FakeDevice(TorchDispatchMode):
    """While it is entered, tensors can be made there; ``reads`` lists what waited for it."""

    def __init__(self):
        super().__init__()
        self.reads = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._note(operation, args, kwargs)
        return computed(operation, args, kwargs)

    def _note(self, operation, args, kwargs):
        name = name_of(operation)
        there = [each for each in tree_leaves((args, kwargs)) if isinstance(each, DeviceTensor)]
        target = kwargs.get("device")
        if name == "_to_copy":
            if there and target is not None and torch.device(target).type == "cpu":
                self.reads.append("a copy to the host")
        elif name == "copy_":
            into, source = args[:2]
            if isinstance(source, DeviceTensor) and not isinstance(into, DeviceTensor):
                self.reads.append("a copy to the host")
        elif there and (name in NUMBERS | SIZES or by_mask(name, args)):
            self.reads.append(str(operation))


def by_mask(name, args):
    """Whether an index is a mask: how much it selects is known on the device only."""
    return name in INDEXED and any(
        index is not None and index.dtype == torch.bool for index in args[1]
    )


def computed(operation, args, kwargs):
    """The operation on the CPU; its result is there if anything of it was, or should be."""
    name, target = name_of(operation), kwargs.get("device")
    found = any(isinstance(each, DeviceTensor) for each in tree_leaves((args, kwargs)))
    there = found if target is None else torch.device(target) == THERE
    if target is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    with _DisableTorchDispatch():
        result = operation(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs))
    if name.endswith("_"):
        return args[0]
    return tree_map(wrapped, result) if there and name not in NUMBERS else result


def unwrapped(value):
    return value.held if isinstance(value, DeviceTensor) else value


def wrapped(value):
    plain = isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor)
    return DeviceTensor(value) if plain else value


def moved(model):
    """The model with its parameters there."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            there = DeviceTensor(parameter.data)
            trains = parameter.requires_grad
            setattr(module, name, torch.nn.Parameter(there, requires_grad=trains))
    return model


class Staged:
    """Gloo for tensors there: it sends and receives the numbers that they hold."""

    def __init__(self, transport):
        self._transport = transport
        self.supports_coalescing = transport.supports_coalescing

    def send(self, tensors, *where):
        return self._transport.send([unwrapped(t) for t in tensors], *where)

    def recv(self, tensors, *where):
        return self._transport.recv([unwrapped(t) for t in tensors], *where)

    def allreduce(self, tensors, operation):
        return self._transport.allreduce([unwrapped(t) for t in tensors], operation)

    def allgather(self, gathered, tensors):
        return self._transport.allgather(
            [[unwrapped(t) for t in each] for each in gathered], [unwrapped(t) for t in tensors]
        )

    def shutdown(self):
        self._transport.shutdown()

    def abort(self):
        self._transport.abort()
