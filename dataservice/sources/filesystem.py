"""The boundary to fsspec: which file systems a job may use, what it may read in them, and how their
errors become ours.

File systems are plug-ins and may raise any exception, so every call to one is made inside
`translate`, which turns any exception into SourceError, once, with the file's name and a remedy.
"""

import errno
import io
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import fsspec
from fsspec.spec import AbstractFileSystem
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_delay,
    wait_random_exponential,
)

from dataservice.core.distribution import installing
from dataservice.core.errors import ServiceError, SourceError, StorageAwayError
from dataservice.core.named_files import path_of
from dataservice.sources.opened import without_secrets
from dataservice.sources.roots import Roots

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# Storage that only holds bytes. fsspec also has protocols that run programs, render templates, or
# open a second address named by the first; a job may not use those.
PROTOCOLS = frozenset(
    {"file", "local", "memory", "http", "https", "s3", "s3a", "gs", "gcs", "hf", "hdfs"}
    | {"abfs", "abfss", "az", "adl", "oss", "oci"}
)
_REFUSED_OPTIONS = frozenset({"protocol", "target_protocol", "target_options", "fo"})
# Of our own, over what a file system reads ahead.
_REMOTE_BUFFER_BYTES = 128 * 1024
# Seconds that storage may be unavailable before its files count as unreadable.
OUTAGE_S = 30.0
_LONGEST_PAUSE_S = 3.0
# Errors that another try does not change: the file is missing, or may not be read, or not in this
# way; and errors that have nothing to do with storage.
_LASTING = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    MemoryError,
    TypeError,
    ValueError,
)
_LASTING_ERRNOS = {
    errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG, errno.ENOENT, errno.ELOOP,
    errno.ENXIO,
}  # fmt: skip
# Libraries whose errors always concern storage.
_CLIENTS = {"aiohttp", "aiobotocore", "botocore", "fsspec", "gcsfs", "google", "s3fs"} | {
    "adlfs", "azure", "huggingface_hub", "httpx", "httpx2", "httpcore",
}  # fmt: skip
_EXTRAS = {
    "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az",
    "hf": "hf",
}  # fmt: skip
_PINNED = re.compile(r"hf://datasets/[^/@]+/[^/@]+@[0-9a-f]{40}(/|$)")
_HTTP_ASK_AGAIN = {408, 425, 429}

NO_SECRET: Mapping[str, Any] = MappingProxyType({})

Result = TypeVar("Result")
log = logging.getLogger(__name__)


def hold_credentials(environment: Mapping[str, str] | None) -> None:
    """Have this process open storage with the credentials of these variables; or, with None, with
    none at all, those of fsspec's own files included."""
    if environment is None:
        fsspec.config.conf.clear()  # read when fsspec was imported
    else:
        os.environ.update(environment)
        fsspec.config.set_conf_env(fsspec.config.conf, environment)


@contextmanager
def translate(
    owner: str,
    path: str,
    what: str,
    *,
    pass_on: tuple[type[Exception], ...] = (),
    only_storage: bool = False,
    secret: Mapping[str, Any] = NO_SECRET,
) -> Iterator[None]:
    """Turn any exception of a file system into SourceError: '<owner>: <path> cannot <what>'; into
    StorageAwayError when a later try may succeed. `only_storage` says that the code inside does not
    look at the file's contents. Values of the options `secret` are not quoted."""
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
        away = is_away(error) or (only_storage and _may_pass(error))
        raise (StorageAwayError if away else SourceError)(
            f"{owner}: {path} cannot {what}: {type(error).__name__}: "
            f"{without_secrets(str(error), secret)}. Check the url, its storage_options or "
            "storage_profile, and that the storage answers."
        ) from _shown(error, secret)


