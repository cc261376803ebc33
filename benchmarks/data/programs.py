"""The loaders that are measured, one a process: `python -m benchmarks.data.programs NAME HOME`.

Each delivers the pictures of `HOME/tars` without end, as uint8 pixels in the size that Qwen2-VL
gives them and the token ids of their captions, and prints how many it has delivered. Pillow's
filter has other weights than torch's; both are bicubic.
"""

import io
import mmap
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

from benchmarks.data.corpus import BATCH, MAX_PIXELS, read_pictures
from dataservice.core.limits import DEFAULT_LIMITS
from dataservice.core.sample import MediaBlob
from dataservice.decode.image import decode_image, image_size
from dataservice.decode.processors.qwen2_vl import Qwen2VLProcessor

HELD = 64  # pictures at the server of bare gRPC
EVERY = 16
"""Pictures between two lines that a program prints."""
PROCESSOR = Qwen2VLProcessor(max_pixels=MAX_PIXELS)
WORKERS = 2
Pixels = NDArray[np.uint8]


def by_pillow(jpeg: bytes) -> Pixels:
    """Decoded and resized as people write it: open, convert, `resize`."""
    picture = Image.open(io.BytesIO(jpeg)).convert("RGB")
    view = PROCESSOR.plan_image(width=picture.width, height=picture.height).views[0]
    size = view.width, view.height
    return np.asarray(picture.resize(size, Image.Resampling.BICUBIC))


def by_service_code(jpeg: bytes) -> Pixels:
    """The same with the code that the service's decoders run."""
    blob = MediaBlob(kind="image", name="picture", data=jpeg)
    width, height = image_size(blob, DEFAULT_LIMITS)
    plan = PROCESSOR.plan_image(width=width, height=height)
    pixels: Pixels = decode_image(blob, plan, DEFAULT_LIMITS)[0]
    return pixels


def bare(decode: Callable[[bytes], Pixels], home: Path) -> Iterator[int]:
    """One process and no loader."""
    tokenizer = Tokenizer.from_file(str(home / "tokenizer" / "tokenizer.json"))
    for jpeg, caption in read_pictures(home):
        decode(jpeg)
        tokenizer.encode(caption)
        yield 1


def webdataset(home: Path) -> Iterator[int]:
    """torch's DataLoader with two workers over webdataset."""
    import webdataset as wds
    from torch import from_numpy
    from torch.utils.data import DataLoader

    tokenizer = Tokenizer.from_file(str(home / "tokenizer" / "tokenizer.json"))

    def made(sample: dict[str, Any]) -> tuple[Any, list[int]]:
        return from_numpy(by_pillow(sample["jpg"]).copy()), tokenizer.encode(
            sample["txt"].decode()
        ).ids

    tars = [str(path) for path in sorted((home / "tars").glob("*.tar"))]
    dataset = wds.WebDataset(tars, shardshuffle=False).repeat().map(made).batched(BATCH, list)
    for batch in DataLoader(dataset, batch_size=None, num_workers=WORKERS):
        yield len(batch)


def service(home: Path, *, same_node: bool = False) -> Iterator[int]:
    """This service's client of the job in `HOME/job`, at the address in `HOME/address`."""
    from trainer_client import ShardDataset

    address, job = (home / "address").read_text(), (home / "job").read_text()
    with ShardDataset(address, job=job, rank=0, world_size=1, same_node=same_node) as dataset:
        for shard in dataset:
            yield sum(each.vision.item_count for each in shard.microbatches if each.vision)
            dataset.commit(shard.step)


def grpc_alone(home: Path) -> Iterator[int]:
    """The bytes of a picture's pixels from one process to another, in messages of gRPC."""
    import grpc

    from benchmarks.data.bare_grpc import METHOD

    size_bytes = by_service_code(_first(home)).nbytes
    command = [sys.executable, "-m", "benchmarks.data.programs", "grpc_server", str(size_bytes)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    channel = grpc.insecure_channel(server.stdout.readline().strip())
    received, buffer = 0, bytearray(size_bytes)
    stream: Any = channel.unary_stream(METHOD)
    for message in stream(b"%d" % sys.maxsize):
        at = received % size_bytes
        buffer[at : at + len(message)] = message
        received += len(message)
        yield 1 if received % size_bytes == 0 else 0


def mapping(home: Path) -> Iterator[int]:
    """The bytes of a picture's pixels into memory that two could map, and out of it."""
    pixels = by_service_code(_first(home)).reshape(-1)
    shared = np.frombuffer(mmap.mmap(-1, pixels.nbytes), np.uint8)
    buffer = np.zeros_like(pixels)
    while True:
        np.copyto(shared, pixels)
        np.copyto(buffer, shared)
        yield 1


def ray_data(home: Path) -> Iterator[int]:
    """Ray Data with two CPUs: files read and decoded by its tasks, batches to the driver."""
    import ray
    import ray.data

    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    tokenizer = Tokenizer.from_file(str(home / "tokenizer" / "tokenizer.json"))
    ray.data.DataContext.get_current().enable_progress_bars = False

    def made(row: dict[str, Any]) -> dict[str, Any]:
        return {"pixels": by_pillow(row["jpg"]), "ids": tokenizer.encode(row["txt"].decode()).ids}

    tars = [str(path) for path in sorted((home / "tars").glob("*.tar"))]
    data = ray.data.read_webdataset(tars * 100, decoder=None).map(made)
    for batch in data.iter_batches(batch_size=BATCH):
        yield len(batch["pixels"])


def _first(home: Path) -> bytes:
    return next(read_pictures(home))[0]


PROGRAMS: dict[str, Callable[[Path], Iterable[int]]] = {
    "pillow": lambda home: bare(by_pillow, home),
    "kernel": lambda home: bare(by_service_code, home),
    "grpc": grpc_alone,
    "webdataset": webdataset,
    "ray_data": ray_data,
    "service": service,
    "same_node": lambda home: service(home, same_node=True),
    "mapping": mapping,
}


def told(delivered: Iterable[int]) -> None:
    """Print how many pictures have come, every few."""
    count = shown = 0
    for more in delivered:
        count += more
        if count - shown >= EVERY:
            shown = count
            print(count, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "grpc_server":
        from benchmarks.data.bare_grpc import held_bytes, serve

        # As many pictures as no cache holds: a service, too, sends each of them once.
        serve(*(held_bytes(int(sys.argv[2])) for _ in range(HELD)))
    else:
        told(PROGRAMS[sys.argv[1]](Path(sys.argv[2])))
