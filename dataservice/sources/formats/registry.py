"""The registry of formats: from a source's `format` to the code that reads it."""

from collections.abc import Callable, Mapping

from dataservice.core.job import SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.ports import RangeCache
from dataservice.sources.formats.arrow import Arrow
from dataservice.sources.formats.custom import Custom
from dataservice.sources.formats.json_array import JsonArray
from dataservice.sources.formats.jsonl import Jsonl
from dataservice.sources.formats.mds import Mds
from dataservice.sources.formats.parquet import Parquet
from dataservice.sources.formats.plain_text import PlainText
from dataservice.sources.formats.protocol import Format
from dataservice.sources.formats.webdataset_tar import WebDatasetTar
from dataservice.sources.roots import Roots
from dataservice.sources.storage import SourceFile, Storage

FORMATS: Mapping[str, Callable[[SourceSpec, Storage, DecodeLimits], Format]] = {
    "webdataset": WebDatasetTar,
    "parquet": Parquet,
    "arrow": Arrow,
    "mds": Mds,
    "jsonl": Jsonl,
    "json": JsonArray,
    "text": PlainText,
    "custom": Custom,
}


def open_format(
    spec: SourceSpec,
    limits: DecodeLimits = DEFAULT_LIMITS,
    roots: Roots | None = None,
    ranges: RangeCache | None = None,
) -> Format:
    """The reader of a source's files; it reads only under `roots`, if given, and what it reads from
    other machines is kept in `ranges`. Raises SourceError when the source's URL cannot be
    opened."""
    return FORMATS[spec.format](spec, Storage(spec, roots, ranges), limits)


def list_files(spec: SourceSpec) -> tuple[SourceFile, ...]:
    """The files of a source, sorted by path. Raises SourceError when one is missing."""
    return open_format(spec).files()