def open_filesystem(
    url: str,
    options: Mapping[str, Any],
    owner: str,
    secret: Mapping[str, Any] = NO_SECRET,
    roots: Roots | None = None,
) -> tuple[AbstractFileSystem, str]:
    """The file system of a URL, and the path in it. Raises SourceError, whose message begins with
    `owner` and quotes nothing of `secret`, which are options too. Web servers lead nowhere beyond
    `roots`, if given."""
    require_storage(url, {**options, **secret}, owner)
    if roots is not None and _protocol_of(url) in ("http", "https"):
        options = {**options, "get_client": partial(_client_within, roots)}
    opener = cast(
        Callable[..., tuple[AbstractFileSystem, str]],
        fsspec.core.url_to_fs,
    )
    try:
        return opener(url, **options, **secret)
    except ImportError as error:
        raise SourceError(
            f"{owner}: {url!r} needs a package that is not installed: {error}. {_installing(url)}"
        ) from error
    except Exception as error:
        raise SourceError(
            f"{owner}: {url!r} is not a URL that fsspec opens: "
            f"{without_secrets(str(error), secret)}. Use a path, or a URL such as "
            "s3://bucket/folder/*.tar."
        ) from _shown(error, secret)


async def _client_within(roots: Roots, **given: Any) -> Any:
    """A client of web servers that follows a redirection only to what lies under the roots, as a
    link is."""
    import aiohttp  # of the file systems that need it

    async def judge(_client: object, _context: object, told: Any) -> None:
        headers = told.response.headers
        to = told.url.join(type(told.url)(headers.get("Location") or headers.get("URI") or ""))
        if not roots.hold(str(to)):
            # fsspec may tell that there is no such file.
            log.warning("a redirection from %s to %s is not followed", told.url.host, to.host)
            raise PermissionError(errno.EACCES, "its server redirects to where jobs may not read")

    watched = aiohttp.TraceConfig()
    watched.on_request_redirect.append(judge)
    return aiohttp.ClientSession(**{**given, "trace_configs": [watched]})


def _installing(url: str) -> str:
    extra = _EXTRAS.get(url.partition("://")[0].lower())
    return f"Install it by {installing(extra)}." if extra else "Install it where the service runs."


def _shown(error: Exception, secret: Mapping[str, Any]) -> Exception | None:
    """The cause, unless it may quote a secret: tracebacks are logged."""
    return None if secret else error


def is_allowed(roots: Roots | None, fs: AbstractFileSystem, path: str) -> bool:
    """Whether a file lies under the roots; without roots, any file may be read."""
    local = "file" in protocols(fs)
    return roots is None or roots.hold_file(path if local else str(fs.unstrip_protocol(path)))


def require_allowed(roots: Roots | None, fs: AbstractFileSystem, path: str, owner: str) -> None:
    """Raises SourceError, whose message begins with `owner`, when a file does not lie under the
    roots."""
    if not is_allowed(roots, fs, path):
        raise SourceError(
            f"{owner}: {path} lies outside of what this service reads, or is a link that leads "
            "out of it. Keep the file itself under one of the operator's allowed_roots."
        )


def patiently(read: Callable[[], Result]) -> Result:
    """The result of reading from storage on another machine. While errors look temporary, it is
    tried again for OUTAGE_S. Raises the last try's error."""
    asking = Retrying(
        stop=stop_after_delay(OUTAGE_S),
        wait=wait_random_exponential(multiplier=0.1, max=_LONGEST_PAUSE_S),
        retry=retry_if_exception(_may_pass),
        before_sleep=_tell,
        reraise=True,
    )
    return asking(read)


