"""From a job file to a record, and from its index to a job that can run."""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import IndexStaleError, SpecError, StateError
from dataservice.core.job import ErrorBudget, JobRecord, SourceSpec
from dataservice.core.job_limits import DEFAULT_JOB_LIMITS, EpochSize, JobLimits
from dataservice.core.job_setup import JobSetup, LimitsOver
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.mixture_tree import MixtureTree
from dataservice.core.named_files import judged_by
from dataservice.core.plan_options import IsfLimits, PlanOptions
from dataservice.core.split_mix import split_mix
from dataservice.core.team import NO_TEAM, full_name, team_of
from dataservice.decode.saved_processor import saved_differences
from dataservice.jobs.job_file import JobSpec, job_from_json, read_job, require_allowed
from dataservice.jobs.longer_samples import require_none_refused
from dataservice.jobs.mixture import mixture_tree, share_tokens
from dataservice.jobs.own_code import require_code_allowed
from dataservice.jobs.own_formats import known_codes
from dataservice.jobs.sample_order import (
    SampleOrder,
    data_fingerprint,
    order_name,
)
from dataservice.jobs.sample_pipeline import pipeline_json, pipeline_of, worker_pipeline
from dataservice.jobs.storage_profiles import (
    NO_PROFILES,
    StorageProfiles,
    opened_sources,
    require_profile,
)
from dataservice.planning.stages.pack import step_limits
from dataservice.sources.catalog import (
    FoundIndex,
    IndexedCatalog,
    IndexIdentity,
    find_index,
    find_rows,
    require_same_index,
)
from dataservice.sources.index_rows import IndexRows
from dataservice.sources.mixture import Mixture
from dataservice.sources.roots import Roots

log = logging.getLogger(__name__)
# Samples by which the limits of ISF packs are found: more would take longer and tell the same.
MOST_LOOKED_AT = 2**20


def job_records(
    spec_yaml: str,
    base_directory: str,
    team: str = NO_TEAM,
    *,
    allowed_roots: Sequence[str] | None = None,
    storage_profiles: StorageProfiles = NO_PROFILES,
    code_packages: Sequence[str] | None = None,
) -> tuple[JobRecord, ...]:
    """Validate a team's job file and make the records to store: of the job, and of its validation
    where it has one. Raises SpecError."""
    roots = _roots(allowed_roots, team)
    file = read_job(spec_yaml, Path(base_directory or "."), roots)
    require_code_allowed(file.all_sources, file.pipeline, code_packages, team)
    for source in file.all_sources:
        if source.storage_profile:
            require_profile(source, storage_profiles, team)
    return tuple(
        JobRecord(
            name=full_name(team, spec.job),
            spec_json=spec.model_dump_json(),
            index_fingerprint="",
            created_unix_s=time.time(),
        )
        for spec in file.jobs
    )


def index_pipelines(
    records: Sequence[JobRecord], team: str, *, allowed_roots: Sequence[str] | None = None
) -> dict[str, str]:
    """What a worker needs to index each source of a job file, by the source's name; `records` are
    the file's."""
    specs = [job_from_json(record.spec_json) for record in records]
    roots, pipeline = _roots(allowed_roots, team), specs[0].pipeline
    return {
        source.name: worker_pipeline([source], pipeline, {}, roots, team)
        for spec in specs
        for source in spec.sources
    }


def _roots(allowed: Sequence[str] | None, team: str) -> Roots | None:
    return None if allowed is None else Roots.of(allowed, team)


