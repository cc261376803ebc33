"""A job's pipeline, as indexing, coordinator and workers build it from JSON.

Separate from setup.py because the decoding processes load this module, and neither gRPC nor Ray.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from pydantic import TypeAdapter

from dataservice.core.errors import IndexStaleError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.named_files import judged_by
from dataservice.core.ports import RangeCache
from dataservice.core.team import NO_TEAM
from dataservice.decode.sample_pipeline import Pipeline, PipelinePart, PipelineSpec, build_pipeline
from dataservice.jobs.own_code import OwnClasses
from dataservice.jobs.own_formats import own_formats
from dataservice.jobs.storage_profiles import NO_PROFILES, StorageProfiles, opened_sources
from dataservice.jobs.worker_pipeline import understood
from dataservice.sources.reader import SourceReader
from dataservice.sources.roots import Roots

DECODING_LIBRARIES = ("av", "numpy", "pillow", "tokenizers")
_PIPELINE = TypeAdapter(PipelineSpec)
_SOURCES = TypeAdapter(list[SourceSpec])


def pipeline_json(spec: PipelineSpec) -> str:
    """The pipeline without the rest of the job, as JSON."""
    return _PIPELINE.dump_json(spec).decode()


def worker_pipeline(
    sources: Sequence[SourceSpec],
    pipeline: PipelineSpec,
    identity: Mapping[str, str],
    roots: Roots | None = None,
    team: str = NO_TEAM,
) -> str:
    """What a worker needs of a job, as JSON: its sources, its pipeline with the digests to expect,
    the folders it may read, and the team whose code it runs."""
    own_code = pipeline.own_code or any(source.format_code for source in sources)
    return json.dumps(
        {
            **({"code_of": team} if own_code else {}),
            "team": team,
            "identity": dict(identity),
            "sources": _SOURCES.dump_python(list(sources), mode="json"),
            "pipeline": _PIPELINE.dump_python(pipeline, mode="json"),
            "roots": None if roots is None else asdict(roots),
        },
        sort_keys=True,
    )


def content_identity(worker_pipeline: str) -> str:
    """What decides, besides the bytes that are read, to what a sample is decoded, and the team of
    the job."""
    with understood():
        plain = json.loads(worker_pipeline)
    versions = [f"{name} {version(name)}" for name in DECODING_LIBRARIES]
    return json.dumps([plain.get("team", NO_TEAM), plain["identity"], plain["pipeline"], versions])


def reader_of(
    worker_pipeline: str,
    *,
    limits: DecodeLimits = DEFAULT_LIMITS,
    storage_profiles: StorageProfiles = NO_PROFILES,
    ranges_of: Callable[[str], RangeCache] | None = None,
) -> SourceReader:
    """The reader of the job's samples, which holds the secrets of the profiles that they name, and
    looks among the bytes that this machine keeps for their team. Raises SpecError."""
    with understood():
        plain = json.loads(worker_pipeline)
        sources = _SOURCES.validate_python(plain["sources"])
        roots = _roots(plain)
        ranges = ranges_of(plain.get("team", NO_TEAM)) if ranges_of is not None else None
    opened = opened_sources(sources, storage_profiles)
    return SourceReader(opened, limits=limits, roots=roots, ranges=ranges)


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedJob:
    """What a process that indexes needs of a job: one source, its pipeline as JSON, what it may
    read, for which team, and whether it runs code of the users' own."""

    source: SourceSpec
    pipeline: str
    roots: Roots | None
    team: str
    runs_code: bool


def indexed_job(worker_pipeline: str) -> IndexedJob:
    """Read `worker_pipeline`'s form of a job with one source. Raises SpecError."""
    with understood():
        plain = json.loads(worker_pipeline)
        (source,) = _SOURCES.validate_python(plain["sources"])
        return IndexedJob(
            source=source,
            pipeline=json.dumps(plain["pipeline"]),
            roots=_roots(plain),
            team=plain["team"],
            runs_code="code_of" in plain,
        )


def _roots(plain: Mapping[str, Any]) -> Roots | None:
    given = plain["roots"]
    return Roots(**{kind: tuple(places) for kind, places in given.items()}) if given else None


def decoder_of(
    custom_processors: dict[str, str],
    worker_pipeline: str,
    *,
    limits: DecodeLimits = DEFAULT_LIMITS,
) -> Pipeline:
    """The pipeline that decodes the job's samples. Raises SpecError, and IndexStaleError where it
    is not the pipeline that the job was opened with."""
    with understood():
        plain = json.loads(worker_pipeline)
        pipeline, wanted = json.dumps(plain["pipeline"]), dict(plain["identity"])
        sources = _SOURCES.validate_python(plain["sources"])
        roots = _roots(plain)
    built = pipeline_of(pipeline, custom_processors, limits, sources, roots)
    _require_identity(built.identity, wanted)
    return built


def _require_identity(found: Mapping[str, PipelinePart], wanted: Mapping[str, str]) -> None:
    """Refuse a pipeline other than the one that the attempt was planned with. The token ids of
    another tokenizer or template would be trained unnoticed where their lengths agree."""
    for name, part in found.items():
        if part.digest != wanted.get(name):
            raise IndexStaleError(
                f"the {name} ({part.place[:200]}) is not what the job was opened with: its digest "
                f"is {part.digest[:12]} here, the job has {str(wanted.get(name))[:12]}. It was "
                "replaced since, or this host has another copy. Nothing was decoded with it. "
                "Restore it on every host and start the trainers again from their checkpoint. To "
                "train with the new one, index again and submit the job under another name: "
                "checkpoints of this one would not fit."
            )


def pipeline_of(
    pipeline: str,
    custom_processors: dict[str, str],
    limits: DecodeLimits = DEFAULT_LIMITS,
    sources: Sequence[SourceSpec] = (),
    roots: Roots | None = None,
) -> Pipeline:
    """Build the pipeline, which parses what the own formats of these sources read, from files under
    the roots, if any are given. Raises SpecError where the tokenizer, the template, a processor or
    a format cannot be loaded."""
    with understood():
        spec = _PIPELINE.validate_json(pipeline)
    with judged_by(None if roots is None else roots.hold_file):
        return build_pipeline(
            spec,
            custom_processors=OwnClasses(custom_processors),
            limits=limits,
            formats=own_formats(sources, custom_processors, limits),
        )
