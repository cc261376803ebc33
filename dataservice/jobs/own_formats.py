"""The formats of the users' own that a job's sources name.

index, preview              made here, and asked where samples lie and what they are
opener, in its own process  made for their digests; the coordinator knows these alone
decoding process            made, and asked what the bytes of a sample are
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import cast

from dataservice.core.errors import SpecError
from dataservice.core.job import CodeSpec, SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.own_code import made_of, version_of
from dataservice.core.own_format import FormatCode, FormatCodes, OwnFormat
from dataservice.core.quoting import quoted
from dataservice.decode.sample_pipeline import OwnFormats, PipelinePart
from dataservice.jobs.own_code import OwnClasses
from dataservice.sources.formats.own_samples import OwnSamples


def format_codes(sources: Sequence[SourceSpec], paths: Mapping[str, str]) -> FormatCodes:
    """What reads the sources' own formats. `paths` are the import paths of the service's config.
    Raises SpecError where a class is not among them or cannot be made."""
    found = {}
    for source, spec in _named(sources):
        make = partial(_made, dict(paths), spec)
        found[source.name] = FormatCode(name=spec.name, digest=_digest(spec, make()), make=make)
    return found


def known_codes(sources: Sequence[SourceSpec], digests: Mapping[str, str]) -> FormatCodes:
    """The same by a pipeline's digests, for a process that runs none of it."""
    return {
        source.name: FormatCode(name=spec.name, digest=digests[_part(source.name)])
        for source, spec in _named(sources)
    }


def own_formats(
    sources: Sequence[SourceSpec], paths: Mapping[str, str], limits: DecodeLimits
) -> OwnFormats:
    """The sources' own formats as a pipeline has them. Raises SpecError as `format_codes` does."""
    parse, identity = {}, {}
    for source, spec in _named(sources):
        made = _made(paths, spec)
        parse[source.name] = OwnSamples(source, spec.name, made, limits).parsed
        identity[_part(source.name)] = PipelinePart(
            place="the operator's own modules", digest=_digest(spec, made)
        )
    return OwnFormats(parse=parse, identity=identity)


def _named(sources: Sequence[SourceSpec]) -> Iterator[tuple[SourceSpec, CodeSpec]]:
    for source in sources:
        if source.format_code is not None:
            yield source, source.format_code


def _digest(spec: CodeSpec, made: OwnFormat) -> str:
    told = [version_of(type(made)), spec.options]
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


def _part(source: str) -> str:
    return f"format of {source}"


def _made(paths: Mapping[str, str], spec: CodeSpec) -> OwnFormat:
    made = made_of(OwnClasses(paths), spec.name, spec.options, what="format")
    if not {"locate", "parse"} <= set(dir(made)):
        raise SpecError(
            f"format {quoted(spec.name)} is a {type(made).__name__} without locate(file) and "
            "parse(parts). See OwnFormat in dataservice/core/own_format.py."
        )
    return cast(OwnFormat, made)
