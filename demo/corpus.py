"""The demo's corpus: five sources of real media files, made from a seed.

    images/   WebDataset tars: JPEG, PNG, WebP, GIF with a .json conversation each
    clips/    WebDataset tars: H.264 MP4, and WAV, FLAC, MP3, Ogg Opus
    parquet/  image struct{bytes, path} and conversations, as Hugging Face datasets writes them
    text/     JSONL: plain documents and chats, with the corpus's longest samples among them
    jsonl/    JSONL that names image files by relative path

`python -m demo.corpus DIR` makes one and prints what it holds.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
import typer
import webdataset
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from demo import samples
from demo.dialogue import Json
from demo.language import Language
from demo.samples import Sample, Stream

ReportProgress = Callable[[str, int, int], None]  # source, samples done, samples in all

_MIN_SAMPLES_PER_SOURCE = 10
_PARQUET_FILES = 2
_ROW_GROUPS_PER_FILE = 4
_TEXT_KINDS = ("documents", "chats")

_IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_TURN_TYPE = pa.struct([("role", pa.string()), ("content", pa.string())])


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSummary:
    """The contents of one source; `media` counts media files by extension, including those in
    tars."""

    name: str
    samples: int
    media: Mapping[str, int]
    files: tuple[Path, ...]
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSummary:
    """The contents of a corpus, source by source."""

    directory: Path
    seed: int
    scale: float
    sources: tuple[SourceSummary, ...]

    @property
    def samples(self) -> int:
        """Number of samples in all sources."""
        return sum(source.samples for source in self.sources)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files on disk."""
        return sum(source.size_bytes for source in self.sources)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recipe:
    """How one source is made; `samples` is its size at scale 1."""

    name: str
    samples: int
    draw: Callable[[Stream, int], Iterator[Sample]]
    write: Callable[[Path, Sequence[Sample]], None]


def make_corpus(
    directory: Path,
    *,
    seed: int = 0,
    scale: float = 1.0,
    progress: ReportProgress | None = None,
) -> CorpusSummary:
    """Write the five sources under `directory`; the same seed and scale give the same bytes.

    `scale` multiplies the number of samples, 730 at 1; each source keeps at least ten. The longest
    sample needs four replicas of 2,048 tokens, or three when a small corpus has few enough words
    for its tokenizer to learn them whole.

    Raises:
        ValueError: `scale` is not above zero.
        FileExistsError: a source's folder is already there.
    """
    if not scale > 0:
        raise ValueError(f"scale is {scale}, but must be above 0; 1.0 makes 730 samples")
    for recipe in _RECIPES:
        if (directory / recipe.name).exists():
            raise FileExistsError(
                f"{directory / recipe.name} is already there and a corpus is only written to a "
                "new place; remove it or choose another directory"
            )
    language = Language(seed)
    sources = tuple(
        _make_source(recipe, directory / recipe.name, language, seed, scale, progress)
        for recipe in _RECIPES
    )
    return CorpusSummary(directory=directory, seed=seed, scale=scale, sources=sources)


def _make_source(
    recipe: _Recipe,
    folder: Path,
    language: Language,
    seed: int,
    scale: float,
    progress: ReportProgress | None,
) -> SourceSummary:
    count = max(_MIN_SAMPLES_PER_SOURCE, round(recipe.samples * scale))
    stream = Stream(language=language, seed=seed, name=recipe.name)
    drawn: list[Sample] = []
    for sample in recipe.draw(stream, count):
        drawn.append(sample)
        if progress:
            progress(recipe.name, len(drawn), count)
    folder.mkdir(parents=True)
    recipe.write(folder, drawn)
    files = tuple(sorted(path for path in folder.rglob("*") if path.is_file()))
    return SourceSummary(
        name=recipe.name,
        samples=count,
        media=Counter(extension for sample in drawn for extension, _ in sample.media),
        files=files,
        size_bytes=sum(path.stat().st_size for path in files),
    )


def _write_tars(folder: Path, drawn: Sequence[Sample], *, shards: int) -> None:
    """WebDataset shards: the files of a sample share its key and follow one another."""
    for number, part in enumerate(_split(drawn, shards)):
        path = folder / f"{folder.name}-{number:05d}.tar"
        # Headers have no current time, so that the same samples give the same bytes.
        with webdataset.TarWriter(str(path), encoder=False, mtime=0.0) as tar:
            for sample in part:
                tar.write({"__key__": sample.key, **_tar_members(sample)})


def _tar_members(sample: Sample) -> dict[str, bytes]:
    """`json`, and `jpg` for one file, `0.jpg`, `1.png`, … for several."""
    several = len(sample.media) > 1
    media = {
        f"{place}.{extension}" if several else extension: content
        for place, (extension, content) in enumerate(sample.media)
    }
    return {**media, "json": _json(sample.record()).encode()}


