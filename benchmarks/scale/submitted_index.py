"""What opening a job over an index on disk takes: `python -m benchmarks.scale.submitted_index`.

One part of an index is made up, and as many links to it as there are to be parts. A `JobOpener`
opens the job as `job submit` has it opened: first reading the lengths, then, once all else has been
read too, finding what was kept. Wall seconds; the files take 250 bytes a sample of `--folder`.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml
from rich.console import Console

from benchmarks.harness import Row
from benchmarks.report import print_rows
from benchmarks.scale.made_job import made_catalog
from dataservice.core.job_setup import JobSetup
from dataservice.core.kernels import load_kernels
from dataservice.core.limits import DEFAULT_LIMITS, OpeningLimits
from dataservice.core.sample import IntArray
from dataservice.jobs.indexing import index_job
from dataservice.jobs.job_file import read_job
from dataservice.jobs.opener import JobOpener
from dataservice.sources.detail_file import DetailFile
from dataservice.sources.index_cache import IndexCache
from dataservice.sources.index_folder import MANIFEST, IndexFolder, part_name
from dataservice.sources.index_part import ROWS_PER_GROUP, SCHEMA, PartWriter
from dataservice.sources.length_cells import write_length_cells
from dataservice.sources.manifest import Manifest
from dataservice.sources.rows_digest import LOSS_WEIGHT
from demo.tokenizer import train_tokenizer

SOURCE = "pictures"
FIRST = f"{0:06d}.jsonl"
LINE = '{"text": "a fox"}\n'
TAKEN_UP = 5  # turns of what the cache found


def made_rows(rows: int) -> pa.Table:
    """The rows of one part, as `write_part` would write them."""
    details = made_catalog(rows).parts.details
    assert isinstance(details, DetailFile)
    reader = pa.ipc.open_file(pa.memory_map(f"/proc/self/fd/{details.descriptor}"))
    made: Any = reader.read_all().combine_chunks()
    items: Any = made["item_modality"].combine_chunks()
    width = SCHEMA.field("content").type.byte_width
    contents = pa.py_buffer(np.random.default_rng(0).bytes(rows * width))
    lists: Any = pa.ListArray.from_arrays
    nulls: Any = pa.nulls
    unknown = {
        "item_seconds_per_patch": pa.float64(),
        "item_key_frames_s": pa.list_(pa.float64()),
    }
    columns = {
        **{name: made[name] for name in made.schema.names},
        **{name: lists(items.offsets, nulls(len(items.values), k)) for name, k in unknown.items()},
        "file": pa.array([""] * rows).dictionary_encode(),
        "content": pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), rows, [None, contents]),
        "piece": pa.nulls(rows, pa.int32()),
        LOSS_WEIGHT: pa.nulls(rows, pa.float64()),
    }
    return pa.table({name: columns[name] for name in SCHEMA.names}, schema=SCHEMA)


def made_home(home: Path, parts: int, rows_a_part: int) -> Path:
    """A job file over an index of so many parts."""
    (home / "data").mkdir()
    (home / "data" / FIRST).write_text(LINE)
    train_tokenizer(home, home / "tokenizer")
    job = home / "job.yaml"
    plain = {
        "job": "submitted",
        "epochs": 1000,
        "sources": [{"name": SOURCE, "format": "jsonl", "url": "data/*.jsonl"}],
        "index": "index",
        "pipeline": {"tokenizer": "tokenizer"},
        "batch": {"samples": 4096},
        "plan": {"memory_tokens": 16_384},
    }
    job.write_text(yaml.safe_dump(plain))
    index_job(read_job(job.read_text(), home).jobs[0], custom_processors={})
    folder = home / "index" / SOURCE
    manifest = Manifest.from_json((folder / MANIFEST).read_bytes(), "the manifest")
    of, table = manifest.parts[0], made_rows(rows_a_part)
    with open(home / "part", "wb") as stream, PartWriter(stream) as writer:
        for first in range(0, rows_a_part, ROWS_PER_GROUP):
            writer.write(table.slice(first, ROWS_PER_GROUP))
        made = writer.finish(
            recipe=of.recipe, file=of.file, media=of.media, skipped=of.skipped, long=of.long
        )
    (home / "part").rename(folder / part_name(of.file.name))
    of = replace(of, rows=made.rows, identity=made.identity, places=made.places)
    link_files(home, SOURCE, replace(manifest, parts=(of,)), parts)
    return job


def link_files(home: Path, source: str, manifest: Manifest, files: int) -> None:
    """Make a source of so many files of one, FIRST in `data`: the others are links to it, and their
    parts to its part."""
    folder, (of,) = home / "index" / source, manifest.parts
    names = [FIRST, *(f"{number:06d}.jsonl" for number in range(1, files))]
    parts = [replace(of, file=replace(of.file, name=name)) for name in names]
    for name in names[1:]:
        os.link(home / "data" / FIRST, home / "data" / name)
        os.link(folder / part_name(FIRST), folder / part_name(name))
    manifest = replace(manifest, parts=tuple(parts))
    write_length_cells(IndexFolder(str(home / "index"), source), manifest)
    (folder / MANIFEST).write_text(manifest.to_json())


def opened(job: Path, cache: IndexCache) -> Generator[tuple[float, JobSetup], None, None]:
    """Open the job again and again: wall seconds of each time, and what was opened."""
    opener = JobOpener(
        custom_processors={},
        limits=DEFAULT_LIMITS,
        allowed_roots=None,
        opening=OpeningLimits(),
        cache=cache,
    )
    with closing(opener):
        opener.start()
        (record,) = opener.read_job(job.read_text(), str(job.parent), "")
        while True:
            began_s = time.monotonic()
            setup = opener.open_job(record)
            yield time.monotonic() - began_s, setup


def first_draw_s(setup: JobSetup) -> float:
    """Of a step and its lengths."""
    began_s = time.monotonic()
    setup.catalog.lengths(first_step(setup))
    return time.monotonic() - began_s


def first_step(setup: JobSetup) -> IntArray:
    """The samples of the first step."""
    return setup.stream.draw(epoch=0, position=0, batch=setup.batch).sample_ids


def located_s(setup: JobSetup) -> float:
    """Of the locations of a step."""
    began_s = time.monotonic()
    setup.catalog.fetch(first_step(setup))
    setup.catalog.columns(first_step(setup))
    return time.monotonic() - began_s


def measured(
    samples: int, rows_a_part: int, folder: Path, *, first_only: bool = False
) -> list[Row]:
    """The figures of an index of so many samples; `first_only` does not wait until all of it is
    read."""
    cache = IndexCache(folder / "cache", 2**40)
    job = made_home(folder, samples // rows_a_part, rows_a_part)
    with closing(opened(job, cache)) as openings:
        began_s = time.monotonic()
        read_s, setup = next(openings)
        drawn_s = first_draw_s(setup)
        first_located_s = located_s(setup)
        while not first_only and not cache.names(""):
            time.sleep(0.1)
        whole_s = time.monotonic() - began_s
        found_s, drawn_again_s = [], []
        for _ in range(0 if first_only else TAKEN_UP):
            taken_s, setup = next(openings)
            found_s.append(taken_s)
            drawn_again_s.append(first_draw_s(setup))
    about = f"{setup.catalog.samples:,} samples in parts of {rows_a_part:,}"
    first = Row(group="index", what=f"opened first: {about}", figure=read_s, unit="s", limit=5)
    drawn = Row(
        group="index",
        what=f"first draw of 4,096: {about}",
        figure=max(drawn_s, *drawn_again_s, 0.0),
        unit="s",
        limit=0.05,
        explanation="The longest; after each opening "
        f"{', '.join(f'{1e3 * each:.0f}' for each in (drawn_s, *drawn_again_s))} ms. Before the "
        "second all rows were read, after which nothing of the lengths may be in memory.",
    )
    located = Row(
        group="index",
        what=f"locations of the first 4,096: {about}",
        figure=first_located_s,
        unit="s",
        explanation="Right after the first opening, while the whole is being read.",
    )
    if first_only:
        return [first, drawn, located]
    return [
        first,
        drawn,
        located,
        Row(
            group="index",
            what=f"opened again: {about}",
            figure=min(found_s),
            unit="s",
            limit=5,
            explanation=f"The longest of {TAKEN_UP} took {max(found_s):.2f} s.",
        ),
        Row(
            group="index",
            what=f"all read, checked and kept: {about}",
            figure=whole_s,
            unit="s",
            explanation="Since the first opening began, which does not wait for it.",
        ),
    ]


def main(arguments: list[str]) -> int:
    """Measure and print; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, default=10)
    parser.add_argument("--rows-a-part", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where the index and the cache may lie")
    parser.add_argument("--first-only", action="store_true", help="do not wait for all of it")
    options = parser.parse_args(arguments)
    load_kernels()  # as a service does before it opens a job
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = measured(
            options.millions * 1_000_000,
            options.rows_a_part,
            Path(folder),
            first_only=options.first_only,
        )
    print_rows(Console(), "A submitted index", rows)
    for row in rows:
        if row.explanation:
            print(f"{row.what}: {row.explanation}")
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
