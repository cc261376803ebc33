"""MosaicML Streaming, in an environment of its own: this file imports nothing of the project.

`python peer_streaming.py HOME MAX_PIXELS`: writes `HOME/mds` if it is not there, and prints how
many pictures torch's DataLoader with two workers has delivered from it, until it is ended.
"""

import io
import math
import signal
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import library
from torch.utils.data import DataLoader

# Streaming imports torchvision, of which nothing is used here, and which refuses to be imported
# beside a build of torch other than its own.
try:
    import torchvision  # type: ignore[import-not-found]  # noqa: F401
except RuntimeError:
    for unused in ("nms", "qnms"):
        library.define(f"torchvision::{unused}", "(Tensor a, Tensor b, float c) -> Tensor")
from streaming import MDSWriter, StreamingDataset  # type: ignore[import-not-found]

BATCH, WORKERS, FACTOR = 32, 2, 28


def size_of(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """Qwen2-VL's (width, height) of a picture that is too large."""
    shrink = math.sqrt(width * height / max_pixels)
    w, h = (math.floor(side / shrink / FACTOR) * FACTOR for side in (width, height))
    return w, h


class Pictures(StreamingDataset):  # type: ignore[misc]
    """Decodes and resizes as it is asked for a sample."""

    def __init__(self, home: Path, max_pixels: int) -> None:
        super().__init__(local=str(home / "mds"), shuffle=False, batch_size=BATCH)
        self.tokenizer = Tokenizer.from_file(str(home / "tokenizer" / "tokenizer.json"))
        self.max_pixels = max_pixels

    def __getitem__(self, index: Any) -> tuple[torch.Tensor, list[int]]:
        sample = super().__getitem__(index)
        picture = Image.open(io.BytesIO(sample["jpg"])).convert("RGB")
        size = size_of(*picture.size, self.max_pixels)
        pixels = np.array(picture.resize(size, Image.Resampling.BICUBIC))
        return torch.from_numpy(pixels), self.tokenizer.encode(sample["txt"]).ids


def write(home: Path) -> None:
    """The pictures as MDS."""
    with MDSWriter(out=str(home / "mds"), columns={"jpg": "bytes", "txt": "str"}) as out:
        for path in sorted((home / "tars").glob("*.tar")):
            with tarfile.open(path) as tar:
                members = [file.read() for member in tar if (file := tar.extractfile(member))]
            for jpeg, caption in zip(members[::2], members[1::2], strict=True):
                out.write({"jpg": jpeg, "txt": caption.decode()})


def main() -> None:
    """Deliver until SIGTERM, and leave nothing outside `HOME`: Streaming removes its shared memory
    as the program ends, and never its files of locks."""
    home, max_pixels = Path(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    tempfile.tempdir = str(home)
    if not (home / "mds" / "index.json").exists():
        write(home)
    count = 0
    while True:
        loader: DataLoader[Any] = DataLoader(
            Pictures(home, max_pixels), batch_size=BATCH, num_workers=WORKERS, collate_fn=list
        )
        for batch in loader:
            count += len(batch)
            print(count, flush=True)


if __name__ == "__main__":
    main()