def _read_back(
    record: JobRecord, allowed_roots: Sequence[str] | None
) -> tuple[JobSpec, Roots | None]:
    """What a registered job's file says, and what its team may read."""
    return job_from_json(record.spec_json), _roots(allowed_roots, team_of(record.name))


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedJob:
    """What was read from a job's files: its index, its pipeline's digests by part, and what its
    owner should know of it."""

    catalog: IndexedCatalog
    identity: Mapping[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltPipeline:
    """What a job's pipeline is known by: the digest of all that its index depends on, and the
    digests of its parts. `notes` say what its owner should know of it, a sentence each."""

    fingerprint: str
    digests: Mapping[str, str]
    notes: tuple[str, ...] = ()


def build_files(
    record: JobRecord,
    *,
    custom_processors: dict[str, str],
    limits: DecodeLimits = DEFAULT_LIMITS,
    allowed_roots: Sequence[str] | None = None,
    job_limits: JobLimits = DEFAULT_JOB_LIMITS,
    code_packages: Sequence[str] | None = None,
) -> BuiltPipeline:
    """Read a job's tokenizer and template, and build its pipeline, which runs what its team wrote.
    No storage is opened. Raises SpecError, QuotaError."""
    spec, roots = _read_back(record, allowed_roots)
    if roots is not None:
        require_allowed(spec, roots)  # the operator may have changed the roots
    require_code_allowed(spec.sources, spec.pipeline, code_packages, team_of(record.name))
    job_limits.check("max_sources", len(spec.sources), "sources")
    job_limits.check("max_epochs", spec.epochs, "epochs")
    pipeline = pipeline_of(
        pipeline_json(spec.pipeline), custom_processors, limits, spec.sources, roots
    )
    with judged_by(None if roots is None else roots.hold_file):
        notes = saved_differences(spec.pipeline)
    return BuiltPipeline(fingerprint=pipeline.fingerprint, digests=pipeline.digests, notes=notes)


def find_files(
    record: JobRecord,
    built: BuiltPipeline,
    *,
    limits: DecodeLimits = DEFAULT_LIMITS,
    allowed_roots: Sequence[str] | None = None,
    job_limits: JobLimits = DEFAULT_JOB_LIMITS,
    storage_profiles: StorageProfiles = NO_PROFILES,
) -> FoundIndex:
    """Find a job's index, and list its sources. Runs nothing of the team's. Raises
    IndexStaleError, SourceError, SpecError, and QuotaError where the index is larger than the
    limit, before it is read."""
    spec, roots = _read_back(record, allowed_roots)
    return find_index(
        _opened(record, spec, built, storage_profiles),
        spec.index,
        built.fingerprint,
        limits=limits,
        roots=roots,
        require_rows=partial(_require_rows, spec, job_limits),
    )


def find_rows_again(
    record: JobRecord,
    *,
    identity: IndexIdentity,
    rows_name: str,
    limits: DecodeLimits = DEFAULT_LIMITS,
    allowed_roots: Sequence[str] | None = None,
) -> IndexRows:
    """The rows of a job's index, which was found with this identity and name. Runs nothing of the
    team's. Raises IndexStaleError, SourceError."""
    spec, roots = _read_back(record, allowed_roots)
    names = [source.name for source in spec.sources]
    return find_rows(names, spec.index, identity, rows_name, limits=limits, roots=roots)


def _opened(
    record: JobRecord, spec: JobSpec, built: BuiltPipeline, storage_profiles: StorageProfiles
) -> list[SourceSpec]:
    codes = known_codes(spec.sources, built.digests)
    return opened_sources(spec.sources, storage_profiles, team_of(record.name), codes=codes)


def check_files(
    record: JobRecord,
    built: BuiltPipeline,
    *,
    identity: IndexIdentity,
    verified: Collection[str] = (),
    limits: DecodeLimits = DEFAULT_LIMITS,
    allowed_roots: Sequence[str] | None = None,
    storage_profiles: StorageProfiles = NO_PROFILES,
) -> tuple[str, ...]:
    """Check that a job's index still describes its sources. Files whose times differ from the
    index's are read and compared. Returns what was verified, to be passed as `verified` the next
    time. Runs nothing of the team's.

    Raises IndexStaleError or SourceError where the index does not describe the sources any more,
    or is not that of `identity`, and where the augmentation is another one.
    """
    spec, roots = _read_back(record, allowed_roots)
    data = data_fingerprint(identity.fingerprint, built.digests)
    _require_same_augmentation(record, order_name(data, spec))
    return require_same_index(
        _opened(record, spec, built, storage_profiles),
        spec.index,
        built.fingerprint,
        identity,
        limits=limits,
        roots=roots,
        verified=verified,
    )


def open_job(
    record: JobRecord,
    *,
    custom_processors: dict[str, str],
    limits: DecodeLimits = DEFAULT_LIMITS,
    allowed_roots: Sequence[str] | None = None,
    job_limits: JobLimits = DEFAULT_JOB_LIMITS,
    storage_profiles: StorageProfiles = NO_PROFILES,
) -> JobSetup:
    """Open a job in this process, which then runs what its team wrote; a service uses a
    `JobOpener` instead. Raises IndexStaleError, SourceError, SpecError, QuotaError."""
    build = partial(
        build_files,
        custom_processors=custom_processors,
        limits=limits,
        allowed_roots=allowed_roots,
        job_limits=job_limits,
    )
    reads: dict[str, Any] = {
        "limits": limits,
        "allowed_roots": allowed_roots,
        "storage_profiles": storage_profiles,
    }
    built = build(record)
    found = find_files(record, built, job_limits=job_limits, **reads)
    opened = OpenedJob(catalog=found.read(), identity=built.digests, notes=built.notes)
    setup = job_setup(record, opened, allowed_roots=allowed_roots, job_limits=job_limits)
    verified = opened.catalog.parts.verified

    def check() -> None:
        nonlocal verified
        verified = check_files(
            setup.record,
            build(setup.record),
            identity=opened.catalog.identity,
            verified=verified,
            **reads,
        )

    return replace(setup, require_current=check)


def job_setup(
    record: JobRecord,
    opened: OpenedJob,
    *,
    allowed_roots: Sequence[str] | None = None,
    job_limits: JobLimits = DEFAULT_JOB_LIMITS,
) -> JobSetup:
    """An opened job as the engine runs it; the caller adds the check that its index is current.
    Its notes are logged under its name. Raises SpecError, StateError, and QuotaError where the job
    is above its limits."""
    spec, roots = _read_back(record, allowed_roots)
    catalog = opened.catalog
    for note in opened.notes:
        log.warning("job %s: %s", record.name, note)
    require_none_refused(spec.pipeline.longer_than, catalog.parts.long)
    mixture = _required_mixture(spec, catalog, job_limits)
    order = SampleOrder.of(spec, catalog.parts.fingerprints, opened.identity)
    stream = _mixture(spec, catalog)
    stream.require_weights()
    job_limits.check("max_samples", stream.largest_epoch, "samples of an epoch")
    return JobSetup(
        record=_identified(record, order.data, order.name),
        stream=stream,
        catalog=catalog,
        batch=spec.batch,
        options=spec.planned,
        pipeline=worker_pipeline(
            spec.sources, spec.pipeline, opened.identity, roots, team_of(record.name)
        ),
        ready_steps=spec.ready_steps,
        order=order.name,
        earlier_orders=order.earlier,
        limits=_isf_limits(catalog, spec.planned, stream.sources_met("")),
        budgets=_budgets(spec),
        epoch_size=mixture.epoch,
        mixture=mixture,
        job_limits=job_limits,
        positions=spec.pipeline.position_rule,
        loss_weights=_loss_weights(spec),
        unit_frames=_unit_frames(spec),
        revise=partial(_revised, catalog),
        layout=spec.topology.layout,
        notes=opened.notes,
    )


def _revised(catalog: IndexedCatalog, setup: JobSetup, record: JobRecord) -> JobSetup:
    """The setup for another version of the job file over the same data: with its batches, plans,
    epochs, budgets, loss weights and topology. What is costly to compute is kept where it does not
    change. Sources that were added after that version wait in it with weight 0, so that whatever
    version a step is planned under, a recorded change of the mixture finds its sources."""
    before = job_from_json(setup.record.spec_json)
    spec = _with_added(job_from_json(record.spec_json), before.sources)
    require_none_refused(spec.pipeline.longer_than, catalog.parts.long)
    mixture = _required_mixture(spec, catalog, setup.job_limits)
    same_packs = all(
        getattr(before.planned, name) == getattr(spec.planned, name)
        for name in ("memory_tokens", "window_steps", "stages")
    )
    same_draw = all(
        getattr(before, name) == getattr(spec, name) for name in ("epochs", "mixture_changes")
    )
    stream = setup.stream if same_draw else _mixture(spec, catalog)
    return replace(
        setup,
        record=record,
        stream=stream,
        batch=spec.batch,
        options=spec.planned,
        ready_steps=spec.ready_steps,
        positions=spec.pipeline.position_rule,
        loss_weights=_loss_weights(spec),
        unit_frames=_unit_frames(spec),
        limits=(
            setup.limits
            if same_packs
            else _isf_limits(catalog, spec.planned, stream.sources_met(""))
        ),
        budgets=_budgets(spec),
        epoch_size=mixture.epoch,
        mixture=mixture,
        layout=spec.topology.layout,
    )


def _with_added(spec: JobSpec, newest: Sequence[SourceSpec]) -> JobSpec:
    """The job file with the sources that newer versions of it have appended."""
    return spec.model_copy(update={"sources": [*spec.sources, *newest[len(spec.sources) :]]})


def _unit_frames(spec: JobSpec) -> int:
    return spec.pipeline.unit_frames if spec.plan.cut_items else 0


def _mixture(spec: JobSpec, catalog: IndexedCatalog) -> Mixture:
    return Mixture(
        catalog.sizes,
        [source.weight for source in spec.sources],
        seed=spec.seed,
        epochs=spec.epochs,
        llm_tokens=catalog.llm_tokens,
        max_passes=[source.max_passes for source in spec.sources],
        share_tokens=share_tokens(spec, catalog.totals),
        names=catalog.source_names,
        changes={f"file{place}": change for place, change in enumerate(spec.mixture_changes)},
    )


def _budgets(spec: JobSpec) -> dict[str, ErrorBudget]:
    return {each.name: each.error_budget or spec.error_budget for each in spec.sources}


def _loss_weights(spec: JobSpec) -> tuple[float, ...]:
    weighs = any(source.weighs_loss for source in spec.sources)
    return tuple(source.loss_weight for source in spec.sources) if weighs else ()


def _require_same_augmentation(record: JobRecord, order: str) -> None:
    """Raises IndexStaleError where a job would go on with other pictures. What else decides its
    order is part of its index, which is compared as well."""
    if record.order not in ("", order):
        raise IndexStaleError(
            f"the augmentation of job {record.name!r} is not what it was registered with: its code "
            "or a library was replaced. Restore it and start the trainers again from their "
            "checkpoint; or submit the job file under another name, as a run from the beginning."
        )


def _isf_limits(catalog: IndexedCatalog, options: PlanOptions, sources: int) -> LimitsOver | None:
    """The ISF limits, found once over the samples of the first so many sources: now over these,
    over others when a change of the mixture brings them in. None where packing is not by ISF."""
    if options.window_steps == 1 and options.stages.pack != "isf":
        return None

    @cache
    def over(sources: int) -> IsfLimits:
        looked_at = _spread_over(int(catalog.sources.offsets[sources]))
        return step_limits(catalog.lengths(looked_at), options, method="search")

    over(sources)
    return over


def _spread_over(samples: int) -> NDArray[np.int64]:
    """All of so many samples; of more than MOST_LOOKED_AT one of each of so many stretches, at a
    place that is always the same and as good as random."""
    stretch = -(-samples // MOST_LOOKED_AT) or 1
    first = np.arange(0, samples, stretch)
    within = split_mix(first.astype(np.uint64)) % np.uint64(stretch)
    return np.minimum(first + within.astype(np.int64), samples - 1)


def _require_drawn(mixture: MixtureTree) -> None:
    """Raises SpecError where a source's weight rounds to no sample: it would be left out
    unnoticed. Weight 0 says so."""
    for source in mixture.sources:
        drawn = mixture.times_seen(source) * source.samples
        if source.passes and drawn < 0.5:
            raise SpecError(
                f"source {source.source!r} gives no sample: weight {source.weight:g} of its "
                f"{source.samples} samples over {mixture.epochs} epochs is {drawn:.2g}. Raise its "
                f"weight to {source.weight / drawn:.2g} or more, or leave the source out."
            )


def _required_mixture(spec: JobSpec, catalog: IndexedCatalog, job_limits: JobLimits) -> MixtureTree:
    """What each source holds, and gives to an epoch. Raises QuotaError where an epoch or a step is
    above the limits, and SpecError where a source gives no sample."""
    _require_rows(spec, job_limits, catalog.sizes)
    mixture = mixture_tree(spec, catalog.totals)
    _require_steps(spec, mixture.epoch, job_limits)
    _require_drawn(mixture)
    return mixture


def _require_rows(spec: JobSpec, job_limits: JobLimits, rows: Sequence[int]) -> None:
    """Raises QuotaError where the sources have too many rows, or too many are drawn from them."""
    weights = [1.0 if spec.weights == "tokens" else source.weight for source in spec.sources]
    job_limits.check_epoch(rows, weights)
    samples = sum(weight * size for weight, size in zip(weights, rows, strict=True))
    if samples and spec.batch.samples is not None:
        _require_steps(spec, EpochSize(samples=samples, tokens=0), job_limits)


def _require_steps(spec: JobSpec, size: EpochSize, job_limits: JobLimits) -> None:
    """Raises QuotaError where one step, or all steps planned ahead together, would be too large."""
    size.drawn(spec.batch, spec.plan.window_steps).require_step(job_limits)
    ready_samples = spec.ready_steps * size.drawn(spec.batch, 1).samples
    job_limits.check("max_ready_samples", ready_samples, "samples of the steps planned ahead")


def _identified(record: JobRecord, fingerprint: str, order: str) -> JobRecord:
    """The record with the identity of its data. Raises StateError where the job was registered
    over other data."""
    if record.order != order and (record.order or record.index_fingerprint):
        was = f"in sample order {record.order}" if record.order else "by an older release"
        raise StateError(
            f"job {record.name!r} was registered {was}; by what its sources, index and tokenizer "
            f"hold now, the order is {order}. Checkpoints of the job would not fit. Restore what "
            "was changed; or submit the job file under another name, as a run from the beginning. "
            "The job's ledger stays until it is deleted."
        )
    return replace(record, index_fingerprint=fingerprint, order=order)
