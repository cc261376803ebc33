"""A whole step in several processes that share one device, and the same step in one process.

Their messages go through host memory, over gloo, or over NCCL. NCCL refuses two ranks on one GPU
of a host, so each rank gives itself out as a host of its own (``NCCL_HOSTID``), and they talk over
the loopback: its calls, streams and order are those of a cluster, its speed is not.
"""

import multiprocessing
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from benchmarks.runtime_model import Model, Size
from trainer_client.runtime import GroupPool, run_step
from trainer_client.shard import Shard
from trainer_client.synthetic import SyntheticDataset, SyntheticJob, SyntheticMedia, SyntheticStep

TIMEOUT_S = 300.0


def job_of(size: Size, replicas: int) -> SyntheticJob:
    """Shared packs beside single ones, with images that are encoded elsewhere."""
    return SyntheticJob(
        replicas=replicas,
        steps=1,
        microbatches=2,
        memory_tokens=size.parity_tokens,
        degrees=(2, 1, 1) if replicas > 3 else (replicas,),
        sample_tokens=(1, size.parity_tokens),
        vocabulary=size.vocabulary,
        media=SyntheticMedia(images=1.0, clips=0.3, side_px=(56, 224), clip_frames=(2, 4)),
    )


def step_of_one_process(size: Size, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Loss and gradients of the job for four, its samples one by one."""
    samples = job_of(size, 4).step(0).samples
    waves = [[((0,), [number])] for number in range(len(samples))]
    shard = SyntheticStep(samples, waves, replicas=1).shard(0).to(device)
    with GroupPool(replica=0, replicas=1) as groups:
        return train(shard, groups, size, device, dtype)


def train(
    shard: Shard,
    groups: GroupPool,
    size: Size,
    device: torch.device,
    dtype: torch.dtype,
    *,
    ahead: bool = False,
) -> list[Tensor]:
    """The loss of a new model and its gradients, in fp64 on the host; `ahead`: each microbatch's
    items are encoded under the decoder of the one before, where there are streams on another."""
    torch.manual_seed(0)
    model = Model(size).to(device=device, dtype=dtype)
    result = run_step(model, shard, groups, features_ahead=ahead)
    grads = [p.grad.double().cpu() for p in model.parameters() if p.grad is not None]
    return [torch.tensor([float(result.loss)], dtype=torch.float64), *grads]


def step_in_processes(
    count: int,
    size: Size,
    device: torch.device,
    dtype: torch.dtype,
    *,
    backend: str,
    ahead: bool,
) -> list[list[Tensor]]:
    """The same of each of `count` processes, over "gloo" or "nccl". Raises RuntimeError where one
    ends without."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=run_rank,
                args=(rank, count, store.port, folder, size, str(device), dtype, backend, ahead),
            )
            for rank in range(count)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(TIMEOUT_S)
        _end(ranks)
        return [torch.load(answer_of(folder, rank)) for rank in range(count)]


def _end(ranks: Sequence[multiprocessing.process.BaseProcess]) -> None:
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    codes = [process.exitcode for process in ranks]
    if any(codes):
        raise RuntimeError(
            f"the processes of the step ended with {codes} within {TIMEOUT_S:g} s; their errors "
            "stand above"
        )


def answer_of(folder: str, rank: int) -> Path:
    """Where a rank leaves what it found."""
    return Path(folder) / f"rank{rank}.pt"


def as_host_of_its_own(rank: int) -> None:
    """What NCCL of this process is told, so that it shares a GPU with other ranks."""
    os.environ.update(
        NCCL_HOSTID=f"rank{rank}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        NCCL_NVLS_ENABLE="0",
    )


def run_rank(
    rank: int,
    count: int,
    port: int,
    folder: str,
    size: Size,
    device: str,
    dtype: torch.dtype,
    backend: str,
    ahead: bool,
) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    if backend == "nccl":
        as_host_of_its_own(rank)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=TIMEOUT_S)
    )
    dataset = SyntheticDataset(job_of(size, count), rank=rank, device=device)
    with dataset, GroupPool(backend=backend, timeout_s=TIMEOUT_S) as groups:
        for shard in dataset:
            found = train(shard, groups, size, torch.device(device), dtype, ahead=ahead)
            torch.save(found, answer_of(folder, rank))
    dist.destroy_process_group()
