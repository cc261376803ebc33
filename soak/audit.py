"""The per-sample audit: compares the samples trained along the surviving checkpoints with the
dataset.

A launch that resumes before step s replaces the steps that earlier launches trained from s on,
since its checkpoint does not contain them. The steps that remain, over all launches, are those that
the model has seen. They must match the dataset: every sample as often as weight and epochs say,
bytes equal to those of a direct decode, and one plan per step on all ranks.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from dataservice.core.layout import member_rows, padded_tokens, sample_starts
from dataservice.core.sample import DecodedSample
from dataservice.decode.sample_pipeline import build_pipeline
from dataservice.jobs.job_file import read_job
from dataservice.sources.catalog import find_index
from dataservice.sources.reader import SourceReader
from soak.digest import digest_of_tokens, digests_of_item
from soak.journal import PackPart, Row, read_journals
from soak.training import Launch
from soak.vision import NAME, HeldVision

IGNORED_LABEL = -100
SHOWN = 8  # findings of one kind that are listed


class Dataset:
    """A job's data, read and decoded here without the service."""

    def __init__(self, job_file: Path) -> None:
        spec = read_job(job_file.read_text(), job_file.parent)
        self._pipeline = build_pipeline(spec.pipeline, custom_processors={NAME: HeldVision})
        self._catalog = find_index(spec.sources, spec.index, self._pipeline.fingerprint).read()
        self._reader = SourceReader(spec.sources)
        self._spec = spec
        self.decoded = lru_cache(maxsize=None)(self._decode)
        self.tokens = lru_cache(maxsize=None)(self._tokens)

    @property
    def expected_visits(self) -> Counter[int]:
        """How often each sample must be trained. Weights and epochs must make this a whole
        number."""
        visits: Counter[int] = Counter()
        first = 0
        for source, size in zip(self._spec.sources, self._catalog.sizes, strict=True):
            times = source.weight * self._spec.epochs
            assert times == int(times), f"{source.name} is shown {times} times: not whole"
            visits.update(dict.fromkeys(range(first, first + size), int(times)))
            first += size
        return visits

    def _decode(self, sample: int) -> DecodedSample:
        ((ref, lengths),) = self._catalog.details(np.array([sample]))
        return self._pipeline.decode(self._reader.read(ref), lengths)

    def _tokens(self, samples: tuple[int, ...], degree: int, cp_rank: int) -> str:
        """The digest of one group member's chunk of a pack of these samples."""
        decoded = [self.decoded(sample) for sample in samples]
        lengths = np.array([len(each.input_ids) for each in decoded])
        padded = padded_tokens(lengths, degree)
        starts = sample_starts(padded)
        ids = np.full(starts[-1], self._pipeline.pad_token_id)
        labels = np.full(starts[-1], IGNORED_LABEL)
        for start, length, each in zip(starts, lengths, decoded, strict=False):
            ids[start : start + length] = each.input_ids
            labels[start : start + length] = each.labels
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1], padded)
        rows = member_rows(padded, degree, cp_rank)
        return digest_of_tokens([ids[rows], labels[rows], positions[rows]])


def audit(folder: Path, launches: Sequence[Launch], dataset: Dataset) -> list[str]:
    """Findings about a training that has ended; empty when every promise held."""
    return audit_rows(surviving(read_journals(folder / "journal"), launches), dataset)


def audit_rows(rows: Sequence[Row], dataset: Dataset) -> list[str]:
    """Findings about these rows."""
    steps: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        steps[row.step].append(row)
    found = missing_steps(steps)
    found += visits_wrong(rows, dataset)
    for step in sorted(steps):
        found += step_wrong(step, steps[step])
        found += bytes_wrong(step, steps[step], dataset)
    return found


def surviving(rows: Sequence[Row], launches: Sequence[Launch]) -> list[Row]:
    """Rows that no later launch has replaced."""
    replaced_from = {
        launch.number: min(
            (later.start_step for later in launches if later.number > launch.number),
            default=1 << 62,
        )
        for launch in launches
    }
    return [row for row in rows if row.step < replaced_from[row.launch]]


def missing_steps(steps: dict[int, list[Row]]) -> list[str]:
    """Findings when steps are missing: they must run from 0 without gaps."""
    gaps = sorted(set(range(max(steps, default=-1) + 1)) - steps.keys())
    return [f"steps {gaps[:SHOWN]} were never trained"] if gaps else []


def visits_wrong(rows: Sequence[Row], dataset: Dataset) -> list[str]:
    """Findings about lost or repeated samples. The first member of a pack's group names its
    samples."""
    visits = Counter(
        sample for row in rows for part in row.parts if part.cp_rank == 0 for sample in part.samples
    )
    expected = dataset.expected_visits
    lost, twice = expected - visits, visits - expected
    found = [f"{lost.total()} lost: {sorted(lost)[:SHOWN]}"] if lost else []
    return found + ([f"{twice.total()} repeated: {sorted(twice)[:SHOWN]}"] if twice else [])


def step_wrong(step: int, rows: Sequence[Row]) -> list[str]:
    """Findings unless all ranks trained one plan, once, and the members of every group agree on
    their pack."""
    found = []
    ranks = sorted(row.rank for row in rows)
    if ranks != list(range(rows[0].world_size)):
        found.append(f"step {step} was trained by ranks {ranks} of {rows[0].world_size}")
    for name in ("plan", "attempt", "launch", "world_size"):
        if len({getattr(row, name) for row in rows}) > 1:
            found.append(f"step {step}: ranks differ in {name}")
    packs: dict[tuple[int, int], list[PackPart]] = defaultdict(list)
    for row in rows:
        for part in row.parts:
            packs[part.wave, part.pack].append(part)
    for (_, pack), parts in packs.items():
        whole = sorted(part.cp_rank for part in parts) == list(range(len(parts[0].group)))
        if not whole or len({(part.group, part.samples) for part in parts}) > 1:
            found.append(f"step {step}: pack {pack} was not held once by each of its group")
    return found


def bytes_wrong(step: int, rows: Sequence[Row], dataset: Dataset) -> list[str]:
    """Findings unless tokens and encoder items equal those of a direct decode."""
    found = [
        f"step {step}: rank {row.rank} trained other tokens than pack {part.pack} has"
        for row in rows
        for part in row.parts
        if part.tokens != dataset.tokens(part.samples, len(part.group), part.cp_rank)
    ]
    samples = {s for row in rows for part in row.parts if part.cp_rank == 0 for s in part.samples}
    counts = Counter(
        s for row in rows for part in row.parts if part.cp_rank == 0 for s in part.samples
    )
    wanted: Counter[str] = Counter()
    for sample in samples:
        for item in dataset.decoded(sample).items:
            for frame in digests_of_item(item):
                wanted[frame] += counts[sample]
    received = Counter(item for row in rows for item in row.items)
    if received != wanted:
        found.append(
            f"step {step}: {(wanted - received).total()} frames or recordings are missing, "
            f"{(received - wanted).total()} are not of its samples"
        )
    return found
