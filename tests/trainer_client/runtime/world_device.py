"""Where the runtime's worlds compute: on the CPU over gloo, or all ranks on one GPU over NCCL.

    RUNTIME_DEVICE=cuda:0 python -m pytest tests/trainer_client/runtime/test_wrapped.py

How several ranks share the GPU: ``benchmarks/runtime_ranks.py``.
"""

import os

import torch

from benchmarks.runtime_ranks import as_host_of_its_own

DEVICE = torch.device(os.environ.get("RUNTIME_DEVICE", "cpu"))
BACKEND = "nccl" if DEVICE.type == "cuda" else "gloo"


def enter(rank):
    """This process is a rank of the world."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if BACKEND == "nccl":
        as_host_of_its_own(rank)
        torch.cuda.set_device(DEVICE)
