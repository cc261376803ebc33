"""FSDP2 on the played device, in this process.

Three things stand in its way, as the device calls itself meta: FSDP2 asks ``torch.meta`` and the
accelerator for streams, takes its device from the mesh, and refuses weights on meta, since those
have no numbers; these have. The mesh stays one of the CPU, over gloo, which is given the numbers.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fully_shard

from tests.trainer_client.runtime.fake_device import THERE, Wait


def play_sharding_there(device):
    """``device``: the entered one, which notes what waits for its streams and events."""

    class Waited:
        def synchronize(self):
            device.reads.append(Wait(f"synchronizing {type(self).__name__}"))

    class Stream(Waited):
        """All that is computed there has one order, so a stream has nothing to wait for."""

        def __init__(self, priority=0):
            pass

        def wait_stream(self, other):
            pass

        def wait_event(self, event):
            pass

        def record_event(self):
            return Event()

    class Event(Waited):
        def record(self, stream=None):
            return self

    @contextmanager
    def entered(stream):
        yield

    torch.meta = SimpleNamespace(Stream=Stream, Event=Event, stream=entered, current_stream=Stream)
    torch.accelerator.current_stream = Stream
    _fully_shard._get_device_from_mesh = lambda mesh: THERE
    _fsdp_param_group.FSDPParamGroup._validate_no_meta_params = lambda group: None
