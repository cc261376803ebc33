"""A job's pipeline: what index, coordinator and workers build from its JSON.

Apart from job_setup.py, because the processes that decode load this and nothing of gRPC or Ray.
"""

import contextlib
import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import cast

from pydantic import TypeAdapter

from dataservice.core.errors import SpecError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.decode.pipeline import Pipeline, PipelineSpec, build_pipeline
from dataservice.decode.processors.base import VisionProcessor
from dataservice.sources.reader import SourceReader
from dataservice.sources.roots import Roots

_PIPELINE = TypeAdapter(PipelineSpec)
_SOURCES = TypeAdapter(list[SourceSpec])


def pipeline_json(spec: PipelineSpec) -> str:
    """The pipeline alone."""
    return _PIPELINE.dump_json(spec).decode()


def worker_pipeline(
    sources: Sequence[SourceSpec], pipeline: PipelineSpec, roots: Roots | None = None
) -> str:
    """What a worker needs of a job, as JSON: its sources, its pipeline, and where it reads."""
    return json.dumps(
        {
            "sources": _SOURCES.dump_python(list(sources), mode="json"),
            "pipeline": _PIPELINE.dump_python(pipeline, mode="json"),
            "roots": None if roots is None else asdict(roots),
        },
        sort_keys=True,
    )


def reader_of(worker_pipeline: str, *, limits: DecodeLimits = DEFAULT_LIMITS) -> SourceReader:
    """What reads the job's samples. Raises SpecError."""
    with _understood():
        plain = json.loads(worker_pipeline)
        sources = _SOURCES.validate_python(plain["sources"])
        given = plain["roots"]
        roots = Roots(**{kind: tuple(places) for kind, places in given.items()}) if given else None
    return SourceReader(sources, limits=limits, roots=roots)


def decoder_of(
    custom_processors: dict[str, str],
    worker_pipeline: str,
    *,
    limits: DecodeLimits = DEFAULT_LIMITS,
) -> Pipeline:
    """What decodes the job's samples. Raises SpecError."""
    with _understood():
        pipeline = json.dumps(json.loads(worker_pipeline)["pipeline"])
    return pipeline_of(pipeline, custom_processors, limits)


def pipeline_of(
    pipeline: str, custom_processors: dict[str, str], limits: DecodeLimits = DEFAULT_LIMITS
) -> Pipeline:
    """Raises SpecError when the tokenizer, template or a processor cannot be loaded."""
    with _understood():
        spec = _PIPELINE.validate_json(pipeline)
    processors = load_processors(custom_processors)
    return build_pipeline(spec, custom_processors=processors, limits=limits)


@contextlib.contextmanager
def _understood() -> Iterator[None]:
    """Whatever a text that is no pipeline of this release makes json and pydantic raise."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SpecError(
            f"this is no job's pipeline: {type(error).__name__}: {str(error)[:200]}. Coordinator "
            "and workers must be of one release."
        ) from error


def load_processors(paths: dict[str, str]) -> dict[str, type[VisionProcessor]]:
    """Import the operator's own processors, `name: package.module:Class`. Raises SpecError."""
    return {name: _load_processor(name, path) for name, path in paths.items()}


def _load_processor(name: str, path: str) -> type[VisionProcessor]:
    module, _, attribute = path.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), attribute or "?")
    except Exception as error:  # the operator's own module may raise anything
        raise SpecError(
            f"custom processor {name!r} is {path!r}, which cannot be imported: "
            f"{type(error).__name__}: {error}. Give `package.module:Class` of an installed "
            "package in the service's config."
        ) from error
    if not isinstance(loaded, type) or not {"plan_image", "plan_video"} <= set(dir(loaded)):
        raise SpecError(
            f"custom processor {name!r} is {path!r}, which is no class with plan_image and "
            "plan_video. See VisionProcessor in dataservice/decode/processors/base.py."
        )
    return cast(type[VisionProcessor], loaded)
