"""The users' own classes, loaded when a job names them: by their names in the service's config, or
by import path, from packages that the operator allows.

    name: tidy           ─▶ custom_processors: {tidy: "ours.tidy:Tidy"}
    name: ours.a:Tidy    ─▶ code_packages: [ours, "{team}_code"], at submit and at opening
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence

from dataservice.core.errors import SpecError
from dataservice.core.job import SourceSpec
from dataservice.core.own_code import FAILURES, source_of
from dataservice.core.quoting import quoted
from dataservice.decode.augment import is_transform
from dataservice.decode.spec import CustomVisionSpec, PipelineSpec
from dataservice.sources.roots import TEAM

_METHODS = (
    {"plan_image", "plan_video"},
    {"prepare"},
    {"augment"},
    {"encode", "decode"},
    {"locate", "parse"},
)


class OwnClasses(Mapping[str, type]):
    """Classes by name or import path, of which only those that a job names are imported. It does
    not ask whether the job may: see `require_code_allowed`."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = paths

    def __getitem__(self, name: str) -> type:
        """Raises KeyError where there is no such name, SpecError where it cannot be imported."""
        return _load(name, name if _is_path(name) else self._paths[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def require_code_allowed(
    sources: Sequence[SourceSpec],
    pipeline: PipelineSpec,
    packages: Sequence[str] | None,
    team: str,
) -> None:
    """Check that the import paths in a job lie in the packages that the operator allows, all where
    that is None; `{team}` in one is the job's team. Raises SpecError where one does not."""
    if packages is None:
        return
    mine = [each.replace(TEAM, team) for each in packages if team or TEAM not in each]
    for name in filter(_is_path, _named(sources, pipeline)):
        module, _, _ = name.partition(":")
        if not any(f"{module}.".startswith(f"{package}.") for package in mine):
            raise SpecError(
                f"the job names the code {quoted(name)} by its import path; this service takes "
                f"such names from the packages {', '.join(mine) or '(none)'}. Ask who runs the "
                "service to add the package to code_packages, or the class to custom_processors, "
                "under a name."
            )


def _named(sources: Sequence[SourceSpec], pipeline: PipelineSpec) -> Iterator[str]:
    """The names under which a job asks for code."""
    yield from (each.name for each in pipeline.prepare)
    yield from (each.name for each in pipeline.augment)
    yield from (source.format_code.name for source in sources if source.format_code)
    if pipeline.tokenizer_code:
        yield pipeline.tokenizer_code.name
    if isinstance(pipeline.vision, CustomVisionSpec):
        yield pipeline.vision.name


def _is_path(name: str) -> bool:
    return ":" in name


def load_processors(paths: dict[str, str]) -> dict[str, type]:
    """Import the operator's own processors, preparers, augmenters, tokenizers and formats, by name,
    each `package.module:Class`. Raises SpecError."""
    return {name: _load(name, path) for name, path in paths.items()}


def _load(name: str, path: str) -> type:
    module, _, attribute = path.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), attribute or "?")
    except FAILURES as error:
        raise SpecError(
            f"{_what(name, path)} cannot be imported: {type(error).__name__}: {error}. Give "
            "`package.module:Class` of an installed package, or of a folder on PYTHONPATH."
        ) from error
    does = set(dir(loaded))
    known = any(methods <= does for methods in _METHODS)
    if not isinstance(loaded, type) or not (known or is_transform(loaded)):
        raise SpecError(
            f"{_what(name, path)} is no class with plan_image and plan_video, with prepare, with "
            "augment, with encode and decode, or with locate and parse, and no transform of "
            "torchvision. See VisionProcessor, Preparer, Augmenter and "
            "OwnTokenizer in dataservice/decode (processors/base.py, prepare.py, augment.py, "
            "own_tokenizer.py), and OwnFormat in dataservice/core/own_format.py."
        )
    for whole_module in (False, True):
        source_of(loaded, whole_module=whole_module)
    return loaded


def _what(name: str, path: str) -> str:
    return (
        f"the class {path!r}" if name == path else f"custom processor {name!r} is {path!r}, which"
    )