def _write_parquet(folder: Path, drawn: Sequence[Sample]) -> None:
    """Two files of several row groups each; half the images have no path, as in published
    datasets."""
    schema = pa.schema(
        [
            ("id", pa.string()),
            ("image", _IMAGE_TYPE),
            ("conversations", pa.list_(_TURN_TYPE)),
        ]
    )
    for number, part in enumerate(_split(drawn, _PARQUET_FILES)):
        table = pa.Table.from_pylist([_parquet_row(sample) for sample in part], schema=schema)
        path = folder / f"train-{number:05d}-of-{_PARQUET_FILES:05d}.parquet"
        pq.write_table(table, path, row_group_size=-(-len(part) // _ROW_GROUPS_PER_FILE))


def _parquet_row(sample: Sample) -> Json:
    ((extension, content),) = sample.media
    path = f"{sample.key}.{extension}" if int(sample.key) % 2 else None
    turns = [{"role": turn.role, "content": turn.text} for turn in sample.turns]
    return {
        "id": sample.key,
        "image": {"bytes": content, "path": path},
        "conversations": turns,
    }


def _write_text(folder: Path, drawn: Sequence[Sample]) -> None:
    """Documents in one file, chats in the other, since they have different keys."""
    by_kind: dict[str, list[Json]] = {kind: [] for kind in _TEXT_KINDS}
    for sample in drawn:
        by_kind["chats" if sample.document is None else "documents"].append(sample.record())
    for kind, records in by_kind.items():
        _write_lines(folder / f"{kind}.jsonl", records)


def _write_jsonl(folder: Path, drawn: Sequence[Sample]) -> None:
    """One LLaVA record per line; `image` is a path relative to the file that names it."""
    (folder / "media").mkdir()
    records: list[Json] = []
    for sample in drawn:
        ((extension, content),) = sample.media
        name = f"media/{sample.key}.{extension}"
        (folder / name).write_bytes(content)
        records.append({"image": name, **replace(sample, dialect="llava").record()})
    _write_lines(folder / "annotations.jsonl", records)


def _write_lines(path: Path, records: Sequence[Json]) -> None:
    path.write_text("".join(_json(record) + "\n" for record in records), encoding="utf-8")


def _json(record: Json) -> str:
    return json.dumps(record, ensure_ascii=False)


def _split(drawn: Sequence[Sample], parts: int) -> Iterator[Sequence[Sample]]:
    """Consecutive slices whose sizes differ by at most one."""
    bounds = [len(drawn) * k // parts for k in range(parts + 1)]
    for k in range(parts):
        yield drawn[bounds[k] : bounds[k + 1]]


_RECIPES = (
    _Recipe(name="images", samples=280, draw=samples.images, write=partial(_write_tars, shards=4)),
    _Recipe(name="clips", samples=150, draw=samples.clips, write=partial(_write_tars, shards=3)),
    _Recipe(name="parquet", samples=120, draw=samples.single_images, write=_write_parquet),
    _Recipe(name="text", samples=140, draw=samples.texts, write=_write_text),
    _Recipe(name="jsonl", samples=40, draw=samples.single_images, write=_write_jsonl),
)


def summary_table(summary: CorpusSummary) -> Table:
    """The corpus as a rich table, one row per source."""
    table = Table(title=f"Corpus in {summary.directory} (seed {summary.seed})")
    table.add_column("source")
    table.add_column("samples", justify="right")
    table.add_column("media files")
    table.add_column("files on disk", justify="right")
    table.add_column("KiB", justify="right")
    for source in summary.sources:
        media = ", ".join(f"{count} {kind}" for kind, count in sorted(source.media.items()))
        kibibytes = f"{source.size_bytes / 1024:,.0f}"
        table.add_row(
            source.name, str(source.samples), media or "none", str(len(source.files)), kibibytes
        )
    table.add_section()
    table.add_row("all", str(summary.samples), "", "", f"{summary.size_bytes / 1024:,.0f}")
    return table


def main(
    directory: Annotated[Path, typer.Argument(help="where to write the corpus")],
    seed: Annotated[int, typer.Option(help="the same seed gives the same bytes")] = 0,
    scale: Annotated[float, typer.Option(help="multiplies the number of samples, 730 at 1")] = 1.0,
) -> None:
    """Make the demo's corpus of real media files."""
    console = Console()
    with Progress(console=console) as bar:
        tasks = {recipe.name: bar.add_task(recipe.name, total=None) for recipe in _RECIPES}

        def show(source: str, done: int, total: int) -> None:
            bar.update(tasks[source], completed=done, total=total)

        summary = make_corpus(directory, seed=seed, scale=scale, progress=show)
    console.print(summary_table(summary))


if __name__ == "__main__":
    typer.run(main)
