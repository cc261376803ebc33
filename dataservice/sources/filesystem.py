"""The border to fsspec: which file systems a job may use, what it may read in them, and their
errors as ours.

File systems are plug-ins and raise what they like, so every call to one is made inside
`translate`, which turns any exception into SourceError, once, with the file's name and a remedy.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, cast

import fsspec
from fsspec.spec import AbstractFileSystem

from dataservice.core.errors import ServiceError, SourceError
from dataservice.sources.roots import Roots

# Storage that holds bytes and does nothing else. fsspec has protocols that run programs, render
# templates, or open a second address that the first one names; a job may not ask for those.
PROTOCOLS = frozenset(
    {"file", "local", "memory", "http", "https", "s3", "s3a", "gs", "gcs", "hf", "hdfs"}
    | {"abfs", "abfss", "az", "adl", "oss", "oci"}
)
_REFUSED_OPTIONS = frozenset({"protocol", "target_protocol", "target_options", "fo"})


@contextmanager
def translate(
    owner: str, path: str, what: str, *, pass_on: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn whatever a file system raises into SourceError: '<owner>: <path> cannot <what>'."""
    try:
        yield
    except ServiceError:
        raise
    except pass_on:
        raise
    except FileNotFoundError as error:
        raise SourceError(
            f"{owner}: {path} cannot {what}: there is no such file. Correct the url or restore "
            "the file."
        ) from error
    except PermissionError as error:
        raise SourceError(
            f"{owner}: {path} cannot {what}: permission denied. Grant this process's user or "
            "cloud identity access to it."
        ) from error
    except Exception as error:
        raise SourceError(
            f"{owner}: {path} cannot {what}: {type(error).__name__}: {error}. Check the url, "
            "the storage_options and that the storage answers."
        ) from error


def open_filesystem(
    url: str, options: dict[str, str], owner: str
) -> tuple[AbstractFileSystem, str]:
    """The file system of a URL and the path in it. Raises SourceError; `owner` opens its text."""
    _require_storage(url, options, owner)
    opener = cast(
        Callable[..., tuple[AbstractFileSystem, str]],
        fsspec.core.url_to_fs,
    )
    try:
        return opener(url, **options)
    except ImportError as error:
        raise SourceError(
            f"{owner}: {url!r} needs a package that is not installed: {error}. Install it, for "
            "example `pip install 'dataservice[s3]'` or `'dataservice[gs]'`."
        ) from error
    except Exception as error:
        raise SourceError(
            f"{owner}: {url!r} is not a URL that fsspec opens: {error}. Use a path, or a URL such "
            "as s3://bucket/folder/*.tar."
        ) from error


def is_allowed(roots: Roots | None, fs: AbstractFileSystem, path: str) -> bool:
    """Whether a file lies under the roots; without roots any may be read."""
    local = "file" in protocols(fs)
    return roots is None or roots.hold_file(path if local else str(fs.unstrip_protocol(path)))


def require_allowed(roots: Roots | None, fs: AbstractFileSystem, path: str, owner: str) -> None:
    """Raises SourceError for a file that does not lie under the roots. `owner` opens its text."""
    if not is_allowed(roots, fs, path):
        raise SourceError(
            f"{owner}: {path} lies outside of what this service reads, or is a link that leads "
            "out of it. Keep the file itself under one of the operator's allowed_roots."
        )


def require_opened(
    roots: Roots | None, fs: AbstractFileSystem, stream: IO[bytes], path: str, owner: str
) -> None:
    """Closes the file and raises SourceError when what was opened does not lie under the roots:
    since it was judged, a folder on the way may have become a link."""
    if roots is None or "file" not in protocols(fs):
        return
    try:
        require_allowed(roots, fs, path_of(stream.fileno(), path), owner)
    except SourceError:
        stream.close()
        raise


def path_of(descriptor: int, path: str) -> str:
    """The real path of an open file, where the system tells it."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return os.path.realpath(path)


def _require_storage(url: str, options: dict[str, str], owner: str) -> None:
    """Raises SourceError before fsspec makes anything of a URL that is no plain storage."""
    named = re.match(r"([^/]*?):", url)
    protocol = named[1].lower() if named and len(named[1]) > 1 else "file"
    if protocol not in PROTOCOLS or "::" in url:
        raise SourceError(
            f"{owner}: {url!r} is of no storage that jobs may read. Use a path, or a URL of "
            f"{', '.join(sorted(PROTOCOLS))}."
        )
    refused = sorted(_REFUSED_OPTIONS & options.keys())
    if refused:
        raise SourceError(
            f"{owner}: storage_options names {', '.join(refused)}, which would choose another "
            "storage than the url. Leave it out."
        )


def protocols(fs: AbstractFileSystem) -> tuple[str, ...]:
    """The protocols by which a file system goes."""
    protocol = fs.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
