"""A balanced data-loading service for multimodal LLM training.

Numba caches a compiled kernel by the file that it stands in and does not see that a helper in
another file has changed. Plans and orders must follow the sources, so kernels are cached under a
digest of all that any takes from another file: the planning room, and the hash of the draw. Where
this folder cannot be written, numba's own choice of folder stands.
"""

import hashlib
import os
import sys
from pathlib import Path

if sys.version_info < (3, 11):
    raise ImportError(
        "the service needs Python 3.11 or later; this is "
        f"{sys.version_info[0]}.{sys.version_info[1]}. The trainers' client, trainer_client, also "
        "runs on 3.10."
    )

_PLANNING = Path(__file__).parent / "planning"


def _kernel_cache() -> Path:
    digest = hashlib.blake2b(digest_size=8)
    for source in [*sorted(_PLANNING.rglob("*.py")), _PLANNING.parent / "core" / "split_mix.py"]:
        digest.update(source.read_bytes())
    return _PLANNING / "__pycache__" / f"kernels-{digest.hexdigest()}"


# Whoever reaches a port could have gRPC's core write a line of its own each time; what goes wrong
# in a call is told by who made or served it.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
if os.access(_PLANNING, os.W_OK):
    os.environ.setdefault("NUMBA_CACHE_DIR", str(_kernel_cache()))
    if (numba := sys.modules.get("numba")) is not None:  # has read the environment already
        numba.config.CACHE_DIR = os.environ["NUMBA_CACHE_DIR"]
