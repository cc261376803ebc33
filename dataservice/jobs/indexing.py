"""Indexes the sources of a job.

Apart from the opening of jobs, which loads the planner: that takes longer than to index a small
source.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from dataservice.core.errors import SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.ports import SampleMeasurer
from dataservice.decode.saved_processor import saved_differences
from dataservice.jobs.job_file import JobSpec
from dataservice.jobs.longer_samples import refusal
from dataservice.jobs.own_formats import format_codes
from dataservice.jobs.sample_pipeline import pipeline_json, pipeline_of
from dataservice.jobs.storage_profiles import NO_PROFILES, StorageProfiles, opened_sources
from dataservice.sources.index import IndexSummary, build_index
from dataservice.sources.shared_indexing import Elsewhere

log = logging.getLogger(__name__)
Progress = Callable[[str, int, int, int], None]
"""Called with (source, rows done, bytes done, bytes in all)."""


class IndexIncompleteError(SourceError):
    """Sources of a job could not be indexed, or have longer samples than it allows; `made` has the
    summaries of all but the former."""

    def __init__(self, message: str, made: Sequence[IndexSummary]) -> None:
        super().__init__(message)
        self.made = made


def index_job(
    spec: JobSpec,
    *,
    custom_processors: dict[str, str],
    processes: int = 1,
    progress: Progress | None = None,
    limits: DecodeLimits = DEFAULT_LIMITS,
    leave_out_damaged: bool = False,
    samples_per_file: int | None = None,
    storage_profiles: StorageProfiles = NO_PROFILES,
    elsewhere: Callable[[str], Elsewhere] | None = None,
) -> list[IndexSummary]:
    """Index every source of a job. Files whose index is current are kept. An error in one source
    or file stops no other. `samples_per_file` is for `dry_run`; `elsewhere` gives who indexes the
    source of this name in place of this process, which then needs neither its storage nor its code.

    Raises:
        IndexIncompleteError: some sources have no index, or one with longer samples than the job's
            `longer_than` allows; it gives the reason for each, and the summaries that there are.
        SpecError: the pipeline cannot be built, or a storage profile is not known.
    """
    for difference in saved_differences(spec.pipeline):  # here, not once in each process
        log.warning("%s", difference)
    make_measurer = partial(_make_measurer, pipeline_json(spec.pipeline), custom_processors, limits)
    sources: Sequence[SourceSpec] = spec.all_sources
    if elsewhere is None:
        codes = format_codes(sources, custom_processors)
        sources = opened_sources(sources, storage_profiles, codes=codes)
    made, problems = [], []
    for source in sources:
        try:
            summary = build_index(
                source,
                out_dir=spec.index,
                make_measurer=make_measurer,
                workers=processes,
                progress=partial(progress, source.name) if progress is not None else None,
                limits=limits,
                leave_out_damaged=leave_out_damaged,
                samples_per_file=samples_per_file,
                elsewhere=elsewhere(source.name) if elsewhere is not None else None,
            )
        except SourceError as error:
            problems.append(str(error))
        else:
            made.append(summary)
            if refused := refusal(spec.pipeline.longer_than, source.name, summary.long):
                problems.append(refused)
    if problems:
        raise IndexIncompleteError("\n".join(problems), made)
    return made


def _make_measurer(
    pipeline: str, custom_processors: dict[str, str], limits: DecodeLimits
) -> SampleMeasurer:
    return pipeline_of(pipeline, custom_processors, limits)
