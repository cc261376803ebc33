"""Small sources on disk, and a measurer that needs no decoder."""

import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataservice.core.errors import SampleError
from dataservice.core.job import SourceSpec
from dataservice.core.sample import ItemLengths, Modality, RawSample, SampleLengths

WriteTar = Callable[[Path, Sequence[tuple[str, bytes]]], Path]


class WordMeasurer:
    """One token a word; an image gives 4 tokens, audio 2; text 'bad' cannot be used."""

    fingerprint = "words-1"

    def measure(self, raw: RawSample) -> SampleLengths:
        words = str(raw.record.get("text", "")).split()
        if "bad" in words:
            raise SampleError("the text is bad. Write another.")
        items = []
        position = len(words)
        for blob in raw.media:
            tokens, modality = (2, Modality.AUDIO) if blob.kind == "audio" else (4, Modality.VISION)
            shape = (len(blob.data),) if blob.kind == "audio" else (1, 28, len(blob.data), 3)
            items.append(
                ItemLengths(
                    modality=modality,
                    encoder_tokens=4 * tokens,
                    llm_tokens=tokens,
                    position=position,
                    shape=shape,
                )
            )
            position += tokens
        return SampleLengths(llm_tokens=position, loss_tokens=len(words), items=tuple(items))

    def measure_pieces(self, raw: RawSample) -> tuple[SampleLengths, ...]:
        return (self.measure(raw),)


@pytest.fixture
def measurer() -> type[WordMeasurer]:
    return WordMeasurer


@pytest.fixture
def write_tar() -> WriteTar:
    def write(path: Path, members: Sequence[tuple[str, bytes]]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w") as tar:
            for name, data in members:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return path

    return write


@pytest.fixture
def write_jsonl() -> Callable[[Path, Sequence[Mapping[str, Any]]], Path]:
    def write(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
        return path

    return write


@pytest.fixture
def write_parquet() -> Callable[..., Path]:
    def write(path: Path, columns: Mapping[str, Any], row_group_size: int = 3) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(dict(columns)), path, row_group_size=row_group_size)
        return path

    return write


@pytest.fixture
def spec() -> Callable[..., SourceSpec]:
    def make(url: object, format: str, name: str = "src", **more: Any) -> SourceSpec:
        return SourceSpec(name=name, url=str(url), format=format, **more)  # type: ignore[arg-type]

    return make
