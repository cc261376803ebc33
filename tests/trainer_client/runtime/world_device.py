"""Where the runtime's worlds compute: on the CPU over gloo, or all ranks on one GPU over NCCL.

    RUNTIME_DEVICE=cuda:0 python -m pytest tests/trainer_client/runtime/test_wrapped.py

NCCL refuses two ranks on one GPU of a host, so there each rank gives itself out as a host of its
own, and they talk over the loopback. Streams, calls and their order are those of a cluster.
"""

import os

import torch

DEVICE = torch.device(os.environ.get("RUNTIME_DEVICE", "cpu"))
BACKEND = "nccl" if DEVICE.type == "cuda" else "gloo"


def enter(rank):
    """This process is a rank of the world."""
    os.environ.update(
        GLOO_SOCKET_IFNAME="lo",
        NCCL_HOSTID=f"rank{rank}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        NCCL_NVLS_ENABLE="0",
    )
    if BACKEND == "nccl":
        torch.cuda.set_device(DEVICE)
