"""Measures the beginning of each file of a job, to see what an index of it would say."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.jobs.indexing import IndexIncompleteError, Progress, index_job
from dataservice.jobs.job_file import JobSpec
from dataservice.jobs.storage_profiles import NO_PROFILES, StorageProfiles
from dataservice.sources.index import IndexSummary


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """The first `samples_per_file` samples of each file, as an index would summarise them:
    `read_bytes` of the files' `total_bytes`. `problem` says which sources have no summary, and
    why."""

    summaries: Sequence[IndexSummary]
    samples_per_file: int
    read_bytes: int
    total_bytes: int
    problem: str


def dry_run(
    spec: JobSpec,
    *,
    samples_per_file: int,
    custom_processors: dict[str, str],
    processes: int = 1,
    progress: Progress | None = None,
    limits: DecodeLimits = DEFAULT_LIMITS,
    storage_profiles: StorageProfiles = NO_PROFILES,
) -> DryRun:
    """Index the beginning of each file as `index_job` does, into a temporary folder. The job's
    index is neither read nor written; damaged files are named among those left out. Raises
    SpecError where the pipeline cannot be built."""
    done: dict[str, tuple[int, int]] = {}

    def count(source: str, rows: int, done_bytes: int, total_bytes: int) -> None:
        done[source] = (done_bytes, total_bytes)
        if progress is not None:
            progress(source, rows, done_bytes, total_bytes)

    summaries: Sequence[IndexSummary]
    problem = ""
    with tempfile.TemporaryDirectory(prefix="dataservice-dry-run-") as folder:
        try:
            summaries = index_job(
                spec.model_copy(update={"index": folder}),
                custom_processors=custom_processors,
                processes=processes,
                progress=count,
                limits=limits,
                leave_out_damaged=True,
                samples_per_file=samples_per_file,
                storage_profiles=storage_profiles,
            )
        except IndexIncompleteError as error:
            summaries, problem = error.made, str(error)
    return DryRun(
        summaries=summaries,
        samples_per_file=samples_per_file,
        read_bytes=sum(read for read, _ in done.values()),
        total_bytes=sum(total for _, total in done.values()),
        problem=problem,
    )
