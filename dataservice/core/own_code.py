"""Classes that the service's config allows jobs to name: how they are made, and what identifies
them."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from dataservice.core.errors import SampleError, SpecError
from dataservice.core.quoting import cut, quoted

FAILURES = (Exception, SystemExit)
"""What the user's own code may raise: anything, and a script ends with `sys.exit`."""


def made_of(
    custom: Mapping[str, Callable[..., object]],
    name: str,
    options: Mapping[str, object],
    *,
    what: str,
    instead: str = "",
) -> object:
    """An object of a class that the service's config names, or that an import path names, with a
    job's options. Raises SpecError."""
    if name not in custom:
        known = ", ".join(sorted(custom)) or "none"
        raise SpecError(
            f"{what} {quoted(name)} is not in the service's config, which has: {known}. Ask who "
            "runs the service to add its import path, and give commands that file as --config; or "
            f"give its import path here, package.module:Class{instead}."
        )
    kind = custom[name]
    try:
        return kind(**options)
    except FAILURES as error:
        raise SpecError(
            f"{what} {quoted(name)} cannot be made with options {quoted(options)}: {cut(error)}. "
            "Give the options that its class takes."
        ) from error


@contextmanager
def running(name: str) -> Iterator[None]:
    """Turn whatever the class of this name raises, but for want of memory, into SampleError."""
    try:
        yield
    except SampleError as error:
        raise SampleError(f"{quoted(name)}: {error}") from error
    except MemoryError:
        raise
    except FAILURES as error:
        raise SampleError(
            f"{quoted(name)} failed with {type(error).__name__}: {cut(error)}. Mend its code, or "
            "leave the sample out."
        ) from error


def version_of(kind: type) -> str:
    """What changes when the code does: the class's own `version`, or its module's source."""
    version = getattr(kind, "version", None)
    if isinstance(version, str | int):
        return f"{kind.__module__}.{kind.__qualname__} version {version}"
    return source_of(kind, whole_module=True)


def source_of(kind: type, *, whole_module: bool = False) -> str:
    """A class's name and, if Python has it, its source, or that of all its module: as it was when
    this was first asked, which is to be when the class is imported. A process that runs what the
    file held before must not take itself for one that runs what it holds now."""
    known = kind, whole_module
    if known not in _SOURCES:
        _SOURCES[known] = _read_source(kind, whole_module)
    return _SOURCES[known]


_SOURCES: dict[tuple[type, bool], str] = {}


def _read_source(kind: type, whole_module: bool) -> str:
    try:
        text = inspect.getsource(sys.modules[kind.__module__] if whole_module else kind)
    except (OSError, TypeError, KeyError):
        text = ""
    return f"{kind.__module__}.{kind.__qualname__}\n{text}"
