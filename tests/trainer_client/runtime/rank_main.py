"""Runs one rank of a test world; started by conftest.py with ORDER among its globals."""

import faulthandler
import importlib
import importlib.util
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

ORDER = globals()["ORDER"]


def main(order):
    faulthandler.enable()  # a rank that the C library aborts says where it was
    sys.path[:] = order["path"]
    torch.set_num_threads(1)
    rank, size = order["rank"], order["size"]
    folder = Path(order["folder"])
    try:
        world_device = importlib.import_module("tests.trainer_client.runtime.world_device")
        world_device.enter(rank)
        store = dist.TCPStore("127.0.0.1", order["port"], is_master=False, wait_for_workers=False)
        if order["backend_ready"]:
            dist.init_process_group(
                world_device.BACKEND,
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=120),
            )
        spec = importlib.util.spec_from_file_location("scenario", order["file"])
        module = importlib.util.module_from_spec(spec)
        sys.modules["scenario"] = module
        spec.loader.exec_module(module)
        answer = getattr(module, order["name"])(rank, size, *order["arguments"])
        torch.save(answer, folder / f"rank{rank}.pt")
    except BaseException:
        (folder / f"rank{rank}.failed").write_text(traceback.format_exc())
    finally:
        # A scenario may leave threads inside the transport; the answer is on disk already.
        os._exit(0)


main(ORDER)