def _may_pass(error: BaseException) -> bool:
    """Whether an error may be temporary. For OSErrors and HTTP statuses this is known; other errors
    come from a client library, which has its own classes for failed connections."""
    answer = getattr(error, "response", None)  # of huggingface_hub's errors
    status = getattr(error, "status", None) or getattr(answer, "status_code", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status in _HTTP_ASK_AGAIN
    if isinstance(error, OSError) and error.errno in _LASTING_ERRNOS:
        return False
    return isinstance(error, Exception) and not isinstance(error, _LASTING)


def is_away(error: BaseException) -> bool:
    """Whether an error of reading a file and of looking at it means that its storage may answer
    later."""
    return _may_pass(error) and _is_of_storage(error)


def _is_of_storage(error: BaseException) -> bool:
    """Whether an error means that storage may answer later. Libraries that parse a file's format
    raise OSErrors too, but without an errno."""
    if isinstance(error, OSError):
        return error.errno is not None or isinstance(error, ConnectionError | TimeoutError)
    return type(error).__module__.partition(".")[0] in _CLIENTS


def _tell(state: RetryCallState) -> None:
    if state.attempt_number == 1 and state.outcome is not None:
        # Its text may quote what was sent, credentials included.
        error = state.outcome.exception()
        log.warning("storage is asked again for %g s: %s", OUTAGE_S, type(error).__name__)


def open_to_read(
    fs: AbstractFileSystem,
    path: str,
    owner: str,
    roots: Roots | None,
    *,
    pass_on: tuple[type[Exception], ...] = (),
    secret: Mapping[str, Any] = NO_SECRET,
) -> IO[bytes]:
    """Open a file that lies under the roots, if any are given. Raises SourceError, whose message
    begins with `owner` and quotes nothing of `secret`; so does reading it from another machine."""
    require_allowed(roots, fs, path, owner)
    local = "file" in protocols(fs)
    failing = partial(translate, owner, path, "be read", only_storage=True, secret=secret)
    opening = partial(fs.open, path, "rb")
    with failing(pass_on=pass_on):
        stream = cast(IO[bytes], opening() if local else patiently(opening))
    if not local:
        return io.BufferedReader(_Remote(stream, failing), _REMOTE_BUFFER_BYTES)
    if roots is not None:
        # Since the path was checked, a folder on the way may have become a link.
        try:
            require_allowed(roots, fs, path_of(stream.fileno(), path), owner)
        except SourceError:
            stream.close()
            raise
    return stream


class _Remote(io.RawIOBase):
    """A file system's stream, wrapped for Python's own buffer: not every stream has all methods of
    a local file, such as `readline` with a limit."""

    def __init__(
        self, stream: IO[bytes], failing: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._stream = stream
        self._failing = failing

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._stream.seekable()

    def readinto(self, buffer: "WriteableBuffer") -> int:
        view = memoryview(buffer)
        with self._failing():
            data = patiently(lambda: self._stream.read(len(view)))
        view[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def close(self) -> None:
        self._stream.close()
        super().close()


def require_storage(url: str, options: Mapping[str, Any], owner: str) -> None:
    """Raises SourceError when a URL is not plain storage, or what it names may become other data,
    before fsspec sees it."""
    protocol = _protocol_of(url)
    if protocol not in PROTOCOLS or "::" in url:
        raise SourceError(
            f"{owner}: {url!r} is of no storage that jobs may read. Use a path, or a URL of "
            f"{', '.join(sorted(PROTOCOLS))}."
        )
    if protocol == "hf" and not _PINNED.match(url):
        raise SourceError(
            f"{owner}: {url!r} does not name one commit, and a branch or a tag may become "
            "other data. Write hf://datasets/ORG/NAME@COMMIT/... with the 40 hex digits that "
            "`git ls-remote https://huggingface.co/datasets/ORG/NAME` shows, or the data set's "
            "page under Files, History."
        )
    refused = sorted(_REFUSED_OPTIONS & options.keys())
    if refused:
        raise SourceError(
            f"{owner}: storage_options names {', '.join(refused)}, which would choose another "
            "storage than the url. Leave it out."
        )


def is_far(url: str) -> bool:
    """Whether a URL lies behind a network, by its protocol."""
    return _protocol_of(url) not in ("file", "local", "memory")


def _protocol_of(url: str) -> str:
    named = re.match(r"([^/]*?):", url)
    return named[1].lower() if named and len(named[1]) > 1 else "file"


def exactly(fs: AbstractFileSystem) -> dict[str, str]:
    """The options with which a range is fetched as it is, where a file system would read ahead."""
    return {"cache_type": "none"} if "hf" in protocols(fs) else {}


def protocols(fs: AbstractFileSystem) -> tuple[str, ...]:
    """The protocols that a file system serves."""
    protocol = fs.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
