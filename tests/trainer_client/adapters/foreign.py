"""Packages that only a few long tests judge by, in folders of their own.

They are installed without what they depend on, so that they cannot replace torch; what they need
beyond the development environment is listed with them.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")

# fmt: off
TORCHTITAN = (
    "torchtitan==0.3.0", "spmd_types==0.2.3", "torch_checkpointing==0.1.1", "tyro==1.0.17",
    "typeguard==4.6.0", "docstring_parser==0.18.0", "shtab==1.13.0", "einops==0.8.2",
    "datasets==4.7.0", "pandas==3.1.1", "dill==0.4.1", "multiprocess==0.70.19", "xxhash==4.1.0",
    "pytz==2026.6", "tzdata==2026.6", "httpx==0.28.1", "httpcore==1.0.9", "sniffio==1.3.1",
    "tensorboard==2.21.0", "absl-py==2.5.1", "Markdown==3.11.3",
)
# fmt: on
MEGATRON = ("megatron-core==0.16.1",)


def installed(packages: tuple[str, ...], folder: Path) -> Path:
    """The folder, with exactly these packages in it."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, *packages], check=True, timeout=400)
    return folder


def run_ranks(packages: Path, ranks: int, script: Path, *words: object) -> None:
    """Run a script on so many ranks; fails with its output where one of them does."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "protos", packages)))
    done = subprocess.run(
        [*TORCHRUN, "--nproc-per-node", str(ranks), str(script), *map(str, words)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-6000:]
