"""From a job file to an index, a record and a job that can run."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from dataservice.core.errors import SpecError, StateError
from dataservice.core.job import ErrorBudget, JobRecord
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.ports import SampleMeasurer
from dataservice.core.team import NO_TEAM, full_name, team_of
from dataservice.engine.setup import JobSetup
from dataservice.job_pipeline import pipeline_json, pipeline_of, worker_pipeline
from dataservice.planning.compose import step_limits
from dataservice.planning.options import PlanOptions
from dataservice.planning.packs.limits import IsfLimits
from dataservice.sources.catalog import IndexedCatalog, open_catalog, require_same_index
from dataservice.sources.index import IndexSummary, build_index
from dataservice.sources.mixture import Mixture
from dataservice.sources.roots import Roots
from dataservice.spec import JobSpec, job_from_json, read_job, require_allowed

Progress = Callable[[str, int, int, int], None]
"""Told (source, rows done, bytes done, bytes in all)."""


def index_job(
    spec: JobSpec,
    *,
    custom_processors: dict[str, str],
    processes: int = 1,
    progress: Progress | None = None,
    limits: DecodeLimits = DEFAULT_LIMITS,
) -> list[IndexSummary]:
    """Index every source of a job; what is current is kept. Raises SourceError, SpecError."""
    make_measurer = partial(_make_measurer, pipeline_json(spec.pipeline), custom_processors, limits)
    return [
        build_index(
            source,
            out_dir=spec.index,
            make_measurer=make_measurer,
            workers=processes,
            progress=partial(progress, source.name) if progress is not None else None,
            limits=limits,
        )
        for source in spec.sources
    ]


def _make_measurer(
    pipeline: str, custom_processors: dict[str, str], limits: DecodeLimits
) -> SampleMeasurer:
    return pipeline_of(pipeline, custom_processors, limits)


def job_record(
    spec_yaml: str,
    base_directory: str,
    team: str = NO_TEAM,
    *,
    allowed_roots: Sequence[str] | None = None,
) -> JobRecord:
    """A team's job file as the store keeps it. Raises SpecError."""
    roots = _roots(allowed_roots, team)
    spec = read_job(spec_yaml, Path(base_directory or "."), roots)
    return JobRecord(
        name=full_name(team, spec.job),
        spec_json=spec.model_dump_json(),
        index_fingerprint="",
        created_unix_s=time.time(),
    )


def _roots(allowed: Sequence[str] | None, team: str) -> Roots | None:
    return None if allowed is None else Roots.of(allowed, team)


def open_job(
    record: JobRecord,
    *,
    custom_processors: dict[str, str],
    limits: DecodeLimits = DEFAULT_LIMITS,
    allowed_roots: Sequence[str] | None = None,
) -> JobSetup:
    """Open a job's index and options. Raises IndexStaleError, SourceError, SpecError."""
    spec = job_from_json(record.spec_json)
    roots = _roots(allowed_roots, team_of(record.name))
    if roots is not None:
        require_allowed(spec, roots)  # what the operator allows may have changed
    load_pipeline = partial(pipeline_of, pipeline_json(spec.pipeline), custom_processors, limits)
    pipeline = load_pipeline()
    catalog = open_catalog(
        spec.sources, spec.index, pipeline.fingerprint, limits=limits, roots=roots
    )
    _require_drawn(spec, catalog.sizes)
    mixture = Mixture(
        catalog.sizes,
        [source.weight for source in spec.sources],
        seed=spec.seed,
        epochs=spec.epochs,
        llm_tokens=catalog.llm_tokens,
    )
    return JobSetup(
        record=_with_fingerprint(record, catalog.fingerprint),
        stream=mixture,
        catalog=catalog,
        batch=spec.batch,
        options=spec.plan,
        pipeline=worker_pipeline(spec.sources, spec.pipeline, roots),
        ready_steps=spec.ready_steps,
        order=_sample_order(catalog, spec),
        limits=_isf_limits(catalog, spec.plan),
        budgets={each.name: each.error_budget or spec.error_budget for each in spec.sources},
        require_current=lambda: require_same_index(
            spec.sources, spec.index, load_pipeline().fingerprint, catalog.fingerprint
        ),
        ranks_per_replica=spec.topology.tensor_parallel * spec.topology.pipeline_parallel,
        pipeline_stages=spec.topology.pipeline_parallel,
        virtual_stages=spec.topology.virtual_stages,
        replicas_per_node=spec.topology.replicas_per_node,
    )


def same_job(stored: JobRecord, submitted: JobRecord) -> bool:
    """Whether two job files differ in nothing but their error budgets, by today's defaults."""
    specs = (job_from_json(stored.spec_json), job_from_json(submitted.spec_json))
    first, second = (
        spec.model_copy(
            update={
                "error_budget": ErrorBudget(),
                "sources": [replace(source, error_budget=None) for source in spec.sources],
            }
        )
        for spec in specs
    )
    return first == second


def _sample_order(catalog: IndexedCatalog, spec: JobSpec) -> str:
    """Names the order in which the mixture yields samples: what decides it, digested."""
    decides = (catalog.fingerprint, spec.seed, [source.weight for source in spec.sources])
    return hashlib.blake2b(repr(decides).encode(), digest_size=6).hexdigest()


def _isf_limits(catalog: IndexedCatalog, options: PlanOptions) -> IsfLimits | None:
    """Found once, over every sample of the job, where the plan packs by ISF."""
    if options.window_steps == 1 and options.stages.pack != "isf":
        return None
    return step_limits(catalog.lengths(np.arange(catalog.samples)), options, method="search")


def _require_drawn(spec: JobSpec, sizes: Sequence[int]) -> None:
    """A source whose weight rounds to no sample would be left out without a word."""
    for source, size in zip(spec.sources, sizes, strict=True):
        drawn = source.weight * size * spec.epochs
        if drawn < 0.5:
            raise SpecError(
                f"source {source.name!r} gives no sample: weight {source.weight:g} of its {size} "
                f"samples over {spec.epochs} epochs is {drawn:.2g}. Raise its weight to "
                f"{1 / (size * spec.epochs):.2g} or more, or leave the source out."
            )


def _with_fingerprint(record: JobRecord, fingerprint: str) -> JobRecord:
    if record.index_fingerprint not in ("", fingerprint):
        raise StateError(
            f"job {record.name!r} was registered over index {record.index_fingerprint[:12]}, "
            f"which is now {fingerprint[:12]}: its sources were indexed again. Its plans would "
            "change under a running training; restore the old index, or delete the job and "
            "submit it again."
        )
    return JobRecord(
        name=record.name,
        spec_json=record.spec_json,
        index_fingerprint=fingerprint,
        state=record.state,
        created_unix_s=record.created_unix_s,
    )
