"""A device that computes as the CPU does, and notes what would make the host wait for it.

Tensors "there" say that they are on the meta device, which autograd knows and torch has no storage
for; each holds its numbers in a tensor of the CPU. Every operation on them goes through
``DeviceTensor.__torch_dispatch__``, and so does every copy to and from them. What reads their
numbers on the host (item, tolist, bool, nonzero, a copy to the CPU, a mask as an index) is noted,
and so is what copies numbers of the host to it and does not return before they are there. A copy
that need not be waited for is not noted; that its memory is pinned, as it must be, shows on a GPU
only. Each note says which file it is of (``waiting_file``).
"""

import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _current_autograd_node, _DisableTorchDispatch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from trainer_client import features

THERE = torch.device("meta")
NUMBERS = {"_local_scalar_dense", "equal", "is_nonzero"}  # which end up in Python
# Sizes of results are known there only.
SIZES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
INDEXED = {"index", "index_put", "index_put_"}
WORKS = []  # kept, as torch holds what is below a work, and not the object of Python

PACKAGES = Path(torch.__file__).parents[1]  # the folder that holds torch's
PROJECT = Path(__file__).parents[3]
# What wraps a model, and what goes through its graph: parts of torch with waits of their own. All
# else of torch, the tensors of FSDP2 among it, waits for whoever calls it.
WAITING_PARTS_OF_TORCH = ("torch/distributed/fsdp", "torch/nn/parallel")
BACKWARD = "torch/autograd/graph.py"
OF_A_NODE, BEHIND_ALL_NODES = "a node of a backward pass", "what ends a backward pass"


def name_of(operation):
    """As in "add" of "aten.add.Tensor"."""
    return str(operation).split(".")[1]


class Wait(str):
    """What waited; ``by`` says for which file."""

    def __new__(cls, what):
        self = super().__new__(cls, what)
        self.by = waiting_file()
        return self


def waiting_file():
    """The innermost file on the stack that is not torch's, or one of a part of torch that has waits
    of its own. Below the files, where torch goes back through a graph by itself: what is waited
    for there is a node's, or of no node, as where DDP's reduction ends."""
    for frame, _ in traceback.walk_stack(None):
        path = Path(frame.f_code.co_filename)
        folder = PACKAGES if path.is_relative_to(PACKAGES) else PROJECT
        name = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)
        if name == BACKWARD:
            return BEHIND_ALL_NODES if _current_autograd_node() is None else OF_A_NODE
        if name.startswith(WAITING_PARTS_OF_TORCH):
            return name
        if path != Path(__file__) and not name.startswith("torch/"):
            return name
    raise AssertionError("torch was called by somebody")


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

    def untyped_storage(self):
        """That of its numbers, which FSDP2 empties and fills again."""
        return self.held.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return computed(operation, args, kwargs or {})


class FakeDevice(TorchDispatchMode):
    """While it is entered, tensors can be made there; ``reads`` lists what waited for it, and
    ``copies`` what waited for numbers on their way to it."""

    def __init__(self):
        super().__init__()
        self.reads, self.copies = [], []
        self._functions = _Functions(self)

    def __enter__(self):
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._functions.__exit__(*error)
        # What was copied there to stay is gone with it.
        features.scaled_there.cache_clear()
        features.filters_there.cache_clear()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # which computes with its part of the numbers, and is seen then
        kwargs = kwargs or {}
        self._note(operation, args, kwargs)
        return computed(operation, args, kwargs)

    def _note(self, operation, args, kwargs):
        name = name_of(operation)
        there = any(isinstance(each, DeviceTensor) for each in tree_leaves((args, kwargs)))
        if name in ("_to_copy", "copy_"):
            self._note_copy(name, args, kwargs)
        elif there and (name in NUMBERS | SIZES or by_mask(name, args) or repeats(name, kwargs)):
            self.reads.append(Wait(str(operation)))
        elif there and name in INDEXED and any(is_on_host(index) for index in args[1]):
            self.copies.append(Wait("an index of the host"))

    def _note_copy(self, name, args, kwargs):
        if name == "copy_":
            there, from_there = (isinstance(each, DeviceTensor) for each in args[:2])
        else:
            from_there, target = isinstance(args[0], DeviceTensor), kwargs.get("device")
            there = from_there if target is None else is_there(target)
        if from_there and not there:
            self.reads.append(Wait("a copy to the host"))
        elif there and not from_there and not (kwargs.get("non_blocking") or True in args[2:]):
            self.copies.append(Wait("a copy to the device"))


class _Functions(TorchFunctionMode):
    """What torch does with numbers of Python below the operations that a device sees."""

    def __init__(self, device):
        super().__init__()
        self._device = device

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.tolist and isinstance(args[0], DeviceTensor):
            self._device.reads.append(Wait("tolist"))
            return args[0].held.tolist()
        if function is torch.Tensor.new_tensor:
            kwargs = {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
            function, args = torch.tensor, args[1:]
        makes = function in (torch.tensor, torch.as_tensor) and is_there(kwargs.get("device"))
        if makes and not isinstance(args[0], DeviceTensor):
            return function(*args, **{**kwargs, "device": "cpu"}).to(THERE)
        return function(*args, **kwargs)


def is_there(target):
    """Whether a device that an operation was given, or None, is the played one."""
    return target is not None and torch.device(target) == THERE


def is_on_host(index):
    return isinstance(index, torch.Tensor) and not isinstance(index, DeviceTensor)


def repeats(name, kwargs):
    """Whether rows are repeated by numbers whose sum, the size of the result, is known there
    only."""
    return name == "repeat_interleave" and kwargs.get("output_size") is None


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
    if operation.namespace == "c10d":
        return there_when_done(result) if there else result
    if name.endswith("_"):
        return args[0]
    return tree_map(wrapped, result) if there and name not in NUMBERS else result


def there_when_done(result):
    """Of a collective of torch's on numbers of tensors there: (those tensors, its work)."""
    *tensors, work = result
    tensors = tree_map(wrapped, tensors)
    return (*tensors, WorkThere(dist.Work.unbox(work), tensors[0]).boxed())


class WorkThere(dist.Work):
    """A collective over tensors there, on whose numbers gloo works; DDP takes them from its
    future."""

    def __init__(self, work, tensors):
        super().__init__()
        WORKS.append(self)
        self._work, self._tensors = work, tensors

    def wait(self, *limit):
        return self._work.wait(*limit)

    def is_completed(self):
        return self._work.is_completed()

    def get_future(self):
        return self._work.get_future().then(lambda _: self._tensors)


def unwrapped(value):
    return value.held if isinstance(value, DeviceTensor) else value


def wrapped(value):
    plain = isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor)
    return DeviceTensor(value) if plain else value


def moved(model):
    """The model with its parameters and buffers there."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, DeviceTensor(buffer))
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
