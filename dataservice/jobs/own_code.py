"""The users' own classes that the service's config names by import path, loaded when a job names
them."""

import importlib
from collections.abc import Iterator, Mapping

from dataservice.core.errors import SpecError
from dataservice.core.own_code import source_of
from dataservice.decode.augment import is_transform

_METHODS = (
    {"plan_image", "plan_video"},
    {"prepare"},
    {"augment"},
    {"encode", "decode"},
    {"locate", "parse"},
)


class OwnClasses(Mapping[str, type]):
    """The operator's own classes by name, of which only those that a job names are imported."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = paths

    def __getitem__(self, name: str) -> type:
        """Raises SpecError where it cannot be imported."""
        return _load(name, self._paths[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def load_processors(paths: dict[str, str]) -> dict[str, type]:
    """Import the operator's own processors, preparers, augmenters, tokenizers and formats, by name,
    each `package.module:Class`. Raises SpecError."""
    return {name: _load(name, path) for name, path in paths.items()}


def _load(name: str, path: str) -> type:
    module, _, attribute = path.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), attribute or "?")
    except Exception as error:  # the operator's own module may raise anything
        raise SpecError(
            f"custom processor {name!r} is {path!r}, which cannot be imported: "
            f"{type(error).__name__}: {error}. Give `package.module:Class` of an installed "
            "package in the service's config."
        ) from error
    does = set(dir(loaded))
    known = any(methods <= does for methods in _METHODS)
    if not isinstance(loaded, type) or not (known or is_transform(loaded)):
        raise SpecError(
            f"custom processor {name!r} is {path!r}, which is no class with plan_image and "
            "plan_video, with prepare, with augment, with encode and decode, or with locate and "
            "parse, and no transform of torchvision. See VisionProcessor, Preparer, Augmenter and "
            "OwnTokenizer in dataservice/decode (processors/base.py, prepare.py, augment.py, "
            "own_tokenizer.py), and OwnFormat in dataservice/core/own_format.py."
        )
    for whole_module in (False, True):
        source_of(loaded, whole_module=whole_module)
    return loaded
