"""Writes MDS shards as MosaicML Streaming does, for columns that are given as bytes.

The library itself needs far more than this project. Its version 0.13 writes these very bytes.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

SIZES = {"int": 8, "int32": 4, "uint8": 1, "float32": 4, "float64": 8}

Sample = Mapping[str, bytes]


def shard(encodings: Mapping[str, str], samples: Sequence[Sample]) -> bytes:
    """One shard; every sample has the bytes of every column."""
    names = sorted(encodings)
    config = {
        "column_encodings": [encodings[name] for name in names],
        "column_names": names,
        "column_sizes": [SIZES.get(encodings[name]) for name in names],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": 67108864,
        "version": 2,
    }
    head = json.dumps(config, sort_keys=True).encode()
    bodies = [
        b"".join(
            struct.pack("<I", len(sample[name])) for name in names if encodings[name] not in SIZES
        )
        + b"".join(sample[name] for name in names)
        for sample in samples
    ]
    ends = [4 * (len(samples) + 2) + len(head)]
    for body in bodies:
        ends.append(ends[-1] + len(body))
    table = struct.pack(f"<{len(ends) + 1}I", len(samples), *ends)
    return table + head + b"".join(bodies)


def listed(files: Sequence[bytes], folder: Path, **more: object) -> Path:
    """A folder of shards with their `index.json`."""
    folder.mkdir(parents=True)
    shards = []
    for number, data in enumerate(files):
        name = f"shard.{number:05}.mds"
        (folder / name).write_bytes(data)
        raw = {"basename": name, "bytes": len(data), "hashes": {}}
        shards.append({"format": "mds", "raw_data": raw, "version": 2, "zip_data": None, **more})
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    return folder


def files_in_list(*files: bytes, reserved: bool = True) -> bytes:
    """The value of a list[jpeg], list[png] or list[pil]; without `reserved`, of a jpeg_array."""
    sizes = struct.pack(f"<{len(files) + 1}I", len(files), *map(len, files))
    return (bytes(4) if reserved else b"") + sizes + b"".join(files)


def pixels(width: int, height: int, mode: str, data: bytes) -> bytes:
    """The value of a pil."""
    return struct.pack("<III", width, height, len(mode)) + mode.encode() + data
