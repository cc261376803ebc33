"""The model and the cluster that a layout is made for: read from YAML, from a model's config.json,
or by the name of a description that ships with the service.

    model.yaml ─┐   use: internvit-6b ──► catalog/encoders.yaml, decoders.yaml
    config.json ┼─► ModelDescription
    a name ─────┘   catalog/models.yaml
"""

import difflib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from dataservice.core.errors import PlanningError, SpecError
from dataservice.core.quoting import quoted
from dataservice.jobs.expected import listed, nearest
from dataservice.jobs.transformers_config import read_transformers_config
from dataservice.jobs.yaml_file import Strict, Written, read_text, validated, written
from dataservice.planning.layout.cluster import Cluster, NodeGroup
from dataservice.planning.layout.model import Decoder, Encoder, Generator, ModelDescription

CATALOG = Path(__file__).parent / "catalog"
Part = Literal["encoders", "decoders", "models", "nodes"]
_REMEDY = "docs/reference.md lists every key with its meaning."


class ModelFile(Strict):
    """A model as a file describes it."""

    name: str = ""
    """What the model is called; the file's name where it is left out."""
    source: str = ""
    """Where the shape comes from."""
    use: str | None = None
    """A model that ships, by its name, or the path of a `config.json`, relative to this file;
    instead of a decoder and encoders."""
    frozen: list[str] = Field(default=[])
    """Modules whose weights stay as they are, besides those that say so themselves: `vision`,
    `vision.projector`, `decoder`."""
    decoder: Decoder | None = None
    """The language model."""
    encoders: list[Encoder] = Field(default=[])
    """The encoders, in the order in which they run."""
    generator: Generator | None = None
    """What makes images or sound, where there is such a module."""

    def described(self, name: str, folder: Path) -> ModelDescription:
        """The description, under this name where it has none. Raises PlanningError, SpecError."""
        if (self.use is None) == (self.decoder is None):
            raise PlanningError(
                "it must have either `use`, a model to begin with, or `decoder`: give one of them"
            )
        if self.use is not None and self.encoders:
            raise PlanningError(
                "it has `use`, a model with encoders of its own, and `encoders`: write the whole "
                "model out, with `decoder`, or leave `encoders` out"
            )
        if self.use is not None:
            named = self.use in shipped()
            base = read_model(self.use if named else folder / self.use)
        else:
            assert self.decoder is not None
            base = ModelDescription(name=name, decoder=self.decoder, encoders=tuple(self.encoders))
        described = replace(
            base,
            name=self.name or name,
            source=self.source or base.source,
            generator=self.generator or base.generator,
        )
        return with_frozen(described, self.frozen)


def with_frozen(model: ModelDescription, names: Sequence[str]) -> ModelDescription:
    """The model with these modules frozen. Raises PlanningError on a name that none has."""
    known = model.parameters_by_module()
    if strange := [name for name in names if name not in known]:
        raise PlanningError(
            f"frozen names {strange[0]!r}; the modules are {listed(list(known), 'and')}"
        )
    encoders = []
    for encoder in model.encoders:
        projector = encoder.projector
        if projector and f"{encoder.name}.projector" in names:
            projector = replace(projector, frozen=True)
        frozen = encoder.frozen or encoder.name in names
        encoders.append(replace(encoder, frozen=frozen, projector=projector))
    decoder = replace(model.decoder, frozen=model.decoder.frozen or "decoder" in names)
    generator = model.generator
    if generator and generator.name in names:
        generator = replace(generator, frozen=True)
    return replace(model, encoders=tuple(encoders), decoder=decoder, generator=generator)


class ClusterFile(Strict):
    """The machines of a training job."""

    groups: list[NodeGroup]
    """The nodes, by kind: one, or a mix."""


def shipped(part: Part = "models") -> tuple[str, ...]:
    """Names of the descriptions that ship with the service."""
    return tuple(_catalog(part))


def read_model(model: Path | str) -> ModelDescription:
    """A model's description: a YAML file, a model's `config.json` or the folder that it lies in,
    or the name of one that ships. Raises SpecError."""
    if (
        isinstance(model, str)
        and not Path(model).exists()
        and not model.endswith((".yaml", ".yml"))
    ):
        file = _named("models", model, "the model")
        return _model(file, f"shipped model {model}", model, CATALOG)
    path = Path(model)
    if path.is_dir() or path.suffix == ".json":
        return read_transformers_config(path)
    what = f"model file {path}"
    return _model(written(read_text(path, "model file"), what), what, path.stem, path.parent)


def read_cluster(cluster: Path | str) -> Cluster:
    """The machines that a YAML file describes. Raises SpecError."""
    path = Path(cluster)
    what = f"cluster file {path}"
    file = written(read_text(path, "cluster file"), what)
    groups = file.plain.get("groups")
    if isinstance(groups, list):
        filled = [_filled(group, "nodes", what) for group in groups]
        file = file.with_plain({**file.plain, "groups": filled})
    made = validated(ClusterFile, file, what, remedy=_REMEDY)
    try:
        return Cluster(groups=tuple(made.groups))
    except PlanningError as error:
        raise SpecError(f"the {what} cannot be right: {error}") from error


def _model(file: Written, what: str, name: str, folder: Path) -> ModelDescription:
    plain = dict(file.plain)
    if isinstance(plain.get("encoders"), list):
        plain["encoders"] = [_filled(each, "encoders", what) for each in plain["encoders"]]
    if "decoder" in plain:
        plain["decoder"] = _filled(plain["decoder"], "decoders", what)
    made = validated(ModelFile, file.with_plain(plain), what, remedy=_REMEDY)
    try:
        return made.described(name, folder)
    except PlanningError as error:
        raise SpecError(f"the {what} cannot be right: {error}") from error


def _filled(given: object, part: Part, what: str) -> object:
    """A mapping over the part of the catalog that its `use` names."""
    if not isinstance(given, Mapping) or "use" not in given:
        return given
    named = _named(part, given["use"], f"the {what}").plain
    return {**named, **{key: value for key, value in given.items() if key != "use"}}


def _named(part: Part, name: object, where: str) -> Written:
    """One entry of the catalog. Raises SpecError where there is none of that name."""
    catalog = _catalog(part)
    if isinstance(name, str) and name in catalog:
        return Written(plain=catalog[name])
    meant = _alike(name, list(catalog)) if isinstance(name, str) else []
    names = (
        f"Did you mean {listed(meant)}?" if meant else f"There are {listed(list(catalog), 'and')}."
    )
    if meant and part == "models":
        names += " `dataservice layout --list` prints all."
    raise SpecError(
        f"{where} names {quoted(name)}, and none of the {part} that ship with the service is "
        f"called so. {names} Or describe it in YAML: docs/layout.md."
    )


def _alike(name: str, catalog: Sequence[str]) -> list[str]:
    """Names that were perhaps meant, the likeliest first: at most six."""
    first = nearest(name, catalog)
    alike = difflib.get_close_matches(name.lower(), catalog, n=4, cutoff=0.75)
    begun = [each for each in catalog if each.startswith(name.lower())]
    found = [each for each in (first, *begun, *alike) if each is not None]
    return list(dict.fromkeys(found))[:6]


@functools.cache
def _catalog(part: Part) -> dict[str, dict[str, Any]]:
    what = f"catalog of {part}"
    return written(read_text(CATALOG / f"{part}.yaml", what), what).plain
