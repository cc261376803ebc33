"""A device that computes as the CPU does, and counts what would make the host wait for it.

Tensors "there" say that they are on the meta device, which autograd knows and torch has no storage
for; each holds its numbers in a tensor of the CPU. Every operation on them goes through
``DeviceTensor.__torch_dispatch__``, and so does every copy to and from them. What reads their
numbers on the host (item, tolist, bool, nonzero, a copy to the CPU, a mask as an index) is noted.
"""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

THERE = torch.device("meta")
aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
}
COPIES_IN_PLACE = {aten.copy_.default}


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
        self.uploads = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._note(operation, args, kwargs)
        return computed(operation, args, kwargs)

    def _note(self, operation, args, kwargs):
        there = [each for each in flat((args, kwargs)) if isinstance(each, DeviceTensor)]
        target = kwargs.get("device")
        if operation is aten._to_copy.default and target is not None:
            if there and torch.device(target).type == "cpu":
                self.reads.append("a copy to the host")
            self.uploads += not there and torch.device(target) == THERE
        elif operation in COPIES_IN_PLACE:
            into, source = args[:2]
            if isinstance(source, DeviceTensor) and not isinstance(into, DeviceTensor):
                self.reads.append("a copy to the host")
        elif there and (operation in READS or by_mask(operation, args)):
            self.reads.append(str(operation))


def by_mask(operation, args):
    """Whether an index is a mask: how much it selects is known on the device only."""
    if operation not in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
        return False
    return any(index is not None and index.dtype == torch.bool for index in args[1])


def computed(operation, args, kwargs):
    """The operation on the CPU; its result is there if anything of it was, or should be."""
    with contextlib.ExitStack() as outside:
        outside.enter_context(torch._C._DisableTorchDispatch())
        found = [each for each in flat((args, kwargs)) if isinstance(each, DeviceTensor)]
        target = kwargs.get("device")
        there = bool(found) if target is None else torch.device(target) == THERE
        if operation in READS - {aten.nonzero.default, aten.masked_select.default}:
            there = False
        if operation in COPIES_IN_PLACE:
            there = isinstance(args[0], DeviceTensor)
        if target is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        result = operation(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs))
    if operation._schema.is_mutable and operation._schema.name.split("::")[1].endswith("_"):
        return args[0]
    if operation._schema.is_mutable and "out" in kwargs:
        return kwargs["out"]
    return tree_map(wrapped, result) if there else result


def flat(nested):
    return torch.utils._pytree.tree_leaves(nested)


def unwrapped(value):
    return value.held if isinstance(value, DeviceTensor) else value


def wrapped(value):
    plain = isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor)
    return DeviceTensor(value) if plain else value


def moved(model):
    """The model with its parameters there."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                there = DeviceTensor(parameter.data)
                module._parameters[name] = torch.nn.Parameter(
                    there, requires_grad=parameter.requires_grad
                )
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
